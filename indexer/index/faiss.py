"""An immutable FAISS index over unit vectors, searched by inner product."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import faiss
import numpy as np
from faiss.class_wrappers import add_to_referenced_objects

from kinlens.embedder.durable import FileFacts, HashedFile
from kinlens.embedder.errors import GalleryCorruptError, InvalidParameterError
from kinlens.embedder.machine import core_count
from kinlens.embedder.types import Embeddings
from kinlens.indexer.bits import Bits, count_of, has_bits, packed_bits, positions_in
from kinlens.indexer.index.gpu import LEAST_BYTES, MAX_K, GpuCopy, faiss_reason
from kinlens.indexer.index.index_types import (
    INDEX_TYPES,
    TUNED_AT,
    Effort,
    IndexKind,
    IndexType,
    found_by,
    full,
    scaled,
)
from kinlens.indexer.index.plan import Plan
from kinlens.indexer.types import REBUILD, Ids, Progress, Scores, StoredRows

CHUNK = 65_536
"""Vectors that are compared, or added to codes, at a time."""

CHUNK_BYTES = 64 * 2**20
"""Memory for the candidates of a batch of queries."""

EXACT_BELOW = 20_000
EXACT_PART = 0.02
SCAN_EXACT_PART = 0.1
"""Brute force is used if a filter passes at most this number or share of vectors, where it was
measured to be faster; SCAN_EXACT_PART is the share for flat."""

_CANDIDATE_BYTES = 12
_OVERFETCH, _MIN_OVERFETCH = 1.5, 16
_SPARSE_EXCLUDED = 4  # over-fetch in brute force if at most one vector in 4 is excluded
_SECOND_OVERFETCH = 8  # factor for a second try, if a filter excludes everything near a query
_FAR_K_FACTOR = 4  # factor on k_factor for far neighbours, which codes separate less well
_GPU_FACTOR = 2  # hits of the GPU (half precision) to rescore, as a multiple of k
_STEP_COST = 8  # cost of a graph step, in comparisons
_HALF_IN_BLOCKS = 8  # queries above which half-precision vectors are compared in blocks
_PARALLEL_FROM = 20_000  # vectors from which on a build uses all cores
# FAISS compares many queries in blocks and synchronises its threads after each. With blocks of
# 1,024 x 16,384 (64 MB) they wait less than half as long as with its default of 4,096 x 1,024.
_LARGE_BLOCKS = {
    "distance_compute_blas_query_bs": 1024,
    "distance_compute_blas_database_bs": 16_384,
}
_BLOCK = 65_536  # bytes per write; with FAISS' default of 1 MiB, writing is half as fast


class SegmentIndex:
    """Vectors (N, D), usually memory-mapped, and a compressed index that finds candidates.

    Scores are always computed from the vectors in their stored precision. Thread safe. With
    `use_gpu`, a copy on the GPU answers searches without a filter, or with one that passes many
    vectors. The CPU answers all others, and all searches after a GPU error.
    """

    def __init__(
        self, index_type: IndexKind, vectors: StoredRows, codes: faiss.Index | None
    ) -> None:
        """`codes` contain the rows of `vectors` to search; without codes, all rows."""
        self.kind = index_type
        self._type = INDEX_TYPES[index_type]
        self._vectors = vectors
        self._codes = codes
        self._is_half = vectors.dtype == np.float16
        self._flat = _flat_over(vectors)
        self._top = self._flat if codes is None else _refined(codes, self._flat)
        self._gpu: GpuCopy | None = None

    @classmethod
    def build(
        cls,
        plan: Plan,
        vectors: StoredRows,
        rows: Ids | None = None,
        on_progress: Progress | None = None,
    ) -> "SegmentIndex":
        """Index the contiguous `vectors` (N, D), which are referenced and not copied.

        rows: the rows to index; None for all. A flat index has all rows.

        Raises: InvalidParameterError.
        """
        _check(vectors, plan.dim)
        index_type = INDEX_TYPES[plan.kind]
        rows = np.arange(len(vectors)) if rows is None else rows
        if index_type.is_scan:
            if on_progress is not None:
                on_progress(len(rows))
            return cls(plan.kind, vectors, None)
        with _threads(core_count() if len(rows) >= _PARALLEL_FROM else 1):
            codes = index_type.codes(vectors, rows, plan.parameters)
        _grow(codes, vectors, rows, on_progress)
        return cls(plan.kind, vectors, codes)

    @classmethod
    def open(
        cls, index_type: IndexKind, vectors: StoredRows, path: Path | None, count: int | None = None
    ) -> "SegmentIndex":
        """Open an index written by `save`.

        path: None for flat. FAISS does not validate the file, so verify its hash before.
        count: number of indexed rows; None for all.

        Raises: GalleryCorruptError.
        """
        if path is None:
            return cls(index_type, vectors, None)
        shape = (len(vectors) if count is None else count, vectors.shape[1])
        return cls(index_type, vectors, _read_codes(path, INDEX_TYPES[index_type], shape))

    @classmethod
    def updated(
        cls, index_type: IndexKind, path: Path, vectors: StoredRows, count: int, moved: Ids
    ) -> "SegmentIndex":
        """Open an index of `count` rows written by `save`, and move it to other `vectors`.

        moved: the new row of each old row; -1 for removed rows. The index must be `is_updatable`.

        Raises: GalleryCorruptError.
        """
        codes = _read_codes(path, INDEX_TYPES[index_type], (count, vectors.shape[1]))
        # Bits of rows that are not in the index are ignored by FAISS.
        codes.remove_ids(faiss.IDSelectorBitmap(packed_bits(moved < 0)))
        _clear_unused(codes)
        if not np.array_equal(moved[moved >= 0], np.flatnonzero(moved >= 0)):
            for number in range(codes.nlist):
                if size := codes.invlists.list_size(number):
                    rows = faiss.rev_swig_ptr(codes.invlists.get_ids(number), size)
                    rows[:] = moved[rows]
        return cls(index_type, vectors, codes)

    def extended(self, rows: Ids, on_progress: Progress | None = None) -> "SegmentIndex":
        """A new index with additional rows; it must not be flat. Invalidates this one."""
        _grow(self._codes, self._vectors, rows, on_progress)
        return SegmentIndex(self.kind, self._vectors, self._codes)

    def use_gpu(self, name: str, parameters: Mapping[str, int]) -> None:
        """Copy the index to the GPU in the background, and search there once it is copied.

        Does nothing for few vectors, which the CPU searches fast enough. `name` is for the log.
        """
        count = self.size if self._codes is None else int(self._codes.ntotal)
        if 4 * count * self.dim < LEAST_BYTES:
            return
        needed = self._type.gpu_bytes(count, self.dim, parameters)
        load = self._type.on_gpu(self._vectors, self._codes)
        self._gpu = GpuCopy(name, load, needed, self.dim)
        # Without waiting, since any thread may drop the last reference; and not at exit, when CUDA
        # may already be shut down.
        weakref.finalize(self, self._gpu.end).atexit = False

    @property
    def gpu(self) -> GpuCopy | None:
        """The copy on the GPU, which may have failed; None if none was requested."""
        return self._gpu

    @property
    def is_on_gpu(self) -> bool:
        """Whether the GPU currently answers searches."""
        return self._gpu is not None and self._gpu.is_there

    def save(self, path: Path) -> FileFacts:
        """Write the compressed index to the new file `path`, without the vectors.

        Raises: OSError; InvalidParameterError for flat, which has nothing to write.
        """
        if self._codes is None:
            raise InvalidParameterError("A flat index has no codes to save, only its vectors.")
        with HashedFile(path) as file:
            writer = faiss.PyCallbackIOWriter(file.write, _BLOCK)
            faiss.write_index(self._codes, writer)
        return file.facts

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return int(self._vectors.shape[1])

    @property
    def size(self) -> int:
        """Number of vectors."""
        return len(self._vectors)

    @property
    def nlist(self) -> int:
        """Number of inverted lists; 0 for an index without lists."""
        return int(getattr(self._codes, "nlist", 0))

    def search(
        self, queries: Embeddings, k: int, effort: Effort, allowed: Bits | None = None
    ) -> tuple[Scores, Ids]:
        """Scores and positions of the `min(k, size)` best vectors for each query (Q, D).

        Best first, ties by position; missing hits have position -1 and score -1. If scores tie at
        `k`, any of them may be returned. `allowed` is a bitmap of the positions to search.

        Raises: InvalidParameterError.
        """
        queries, k = self._checked(queries, k)
        with _threads(len(queries)):
            if allowed is None:
                if self._top is self._flat and not self.is_on_gpu:
                    return self._brute_force(queries, k)
                return self._searched(queries, k, effort, None, self.size, (k,))
            count = count_of(allowed, self.size)
            # Over-fetch and filter: faster than FAISS with a bitmap. If the filter excludes the
            # nearest vectors, too few hits remain and the search is repeated, so recall does not
            # suffer.
            wide = int(_OVERFETCH * k * self.size / max(1, count)) + _MIN_OVERFETCH
            is_scan = self._type.is_scan and not (wide <= MAX_K and self.is_on_gpu)
            part = SCAN_EXACT_PART if is_scan else EXACT_PART
            if count <= max(EXACT_BELOW, part * self.size) or (is_scan and len(queries) == 1):
                return self._brute_force(queries, k, allowed)
            widths = wide, _SECOND_OVERFETCH * wide
            return self._searched(queries, k, effort, allowed, count, widths)

    def exact(self, queries: Embeddings, k: int, allowed: Bits | None = None) -> tuple[Scores, Ids]:
        """The exact results of `search`: compares with all vectors, or with those in `allowed`.

        Raises: InvalidParameterError.
        """
        queries, k = self._checked(queries, k)
        with _threads(len(queries)):
            return self._brute_force(queries, k, allowed)

    def vectors(self, positions: Ids) -> Embeddings:
        """The full-precision vectors (N, D) at known positions (N,)."""
        return full(self._vectors[positions])

    def close(self) -> None:
        """Release the GPU, if there is one; the CPU answers from then on."""
        if self._gpu is not None:
            self._gpu.close()

    def _searched(
        self,
        queries: Embeddings,
        k: int,
        effort: Effort,
        allowed: Bits | None,
        count: int,
        widths: tuple[int, ...],
    ) -> tuple[Scores, Ids]:
        """The best `k` of the `count` allowed vectors.

        Over-fetches with each of `widths` for queries that still miss hits, then uses the highest
        effort.
        """
        if not len(queries):
            return empty_result(0, k)
        if not widths:
            return self._probe_all_lists(queries, k, effort, allowed, count)
        if self._is_exact_cheaper(widths[0], effort, count):
            return self._brute_force(queries, k, allowed)
        scores, positions = self._overfetch(queries, k, widths[0], effort, allowed)
        short = np.flatnonzero(positions[:, min(k, count) - 1] < 0)  # missing hits come last
        if len(short):
            again = self._searched(queries[short], k, effort, allowed, count, widths[1:])
            scores[short], positions[short] = again
        return scores, positions

    def _is_exact_cheaper(self, wide: int, effort: Effort, count: int) -> bool:
        """Whether comparing with `count` vectors is at most as much work as finding `wide` hits."""
        if wide * effort.k_factor >= count:
            return True
        return self._type.is_graph and _STEP_COST * scaled(effort.value, wide, self.size) >= count

    def _brute_force(
        self, queries: Embeddings, k: int, allowed: Bits | None = None
    ) -> tuple[Scores, Ids]:
        if not k or not len(queries):
            return empty_result(len(queries), k)
        in_blocks = self._is_half and len(queries) > _HALF_IN_BLOCKS
        if allowed is None and in_blocks:
            return compare_rows(queries, k, self._vectors, np.arange(self.size))
        if allowed is None:
            return ordered(*found_by(self._flat, queries, k))
        count = count_of(allowed, self.size)
        excluded = self.size - count
        if len(queries) == 1 and count > SCAN_EXACT_PART * self.size:
            parameters = faiss.SearchParameters(sel=faiss.IDSelectorBitmap(allowed))
            return ordered(*found_by(self._flat, queries, k, parameters))
        if in_blocks or _SPARSE_EXCLUDED * excluded > self.size:
            return compare_rows(queries, k, self._vectors, positions_in(allowed, self.size))
        # Over-fetching takes less time than copying the allowed vectors.
        wide = k + min(excluded, int(_OVERFETCH * k * excluded / self.size) + _MIN_OVERFETCH)
        scores, positions = _filtered(*ordered(*found_by(self._flat, queries, wide)), allowed, k)
        short = np.flatnonzero(positions[:, -1] < 0)
        if len(short):
            rows = positions_in(allowed, self.size)
            scores[short], positions[short] = compare_rows(queries[short], k, self._vectors, rows)
        return scores, positions

    def _overfetch(
        self, queries: Embeddings, k: int, wide: int, effort: Effort, allowed: Bits | None
    ) -> tuple[Scores, Ids]:
        """The best `k` allowed ones among the `wide` nearest, in order."""
        wide = min(max(wide, TUNED_AT), self.size)

        def search(some: Embeddings) -> tuple[Scores, Ids]:
            found = self._found_on_gpu(some, wide, effort)
            if found is None:
                parameters = _parameters(self._type, self.nlist, self.size, effort, wide)
                found = found_by(self._top, some, wide, parameters)
            found = ordered(*found)
            if allowed is not None:
                return _filtered(*found, allowed, k)
            return found if wide == k else (found[0][:, :k], found[1][:, :k])

        return _chunked(search, queries, wide * effort.k_factor)

    def _found_on_gpu(
        self, queries: Embeddings, k: int, effort: Effort
    ) -> tuple[Scores, Ids] | None:
        """The `k` best from the GPU; None if it cannot answer."""
        value = scaled(effort.on_gpu, k, self.size)
        if k > MAX_K or value > self._type.gpu_max_effort or not self.is_on_gpu:
            return None
        assert self._gpu is not None
        wide = min(_GPU_FACTOR * k, self.size)
        found = self._gpu.search(queries, wide, value)
        if found is None:
            return None
        scores, positions = found
        if self._is_half:
            self._compare_each(queries, scores, positions)
        else:
            pointers = [faiss.swig_ptr(array) for array in (queries, scores, positions)]
            self._flat.compute_distance_subset(len(queries), pointers[0], wide, *pointers[1:])
        scores, positions = ordered(scores, positions)
        return scores[:, :k], positions[:, :k]

    def _compare_each(self, queries: Embeddings, scores: Scores, positions: Ids) -> None:
        """Compute the scores of `positions` (Q, K) into `scores`."""
        at_once = max(1, CHUNK // positions.shape[1])
        for start in range(0, len(queries), at_once):
            part = slice(start, start + at_once)
            own = full(self._vectors[np.maximum(positions[part], 0)])
            scores[part] = np.einsum("qd,qkd->qk", queries[part], own)

    def _probe_all_lists(
        self, queries: Embeddings, k: int, effort: Effort, allowed: Bits | None, count: int
    ) -> tuple[Scores, Ids]:
        """Search all inverted lists; brute force without lists or without a filter."""
        hardest = Effort(self.nlist, _FAR_K_FACTOR * effort.k_factor)
        if allowed is None or not self.nlist or k * hardest.k_factor >= count:
            return self._brute_force(queries, k, allowed)
        parameters = self._type.search_parameters(self.nlist, self.size, hardest, k, allowed)

        def search(some: Embeddings) -> tuple[Scores, Ids]:
            return ordered(*found_by(self._top, some, k, parameters))

        return _chunked(search, queries, k * hardest.k_factor)

    def _checked(self, queries: Embeddings, k: int) -> tuple[Embeddings, int]:
        if k < 1:
            raise InvalidParameterError(f"k = {k} must be at least 1.")
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        _check(queries, self.dim)
        return queries, min(k, self.size)


def range_search(
    vectors: StoredRows, query: Embeddings, least: float, allowed: Bits | None = None
) -> Ids:
    """The positions of all vectors (N, D) with a score of at least `least` for the query (1, D).

    Compares with every vector in the bitmap `allowed`; None for all.
    """
    if not len(vectors):
        return np.empty(0, np.int64)
    # FAISS returns scores above its radius; both are single precision.
    radius = np.float32(least)
    if float(radius) >= least:
        radius = np.nextafter(radius, np.float32(-np.inf))
    parameters = None
    if allowed is not None:
        parameters = faiss.SearchParameters(sel=faiss.IDSelectorBitmap(allowed))
    found = faiss.RangeSearchResult(1)
    index, pointer = _flat_over(vectors), faiss.swig_ptr(query)
    with _threads(1):
        index.range_search_c(1, pointer, float(radius), found, parameters)
    count = int(faiss.rev_swig_ptr(found.lims, 2)[1])
    if not count:
        return np.empty(0, np.int64)
    positions: Ids = faiss.rev_swig_ptr(found.labels, count).copy()
    return positions


def compare_rows(
    queries: Embeddings, k: int, vectors: StoredRows, positions: Ids
) -> tuple[Scores, Ids]:
    """Scores and positions (Q, k) of the best vectors among `positions`; -1 for missing hits."""
    scores, found = empty_result(len(queries), 0)
    for start in range(0, len(positions), CHUNK):
        chunk = positions[start : start + CHUNK]
        some, rows = faiss.knn(
            queries, full(vectors[chunk]), min(k, len(chunk)), metric=faiss.METRIC_INNER_PRODUCT
        )
        scores = np.concatenate([scores, some], axis=1)
        found = np.concatenate([found, chunk[rows]], axis=1)
        scores, found = ordered(scores, found)
        scores, found = scores[:, :k], found[:, :k]
    missing = empty_result(len(queries), k - scores.shape[1])
    return (
        np.concatenate([scores, missing[0]], axis=1),
        np.concatenate([found, missing[1]], axis=1),
    )


def _chunked(
    search: Callable[[Embeddings], tuple[Scores, Ids]], queries: Embeddings, candidates: int
) -> tuple[Scores, Ids]:
    """Search queries (Q, D), Q >= 1, in batches to limit the memory for candidates."""
    rows = max(1, CHUNK_BYTES // (_CANDIDATE_BYTES * candidates))
    if len(queries) <= rows:
        return search(queries)
    found = [search(queries[start : start + rows]) for start in range(0, len(queries), rows)]
    scores, positions = zip(*found, strict=True)
    return np.concatenate(scores), np.concatenate(positions)


def _filtered(scores: Scores, positions: Ids, allowed: Bits, k: int) -> tuple[Scores, Ids]:
    """The first `k` allowed hits of each row; -1 for missing hits."""
    is_in = has_bits(allowed, positions) & (positions >= 0)
    kept = np.argsort(~is_in, axis=1, kind="stable")[:, :k]
    positions = np.where(is_in, positions, -1)
    scores = np.where(is_in, scores, np.float32(-1))
    return np.take_along_axis(scores, kept, axis=1), np.take_along_axis(positions, kept, axis=1)


def empty_result(rows: int, k: int) -> tuple[Scores, Ids]:
    """A result with missing hits only: scores and positions are -1."""
    return np.full((rows, k), -1, np.float32), np.full((rows, k), -1, np.int64)


def ordered(scores: Scores, positions: Ids) -> tuple[Scores, Ids]:
    """Sort hits by descending score, ties by position, missing hits last; clip to [-1, 1]."""
    scores = np.minimum(scores, np.float32(1))
    np.maximum(scores, np.float32(-1), out=scores)
    # count_nonzero is the fastest check on small arrays, which matters for single queries.
    is_unordered = np.count_nonzero(scores[:, 1:] >= scores[:, :-1])
    if not is_unordered and not np.count_nonzero(positions < 0):
        return scores, positions
    ranks = np.where(positions < 0, np.inf, -scores)
    order = np.lexsort((positions, ranks), axis=1)
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(positions, order, axis=1)


def _clear_unused(codes: faiss.IndexIVFPQFastScan) -> None:
    """Clear the unused codes of the last block of each list.

    FAISS leaves the codes of removed rows there, and combines them with those of rows that are
    added later, which searches then miss.
    """
    packer, lists = codes.get_CodePacker(), codes.invlists
    used = np.zeros((packer.nvec, 1, packer.block_size), np.uint8)
    code = np.full(packer.code_size, 0xFF, np.uint8)
    for slot in range(1, packer.nvec):
        used[slot] = used[slot - 1]
        packer.pack_1(code, slot - 1, used[slot])
    for number in range(codes.nlist):
        blocks, rest = divmod(lists.list_size(number), packer.nvec)
        if rest:
            size = (blocks + 1) * packer.block_size
            data = faiss.rev_swig_ptr(lists.get_codes(number), size)
            data[-packer.block_size :] &= used[rest, 0]


@lru_cache(maxsize=256)
def _parameters(
    index_type: IndexType, nlist: int, size: int, effort: Effort, k: int
) -> faiss.SearchParameters:
    """Cached: for a single query in a small index, creating them takes as long as the search."""
    return index_type.search_parameters(nlist, size, effort, k)


def _flat_over(vectors: StoredRows) -> faiss.IndexFlatCodes:
    """A flat index that reads `vectors` (N, D) in place and keeps a reference to them."""
    dim = vectors.shape[1]
    if vectors.dtype == np.float16:
        half = faiss.ScalarQuantizer.QT_fp16
        index = faiss.IndexScalarQuantizer(dim, half, faiss.METRIC_INNER_PRODUCT)
        index.is_trained = True  # half precision needs no training
    else:
        index = faiss.IndexFlatIP(dim)
    if len(vectors):
        no_owner = faiss.MaybeOwnedVectorUInt8().owner
        pointer = faiss.swig_ptr(vectors.reshape(-1).view(np.uint8))
        index.codes = faiss.MaybeOwnedVectorUInt8.create_view(pointer, vectors.nbytes, no_owner)
        index.ntotal = len(vectors)
    add_to_referenced_objects(index, vectors)
    return index


def _refined(codes: faiss.Index, flat: faiss.IndexFlatCodes) -> faiss.Index:
    """An index that finds candidates with `codes` and compares them at full precision."""
    # FAISS requires as many codes as vectors, but removed items have no code.
    size, flat.ntotal = flat.ntotal, codes.ntotal
    found = faiss.IndexRefine(codes, flat)
    flat.ntotal = found.ntotal = size
    return found


def _grow(codes: faiss.Index, vectors: StoredRows, rows: Ids, on_progress: Progress | None) -> None:
    """Add these rows of `vectors` to codes that do not have them yet."""
    for start in range(0, len(rows), CHUNK):
        batch = rows[start : start + CHUNK]
        with _threads(core_count() if len(rows) >= _PARALLEL_FROM else 1):
            codes.add_with_ids(full(vectors[batch]), batch)
        if on_progress is not None:
            on_progress(len(batch))


def _read_codes(path: Path, index_type: IndexType, shape: tuple[int, int]) -> faiss.Index:
    try:
        codes = faiss.read_index(str(path), index_type.read_flags)
    except (RuntimeError, MemoryError) as error:
        raise GalleryCorruptError(
            f"{path} is not a readable index: it is missing, truncated or damaged "
            f"({faiss_reason(error)}). {REBUILD}"
        ) from error
    own = faiss.downcast_index(codes.index) if isinstance(codes, faiss.IndexIDMap) else codes
    found = (type(own), codes.metric_type, codes.ntotal, codes.d)
    if found != (index_type.faiss_class, faiss.METRIC_INNER_PRODUCT, *shape):
        raise GalleryCorruptError(
            f"{path} has {codes.ntotal:,} vectors of length {codes.d} in a "
            f"{type(own).__name__}, but the segment has {shape[0]:,} of length "
            f"{shape[1]} in an index {index_type.name}. {REBUILD}"
        )
    return codes


class _LargeBlocks:
    """While at least one thread compares many queries, FAISS has larger blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: dict[str, int] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = {name: getattr(faiss.cvar, name) for name in _LARGE_BLOCKS}
                self._set(_LARGE_BLOCKS)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._set(self._before)

    @staticmethod
    def _set(sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            setattr(faiss.cvar, name, size)


_large_blocks = _LargeBlocks()


@contextlib.contextmanager
def _threads(most: int) -> Iterator[None]:
    """Let FAISS use this number of threads, or all cores; afterwards what its host has set.

    A single query gets one thread: a second one makes it ten times slower.
    """
    before = faiss.omp_get_max_threads()
    count = 1 if most <= 1 else min(most, core_count())
    faiss.omp_set_num_threads(count)  # of the calling thread alone
    try:
        with contextlib.nullcontext() if count == 1 else _large_blocks:
            yield
    finally:
        faiss.omp_set_num_threads(before)


def _check(vectors: StoredRows, dim: int) -> None:
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise InvalidParameterError(
            f"Vectors of shape {vectors.shape} do not fit an index of dimension {dim}. "
            f"Give an array (N, {dim}) from the bundle of this gallery."
        )
