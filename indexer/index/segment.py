"""The vectors of one state of a gallery, indexed and immutable on the disk.

segments/<name>/
  vectors.npy    float32 (N, D), by position; mapped into memory
  ids.npy        int64 (N,): the item number of each position, ascending but for the held out
  index.faiss    the compressed index; none for the kind flat
  segment.json   SegmentManifest

Held-out queries are left out of the index while it is tuned, then added: they come last.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from embedder.errors import GalleryCorruptError
from embedder.types import Embeddings
from indexer.folder.hashed_file import FileFacts, HashedFile
from indexer.index.faiss import SegmentIndex
from indexer.index.plan import IndexSettings, Plan, plan_index
from indexer.index.segment_manifest import (
    IDS,
    INDEX,
    VECTORS,
    SegmentManifest,
    check_file,
    mapped,
    read_manifest,
    write_manifest,
)
from indexer.index.tune import Tuned, tune
from indexer.types import Ids, Progress

HELD_OUT = 1000
"""Queries that are held out to tune with; at most one in ten vectors."""

SMALL = 64
"""Below so many vectors none is held out: the index is tuned with its own vectors."""

Batches = Iterable[tuple[Ids, Embeddings]]


class Segment:
    """An open segment: `index` by position, `ids` (N,) the item number of each position."""

    def __init__(self, manifest: SegmentManifest, index: SegmentIndex, ids: Ids) -> None:
        self.manifest = manifest
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
        return cls(manifest, SegmentIndex.open(manifest.kind, vectors, codes, device), ids)

    @property
    def settings(self) -> IndexSettings:
        """What was asked for when it was made."""
        return self.manifest.settings

    def positions_of(self, ids: Ids) -> Ids:
        """The position of each item (N,); -1 where the segment does not have it."""
        ids = np.asarray(ids, np.int64)
        split = self.manifest.size - self.manifest.held_out
        positions = _positions(self.ids[:split], ids)
        if self.manifest.held_out:
            last = _positions(self.ids[split:], ids)
            positions = np.where(last < 0, positions, last + split)
        return positions

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
    plan = _plan(len(ids), dim, settings)
    is_held = _held_out(len(ids))
    files = {
        VECTORS: _write_vectors(folder / VECTORS, ids, is_held, chain([first], batches), dim),
        IDS: _write_array(folder / IDS, np.concatenate([ids[~is_held], ids[is_held]])),
    }
    return Vectors(plan, int(is_held.sum()), files, started)


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
    if plan.kind != "flat":
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


def _plan(n: int, dim: int, settings: IndexSettings) -> Plan:
    return plan_index(
        n,
        dim,
        kind=settings.kind,
        memory_mb=settings.memory_mb,
        device=settings.device,
        target_recall=settings.target_recall,
    )


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
        _write_header(file, np.float32, (len(ids), dim))
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
        _write_header(file, np.int64, array.shape)
        file.write(np.ascontiguousarray(array, dtype=np.int64))
    return file.facts


def _write_header(file: HashedFile, dtype: type, shape: tuple[int, ...]) -> None:
    descr = npy.dtype_to_descr(np.dtype(dtype))
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, header)


def _positions(ascending: Ids, ids: Ids) -> Ids:
    found = np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)
    return np.where(ascending[found] == ids, found, -1)
