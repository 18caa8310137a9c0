"""The index over the vectors of one state of a gallery, with their attributes; immutable.

segments/<name>/
  index.faiss    the compressed index of the rows of live items; none for the kind flat
  gone.bin       a bit for each row of the vectors that has no live item
  columns.bin    the attributes by row, see indexer.columns
  segment.json   SegmentManifest

A position is a row of the file of vectors (indexer.catalog.vectors), which is read where it lies. A
segment of an earlier version has its own vectors.npy and, in ids.npy, the item of each position.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError, field_serializer

from kinlens.embedder.bundle import sha256_of
from kinlens.embedder.durable import FileFacts, HashedFile
from kinlens.embedder.errors import GalleryCorruptError, ProviderError, RecallError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.bits import Bits, empty_bits, has_bits, packed_bits, positions_in
from kinlens.indexer.catalog.vectors import VECTORS, RowNumbers, VectorFile
from kinlens.indexer.columns.columns import Column, Columns, write_columns
from kinlens.indexer.index.faiss import SegmentIndex
from kinlens.indexer.index.kinds import KINDS, Effort, IndexKind, full
from kinlens.indexer.index.plan import IndexSettings, Plan
from kinlens.indexer.index.tune import Measure, Tuned, least_effort, tune
from kinlens.indexer.types import Ids, IndexPlace, Progress, StoredRows, places_of

_log = logging.getLogger(__name__)

INDEX = "index.faiss"
GONE = "gone.bin"
COLUMNS = "columns.bin"
MANIFEST = "segment.json"

_OWN_VECTORS, _OWN_IDS = "vectors.npy", "ids.npy"  # of an earlier version

HASHED_BELOW = 64 * 2**20
"""Bytes up to which a file's hash is checked on every opening."""

_CURE = "Make the index again from the catalogue: kinlens-index compact GALLERY --rebuild."
_SHORT = 12
_MIB = 2**20
_FORMER = ("fp16", "ivf-rabitq")

HELD_OUT = 1000
"""Queries that are held out to tune with; at most one in ten vectors."""

SMALL = 64
"""Below so many vectors none is held out: the index is tuned with its own vectors."""

TESTED = 300
"""Queries that say whether an index that was brought up to date is still good enough."""

REFERENCE = 8
"""So many times the lists and candidates give the answers that it is compared with."""

COPY_S = 900.0
"""A GPU that has not taken an index by then has hung."""

HARDER = 2
"""An index that needs so many times the effort of its training is trained again."""

OUTGROWN = 2
"""An index that has grown so many times since it was trained is trained again."""


class OnGpu(BaseModel, frozen=True, extra="forbid"):
    """What was measured on a GPU: the effort that reached the target, and the recall."""

    effort: int = Field(ge=1)
    recall: float = Field(ge=0, le=1)


class SegmentManifest(BaseModel, frozen=True, extra="forbid"):
    """What a segment holds and how it was made.

    seq: the state whose items it holds. size: positions, `gone` of which have no item. vectors: the
    file that they are rows of; None in an earlier version. recall: at 10, measured with `held_out`
    queries that were not in the index yet; 0 of them if the gallery was too small and its own
    vectors were used. trained_on: how many vectors there were when it was trained; trained_effort:
    the effort that was found then. gpu: None where none was measured; a GPU then searches with the
    effort of the CPU, which is enough, since it compares with vectors in place of their codes.
    """

    schema_version: Literal[1, 2] = 2
    seq: int = Field(ge=0)
    size: int = Field(ge=1)
    gone: int = Field(default=0, ge=0)
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
    trained_effort: Effort | None = None
    gpu: OnGpu | None = None
    build_s: float = Field(ge=0)
    created_at: str = Field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")
    )
    settings: IndexSettings
    files: dict[str, FileFacts]
    digest: str = ""

    @field_serializer("trained_effort")
    def _without_gpu(self, effort: Effort | None) -> dict[str, int] | None:
        return None if effort is None else {"value": effort.value, "k_factor": effort.k_factor}

    @property
    def computed_digest(self) -> str:
        """sha256 (hex) of everything else, without `gpu` where it is None: earlier versions had no
        such field.
        """
        without = {"digest"} if self.gpu else {"digest", "gpu"}
        return hashlib.sha256(self.model_dump_json(exclude=without).encode()).hexdigest()

    @property
    def items(self) -> int:
        """Number of items."""
        return self.size - self.gone

    @property
    def tuned(self) -> Effort:
        """The effort that reached the target."""
        return Effort(self.effort, self.k_factor, self.gpu.effort if self.gpu else 0)


