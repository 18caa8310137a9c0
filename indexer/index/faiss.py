"""An immutable FAISS index over unit vectors, searched by inner product."""

from collections.abc import Callable, Mapping
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
from kinlens.indexer.index.gpu import LEAST_BYTES, MAX_K, GpuCopy, reason_of
from kinlens.indexer.index.kinds import (
    KINDS,
    TUNED_AT,
    Effort,
    IndexKind,
    Kind,
    found_by,
    full,
    scaled,
)
from kinlens.indexer.index.plan import Plan
from kinlens.indexer.types import Ids, Progress, Scores, StoredRows

CHUNK = 65_536
"""Vectors that are compared with at once, or added to codes."""

# Of many queries FAISS compares blocks, and its threads meet after each: with blocks of 1,024 by
# 16,384, 64 MB, they wait less than half as long as with its own of 4,096 by 1,024.
faiss.cvar.distance_compute_blas_query_bs = 1_024
faiss.cvar.distance_compute_blas_database_bs = 16_384


CHUNK_BYTES = 64 * 2**20
"""Memory for the candidates of the queries that are searched for at once."""

EXACT_BELOW = 20_000
EXACT_PART = 0.02
SCAN_EXACT_PART = 0.1
"""Filters that leave at most so many vectors, or this part (of flat), are answered by
comparing with all that are left: measured, it is faster from there on."""

_CANDIDATE_BYTES = 12
_EXCESS, _EXCESS_LEAST = 1.5, 16
_MOST = 4  # where at most one vector in so many is left out, all are compared with
_WIDER = 8  # a second try where a filter leaves nothing near a query
_HARDER = 4  # k_factor where neighbours are far away: codes tell them apart less well
_NODE = 8  # comparisons that a step of a graph costs
_FEW = 8  # queries from which on vectors in half precision are compared with in blocks
_LARGE = 20_000  # vectors from which on a build takes all cores
_BLOCK = 65_536  # bytes; FAISS hands over 1 MiB by default, which is half as fast
_CURE = "Make the index again from the catalogue: kinlens-index compact GALLERY --rebuild."


