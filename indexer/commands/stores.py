"""Open the gallery of a command: in a folder, or on Milvus."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from kinlens.embedder.errors import GalleryError
from kinlens.indexer.commands.console import err, progress
from kinlens.indexer.exchange.milvus import MilvusStore
from kinlens.indexer.exchange.objects import REMOTE
from kinlens.indexer.exchange.parquet import read_dump
from kinlens.indexer.folder.manifest import name_of
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.shards import MANIFEST as SHARDS
from kinlens.indexer.ingest.shards import VectorShards
from kinlens.indexer.live.compaction import KEEP_REMOVED_S
from kinlens.indexer.types import MILVUS, Entry, GalleryExport, Progress, milvus_address

Store = Gallery | MilvusStore


def opened(
    text: str, *, bundle_id: str | None = None, image_root: Path | None = None, device: str = "cpu"
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
            uri, name, expected_bundle_id=bundle_id, image_root=image_root, token=_token()
        )
    )


def compact_if_due(store: Store, no_compact: bool) -> None:
    """Compact a gallery if its changes make searches slow, and calibrate it again if outdated.

    Raises: PlanError, RecallError, GalleryWriteError.
    """
    if not isinstance(store, Gallery):
        return
    reason = store.needs_compaction()
    if reason is None:
        store.calibrate_if_outdated()
        return
    if no_compact:
        err.print(f"A compaction is due: {reason}. Run kinlens-index compact.", soft_wrap=True)
        store.calibrate_if_outdated()
        return
    err.print(f"Compacting: {reason}.", soft_wrap=True)
    with progress(store.size, "Indexing") as advance:
        store.compact(wait=True, keep_removed_s=KEEP_REMOVED_S, on_progress=advance)


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
    return store.facts().model_dump(include=known)


@contextlib.contextmanager
def content_of(text: str) -> Iterator[GalleryExport]:
    """The input of `import`: a file of `export`, vectors of `embed`, or a gallery of any engine.

    Raises: SourceError, GalleryError; EngineUnavailableError without pyarrow.
    """
    if not text.startswith(MILVUS):
        is_remote = REMOTE in text
        if is_remote or Path(text, SHARDS).is_file():
            yield VectorShards(text).dump(name_of(Path(text)))
            return
        if not Path(text).is_dir():
            yield read_dump(text)
            return
    with opened(text) as store:
        entries = itertools.chain.from_iterable
        yield GalleryExport(facts_of(store), store.dim, store.size, lambda: entries(store.scan()))


class _Entries:
    """A re-iterable view of the entries of a dump."""

    def __init__(self, dump: GalleryExport) -> None:
        self._dump = dump

    def __iter__(self) -> Iterator[Entry]:
        return self._dump.entries()

    def __len__(self) -> int:
        return self._dump.count


def publish_on_milvus(
    text: str, dump: GalleryExport, index: str, memory_mb: float | None, on_progress: Progress
) -> MilvusStore:
    """Publish a dump as the gallery at milvus://HOST:PORT/NAME, and open it.

    Raises: SourceError, GalleryError.
    """
    uri, name = milvus_address(text)
    return MilvusStore.publish(
        uri,
        name,
        _Entries(dump),
        dim=dump.dim,
        bundle_id=dump.facts["bundle_id"],
        precision=dump.facts.get("precision", "fp32"),
        source=dump.facts.get("source", ""),
        source_root=dump.facts.get("source_root", ""),
        token=_token(),
        index=index,
        memory_mb=memory_mb,
        processes=None,
        on_progress=on_progress,
    )


def _token() -> str:
    return os.environ.get("KINLENS_MILVUS_TOKEN", "")
