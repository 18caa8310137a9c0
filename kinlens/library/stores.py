"""Galleries in a folder or on Milvus, as the commands and the library open and care for them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kinlens.embedder.errors import GalleryError, InvalidParameterError, KinlensError, disk_fault
from kinlens.embedder.programs.progress import console, progress_bar
from kinlens.indexer.exchange.milvus import MilvusStore
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.live.compaction import KEEP_REMOVED_S
from kinlens.indexer.types import MILVUS, milvus_address
from kinlens.quality.calibrator import Calibrator

Store = Gallery | MilvusStore


def opened(
    text: str, *, bundle_id: str | None = None, image_root: str | None = None, device: str = "cpu"
) -> contextlib.closing[Store]:
    """Open the gallery in a folder or at milvus://HOST:PORT/NAME.

    Raises: GalleryError.
    """
    if not text.startswith(MILVUS):
        return contextlib.closing(
            Gallery.open(text, expected_bundle_id=bundle_id, image_root=image_root, device=device)
        )
    uri, name = milvus_address(text)
    return contextlib.closing(
        MilvusStore.open(
            uri, name, expected_bundle_id=bundle_id, image_root=image_root, token=milvus_token()
        )
    )


def in_folder(text: str, lack: str) -> contextlib.closing[Gallery]:
    """Open a gallery for what Milvus `lack`s. Raises: InvalidParameterError, GalleryError."""
    if text.startswith(MILVUS):
        raise InvalidParameterError(
            f"{text} is on Milvus, which {lack}. Copy the gallery into a folder: kinlens-index "
            f"import {text} --out FOLDER."
        )
    return contextlib.closing(Gallery.open(text))


def milvus_token() -> str:
    """The token for the server of galleries on Milvus."""
    return os.environ.get("KINLENS_MILVUS_TOKEN", "")


def bundle_of(store: Store) -> Path:
    """The bundle that built a gallery. Raises: GalleryError if its folder is unknown or gone."""
    path = store.built_with() if isinstance(store, Gallery) else None
    if path is None or not path.is_dir():
        raise GalleryError(
            f"Images have to be embedded, and the bundle that built gallery {store.name} is "
            f"{'unknown' if path is None else f'no longer in {path}'}. Pass it with --bundle."
        )
    return path


def compact_if_due(store: Store, no_compact: bool) -> None:
    """Compact a gallery if its changes make searches slow, and calibrate it again if outdated.

    Call it after the report of the changes: they are done, so a failure is only a warning.
    """
    if not isinstance(store, Gallery):
        return
    with _failures_as_warnings():
        reason = store.needs_compaction()
        if reason is not None and no_compact:
            note(f"A compaction is due: {reason}. Run kinlens-index compact.")
        elif reason is not None:
            note(f"Compacting: {reason}.")
            with progress_bar(store.size, "Indexing", shown=True) as advance:
                store.compact(wait=True, keep_removed_s=KEEP_REMOVED_S, on_progress=advance)
    with _failures_as_warnings():
        Calibrator(store).fit_if_outdated()


def calibrate(path: Path | str) -> None:
    """Fit the probabilities of a gallery that was just built. A failure is only a warning."""
    with (
        _failures_as_warnings(),
        contextlib.closing(Gallery.open(path, verify_hashes=False)) as gallery,
    ):
        Calibrator(gallery).fit_if_outdated()


def note(text: str) -> None:
    """Print a line for people on stderr, above a progress bar."""
    console.print(text, soft_wrap=True)


@contextlib.contextmanager
def _failures_as_warnings() -> Iterator[None]:
    try:
        yield
    except (KinlensError, OSError) as error:
        why = disk_fault(error) if isinstance(error, OSError) else error
        note(f"Warning: the changes are stored, but the upkeep of the gallery failed: {why}")
