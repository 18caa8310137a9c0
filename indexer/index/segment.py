"""The vectors of one state of a gallery, indexed and immutable on the disk.

segments/<name>/
  vectors.npy    float32 (N, D), by position; mapped into memory
  ids.npy        int64 (N,): the item number of each position, ascending but for the held out
  index.faiss    the compressed index; none for the kind flat
  columns.bin    the attributes, see indexer.columns; a segment of an earlier version has none
  segment.json   SegmentManifest

Held-out queries are left out of the index while it is tuned, then added: they come last.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from embedder.bundle import sha256_of
from embedder.durable import FileFacts, HashedFile
from embedder.errors import GalleryCorruptError
from embedder.types import Embeddings
from indexer.attributes import Schema
from indexer.bits import Bits, positions_in
from indexer.columns.columns import Attributes, Columns, ColumnsBuilder, write_columns
from indexer.index.faiss import SegmentIndex
from indexer.index.kinds import KINDS, Effort, IndexKind
from indexer.index.plan import IndexSettings, Plan, plan_index
from indexer.index.tune import Tuned, tune
from indexer.types import Ids, Progress, places_of

VECTORS = "vectors.npy"
IDS = "ids.npy"
INDEX = "index.faiss"
COLUMNS = "columns.bin"
MANIFEST = "segment.json"

HASHED_BELOW = 64 * 2**20
"""Bytes up to which a file's hash is checked on every opening."""

_CURE = "Make the index again from the catalogue: kinlens-index compact GALLERY --rebuild."
_SHORT = 12

HELD_OUT = 1000
"""Queries that are held out to tune with; at most one in ten vectors."""

SMALL = 64
"""Below so many vectors none is held out: the index is tuned with its own vectors."""

Batches = Iterable[tuple[Ids, Embeddings]]


class SegmentManifest(BaseModel, frozen=True, extra="forbid"):
    """What a segment holds and how it was made.

    seq: the state whose items it holds. recall: at 10, measured with `held_out` queries that were
    not in the index yet; 0 of them if the gallery was too small and its own vectors were used.
    """

    schema_version: Literal[1] = 1
    seq: int = Field(ge=0)
    size: int = Field(ge=1)
    dim: int = Field(ge=1)
    kind: IndexKind
    parameters: dict[str, int]
    effort: int = Field(ge=0)
    k_factor: int = Field(ge=1)
    recall: float = Field(ge=0, le=1)
    target_recall: float = Field(gt=0, le=1)
    held_out: int = Field(ge=0)
    build_s: float = Field(ge=0)
    created_at: str = Field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")
    )
    settings: IndexSettings
    files: dict[str, FileFacts]

    @property
    def tuned(self) -> Effort:
        """The effort that reached the target."""
        return Effort(self.effort, self.k_factor)