class SegmentIndex:
    """Vectors (N, D), usually mapped from a file, and a compressed index that finds candidates.

    Scores are always those of the vectors, in the precision in which they are kept. Thread safe.
    On a GPU (`use_gpu`) a copy answers as long as it can, without a filter or with one that leaves
    many; the rest, and all after a fault, comes from the CPU.
    """

    def __init__(self, kind: IndexKind, vectors: StoredRows, codes: faiss.Index | None) -> None:
        """`codes` hold the rows of `vectors` that are searched; a kind without codes, all."""
        self.kind = kind
        self._kind = KINDS[kind]
        self._vectors = vectors
        self._codes = codes
        self._is_half = vectors.dtype == np.float16
        self._flat = _flat_over(vectors)
        self._top = self._flat if codes is None else self._kind.searched(codes, self._flat)
        self._gpu: GpuCopy | None = None

    @classmethod
    def build(
        cls,
        plan: Plan,
        vectors: StoredRows,
        rows: Ids | None = None,
        on_progress: Progress | None = None,
    ) -> "SegmentIndex":
        """Index the contiguous `vectors` (N, D), which are kept and not copied; of a kind that
        `grows`, these rows alone.

        Raises: InvalidParameterError, ProviderError.
        """
        _check(vectors, plan.dim)
        kind = KINDS[plan.kind]
        rows = np.arange(len(vectors)) if rows is None else rows
        codes = None
        if kind.faiss_class is not None:
            _set_threads(core_count() if len(rows) >= _LARGE else 1)
            codes = kind.codes(vectors, rows, plan.parameters)
        if kind.grows:
            _grow(codes, vectors, rows, on_progress)
        elif on_progress is not None:
            on_progress(len(rows))
        return cls(plan.kind, vectors, codes)

    @classmethod
    def open(
        cls,
        kind: IndexKind,
        vectors: StoredRows,
        path: Path | None,
        count: int | None = None,
    ) -> "SegmentIndex":
        """Map what `save` wrote of `count` rows, None for all; no path for the kind flat. FAISS
        trusts the file.

        Raises: GalleryCorruptError.
        """
        if path is None:
            return cls(kind, vectors, None)
        shape = (len(vectors) if count is None else count, vectors.shape[1])
        return cls(kind, vectors, _read_codes(path, KINDS[kind], shape))

    @classmethod
    def followed(
        cls, kind: IndexKind, path: Path, vectors: StoredRows, count: int, moved: Ids
    ) -> "SegmentIndex":
        """What `save` wrote of `count` rows, over other `vectors`: `moved` has the new row of each
        of those rows, -1 for one that has gone. Of a kind that `follows`.

        Raises: GalleryCorruptError.
        """
        codes = _read_codes(path, KINDS[kind], (count, vectors.shape[1]))
        # FAISS looks at each bit alone; rows that it never had are no harm.
        codes.remove_ids(faiss.IDSelectorBitmap(packed_bits(moved < 0)))
        if not np.array_equal(moved[moved >= 0], np.flatnonzero(moved >= 0)):
            for place in range(codes.nlist):
                if size := codes.invlists.list_size(place):
                    rows = faiss.rev_swig_ptr(codes.invlists.get_ids(place), size)
                    rows[:] = moved[rows]
        return cls(kind, vectors, codes)

    def extended(self, rows: Ids, on_progress: Progress | None = None) -> "SegmentIndex":
        """The index of these further rows as well, of a kind that `grows`; this one is used up."""
        _grow(self._codes, self._vectors, rows, on_progress)
        return SegmentIndex(self.kind, self._vectors, self._codes)

    def use_gpu(self, name: str, parameters: Mapping[str, int]) -> None:
        """Search a copy on the GPU as soon as it is there, if that has the memory, and the vectors
        are not so few that the CPU is quick enough; `name` is for the log.
        """
        count = self.size if self._codes is None else int(self._codes.ntotal)
        if 4 * count * self.dim < LEAST_BYTES:
            return
        needed = self._kind.gpu_bytes(count, self.dim, parameters)
        load = self._kind.on_gpu(self._vectors, self._codes)
        self._gpu = GpuCopy(name, load, needed, self.dim)

    @property
    def gpu(self) -> GpuCopy | None:
        """The copy on the GPU, which may be gone again; None if none was asked for."""
        return self._gpu

    @property
    def is_on_gpu(self) -> bool:
        """Whether the GPU answers now."""
        return self._gpu is not None and self._gpu.is_there

    def save(self, path: Path) -> FileFacts:
        """Write the compressed index to the new file `path`, without the vectors.

        Raises: OSError; InvalidParameterError for the kind flat, which has nothing to write.
        """
        if self._codes is None:
            raise InvalidParameterError("A flat index has no codes to save: keep its vectors.")
        with HashedFile(path) as file:
            writer = faiss.PyCallbackIOWriter(file.write, _BLOCK)
            faiss.write_index(self._codes, writer, self._kind.write_flags)
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
        """Inverted lists; 0 for a kind without."""
        return int(getattr(self._codes, "nlist", 0))

    def search(
        self, queries: Embeddings, k: int, effort: Effort, allowed: Bits | None = None
    ) -> tuple[Scores, Ids]:
        """The `min(k, size)` best of each query (Q, D): scores and positions, best first, equal
        scores by position. Position -1 and score -1 where the bitmap `allowed` leaves fewer.

        Which of equal scores are found is open where `k` cuts them.

        Raises: InvalidParameterError.
        """
        queries, k = self._checked(queries, k)
        if allowed is None:
            if self._top is self._flat and not self.is_on_gpu:
                return self._brute_force(queries, k)
            return self._searched(queries, k, effort, None, self.size, (k,))
        count = count_of(allowed, self.size)
        # Fetch in excess and drop: faster than FAISS with a bitmap, and recall does not suffer
        # where the filter leaves out just what is near the query; then too few are left.
        wide = int(_EXCESS * k * self.size / max(1, count)) + _EXCESS_LEAST
        is_scan = self._kind.is_scan and not (wide <= MAX_K and self.is_on_gpu)
        part = SCAN_EXACT_PART if is_scan else EXACT_PART
        if count <= max(EXACT_BELOW, part * self.size):
            return self._brute_force(queries, k, allowed)
        return self._searched(queries, k, effort, allowed, count, (wide, _WIDER * wide))

    def exact(self, queries: Embeddings, k: int, allowed: Bits | None = None) -> tuple[Scores, Ids]:
        """As `search`, but by comparing with all vectors, or with those in `allowed`.

        Raises: InvalidParameterError.
        """
        return self._brute_force(*self._checked(queries, k), allowed)

    def range_search(self, query: Embeddings, least: float, allowed: Bits | None = None) -> Ids:
        """The positions of all vectors whose score for the query (1, D) is at least `least`, of
        those that the bitmap `allowed` leaves; by comparing with each.
        """
        return range_search(self._vectors, query, least, allowed)

    def vectors(self, positions: Ids) -> Embeddings:
        """The full-precision vectors (N, D) at known positions (N,)."""
        return full(self._vectors[positions])

    def close(self) -> None:
        """Free the GPU, if there is one; the CPU answers from then on."""
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
        """The best `k` of the `count` allowed: of the `widths` nearest, one width after the other
        for queries that still lack answers, then by the greatest effort."""
        if not len(queries):
            return nothing(0, k)
        if not widths:
            return self._probe_all_lists(queries, k, effort, allowed, count)
        if self._is_cheaper_compared(widths[0], effort, count):
            return self._brute_force(queries, k, allowed)
        scores, positions = self._overfetch(queries, k, widths[0], effort, allowed)
        short = np.flatnonzero(positions[:, min(k, count) - 1] < 0)  # what is missing stands last
        if len(short):
            again = self._searched(queries[short], k, effort, allowed, count, widths[1:])
            scores[short], positions[short] = again
        return scores, positions

    def _is_cheaper_compared(self, wide: int, effort: Effort, count: int) -> bool:
        """Whether finding `wide` answers is no less work than comparing with `count` vectors."""
        if wide * effort.k_factor >= count:
            return True
        return self._kind.is_graph and _NODE * scaled(effort.value, wide, self.size) >= count

    def _brute_force(
        self, queries: Embeddings, k: int, allowed: Bits | None = None
    ) -> tuple[Scores, Ids]:
        if not k or not len(queries):
            return nothing(len(queries), k)
        in_blocks = self._is_half and len(queries) > _FEW  # which is faster
        if allowed is None and in_blocks:
            return compare(queries, k, self._vectors, np.arange(self.size))
        if allowed is None:
            return ordered(*found_by(self._flat, queries, k))
        left_out = self.size - count_of(allowed, self.size)
        if in_blocks or _MOST * left_out > self.size:
            return compare(queries, k, self._vectors, positions_in(allowed, self.size))
        # To fetch more and drop them takes less than to copy what is allowed.
        wide = k + min(left_out, int(_EXCESS * k * left_out / self.size) + _EXCESS_LEAST)
        scores, positions = _sifted(*ordered(*found_by(self._flat, queries, wide)), allowed, k)
        short = np.flatnonzero(positions[:, -1] < 0)
        if len(short):
            rows = positions_in(allowed, self.size)
            scores[short], positions[short] = compare(queries[short], k, self._vectors, rows)
        return scores, positions

    def _overfetch(
        self, queries: Embeddings, k: int, wide: int, effort: Effort, allowed: Bits | None
    ) -> tuple[Scores, Ids]:
        """The best `k` allowed ones among the `wide` nearest, in order."""
        wide = min(max(wide, TUNED_AT), self.size)

        def search(some: Embeddings) -> tuple[Scores, Ids]:
            found = self._found_on_gpu(some, wide, effort)
            if found is None:
                asked = _parameters(self._kind, self.nlist, self.size, effort, wide)
                found = found_by(self._top, some, wide, asked)
            found = ordered(*found)
            if allowed is not None:
                return _sifted(*found, allowed, k)
            return found if wide == k else (found[0][:, :k], found[1][:, :k])

        return _chunked(search, queries, wide * effort.k_factor)

    def _found_on_gpu(
        self, queries: Embeddings, k: int, effort: Effort
    ) -> tuple[Scores, Ids] | None:
        """The `k` best by the GPU; None if it does not answer."""
        value = scaled(effort.on_gpu, k, self.size)
        if k > MAX_K or value > self._kind.gpu_most or not self.is_on_gpu:
            return None
        assert self._gpu is not None
        factor = self._kind.gpu_factor
        wide = min(factor * k, self.size)
        found = self._gpu.search(queries, wide, value)
        if found is None or factor == 1:
            return found
        scores, positions = found
        if self._is_half:
            self._compare_each(queries, scores, positions)
        else:
            pointers = [faiss.swig_ptr(array) for array in (queries, scores, positions)]
            self._flat.compute_distance_subset(len(queries), pointers[0], wide, *pointers[1:])
        scores, positions = ordered(scores, positions)
        return scores[:, :k], positions[:, :k]

    def _compare_each(self, queries: Embeddings, scores: Scores, positions: Ids) -> None:
        """Put the scores of these positions (Q, K) into `scores`."""
        at_once = max(1, CHUNK // positions.shape[1])
        for start in range(0, len(queries), at_once):
            part = slice(start, start + at_once)
            own = full(self._vectors[np.maximum(positions[part], 0)])
            scores[part] = np.einsum("qd,qkd->qk", queries[part], own)

    def _probe_all_lists(
        self, queries: Embeddings, k: int, effort: Effort, allowed: Bits | None, count: int
    ) -> tuple[Scores, Ids]:
        """Where there are any and a filter; else a comparison with all."""
        hardest = Effort(self.nlist, _HARDER * effort.k_factor)
        if allowed is None or not self.nlist or k * hardest.k_factor >= count:
            return self._brute_force(queries, k, allowed)
        asked = self._kind.search_parameters(self.nlist, self.size, hardest, k, allowed)

        def search(some: Embeddings) -> tuple[Scores, Ids]:
            return ordered(*found_by(self._top, some, k, asked))

        return _chunked(search, queries, k * hardest.k_factor)

    def _checked(self, queries: Embeddings, k: int) -> tuple[Embeddings, int]:
        """With as many threads as help: a second one makes a single query ten times slower."""
        if k < 1:
            raise InvalidParameterError(f"k = {k} is too small. Ask for at least 1 hit.")
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        _check(queries, self.dim)
        _set_threads(1 if len(queries) == 1 else min(len(queries), core_count()))
        return queries, min(k, self.size)


def range_search(
    vectors: StoredRows, query: Embeddings, least: float, allowed: Bits | None = None
) -> Ids:
    """The positions of all vectors (N, D) whose score for the query (1, D) is at least `least`,
    of those that the bitmap `allowed` leaves. Compares with each of them.
    """
    if not len(vectors):
        return np.empty(0, np.int64)
    _set_threads(1)
    # FAISS gives what is above its radius; scores and radius are of single precision.
    radius = np.float32(least)
    if float(radius) >= least:
        radius = np.nextafter(radius, np.float32(-np.inf))
    asked = None
    if allowed is not None:
        asked = faiss.SearchParameters(sel=faiss.IDSelectorBitmap(allowed))
    found = faiss.RangeSearchResult(1)
    _flat_over(vectors).range_search_c(1, faiss.swig_ptr(query), float(radius), found, asked)
    count = int(faiss.rev_swig_ptr(found.lims, 2)[1])
    if not count:
        return np.empty(0, np.int64)
    positions: Ids = faiss.rev_swig_ptr(found.labels, count).copy()
    return positions


def compare(queries: Embeddings, k: int, vectors: StoredRows, positions: Ids) -> tuple[Scores, Ids]:
    """The best `k` (Q, k) of the vectors at `positions`; -1 where there are fewer."""
    scores, found = nothing(len(queries), 0)
    for start in range(0, len(positions), CHUNK):
        chunk = positions[start : start + CHUNK]
        some, rows = faiss.knn(
            queries, full(vectors[chunk]), min(k, len(chunk)), metric=faiss.METRIC_INNER_PRODUCT
        )
        scores = np.concatenate([scores, some], axis=1)
        found = np.concatenate([found, chunk[rows]], axis=1)
        scores, found = ordered(scores, found)
        scores, found = scores[:, :k], found[:, :k]
    missing = nothing(len(queries), k - scores.shape[1])
    return (
        np.concatenate([scores, missing[0]], axis=1),
        np.concatenate([found, missing[1]], axis=1),
    )


def _chunked(
    search: Callable[[Embeddings], tuple[Scores, Ids]], queries: Embeddings, candidates: int
) -> tuple[Scores, Ids]:
    """Search for some queries (Q, D), Q >= 1, at a time: each needs memory for its candidates."""
    rows = max(1, CHUNK_BYTES // (_CANDIDATE_BYTES * candidates))
    if len(queries) <= rows:
        return search(queries)
    found = [search(queries[start : start + rows]) for start in range(0, len(queries), rows)]
    scores, positions = zip(*found, strict=True)
    return np.concatenate(scores), np.concatenate(positions)


def _sifted(scores: Scores, positions: Ids, allowed: Bits, k: int) -> tuple[Scores, Ids]:
    """The first `k` answers of each row that are allowed; -1 where there are fewer."""
    is_in = has_bits(allowed, positions) & (positions >= 0)
    kept = np.argsort(~is_in, axis=1, kind="stable")[:, :k]
    positions = np.where(is_in, positions, -1)
    scores = np.where(is_in, scores, np.float32(-1))
    return np.take_along_axis(scores, kept, axis=1), np.take_along_axis(positions, kept, axis=1)


def nothing(rows: int, k: int) -> tuple[Scores, Ids]:
    """An answer without any position."""
    return np.full((rows, k), -1, np.float32), np.full((rows, k), -1, np.int64)


def ordered(scores: Scores, positions: Ids) -> tuple[Scores, Ids]:
    """Best first, equal scores by position, what is missing last; scores within [-1, 1]."""
    scores = np.minimum(scores, np.float32(1))
    np.maximum(scores, np.float32(-1), out=scores)
    # Counting is the fastest question to small arrays; for one query that is what matters.
    is_unordered = np.count_nonzero(scores[:, 1:] >= scores[:, :-1])
    if not is_unordered and not np.count_nonzero(positions < 0):
        return scores, positions
    ranks = np.where(positions < 0, np.inf, -scores)
    order = np.lexsort((positions, ranks), axis=1)
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(positions, order, axis=1)


@lru_cache(maxsize=256)
def _parameters(
    kind: Kind, nlist: int, size: int, effort: Effort, k: int
) -> faiss.SearchParameters:
    """Made once: for a single query in a small index, making them takes as long as to search."""
    return kind.search_parameters(nlist, size, effort, k)


def _flat_over(vectors: StoredRows) -> faiss.IndexFlatCodes:
    """A flat index that reads `vectors` (N, D) in place; it lives no longer than they do."""
    dim = vectors.shape[1]
    if vectors.dtype == np.float16:
        half = faiss.ScalarQuantizer.QT_fp16
        index = faiss.IndexScalarQuantizer(dim, half, faiss.METRIC_INNER_PRODUCT)
        index.is_trained = True  # there is nothing to learn
    else:
        index = faiss.IndexFlatIP(dim)
    if len(vectors):
        nobody = faiss.MaybeOwnedVectorUInt8().owner
        pointer = faiss.swig_ptr(vectors.reshape(-1).view(np.uint8))
        index.codes = faiss.MaybeOwnedVectorUInt8.create_view(pointer, vectors.nbytes, nobody)
        index.ntotal = len(vectors)
    add_to_referenced_objects(index, vectors)
    return index


def _grow(codes: faiss.Index, vectors: StoredRows, rows: Ids, on_progress: Progress | None) -> None:
    """Add these rows of `vectors` to codes that do not have them yet."""
    _set_threads(core_count() if len(rows) >= _LARGE else 1)
    for start in range(0, len(rows), CHUNK):
        batch = rows[start : start + CHUNK]
        codes.add_with_ids(full(vectors[batch]), batch)
        if on_progress is not None:
            on_progress(len(batch))


def _read_codes(path: Path, kind: Kind, shape: tuple[int, int]) -> faiss.Index:
    try:
        codes = faiss.read_index(str(path), kind.read_flags)
    except (RuntimeError, MemoryError) as error:
        raise GalleryCorruptError(
            f"{path} is not a readable index: it is missing, truncated or damaged "
            f"({reason_of(error)}). {_CURE}"
        ) from error
    own = faiss.downcast_index(codes.index) if isinstance(codes, faiss.IndexIDMap) else codes
    found = (type(own), codes.metric_type, codes.ntotal, codes.d)
    if found != (kind.faiss_class, faiss.METRIC_INNER_PRODUCT, *shape):
        raise GalleryCorruptError(
            f"{path} holds {codes.ntotal:,} vectors of length {codes.d} in a "
            f"{type(own).__name__}, but the segment has {shape[0]:,} of length "
            f"{shape[1]} in an index of kind {kind.name}. {_CURE}"
        )
    return codes


def _set_threads(count: int) -> None:
    """For this thread alone."""
    faiss.omp_set_num_threads(max(1, count))


def _check(vectors: StoredRows, dim: int) -> None:
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise InvalidParameterError(
            f"Vectors of shape {vectors.shape} do not fit an index of dimension {dim}. "
            f"Give an array (N, {dim}) from the bundle of this gallery."
        )
