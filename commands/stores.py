"""Open the gallery of a command: in a folder, or on Milvus."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kinlens.commands.console import err, progress
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import (
    GalleryError,
    InvalidParameterError,
    KinlensError,
    SourceError,
    disk_fault,
)
from kinlens.indexer.addresses import REMOTE, image_root_of
from kinlens.indexer.exchange.milvus import MilvusStore
from kinlens.indexer.folder.layout import GalleryFolder
from kinlens.indexer.folder.manifest import name_of
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.foreign import Tables, files_of, is_foreign, read_export
from kinlens.indexer.ingest.shards import MANIFEST as SHARDS
from kinlens.indexer.ingest.shards import VectorShards
from kinlens.indexer.live.compaction import KEEP_REMOVED_S
from kinlens.indexer.types import (
    MILVUS,
    OTHER_MODEL,
    GalleryExport,
    milvus_address,
)
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


def compact_if_due(store: Store, no_compact: bool) -> None:
    """Compact a gallery if its changes make searches slow, and calibrate it again if outdated.

    Call it after the report of the changes: they are done, so a failure is only a warning.
    """
    if not isinstance(store, Gallery):
        return
    with _failures_as_warnings():
        reason = store.needs_compaction()
        if reason is not None and no_compact:
            err.print(f"A compaction is due: {reason}. Run kinlens-index compact.", soft_wrap=True)
        elif reason is not None:
            err.print(f"Compacting: {reason}.", soft_wrap=True)
            with progress(store.size, "Indexing") as advance:
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


@contextlib.contextmanager
def _failures_as_warnings() -> Iterator[None]:
    try:
        yield
    except (KinlensError, OSError) as error:
        why = disk_fault(error) if isinstance(error, OSError) else error
        err.print(
            f"Warning: the changes are stored, but the upkeep of the gallery failed: {why}",
            soft_wrap=True,
        )


def bundle_of(store: Store) -> Path:
    """The bundle that built a gallery. Raises: GalleryError if its folder is unknown or gone."""
    path = store.built_with() if isinstance(store, Gallery) else None
    if path is None or not path.is_dir():
        raise GalleryError(
            f"Images have to be embedded, and the bundle that built gallery {store.name} is "
            f"{'unknown' if path is None else f'no longer in {path}'}. Pass it with --bundle."
        )
    return path


def facts_of(store: Store) -> dict[str, str]:
    """The metadata of a gallery that an export contains."""
    known = {"name", "bundle_id", "precision", "created_at", "source", "source_root"}
    facts: dict[str, str] = store.facts().model_dump(include=known)
    if isinstance(store, Gallery) and store.manifest.shortened:
        facts["shortened"] = "true"
    return facts


@contextlib.contextmanager
def content_of(
    sources: Sequence[str],
    tables_of: Callable[[Sequence[Path]], Tables],
    bundle: Path | None,
    model: str | None,
    image_root: str | None,
) -> Iterator[GalleryExport]:
    """The input of `import`: a file of `export`, vectors of `embed`, a gallery of any engine, or
    files of another program.

    Raises: SourceError, GalleryError; EngineUnavailableError without pyarrow.
    """
    [text, *more], place = sources, Path(sources[0])
    if not more and not text.startswith(MILVUS) and (REMOTE in text or (place / SHARDS).is_file()):
        yield VectorShards(text).dump(name_of(place))
        return
    if not more and (text.startswith(MILVUS) or GalleryFolder(place).current_name()):
        with opened(text) as store:
            entries = itertools.chain.from_iterable
            scan = store.scan
            yield GalleryExport(facts_of(store), store.dim, store.size, lambda: entries(scan()))
        return
    if not more and place.is_file() and not is_foreign(place):
        yield read_export(place)
        return
    tables = tables_of(files_of(sources))
    yield _foreign(tables, bundle, model, image_root)
    if tables.normalised:
        err.print(
            f"{tables.normalised:,} vectors were not of norm 1 and were normalised: scores are "
            "cosines.",
            soft_wrap=True,
        )


def _foreign(
    tables: Tables, bundle: Path | None, model: str | None, image_root: str | None
) -> GalleryExport:
    """Vectors of another program, of the model in `bundle` or named `model`, as an export.

    Raises: SourceError, BundleError.
    """
    file = tables.files[0]
    if (bundle is None) == (model is None):
        raise SourceError(
            f"{file} was not written by Kinlens and names no model. Pass --bundle BUNDLE if "
            "its vectors are of that model; else --model NAME, to search by vector only."
        )
    opened_bundle = None if bundle is None else Bundle.open(bundle)
    facts = {
        "name": name_of(file.with_suffix("")),
        "bundle_id": f"{OTHER_MODEL}{model}" if opened_bundle is None else opened_bundle.bundle_id,
        "source": f"vectors in {file.resolve()}",
        "source_root": "" if image_root is None else _absolute(image_root),
    }
    dump = tables.dump(facts)
    if opened_bundle is not None and dump.dim != opened_bundle.manifest.dim:
        raise SourceError(
            f"The vectors in {file} have {dump.dim} components, those of {bundle} have "
            f"{opened_bundle.manifest.dim}. Pass the bundle that computed them, or name another "
            "model with --model NAME."
        )
    return dump


def _absolute(image_root: str) -> str:
    root = image_root_of(image_root)
    return str(root.resolve() if isinstance(root, Path) else root)


def milvus_token() -> str:
    return os.environ.get("KINLENS_MILVUS_TOKEN", "")
