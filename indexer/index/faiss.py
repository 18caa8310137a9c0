"""An immutable FAISS index over unit vectors, searched by inner product."""

from pathlib import Path

import faiss
import numpy as np

from embedder.errors import InvalidParameterError
from embedder.types import Embeddings
from indexer.folder.hashed_file import FileFacts
from indexer.index.build import build_codes, flat_over, grow, searched_by
from indexer.index.cores import core_count
from indexer.index.file import read_codes, write_codes
from indexer.index.gpu import MAX_K, GpuIndex
from indexer.index.plan import IndexKind, Plan
from indexer.index.search import (
    TUNED_AT,
    Bits,
    Effort,
    chunked,
    compare,
    count_of,
    found_by,
    nothing,
    ordered,
    parameters,
    positions_in,
    scaled,
    sifted,
)
from indexer.types import Ids, Progress, Scores

__all__ = ["Effort", "SegmentIndex"]

EXACT_BELOW = 20_000
EXACT_PART = 0.02
SCAN_EXACT_PART = 0.1
"""Filters that leave at most so many vectors, or this part (of flat and fp16), are answered by
comparing with all that are left: measured, it is faster from there on."""

_EXCESS, _EXCESS_LEAST = 1.5, 16
_WIDER = 8  # a second try where a filter leaves nothing near a query
_HARDER = 4  # k_factor where neighbours are far away: codes tell them apart less well
_NODE = 8  # comparisons that a step of a graph costs


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
