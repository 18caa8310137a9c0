"""An immutable FAISS index over unit vectors, searched by inner product."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from embedder.durable import FileFacts
from embedder.errors import InvalidParameterError
from embedder.machine import core_count
from embedder.types import Embeddings
from indexer.index.codes import build_codes, flat_over, grow, read_codes, searched_by, write_codes
from indexer.index.gpu import MAX_K, GpuIndex
from indexer.index.plan import COARSE_HNSW_FROM, IndexKind, Plan
from indexer.types import Ids, Progress, Scores

# Of many queries FAISS compares blocks, and its threads meet after each: with blocks of 1,024 by
# 16,384, 64 MB, they wait less than half as long as with its own of 4,096 by 1,024.
faiss.cvar.distance_compute_blas_query_bs = 1_024
faiss.cvar.distance_compute_blas_database_bs = 16_384

Bits = NDArray[np.uint8]
"""A set of positions as a little-endian bitmap."""

TUNED_AT = 10
"""The number of answers that an effort is tuned for."""

_CHUNK = 65_536
_CANDIDATE_BYTES = 12
_CHUNK_BYTES = 64 * 2**20  # candidates of the queries that are searched for at once

EXACT_BELOW = 20_000
EXACT_PART = 0.02
SCAN_EXACT_PART = 0.1
"""Filters that leave at most so many vectors, or this part (of flat and fp16), are answered by
comparing with all that are left: measured, it is faster from there on."""

_EXCESS, _EXCESS_LEAST = 1.5, 16
_WIDER = 8  # a second try where a filter leaves nothing near a query
_HARDER = 4  # k_factor where neighbours are far away: codes tell them apart less well
_NODE = 8  # comparisons that a step of a graph costs


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard an index tries to find 10 answers; for more it tries harder in proportion.

    value: efSearch (hnsw, cagra) or nprobe (ivf); 0 for flat and fp16. k_factor: so many times k
    candidates are compared at full precision.
    """

    value: int
    k_factor: int = 1


def parameters(
    kind: IndexKind, codes: faiss.Index | None, effort: Effort, k: int, allowed: Bits | None
) -> Any:
    """Parameters of one call, so that no index is changed for it."""
    nlist = getattr(codes, "nlist", 0)
    size = 0 if codes is None else codes.ntotal
    if allowed is None:
        return _unfiltered(kind, nlist, size, effort, k)
    return _made(kind, nlist, size, effort, k, {"sel": faiss.IDSelectorBitmap(allowed)})


@lru_cache(maxsize=256)
def _unfiltered(kind: IndexKind, nlist: int, size: int, effort: Effort, k: int) -> Any:
    """Made once: for a single query in a small index, making them takes as long as to search."""
    return _made(kind, nlist, size, effort, k, {})


def _made(
    kind: IndexKind, nlist: int, size: int, effort: Effort, k: int, sel: dict[str, Any]
) -> Any:
    if kind == "flat":
        return faiss.SearchParameters(**sel)
    value = scaled(effort.value, k, size)
    if kind == "cagra":
        return faiss.SearchParametersHNSW(efSearch=value, **sel)
    if kind == "fp16":
        base = faiss.SearchParameters(**sel)
    elif kind == "hnsw":
        base = faiss.SearchParametersHNSW(efSearch=value, **sel)
    else:
        nprobe = max(1, min(value, nlist))
        if nlist >= COARSE_HNSW_FROM:
            sel = {**sel, "quantizer_params": faiss.SearchParametersHNSW(efSearch=2 * nprobe)}
        base = faiss.SearchParametersIVF(nprobe=nprobe, **sel)
    return faiss.IndexRefineSearchParameters(k_factor=effort.k_factor, base_index_params=base)