def write_manifest(folder: Path, manifest: SegmentManifest) -> None:
    """Write the manifest into a folder that nobody reads yet. Raises: OSError."""
    manifest = manifest.model_copy(update={"digest": manifest.computed_digest})
    text = manifest.model_dump_json(indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> SegmentManifest:
    """The manifest of a segment. Raises: GalleryCorruptError."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict) and data.get("kind") in _FORMER:
            data = _as_flat(data)
        manifest = SegmentManifest.model_validate(data)
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(
            f"{path} is not a segment manifest that this version of Kinlens can read: "
            f"{brief(error)}. {_CURE}"
        ) from error
    if manifest.vectors and manifest.digest != manifest.computed_digest:
        raise GalleryCorruptError(f"{path} is damaged: it does not match its digest. {_CURE}")
    expected = {GONE} if manifest.vectors else {_OWN_VECTORS, _OWN_IDS}
    expected |= {INDEX} if KINDS[manifest.kind].faiss_class else set()
    if manifest.files.keys() - {COLUMNS} != expected:
        raise GalleryCorruptError(
            f"{path} lists the files {sorted(manifest.files)}, an index of kind {manifest.kind} "
            f"has {sorted(expected)}. {_CURE}"
        )
    return manifest


def _as_flat(data: dict[str, Any]) -> dict[str, Any]:
    """A segment of a kind that is not made any more: its vectors are compared with as they are."""
    files = {name: facts for name, facts in data["files"].items() if name != INDEX}
    settings = {**data["settings"], "kind": "auto"}
    plain = {"kind": "flat", "parameters": {}, "effort": 0, "k_factor": 1, "recall": 1.0}
    return {**data, **plain, "files": files, "settings": settings}


def check_file(path: Path, facts: FileFacts, verify_hash: bool | None) -> None:
    """A file has its size and, where this is checked, its hash. Raises: GalleryCorruptError.

    A mapped file that is shorter than it should be would kill the process with SIGBUS.
    """
    try:
        found = path.stat().st_size
        if found != facts.bytes:
            raise GalleryCorruptError(
                f"{path} has {found:,} bytes, the manifest says {facts.bytes:,}: the file was "
                f"truncated or changed. {_CURE}"
            )
        if verify_hash is False or (verify_hash is None and found >= HASHED_BELOW):
            return
        sha256 = sha256_of(path)
    except OSError as error:
        raise GalleryCorruptError(f"{path} cannot be read: {error}. {_CURE}") from error
    if sha256 != facts.sha256:
        raise GalleryCorruptError(
            f"{path} has sha256 {sha256[:_SHORT]}, the manifest says {facts.sha256[:_SHORT]}: the "
            f"file is damaged or was changed. {_CURE}"
        )


def mapped(path: Path, dtype: type, shape: tuple[int, ...]) -> NDArray[Any]:
    """An array in a file, mapped into memory. Raises: GalleryCorruptError."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(f"{path} is not an array: {error}. {_CURE}") from error
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise GalleryCorruptError(
            f"{path} holds {array.dtype} {array.shape}, the segment has {np.dtype(dtype)} {shape}. "
            f"{_CURE}"
        )
    found: NDArray[Any] = np.asarray(array)  # indexing a memmap itself takes ten times as long
    return found


def brief(error: Exception) -> str:
    """What is wrong with a manifest: the first fault alone."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)


class Numbers(Protocol):
    """Which item each position is of."""

    def of(self, rows: Ids) -> Ids:
        """The number of the item of each position."""

    def rows_of(self, ids: Ids) -> Ids:
        """The position of each item; -1 for one that has none."""


class _OwnNumbers:
    """Those of a segment of an earlier version, whose last positions are in no order."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self._order = np.argsort(ids, kind="stable")
        self._sorted = ids[self._order]

    def of(self, rows: Ids) -> Ids:
        found: Ids = self._ids[rows]
        return found

    def rows_of(self, ids: Ids) -> Ids:
        places = places_of(ids, self._sorted)
        return np.where(places < 0, -1, self._order[places])


class Segment:
    """An open segment: `index` by position, `numbers` the item of each position.

    `gone` are positions without an item; `tuned` is the effort that reached the target; `columns`
    are the attributes by position, None in a segment of an earlier version.
    """

    def __init__(
        self,
        manifest: SegmentManifest,
        index: SegmentIndex,
        numbers: Numbers,
        gone: Bits,
        columns: Columns | None,
        file: VectorFile | None,
    ) -> None:
        self.manifest = manifest
        self.size = manifest.size
        self.columns = columns
        self.tuned = manifest.tuned
        self.index = index
        self.numbers = numbers
        self.gone = gone
        self._file = file  # which stays on the disk as long as it is open

    @classmethod
    def open(
        cls, folder: Path, *, verify_hashes: bool | None = None, device: str = "cpu"
    ) -> "Segment":
        """Map the files of a segment. Sizes are always checked; hashes too with `verify_hashes`,
        and if that is None those of small files.

        With the device `cuda` a GPU searches as long as there is one with memory enough.

        Raises: GalleryCorruptError; FileNotFoundError if its vectors are gone.
        """
        manifest = read_manifest(folder)
        for name, facts in manifest.files.items():
            check_file(folder / name, facts, verify_hashes)
        numbers: Numbers
        if manifest.vectors is None:
            shape = (manifest.size, manifest.dim)
            vectors: StoredRows = mapped(folder / _OWN_VECTORS, np.float32, shape)
            numbers = _OwnNumbers(mapped(folder / _OWN_IDS, np.int64, shape[:1]))
            gone, file = empty_bits(manifest.size), None
        else:
            file = VectorFile.open(folder.parent.parent / VECTORS / manifest.vectors, manifest.dim)
            vectors, numbers = file.rows(manifest.size), file.numbers
            gone = np.fromfile(folder / GONE, np.uint8)
            if len(gone) != (manifest.size + 7) // 8:
                raise GalleryCorruptError(f"{folder / GONE} has another length. {_CURE}")
        codes = folder / INDEX if INDEX in manifest.files else None
        columns = None
        if COLUMNS in manifest.files:
            columns = Columns.open(folder / COLUMNS, manifest.size)
        index = SegmentIndex.open(manifest.kind, vectors, codes, manifest.items)
        if device == "cuda":
            index.use_gpu(f"The index {manifest.kind} in {folder}", manifest.parameters)
        return cls(manifest, index, numbers, gone, columns, file)

    @property
    def unindexed(self) -> int:
        """How many positions without an item the index does not have."""
        return 0 if self.index.kind == "flat" else self.manifest.gone

    @property
    def place(self) -> IndexPlace:
        """Where it is searched."""
        manifest, gpu = self.manifest, self.index.gpu
        kind, facts = KINDS[manifest.kind], (manifest.items, manifest.dim, manifest.parameters)
        if gpu is None or not self.index.is_on_gpu:
            reason = None if gpu is None else gpu.reason
            return IndexPlace(kind.name, "cpu", kind.memory_bytes(*facts) / _MIB, reason=reason)
        return IndexPlace(kind.name, "cuda", kind.host_bytes(*facts) / _MIB, gpu.gpu_mb)

    def positions_of(self, ids: Ids) -> Ids:
        """The position of each item (N,); -1 where the segment does not have it."""
        positions = self.numbers.rows_of(np.asarray(ids, np.int64))
        is_there = (positions >= 0) & (positions < self.size)
        if self.manifest.gone:
            is_there &= ~has_bits(self.gone, np.where(is_there, positions, 0))
        return np.where(is_there, positions, -1)

    def numbers_in(self, bits: Bits, after: int, limit: int | None) -> tuple[Ids, int | None]:
        """Of the positions in the set the item numbers above `after`, ascending, at most `limit`;
        and the highest number of all of them.
        """
        if not isinstance(self.numbers, RowNumbers):
            found = np.sort(self.numbers.of(positions_in(bits, self.size)))
            last = int(found[-1]) if len(found) else None
            return found[found > after][:limit], last
        first = self.numbers.rows_up_to(after) // 8
        own = bits[first:]
        if limit is not None:  # the first 8 positions may be before `after`
            reached = np.cumsum(np.bitwise_count(own), dtype=np.int64)
            own = own[: int(np.searchsorted(reached, limit + 8)) + 1]
        count = min(8 * len(own), self.size - 8 * first)
        found = self.numbers.of(8 * first + positions_in(own, max(count, 0)))
        filled = np.flatnonzero(bits)[-2:]
        ends = [p for byte in filled.tolist() for p in range(8 * byte, 8 * byte + 8)]
        there = [p for p in ends if p < self.size and bits[p >> 3] >> (p & 7) & 1]
        last = int(self.numbers.of(np.array(there[-1:], np.int64))[0]) if there else None
        return found[found > after][:limit], last

    def close(self) -> None:
        """Let go of the GPU; memory maps end with the last reader of their arrays."""
        self.index.close()


@dataclass(frozen=True, slots=True)
class Rows:
    """What a segment is made of: the first `size` rows of a file of vectors, of which `gone`
    (size,) have no item; at least one has.
    """

    file: VectorFile
    size: int
    gone: NDArray[np.bool_]

    @property
    def is_full(self) -> bool:
        """Whether each row has an item."""
        return not self.gone.any()

    @property
    def live(self) -> Ids:
        """The rows that have an item, ascending."""
        return np.flatnonzero(~self.gone)


@dataclass(frozen=True, slots=True)
class PreviousSegment:
    """The segment so far, in a folder: `moved` (N,) is the new row of each of its positions, -1 for
    one without an item, then or now.
    """

    folder: Path
    manifest: SegmentManifest
    moved: Ids


def write_segment(
    folder: Path,
    seq: int,
    rows: Rows,
    columns: Iterable[tuple[str, Column]],
    settings: IndexSettings,
    plans: Sequence[Plan],
    on_progress: Progress | None = None,
    before: PreviousSegment | None = None,
) -> SegmentManifest:
    """Index rows, and write a segment of them into the empty `folder`; nothing is synced. The first
    of the `plans` is carried out that reaches the target of the `settings`.

    `before` is the segment so far, whose index is brought up to date where that will do.
    `on_progress` is called with how many more vectors are indexed.

    Raises: RecallError, ProviderError, OSError.
    """
    started = perf_counter()
    live = rows.live
    plans = [plan for plan in plans if rows.is_full or not KINDS[plan.kind].needs_all_rows]
    vectors = rows.file.rows(rows.size)
    files = {
        GONE: _write(folder / GONE, packed_bits(rows.gone)),
        COLUMNS: write_columns(folder / COLUMNS, columns),
    }
    plan, made = plans[0], None
    if before is not None and _can_follow(before.manifest, plan, settings):
        made = _updated(before, vectors, live, on_progress)
    while made is None:
        plan = plans.pop(0)
        try:
            made = _indexed(plan, vectors, live, settings.target_recall, on_progress)
        except (RecallError, ProviderError) as error:
            is_open = isinstance(error, ProviderError) or settings.kind == "auto"
            if not plans or not is_open:  # who asks for a kind is told that it does not do
                raise
            _log.warning("%s The index %s is made instead.", error, plans[0].kind)
    if KINDS[plan.kind].faiss_class:
        files[INDEX] = made.index.save(folder / INDEX)
    made.index.close()
    manifest = SegmentManifest(
        seq=seq,
        size=rows.size,
        gone=rows.size - len(live),
        vectors=rows.file.name,
        dim=plan.dim,
        kind=plan.kind,
        parameters=made.parameters,
        effort=made.tuned.effort.value,
        k_factor=made.tuned.effort.k_factor,
        recall=made.tuned.recall,
        target_recall=settings.target_recall,
        held_out=made.queries,
        trained_on=made.trained_on,
        trained_effort=made.trained_effort,
        gpu=made.gpu,
        build_s=perf_counter() - started,
        settings=settings,
        files=files,
    )
    write_manifest(folder, manifest)
    return manifest


@dataclass(frozen=True, slots=True)
class _Made:
    index: SegmentIndex
    tuned: Tuned
    queries: int
    trained_on: int
    trained_effort: Effort
    parameters: dict[str, int]
    gpu: OnGpu | None = None


def _indexed(
    plan: Plan, vectors: StoredRows, live: Ids, target: float, on_progress: Progress | None
) -> _Made:
    """Held-out queries are left out of the index while it is tuned, then added."""
    kind = KINDS[plan.kind]
    if kind.is_scan:  # which finds what is asked for
        index = SegmentIndex.build(plan, vectors, live, on_progress)
        return _trained(index, tune(index, full(vectors[live[:SMALL]]), target), 0, plan)
    is_held = _held_out(len(live))
    kept, held = live[~is_held], live[is_held]
    queries = full(vectors[held if len(held) else live])
    if kind.grows:
        flags = np.zeros(len(vectors), np.bool_)
        flags[kept] = True
        index = SegmentIndex.build(plan, vectors, kept, on_progress)
        allowed = packed_bits(flags)
        tuned = tune(index, queries, target, allowed=allowed)
        gpu = _tuned_on_gpu(index, queries, plan, target, allowed)
        index = index.extended(held, on_progress)
    else:  # made twice, since nothing can be added to it
        index = SegmentIndex.build(plan, vectors[kept], None, on_progress)
        gpu = _tuned_on_gpu(index, queries, plan, target)
        tuned = _tuned_after(gpu, index, queries, target)
        index = SegmentIndex.build(plan, vectors)
    return _trained(index, tuned, len(held), plan, gpu)


def _tuned_on_gpu(
    index: SegmentIndex, queries: Embeddings, plan: Plan, target: float, allowed: Bits | None = None
) -> OnGpu | None:
    """What the GPU needs to reach the target, if it is made for one. Raises: RecallError."""
    if plan.device == "cpu":
        return None
    index.use_gpu(f"The new index {plan.kind}", plan.parameters)
    if index.gpu is None or not (index.gpu.wait(COPY_S) and index.is_on_gpu):
        index.close()
        return None
    try:
        tuned = tune(index, queries, target, allowed=allowed)
        # One that was lost meanwhile has measured the CPU.
        is_whole = index.gpu.reason is None
        return OnGpu(effort=tuned.effort.value, recall=tuned.recall) if is_whole else None
    finally:
        index.close()


def _tuned_after(
    gpu: OnGpu | None, index: SegmentIndex, queries: Embeddings, target: float
) -> Tuned:
    """What the CPU needs; the best that it can do, where the GPU alone reaches the target."""
    try:
        return tune(index, queries, target)
    except RecallError as error:
        if gpu is None:
            raise
        _log.warning("On the CPU: %s", error)
        hardest = Effort(KINDS[index.kind].efforts(index.size, index.nlist)[-1])
        return Measure(index, queries, target)(hardest).tuned


def _trained(
    index: SegmentIndex, tuned: Tuned, queries: int, plan: Plan, gpu: OnGpu | None = None
) -> _Made:
    return _Made(index, tuned, queries, plan.n, tuned.effort, dict(plan.parameters), gpu)


def _can_follow(before: SegmentManifest, plan: Plan, settings: IndexSettings) -> bool:
    """Whether an index can be brought up to date in place of one that is made anew."""
    return (
        KINDS[plan.kind].follows
        and (before.kind, before.target_recall) == (plan.kind, settings.target_recall)
        and before.parameters.keys() == plan.parameters.keys()
        and before.trained_on <= OUTGROWN * plan.n
        and plan.n <= OUTGROWN * before.trained_on
    )


def _updated(
    before: PreviousSegment, vectors: StoredRows, live: Ids, on_progress: Progress | None
) -> _Made | None:
    manifest = before.manifest
    moved = before.moved
    index = SegmentIndex.followed(
        manifest.kind, before.folder / INDEX, vectors, manifest.items, moved
    )
    kept = moved[moved >= 0]
    flags = np.zeros(len(vectors), np.bool_)
    flags[kept] = True
    fresh = live[~flags[live]]
    tuned, trained = Tuned(manifest.tuned, manifest.recall), manifest.trained_effort
    trained = trained or manifest.tuned
    if len(fresh) >= SMALL and len(kept):
        try:
            tuned = _tested(
                index, full(vectors[fresh[_drawn(len(fresh), TESTED)]]), manifest, trained
            )
        except RecallError:
            return None
        if _work(tuned.effort) > HARDER * _work(trained):
            return None
    if on_progress is not None:
        on_progress(len(kept))
    index = index.extended(fresh, on_progress)
    return _Made(
        index,
        tuned,
        manifest.held_out,
        manifest.trained_on,
        trained,
        manifest.parameters,
        manifest.gpu if _work(tuned.effort) == _work(manifest.tuned) else None,
    )


def _tested(
    index: SegmentIndex, queries: Embeddings, manifest: SegmentManifest, trained: Effort
) -> Tuned:
    """The effort of the training, else that so far, if it still finds enough; else a greater one.

    Raises: RecallError.
    """
    so_far = manifest.tuned
    reference = Effort(REFERENCE * so_far.value, REFERENCE * so_far.k_factor)
    measure = Measure(index, queries, manifest.target_recall, reference=reference)
    for effort in dict.fromkeys((trained, so_far)):
        tried = measure(effort)
        if tried.tuned.recall + tried.error >= measure.target:  # what few queries miss by chance
            return tried.tuned
    return least_effort(measure)


def _work(effort: Effort) -> int:
    return effort.value * effort.k_factor


def _held_out(n: int) -> NDArray[np.bool_]:
    """Which of `n` vectors are held out; always the same ones."""
    is_held = np.zeros(n, np.bool_)
    if n >= SMALL:
        is_held[_drawn(n, min(HELD_OUT, n // 10))] = True
    return is_held


def _drawn(n: int, count: int) -> Ids:
    """Up to `count` of `n` places; always the same ones."""
    return np.random.default_rng(0).choice(n, min(n, count), replace=False, shuffle=False)


def _write(path: Path, array: NDArray[np.uint8]) -> FileFacts:
    with HashedFile(path) as file:
        file.write(array)
    return file.facts
