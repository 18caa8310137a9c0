"""An index segment: an immutable index and attribute columns over one state of a gallery.

segments/<name>/
  index.faiss    the compressed index of the rows of live items; not for flat
  gone.bin       bitmap of the vector rows without a live item
  copies.bin     the rows with equal content, see kinlens.indexer.index.copies; if there are any
  segment.json   SegmentManifest

A position is a row of the file of vectors (kinlens.indexer.catalog.vectors). A segment of an
earlier version may have a columns.bin with the attributes by row, or its own vectors.npy, and
ids.npy with the item id of each position.
"""

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from kinlens.embedder.bundle import sha256_of
from kinlens.embedder.durable import FileFacts, HashedFile
from kinlens.embedder.errors import GalleryCorruptError, PlanError, RecallError
from kinlens.embedder.programs.faults import file_fault
from kinlens.embedder.types import Embeddings
from kinlens.indexer.bits import Bits, empty_bits, packed_bits
from kinlens.indexer.catalog.vectors import VECTORS, VectorFile
from kinlens.indexer.index.copies import Copies
from kinlens.indexer.index.faiss import SegmentIndex
from kinlens.indexer.index.gpu import GpuCopy
from kinlens.indexer.index.index_types import INDEX_TYPES, Effort, IndexKind, full
from kinlens.indexer.index.plan import IndexSettings, Plan, plan_compaction
from kinlens.indexer.index.tune import Tuned, measuring, tune
from kinlens.indexer.types import REBUILD, Ids, IndexLocation, Progress, StoredRows, VectorType

_log = logging.getLogger(__name__)

SEGMENTS = "segments"
"""The folder of a generation that contains the segments."""

INDEX = "index.faiss"
REMOVED = "gone.bin"
COLUMNS = "columns.bin"
COPIES = "copies.bin"
SEGMENT_MANIFEST = "segment.json"

_OWN_VECTORS, _OWN_IDS = "vectors.npy", "ids.npy"  # written by earlier versions

HASHED_BELOW = 64 * 2**20
"""File size in bytes below which hashes are checked at every opening."""

_TRUE_CODES = 3
"""The first schema version in which all codes of an updated index are right; see `_clear_unused` of
kinlens.indexer.index.faiss. Earlier indexes are rebuilt."""

_SHORT = 12
_MIB = 2**20
_REMOVED_KINDS = ("fp16", "ivf-rabitq", "cagra")

HELD_OUT = 1000
"""Vectors held out of the index as tuning queries; at most one in ten."""

SMALL = 64
"""Number of vectors below which none is held out: the index is tuned with its own vectors."""

UPDATE_QUERIES = 300
"""Queries that check the recall of an updated index."""

COPY_S = 900.0
"""Time limit for copying an index to the GPU, in seconds; after it, the GPU is considered hung."""

MAX_SIZE_RATIO = 1.5
"""An index is retrained if it grew or shrank by more than this factor since training."""


class OnGpu(BaseModel, frozen=True, extra="forbid"):
    """Measured on a GPU: the effort that reached the target, and its recall."""

    effort: int = Field(ge=1)
    recall: float = Field(ge=0, le=1)


class SegmentManifest(BaseModel, frozen=True, extra="forbid"):
    """Contents and build of a segment.

    seq: the write whose items it contains.
    size: number of positions; `gone` of them have no item.
    copies: number of items with the content of an earlier one; only flat indexes contain them.
    vectors: the name of the file of vectors; None in an earlier version.
    recall: at 10, measured with `held_out` queries before they were indexed. `held_out` is 0 for a
        small gallery, which is measured with indexed vectors.
    trained_on: number of vectors at training.
    trained_effort: written by 0.2.0; not used.
    gpu: None if not measured. A GPU then uses the effort of the CPU, which suffices, since it
        compares with vectors instead of codes.
    """

    schema_version: Literal[1, 2, 3] = 3
    seq: int = Field(ge=0)
    size: int = Field(ge=1)
    gone: int = Field(default=0, ge=0)
    copies: int = Field(default=0, ge=0)
    vectors: str | None = None
    dim: int = Field(ge=1)
    kind: IndexKind
    parameters: dict[str, int]
    effort: int = Field(ge=0)
    k_factor: int = Field(ge=1)
    recall: float = Field(ge=0, le=1)
    target_recall: float = Field(gt=0, le=1)
    held_out: int = Field(ge=0)
    trained_on: int = Field(default=0, ge=0)
    trained_effort: dict[str, int] | None = None
    gpu: OnGpu | None = None
    build_s: float = Field(ge=0)
    created_at: str = Field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")
    )
    settings: IndexSettings
    files: dict[str, FileFacts]
    digest: str = ""

    @property
    def computed_digest(self) -> str:
        """sha256 (hex) of all other fields. Omits unused ones that earlier versions do not have."""
        without = {"digest"} | {name for name in ("gpu", "copies") if not getattr(self, name)}
        return hashlib.sha256(self.model_dump_json(exclude=without).encode()).hexdigest()

    @property
    def items(self) -> int:
        """Number of items."""
        return self.size - self.gone

    @property
    def tuned(self) -> Effort:
        """The tuned effort, which reaches the target recall."""
        return Effort(self.effort, self.k_factor, self.gpu.effort if self.gpu else 0)