def write_manifest(folder: Path, manifest: SegmentManifest) -> None:
    """Write the manifest into a folder that nobody reads yet. Raises: OSError."""
    text = manifest.model_dump_json(indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> SegmentManifest:
    """The manifest of a segment. Raises: GalleryCorruptError."""
    path = folder / MANIFEST
    try:
        manifest = SegmentManifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(
            f"{path} is not a segment manifest that this version of Kinlens can read: "
            f"{brief(error)}. {_CURE}"
        ) from error
    expected = {VECTORS, IDS} | ({INDEX} if KINDS[manifest.kind].faiss_class else set())
    if manifest.files.keys() - {COLUMNS} != expected:
        raise GalleryCorruptError(
            f"{path} lists the files {sorted(manifest.files)}, an index of kind {manifest.kind} "
            f"has {sorted(expected)}. {_CURE}"
        )
    return manifest


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


class Segment:
    """An open segment: `index` by position, `ids` (N,) the item number of each position.

    `tuned` is the effort that reached the target; `columns` are the attributes by position, None
    in a segment of an earlier version.
    """

    def __init__(
        self, manifest: SegmentManifest, index: SegmentIndex, ids: Ids, columns: Columns | None
    ) -> None:
        self.manifest = manifest
        self.columns = columns
        self.tuned = manifest.tuned
        self.index = index
        self.ids = ids

    @classmethod
    def open(
        cls, folder: Path, *, verify_hashes: bool | None = None, device: str = "cpu"
    ) -> "Segment":
        """Map the files of a segment. Sizes are always checked; hashes too with `verify_hashes`,
        and if that is None those of small files.

        Raises: GalleryCorruptError, ProviderError.
        """
        manifest = read_manifest(folder)
        for name, facts in manifest.files.items():
            check_file(folder / name, facts, verify_hashes)
        vectors = mapped(folder / VECTORS, np.float32, (manifest.size, manifest.dim))
        ids = mapped(folder / IDS, np.int64, (manifest.size,))
        codes = folder / INDEX if INDEX in manifest.files else None
        columns = None
        if COLUMNS in manifest.files:
            columns = Columns.open(folder / COLUMNS, manifest.size)
        index = SegmentIndex.open(manifest.kind, vectors, codes, device)
        return cls(manifest, index, ids, columns)

    @property
    def settings(self) -> IndexSettings:
        """What was asked for when it was made."""
        return self.manifest.settings

    def positions_of(self, ids: Ids) -> Ids:
        """The position of each item (N,); -1 where the segment does not have it."""
        ids = np.asarray(ids, np.int64)
        split = self.manifest.size - self.manifest.held_out
        positions = places_of(ids, self.ids[:split])
        if self.manifest.held_out:
            last = places_of(ids, self.ids[split:])
            positions = np.where(last < 0, positions, last + split)
        return positions

    def numbers_in(self, bits: Bits, after: int, limit: int | None) -> tuple[Ids, int | None]:
        """Of the positions in the set the item numbers above `after`, ascending, at most `limit`;
        and the highest number of all of them.
        """
        split = self.manifest.size - self.manifest.held_out
        start = int(np.searchsorted(self.ids[:split], after, "right")) // 8
        own = bits[start : (split + 7) // 8]
        if limit is not None:  # the first 8 positions may be before `after`
            reached = np.cumsum(np.bitwise_count(own), dtype=np.int64)
            own = own[: int(np.searchsorted(reached, limit + 8)) + 1]
        end = min(split, 8 * (start + len(own)))
        positions = 8 * start + positions_in(own, end - 8 * start)
        first = split // 8  # in whose byte the held-out positions begin
        last = 8 * first + positions_in(bits[first:], self.manifest.size - 8 * first)
        held = np.sort(self.ids[last[last >= split]])
        found = np.concatenate([self.ids[positions], held])
        found = np.sort(found[found > after])[:limit]
        filled = np.flatnonzero(bits[: (split + 7) // 8])[-2:]
        ends = [p for byte in filled for p in range(8 * byte, 8 * byte + 8) if p < split]
        there = [int(self.ids[p]) for p in ends if bits[p >> 3] >> (p & 7) & 1]
        return found, max([*there, *held[-1:].tolist()], default=None)

    def close(self) -> None:
        """Let go of the GPU; memory maps end with the last reader of their arrays."""
        self.index.close()


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of a segment to be: on the disk in their order, and the index that they get."""

    plan: Plan
    held_out: int
    files: dict[str, FileFacts]
    started: float


def write_vectors(folder: Path, ids: Ids, batches: Batches, settings: IndexSettings) -> Vectors:
    """Write the vectors of the items `ids` (N,), ascending, N >= 1, into the empty `folder`.

    `batches` gives these items and their vectors, in this order. Nothing is synced.

    Raises: PlanError, GalleryCorruptError, OSError.
    """
    started = perf_counter()
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise _out_of_step(ids, 0)
    dim = first[1].shape[1]
    plan = plan_index(len(ids), dim, settings)
    is_held = _held_out(len(ids))
    files = {
        VECTORS: _write_vectors(folder / VECTORS, ids, is_held, chain([first], batches), dim),
        IDS: _write_array(folder / IDS, np.concatenate([ids[~is_held], ids[is_held]])),
    }
    return Vectors(plan, int(is_held.sum()), files, started)


def write_attributes(
    folder: Path,
    written: Vectors,
    ids: Ids,
    batches: Iterable[tuple[Ids, Sequence[Attributes]]],
    kinds: Schema,
) -> Vectors:
    """Write the attributes of the items `ids` (N,) as columns beside their vectors.

    `batches` gives these items, in this order, with their attributes.

    Raises: GalleryCorruptError, OSError.
    """
    is_held = _held_out(len(ids))
    positions = np.empty(len(ids), np.int64)
    positions[~is_held] = np.arange(len(ids) - is_held.sum())
    positions[is_held] = np.arange(len(ids) - is_held.sum(), len(ids))
    builder, start = ColumnsBuilder(len(ids), kinds), 0
    for found, attributes in batches:
        rows = slice(start, start + len(found))
        start += len(found)
        if not np.array_equal(ids[rows], found):
            raise _out_of_step(ids, start)
        builder.add(positions[rows].tolist(), attributes)
    files = {**written.files, COLUMNS: write_columns(folder / COLUMNS, builder.columns())}
    return replace(written, files=files)


def write_segment(
    folder: Path,
    seq: int,
    written: Vectors,
    settings: IndexSettings,
    on_progress: Progress | None = None,
) -> SegmentManifest:
    """Index what `write_vectors` has written into `folder`, and write the manifest.

    `on_progress` is called with how many more vectors are indexed, N in all.

    Raises: RecallError, ProviderError, OSError.
    """
    plan, files = written.plan, dict(written.files)
    vectors = mapped(folder / VECTORS, np.float32, (plan.n, plan.dim))
    target = settings.target_recall
    index, tuned = _indexed(plan, vectors, written.held_out, target, on_progress)
    if KINDS[plan.kind].faiss_class:
        files[INDEX] = index.save(folder / INDEX)
    index.close()
    manifest = SegmentManifest(
        seq=seq,
        size=plan.n,
        dim=plan.dim,
        kind=plan.kind,
        parameters=dict(plan.parameters),
        effort=tuned.effort.value,
        k_factor=tuned.effort.k_factor,
        recall=tuned.recall,
        target_recall=target,
        held_out=written.held_out,
        build_s=perf_counter() - written.started,
        settings=settings,
        files=files,
    )
    write_manifest(folder, manifest)
    return manifest


def _indexed(
    plan: Plan, vectors: Embeddings, held_out: int, target: float, on_progress: Progress | None
) -> tuple[SegmentIndex, Tuned]:
    split = len(vectors) - held_out
    index = SegmentIndex.build(plan, vectors[:split], on_progress)
    tuned = tune(index, vectors[split:] if held_out else vectors, target)
    return (index.extended(plan, vectors, on_progress) if held_out else index), tuned


def _held_out(n: int) -> NDArray[np.bool_]:
    """Which of `n` vectors are held out; always the same ones."""
    is_held = np.zeros(n, np.bool_)
    if n >= SMALL:
        count = min(HELD_OUT, n // 10)
        is_held[np.random.default_rng(0).choice(n, count, replace=False, shuffle=False)] = True
    return is_held


def _write_vectors(
    path: Path, ids: Ids, is_held: NDArray[np.bool_], batches: Batches, dim: int
) -> FileFacts:
    held: list[Embeddings] = []
    with HashedFile(path) as file:
        shape = {"descr": "<f4", "fortran_order": False, "shape": (len(ids), dim)}
        npy.write_array_header_1_0(file, shape)
        for rows, vectors in _in_step(ids, batches):
            held.append(vectors[is_held[rows]])
            file.write(np.ascontiguousarray(vectors[~is_held[rows]], dtype=np.float32))
        file.write(np.concatenate(held).astype(np.float32, copy=False))
    return file.facts


def _in_step(ids: Ids, batches: Batches) -> Iterator[tuple[slice, Embeddings]]:
    """The vectors with the rows they belong to. Raises: GalleryCorruptError."""
    start = 0
    for found, vectors in batches:
        rows = slice(start, start + len(found))
        start += len(found)
        if not np.array_equal(ids[rows], found):
            break
        yield rows, vectors
    else:
        if start == len(ids):
            return
    raise _out_of_step(ids, start)


def _out_of_step(ids: Ids, start: int) -> GalleryCorruptError:
    return GalleryCorruptError(
        f"The catalogue lists {len(ids):,} items, but their vectors do not follow the list up to "
        f"item {start:,}. Restore a backup (kinlens-index restore) or build the gallery again."
    )


def _write_array(path: Path, array: NDArray[np.int64]) -> FileFacts:
    with HashedFile(path) as file:
        npy.write_array(file, array, version=(1, 0))
    return file.facts
