"""Galleries in a folder or on Milvus, as the commands and the library open and care for them."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from kinlens.embedder.errors import GalleryError, InvalidParameterError, KinlensError, disk_fault
from kinlens.embedder.programs.progress import console, progress_bar
from kinlens.indexer.exchange.milvus import MilvusStore
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.live.compaction import KEEP_REMOVED_S
from kinlens.indexer.types import MILVUS, milvus_address
from kinlens.quality.calibrator import Calibrator

Store = Gallery | MilvusStore
Say = Callable[[str], object]


def open_store(
    place: Path | str,
    *,
    bundle_id: str | None = None,
    image_root: str | None = None,
    device: str = "cpu",
) -> Store:
    """Open the gallery in a folder or at milvus://HOST:PORT/NAME. Raises: GalleryError."""
    text = str(place)
    if not text.startswith(MILVUS):
        return Gallery.open(
            text, expected_bundle_id=bundle_id, image_root=image_root, device=device
        )
    uri, name = milvus_address(text)
    return MilvusStore.open(
        uri, name, expected_bundle_id=bundle_id, image_root=image_root, token=milvus_token()
    )


def opened(text: str, *, bundle_id: str | None = None) -> contextlib.closing[Store]:
    """Open a store, and close it at the end of a block. Raises: GalleryError."""
    return contextlib.closing(open_store(text, bundle_id=bundle_id))


def refuse_milvus(text: str, lack: str) -> None:
    """Raises: InvalidParameterError for the address of a gallery on Milvus, which `lack`s."""
    if text.startswith(MILVUS):
        raise InvalidParameterError(
            f"{text} is on Milvus, which {lack}. Copy the gallery into a folder: kinlens-index "
            f"import {text} --out FOLDER."
        )


def folder_of(store: Store, lack: str) -> Gallery:
    """A gallery for what Milvus `lack`s. Raises: InvalidParameterError for one on Milvus."""
    if not isinstance(store, Gallery):
        refuse_milvus(f"{MILVUS}HOST:PORT/{store.name}", lack)
        raise AssertionError("there are two kinds of stores")
    return store


def milvus_token() -> str:
    """The token for the server of galleries on Milvus."""
    return os.environ.get("KINLENS_MILVUS_TOKEN", "")


def bundle_of(store: Store) -> Path:
    """The bundle that built a gallery. Raises: GalleryError if its folder is unknown or gone."""
    path = store.built_with() if isinstance(store, Gallery) else None
    if path is None or not path.is_dir():
        raise GalleryError(
            f"Images have to be embedded, and the bundle that built gallery {store.name} is "
            f"{'unknown' if path is None else f'no longer in {path}'}. Pass it with "
            "`bundle`, or open the gallery with it in Python."
        )
    return path


def keep_up(
    store: Store,
    *,
    compacts: bool = True,
    say: Say = lambda _: None,
    warn: Say = warnings.warn,
    shown: bool | None = None,
) -> None:
    """Compact a gallery if its changes make searches slow, and calibrate it again if outdated.

    Call it after the report of the changes: they are done, so a failure is only a warning.
    """
    if not isinstance(store, Gallery):
        return
    with _failures_as_warnings(warn):
        reason = store.needs_compaction()
        if reason is not None and not compacts:
            say(f"A compaction is due: {reason}. Run kinlens-index compact.")
        elif reason is not None:
            say(f"Compacting: {reason}.")
            with progress_bar(store.size, "Indexing", shown=shown) as advance:
                store.compact(wait=True, keep_removed_s=KEEP_REMOVED_S, on_progress=advance)
    fit_probabilities(store, warn)


def fit_probabilities(store: Store, warn: Say = warnings.warn) -> None:
    """Fit the probabilities of a gallery again if they are outdated. A failure is a warning."""
    if isinstance(store, Gallery):
        with _failures_as_warnings(warn):
            Calibrator(store).fit_if_outdated()


def note(text: str) -> None:
    """Print a line for people on stderr, above a progress bar."""
    console.print(text, soft_wrap=True)


@contextlib.contextmanager
def _failures_as_warnings(warn: Say) -> Iterator[None]:
    try:
        yield
    except (KinlensError, OSError) as error:
        why = disk_fault(error) if isinstance(error, OSError) else error
        warn(f"Warning: the changes are stored, but the upkeep of the gallery failed: {why}")