def write_segment_manifest(folder: Path, manifest: SegmentManifest) -> None:
    """Write the manifest into a folder that is not in use yet. Raises: OSError."""
    manifest = manifest.model_copy(update={"digest": manifest.computed_digest})
    text = manifest.model_dump_json(indent=2) + "\n"
    (folder / SEGMENT_MANIFEST).write_text(text, encoding="utf-8")


def read_segment_manifest(folder: Path) -> SegmentManifest:
    """The manifest of a segment. Raises: GalleryCorruptError."""
    path = folder / SEGMENT_MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        is_removed = isinstance(data, dict) and data.get("kind") in _REMOVED_KINDS
        if is_removed:
            data = _as_flat(data)
        manifest = SegmentManifest.model_validate(data)
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(
            f"{path} is not a segment manifest that this version of Kinlens can read: "
            f"{brief(error)}. {REBUILD}"
        ) from error
    if manifest.vectors and not is_removed and manifest.digest != manifest.computed_digest:
        raise GalleryCorruptError(f"{path} is damaged: it does not match its digest. {REBUILD}")
    expected = {REMOVED} if manifest.vectors else {_OWN_VECTORS, _OWN_IDS}
    expected |= {INDEX} if INDEX_TYPES[manifest.kind].faiss_class else set()
    expected |= {COPIES} if manifest.copies else set()
    if manifest.files.keys() - {COLUMNS} != expected:
        raise GalleryCorruptError(
            f"{path} lists the files {sorted(manifest.files)}, but an index {manifest.kind} "
            f"has {sorted(expected)}. {REBUILD}"
        )
    return manifest


def _as_flat(data: dict[str, Any]) -> dict[str, Any]:
    """Read a segment of an index type that no longer exists as a flat one."""
    files = {name: facts for name, facts in data["files"].items() if name != INDEX}
    settings = {**data["settings"], "kind": "auto"}
    plain = {
        "kind": "flat",
        "parameters": {},
        "effort": 0,
        "k_factor": 1,
        "recall": 1.0,
        "gpu": None,
    }
    return {**data, **plain, "files": files, "settings": settings}


def check_file(path: Path, facts: FileFacts, verify_hash: bool | None) -> None:
    """Check the size of a file and, depending on `verify_hash`, its hash.

    Reading a memory map beyond the end of a truncated file would kill the process with SIGBUS.

    Raises: GalleryCorruptError.
    """
    try:
        found = path.stat().st_size
        if found != facts.bytes:
            raise GalleryCorruptError(
                f"{path} has {found:,} bytes, but {facts.bytes:,} in the manifest: the file was "
                f"truncated or changed. {REBUILD}"
            )
        if verify_hash is False or (verify_hash is None and found >= HASHED_BELOW):
            return
        sha256 = sha256_of(path)
    except OSError as error:
        raise GalleryCorruptError(f"{path} cannot be read: {error}. {REBUILD}") from error
    if sha256 != facts.sha256:
        raise GalleryCorruptError(
            f"{path} has sha256 {sha256[:_SHORT]}, but {facts.sha256[:_SHORT]} in the manifest: "
            f"the file is damaged or was changed. {REBUILD}"
        )


def missing_segment(folder: Path) -> GalleryCorruptError:
    """The error for a segment that the catalogue names and nobody has replaced."""
    return GalleryCorruptError(
        f"The segment {folder.name} is missing in {folder.parent}. {REBUILD}"
    )


