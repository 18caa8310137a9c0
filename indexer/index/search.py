"""One search with FAISS: its parameters, its order, and comparing with chosen vectors only."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from embedder.types import Embeddings
from indexer.index.costs import COARSE_HNSW_FROM
from indexer.index.plan import IndexKind
from indexer.types import Ids, Scores

Bits = NDArray[np.uint8]
"""A set of positions as a little-endian bitmap."""

TUNED_AT = 10
"""The number of answers that an effort is tuned for."""

_CHUNK = 65_536
_CANDIDATE_BYTES = 12
_CHUNK_BYTES = 64 * 2**20  # candidates of the queries that are searched for at once


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
