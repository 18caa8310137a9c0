"""Open the gallery of a command: in a folder, or on Milvus."""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kinlens.commands.console import err, progress
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import GalleryError, KinlensError, SourceError, disk_fault
from kinlens.indexer.exchange.milvus import MilvusStore
from kinlens.indexer.exchange.objects import REMOTE
from kinlens.indexer.exchange.parquet import read_dump
from kinlens.indexer.folder.layout import GalleryFolder
from kinlens.indexer.folder.manifest import name_of
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.foreign import Tables, files_of, is_foreign
from kinlens.indexer.ingest.shards import MANIFEST as SHARDS
from kinlens.indexer.ingest.shards import VectorShards
from kinlens.indexer.live.compaction import KEEP_REMOVED_S
from kinlens.indexer.types import (
    MILVUS,
    OTHER_MODEL,
    Entry,
    GalleryExport,
    Progress,
    milvus_address,
)
from kinlens.quality.calibrator import Calibrator

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


@dataclass(frozen=True, slots=True)
class Foreign:
    """How to read vectors of another program, and the model that they are of."""

    bundle: Path | None = None
    model: str | None = None
    image_root: Path | None = None
    key_column: str | None = None
    vector_column: str | None = None
    columns: Sequence[str] | None = None
    keys: Path | None = None
    csv: Path | None = None

    def tables(self, files: Sequence[Path]) -> Tables:
        """The vectors in these files."""
        return Tables(files, self.key_column, self.vector_column, self.columns, self.keys, self.csv)

    def dump(self, tables: Tables) -> GalleryExport:
        """The content of files as an export. Raises: SourceError, BundleError."""
        file = tables.files[0]
        if (self.bundle is None) == (self.model is None):
            raise SourceError(
                f"{file} was not written by Kinlens and names no model. Pass --bundle BUNDLE if "
                "its vectors are of that model; else --model NAME, to search by vector only."
            )
        bundle_id, dim = f"{OTHER_MODEL}{self.model}", None
        if self.bundle is not None:
            bundle = Bundle.open(self.bundle)
            bundle_id, dim = bundle.bundle_id, bundle.manifest.dim
        root = "" if self.image_root is None else str(self.image_root.resolve())
        source = f"vectors in {file.resolve()}"
        dump = tables.dump(
            {
                "name": name_of(file.with_suffix("")),
                "bundle_id": bundle_id,
                "source": source,
                "source_root": root,
            }
        )
        if dim not in (None, dump.dim):
            raise SourceError(
                f"The vectors in {file} have {dump.dim} components, those of {self.bundle} {dim}. "
                "Pass the bundle that computed them, or --model NAME for another model."
            )
        return dump


@contextlib.contextmanager
def content_of(sources: Sequence[str], foreign: Foreign) -> Iterator[GalleryExport]:
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
        yield read_dump(place)
        return
    tables = foreign.tables(files_of(sources))
    yield foreign.dump(tables)
    if tables.normalised:
        err.print(
            f"{tables.normalised:,} vectors were not of norm 1 and were normalised: scores are "
            "cosines.",
            soft_wrap=True,
        )


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
        on_progress=on_progress,
    )


def _token() -> str:
    return os.environ.get("KINLENS_MILVUS_TOKEN", "")