def scaled(value: int, k: int, size: int) -> int:
    """The value for `k` answers of `size` vectors: with that for 10, fewer of more are found.

    In proportion to k while it is small; a great value already looks beyond the first 10. Measured
    on galleries from easy (18) to hard (72): with this, recall at 30 to 1000 is that at 10 or more.
    """
    return min(value + min(value, 2 * TUNED_AT) * max(0, k - TUNED_AT) // TUNED_AT, size)


def found_by(
    index: faiss.Index, queries: Embeddings, k: int, parameters: Any
) -> tuple[Scores, Ids]:
    """The answers (Q, k) of FAISS itself, past its Python layer.

    That is replaced in a process that imports `faiss.contrib.torch_utils`, as libraries for metric
    learning do, and then takes no parameters.
    """
    scores, positions = nothing(len(queries), k)
    index.search_c(
        len(queries),
        faiss.swig_ptr(queries),
        k,
        faiss.swig_ptr(scores),
        faiss.swig_ptr(positions),
        parameters,
    )
    return scores, positions


def count_of(allowed: Bits, size: int) -> int:
    """How many positions below `size` a bitmap holds."""
    whole, rest = divmod(size, 8)
    count = int(np.bitwise_count(allowed[:whole]).sum(dtype=np.int64))
    return count + (int(allowed[whole] & (2**rest - 1)).bit_count() if rest else 0)


def positions_in(allowed: Bits, size: int) -> Ids:
    """The positions below `size` that a bitmap holds, ascending."""
    filled = np.flatnonzero(allowed)
    row, bit = np.nonzero(np.unpackbits(allowed[filled, None], axis=1, bitorder="little"))
    positions: Ids = 8 * filled[row] + bit
    return positions[: np.searchsorted(positions, size)]


def compare(queries: Embeddings, k: int, vectors: Embeddings, positions: Ids) -> tuple[Scores, Ids]:
    """The best `k` (Q, k) of the vectors at `positions`; -1 where there are fewer."""
    scores, found = nothing(len(queries), 0)
    for start in range(0, len(positions), _CHUNK):
        chunk = positions[start : start + _CHUNK]
        some, rows = faiss.knn(
            queries, vectors[chunk], min(k, len(chunk)), metric=faiss.METRIC_INNER_PRODUCT
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


def chunked(
    search: Callable[[Embeddings], tuple[Scores, Ids]], queries: Embeddings, candidates: int
) -> tuple[Scores, Ids]:
    """Search for some queries (Q, D), Q >= 1, at a time: each needs memory for its candidates."""
    rows = max(1, _CHUNK_BYTES // (_CANDIDATE_BYTES * candidates))
    if len(queries) <= rows:
        return search(queries)
    found = [search(queries[start : start + rows]) for start in range(0, len(queries), rows)]
    scores, positions = zip(*found, strict=True)
    return np.concatenate(scores), np.concatenate(positions)


def sifted(scores: Scores, positions: Ids, allowed: Bits, k: int) -> tuple[Scores, Ids]:
    """The first `k` answers of each row that are allowed; -1 where there are fewer."""
    is_in = (allowed[positions >> 3] >> (positions & 7).astype(np.uint8)) & 1 == 1
    is_in &= positions >= 0
    kept = np.argsort(~is_in, axis=1, kind="stable")[:, :k]
    positions = np.where(is_in, positions, -1)
    scores = np.where(is_in, scores, np.float32(-1))
    return np.take_along_axis(scores, kept, axis=1), np.take_along_axis(positions, kept, axis=1)


def nothing(rows: int, k: int) -> tuple[Scores, Ids]:
    """An answer without any position."""
    return np.full((rows, k), -1, np.float32), np.full((rows, k), -1, np.int64)


def ordered(scores: Scores, positions: Ids) -> tuple[Scores, Ids]:
    """Best first, equal scores by position, what is missing last; scores within [-1, 1]."""
    scores = np.minimum(np.maximum(scores, -1), 1)
    if (positions >= 0).all() and (scores[:, 1:] < scores[:, :-1]).all():
        return scores, positions
    ranks = np.where(positions < 0, np.inf, -scores)
    order = np.lexsort((positions, ranks), axis=1)
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(positions, order, axis=1)


class SegmentIndex:
    """Vectors (N, D), usually mapped from a file, and a compressed index that finds candidates.

    Scores are always those of the full-precision vectors. Thread safe.
    """

    def __init__(
        self, kind: IndexKind, vectors: Embeddings, codes: faiss.Index | None, device: str = "cpu"
    ) -> None:
        self.kind = kind
        self._vectors = vectors
        self._codes = codes
        self._flat = flat_over(vectors)
        self._top = searched_by(kind, codes, self._flat)
        self._gpu = _on_gpu(kind, vectors, codes) if device == "cuda" else None

    @classmethod
    def build(
        cls, plan: Plan, vectors: Embeddings, on_progress: Progress | None = None
    ) -> "SegmentIndex":
        """Index the contiguous `vectors` (N, D), which are kept and not copied.

        Raises: InvalidParameterError, ProviderError.
        """
        _check(vectors, plan.dim)
        if plan.kind == "flat":
            if on_progress is not None:
                on_progress(len(vectors))
            return cls(plan.kind, vectors, None, plan.device)
        return cls(plan.kind, vectors, build_codes(plan, vectors, on_progress), plan.device)

    @classmethod
    def open(
        cls, kind: IndexKind, vectors: Embeddings, path: Path | None, device: str = "cpu"
    ) -> "SegmentIndex":
        """Map what `save` wrote; no path for the kind flat. FAISS trusts the file.

        Raises: GalleryCorruptError, ProviderError.
        """
        codes = None if path is None else read_codes(path, kind, vectors)
        return cls(kind, vectors, codes, device)

    def extended(
        self, plan: Plan, vectors: Embeddings, on_progress: Progress | None = None
    ) -> "SegmentIndex":
        """The index of longer `vectors` that begin with those of this one, which is used up.

        Raises: ProviderError.
        """
        if self.kind in ("flat", "cagra"):
            self.close()
            if on_progress is not None:
                on_progress(len(vectors) - self.size)
            return self.build(plan, vectors)
        grow(self._codes, vectors, on_progress)
        return SegmentIndex(self.kind, vectors, self._codes, plan.device)

    def save(self, path: Path) -> FileFacts:
        """Write the compressed index to the new file `path`, without the vectors.

        Raises: OSError; InvalidParameterError for the kind flat, which has nothing to write.
        """
        if self._codes is None:
            raise InvalidParameterError("A flat index has no codes to save: keep its vectors.")
        return write_codes(path, self.kind, self._codes)

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
        self,
        queries: Embeddings,
        k: int,
        effort: Effort,
        allowed: Bits | None = None,
        threads: int | None = None,
    ) -> tuple[Scores, Ids]:
        """The `min(k, size)` best of each query (Q, D): scores and positions, best first, equal
        scores by position. Position -1 and score -1 where the bitmap `allowed` leaves fewer.

        Which of equal scores are found is open where `k` cuts them.

        Raises: InvalidParameterError.
        """
        queries, k = self._checked(queries, k)
        _set_threads(threads or min(len(queries), core_count()))
        if allowed is None:
            return self._searched(queries, k, effort, None, self.size, (k,))
        count = count_of(allowed, self.size)
        part = SCAN_EXACT_PART if self.kind in ("flat", "fp16") else EXACT_PART
        if count <= max(EXACT_BELOW, part * self.size):
            return self._compared(queries, k, allowed)
        # Fetch in excess and drop: faster than FAISS with a bitmap, and recall does not suffer
        # where the filter leaves out just what is near the query; then too few are left.
        wide = int(_EXCESS * k * self.size / count) + _EXCESS_LEAST
        return self._searched(queries, k, effort, allowed, count, (wide, _WIDER * wide))

    def exact(
        self, queries: Embeddings, k: int, positions: Ids | None = None
    ) -> tuple[Scores, Ids]:
        """As `search`, but by comparing with all vectors, or with those at `positions`.

        Raises: InvalidParameterError.
        """
        queries, k = self._checked(queries, k)
        _set_threads(min(len(queries), core_count()))
        if positions is not None:
            return compare(queries, k, self._vectors, positions)
        return self._compared(queries, k, None)

    def vectors(self, positions: Ids) -> Embeddings:
        """The full-precision vectors (N, D) at known positions (N,)."""
        found: Embeddings = np.asarray(self._vectors[positions])
        return found

    def close(self) -> None:
        """Free the GPU, if there is one; nothing else may be asked then."""
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
        scores, positions = nothing(len(queries), k)
        short = np.arange(len(queries))
        for wide in widths:
            if not len(short):
                break
            if self._is_cheaper_compared(wide, effort, count):
                scores[short], positions[short] = self._compared(queries[short], k, allowed)
                return scores, positions
            found = self._widely(queries[short], k, wide, effort, allowed)
            scores[short], positions[short] = found
            short = short[(found[1][:, : min(k, count)] < 0).any(axis=1)]
        if len(short):
            found = self._hardest(queries[short], k, effort, allowed, count)
            scores[short], positions[short] = found
        return scores, positions

    def _is_cheaper_compared(self, wide: int, effort: Effort, count: int) -> bool:
        """Whether finding `wide` answers is no less work than comparing with `count` vectors."""
        if wide * effort.k_factor >= count:
            return True
        is_graph = self.kind in ("hnsw", "cagra")
        return is_graph and _NODE * scaled(effort.value, wide, self.size) >= count

    def _compared(self, queries: Embeddings, k: int, allowed: Bits | None) -> tuple[Scores, Ids]:
        if allowed is not None:
            return compare(queries, k, self._vectors, positions_in(allowed, self.size))
        if not k:
            return nothing(len(queries), 0)
        return ordered(*self._flat.search(queries, k))

    def _widely(
        self, queries: Embeddings, k: int, wide: int, effort: Effort, allowed: Bits | None
    ) -> tuple[Scores, Ids]:
        """The best `k` allowed ones among the `wide` nearest, in order."""
        wide = min(max(wide, TUNED_AT), self.size)

        def search(some: Embeddings) -> tuple[Scores, Ids]:
            if self._gpu is not None and wide <= MAX_K:
                found = ordered(*self._gpu.search(some, wide, min(effort.value, self.size)))
            else:
                found = ordered(*self._approximate(some, wide, effort, None))
            return (
                (found[0][:, :k], found[1][:, :k])
                if allowed is None
                else sifted(*found, allowed, k)
            )

        return chunked(search, queries, wide * effort.k_factor)

    def _hardest(
        self, queries: Embeddings, k: int, effort: Effort, allowed: Bits | None, count: int
    ) -> tuple[Scores, Ids]:
        """All lists, where there are any and a filter; else a comparison with all."""
        hardest = Effort(self.nlist, _HARDER * effort.k_factor)
        if allowed is None or not self.nlist or k * hardest.k_factor >= count:
            return self._compared(queries, k, allowed)

        def search(some: Embeddings) -> tuple[Scores, Ids]:
            return ordered(*self._approximate(some, k, hardest, allowed))

        return chunked(search, queries, k * hardest.k_factor)

    def _approximate(
        self, queries: Embeddings, k: int, effort: Effort, allowed: Bits | None
    ) -> tuple[Scores, Ids]:
        asked = parameters(self.kind, self._codes, effort, k, allowed)
        return found_by(self._top, queries, k, asked)

    def _checked(self, queries: Embeddings, k: int) -> tuple[Embeddings, int]:
        if k < 1:
            raise InvalidParameterError(f"k = {k} is too small. Ask for at least 1 hit.")
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        _check(queries, self.dim)
        return queries, min(k, self.size)


def _set_threads(count: int) -> None:
    """A second OpenMP thread makes a single query ten times slower. Set for this thread alone."""
    faiss.omp_set_num_threads(max(1, count))


def _check(vectors: Embeddings, dim: int) -> None:
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise InvalidParameterError(
            f"Vectors of shape {vectors.shape} do not fit an index of dimension {dim}. "
            f"Give an array (N, {dim}) from the bundle of this gallery."
        )


def _on_gpu(kind: IndexKind, vectors: Embeddings, codes: faiss.Index | None) -> GpuIndex:
    return GpuIndex.cagra(codes) if kind == "cagra" else GpuIndex.flat(vectors)