def read_copies(folder: Path, manifest: SegmentManifest) -> Copies | None:
    """The copies of a segment; None if it has none. Raises: GalleryCorruptError."""
    if not manifest.copies:
        return None
    path = folder / COPIES
    try:
        pairs = np.fromfile(path, np.int64).reshape(2, -1)
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(f"{path} cannot be read: {error}. {REBUILD}") from error
    if pairs.size and not 0 <= pairs.min() <= pairs.max() < manifest.size:
        raise GalleryCorruptError(f"{path} is damaged: it names unknown rows. {REBUILD}")
    return Copies.from_array(pairs, manifest.size)


def brief(error: Exception) -> str:
    """A short message for an invalid manifest: only the first error."""
    return file_fault(error) if isinstance(error, ValidationError) else str(error)


class Segment:
    """An open segment.

    index: finds positions; None for a segment with vectors of its own, of an earlier version.
    removed: bitmap of the positions without an item.
    tuned: the effort that reaches the target recall.
    """

    def __init__(
        self,
        manifest: SegmentManifest,
        index: SegmentIndex | None,
        removed: Bits,
        file: VectorFile | None = None,
        copies: Copies | None = None,
    ) -> None:
        self.manifest = manifest
        self.tuned = manifest.tuned
        self.index = index
        self.removed = removed
        self.copies = copies
        self._file = file  # keeps it open, and so on disk

    @classmethod
    def open(
        cls, folder: Path, *, verify_hashes: bool | None = None, device: str = "cpu"
    ) -> "Segment":
        """Open and memory-map a segment. File sizes are always checked.

        verify_hashes: whether to check hashes; None checks small files only.
        device: with `cuda`, a GPU with enough memory searches; otherwise the CPU.

        Raises: GalleryCorruptError; FileNotFoundError if its vectors have been removed.
        """
        manifest = read_segment_manifest(folder)
        for name, facts in manifest.files.items():
            check_file(folder / name, facts, verify_hashes)
        if manifest.vectors is None:
            return cls(manifest, None, empty_bits(0))
        file = VectorFile.open(folder.parent.parent / VECTORS / manifest.vectors, manifest.dim)
        removed = np.fromfile(folder / REMOVED, np.uint8)
        if len(removed) != (manifest.size + 7) // 8:
            raise GalleryCorruptError(f"{folder / REMOVED} has the wrong length. {REBUILD}")
        codes = folder / INDEX if INDEX in manifest.files else None
        copies = read_copies(folder, manifest)
        indexed = manifest.items - manifest.copies
        index = SegmentIndex.open(manifest.kind, file.rows(manifest.size), codes, indexed)
        if device == "cuda":
            index.use_gpu(f"The index {manifest.kind} in {folder}", manifest.parameters)
        return cls(manifest, index, removed, file, copies)

    @property
    def unindexed(self) -> int:
        """Number of positions that are not in the index."""
        return 0 if self.manifest.kind == "flat" else self.manifest.gone + self.manifest.copies

    @property
    def location(self) -> IndexLocation:
        """The device that searches it, and its memory."""
        manifest, gpu = self.manifest, self.gpu
        index_type = INDEX_TYPES[manifest.kind]
        codes = index_type.code_bytes(manifest.items, manifest.dim, manifest.parameters)
        if gpu is None or not gpu.is_there:
            reason = None if gpu is None else gpu.reason
            vectors = 4.0 * manifest.items * manifest.dim if index_type.is_scan else 0.0
            return IndexLocation(index_type.name, "cpu", (vectors + codes) / _MIB, reason=reason)
        return IndexLocation(index_type.name, "cuda", codes / _MIB, gpu.gpu_mb)

    @property
    def gpu(self) -> GpuCopy | None:
        """The copy of the index on the GPU, which may have failed; None if none was requested."""
        return None if self.index is None else self.index.gpu

    def close(self) -> None:
        """Release the GPU. Memory maps are released with the last reference to their arrays."""
        if self.index is not None:
            self.index.close()


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows to index: the first `size` rows of a file of vectors.

    removed: mask (size,) of rows without an item; at least one row has an item.
    copies: the rows of items with equal content.
    """

    file: VectorFile
    size: int
    removed: NDArray[np.bool_]
    copies: Copies

    @property
    def live(self) -> Ids:
        """The rows that have an item, ascending."""
        return np.flatnonzero(~self.removed)

    @property
    def indexed(self) -> Ids:
        """The first row of each content, ascending."""
        is_indexed = ~self.removed
        is_indexed[self.copies.later] = False
        return np.flatnonzero(is_indexed)


@dataclass(frozen=True, slots=True)
class PreviousSegment:
    """The current segment, which a compaction replaces.

    moved: the new row of each of its positions (N,); -1 for positions without an item.
    """

    folder: Path
    manifest: SegmentManifest
    moved: Ids


def write_segment(
    folder: Path,
    seq: int,
    rows: Rows,
    settings: IndexSettings,
    plan: Plan,
    on_progress: Progress | None = None,
    previous: PreviousSegment | None = None,
) -> SegmentManifest:
    """Index rows and write the segment into the empty `folder`; nothing is synced.

    plan: with `auto`, a flat index replaces one that does not reach the target recall.
    on_progress: called with the number of vectors indexed since the last call.
    previous: the current segment; its index is updated instead of rebuilt where possible.

    Raises: RecallError, OSError.
    """
    started = perf_counter()
    live, indexed = rows.live, rows.indexed
    vectors = rows.file.rows(rows.size)
    files = {REMOVED: _write(folder / REMOVED, packed_bits(rows.removed))}
    copies = len(live) - len(indexed)
    if copies:
        files[COPIES] = _write(folder / COPIES, rows.copies.to_array())
    built = None
    if previous is not None and _can_update(previous.manifest, plan, settings):
        built = _updated(previous, vectors, indexed, on_progress)
    if built is None:
        try:
            built = _indexed(plan, vectors, indexed, settings.target_recall, on_progress)
        except RecallError as error:
            plan = _exact_instead(plan, settings, rows.file.type, error)
            built = _indexed(plan, vectors, indexed, settings.target_recall, on_progress)
    if INDEX_TYPES[plan.kind].faiss_class:
        files[INDEX] = built.index.save(folder / INDEX)
    built.index.close()
    manifest = SegmentManifest(
        seq=seq,
        size=rows.size,
        gone=rows.size - len(live),
        copies=copies,
        vectors=rows.file.name,
        dim=plan.dim,
        kind=plan.kind,
        parameters=built.parameters,
        effort=built.tuned.effort.value,
        k_factor=built.tuned.effort.k_factor,
        recall=built.tuned.recall,
        target_recall=settings.target_recall,
        held_out=built.queries,
        trained_on=built.trained_on,
        gpu=built.gpu,
        build_s=perf_counter() - started,
        settings=settings,
        files=files,
    )
    write_segment_manifest(folder, manifest)
    return manifest


def _exact_instead(
    plan: Plan, settings: IndexSettings, vector_type: VectorType, error: RecallError
) -> Plan:
    """The plan of a flat index; raises `error` if another one was asked for, or it does not fit."""
    if settings.kind != "auto":
        raise error
    try:
        exact = plan_compaction(plan.n, plan.dim, replace(settings, kind="flat"), vector_type)
    except PlanError:
        raise error from None
    _log.warning("%s The index flat is built instead.", error)
    return exact


@dataclass(frozen=True, slots=True)
class _Built:
    index: SegmentIndex
    tuned: Tuned
    queries: int
    trained_on: int
    parameters: dict[str, int]
    gpu: OnGpu | None = None


def _indexed(
    plan: Plan, vectors: StoredRows, live: Ids, target: float, on_progress: Progress | None
) -> _Built:
    """Build and tune an index. Held-out queries are added after tuning."""
    index_type = INDEX_TYPES[plan.kind]
    if index_type.is_scan:  # exact, so no queries are held out
        index = SegmentIndex.build(plan, vectors, live, on_progress)
        return _trained(index, tune(index, full(vectors[live[:SMALL]]), target), 0, plan)
    is_held_out = _held_out(len(live))
    kept, later = live[~is_held_out], live[is_held_out]
    queries = full(vectors[later if len(later) else live])
    flags = np.zeros(len(vectors), np.bool_)
    flags[kept] = True
    index = SegmentIndex.build(plan, vectors, kept, on_progress)
    allowed = packed_bits(flags)
    tuned = tune(index, queries, target, allowed=allowed)
    gpu = _tuned_on_gpu(index, queries, plan, target, allowed)
    index = index.extended(later, on_progress)
    return _trained(index, tuned, len(later), plan, gpu)


def _tuned_on_gpu(
    index: SegmentIndex, queries: Embeddings, plan: Plan, target: float, allowed: Bits
) -> OnGpu | None:
    """The effort that reaches the target on the GPU; None without a GPU. Raises: RecallError."""
    if plan.device == "cpu":
        return None
    index.use_gpu(f"The new index {plan.kind}", plan.parameters)
    if index.gpu is None or not (index.gpu.wait(COPY_S) and index.is_on_gpu):
        index.close()
        return None
    try:
        tuned = tune(index, queries, target, allowed=allowed)
        # If the GPU failed during tuning, the CPU was measured.
        is_whole = index.gpu.reason is None
        return OnGpu(effort=tuned.effort.value, recall=tuned.recall) if is_whole else None
    finally:
        index.close()


def _trained(
    index: SegmentIndex, tuned: Tuned, queries: int, plan: Plan, gpu: OnGpu | None = None
) -> _Built:
    return _Built(index, tuned, queries, plan.n, dict(plan.parameters), gpu)


def _can_update(previous: SegmentManifest, plan: Plan, settings: IndexSettings) -> bool:
    """Whether the current index can be updated instead of rebuilt."""
    return (
        INDEX_TYPES[plan.kind].is_updatable
        and previous.schema_version >= _TRUE_CODES
        and (previous.kind, previous.target_recall) == (plan.kind, settings.target_recall)
        and previous.parameters.keys() == plan.parameters.keys()
        and previous.trained_on <= MAX_SIZE_RATIO * plan.n
        and plan.n <= MAX_SIZE_RATIO * previous.trained_on
    )


def _kept(previous: PreviousSegment, indexed: Ids, size: int) -> Ids:
    """`previous.moved`, with -1 for positions that are not in both indexes."""
    is_indexed = np.zeros(size, np.bool_)
    is_indexed[indexed] = True
    moved = previous.moved.copy()
    copies = read_copies(previous.folder, previous.manifest)
    if copies is not None:
        moved[copies.later] = -1
    moved[(moved >= 0) & ~is_indexed[moved]] = -1
    return moved


def _updated(
    previous: PreviousSegment, vectors: StoredRows, indexed: Ids, on_progress: Progress | None
) -> _Built | None:
    """The current index with new items and without removed ones; None if it must be retrained.

    It is retrained if it would find too few neighbours of the new items.
    """
    manifest = previous.manifest
    moved = _kept(previous, indexed, len(vectors))
    count = manifest.items - manifest.copies
    index = SegmentIndex.updated(manifest.kind, previous.folder / INDEX, vectors, count, moved)
    is_kept = np.zeros(len(vectors), np.bool_)
    is_kept[moved[moved >= 0]] = True
    fresh = indexed[~is_kept[indexed]]
    tuned = Tuned(manifest.tuned, manifest.recall)
    if len(fresh) >= SMALL and is_kept.any():
        queries = full(vectors[fresh[_drawn(len(fresh), UPDATE_QUERIES)]])
        target, allowed = manifest.target_recall, packed_bits(is_kept)
        tuned = measuring(index, queries, allowed=allowed)(manifest.tuned)
        if tuned.recall + tuned.error < target:  # within one standard error
            return None
    if on_progress is not None:
        on_progress(int(np.count_nonzero(is_kept)))
    index = index.extended(fresh, on_progress)
    return _Built(
        index, tuned, manifest.held_out, manifest.trained_on, manifest.parameters, manifest.gpu
    )


def _held_out(n: int) -> NDArray[np.bool_]:
    """Mask of the `n` vectors that are held out; always the same sample."""
    is_held_out = np.zeros(n, np.bool_)
    if n >= SMALL:
        is_held_out[_drawn(n, min(HELD_OUT, n // 10))] = True
    return is_held_out


def _drawn(n: int, count: int) -> Ids:
    """Up to `count` random indices below `n`; always the same sample."""
    return np.random.default_rng(0).choice(n, min(n, count), replace=False, shuffle=False)


def _write(path: Path, array: NDArray[Any]) -> FileFacts:
    with HashedFile(path) as file:
        file.write(array)
    return file.facts
