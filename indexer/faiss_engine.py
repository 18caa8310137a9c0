"""An immutable FAISS index over unit vectors, searched by inner product."""

from pathlib import Path

import faiss
import numpy as np
from faiss.class_wrappers import add_to_referenced_objects

from embedder.errors import InvalidParameterError
from embedder.types import Embeddings
from indexer.cores import core_count
from indexer.engine import Ids, Scores
from indexer.faiss_build import Progress, build_codes, flat_over, grow
from indexer.faiss_file import read_codes, write_codes
from indexer.faiss_search import (
    TUNED_AT,
    Bits,
    Effort,
    compare,
    count_of,
    nothing,
    ordered,
    parameters,
    positions_in,
    sifted,
)
from indexer.gpu import MAX_K, GpuIndex
from indexer.hashed_file import FileFacts
from indexer.plan import IndexKind, Plan

__all__ = ["Effort", "SegmentIndex"]

EXACT_BELOW = 20_000
EXACT_PART = 0.02
SCAN_EXACT_PART = 0.1
"""Filters that leave at most so many vectors, or this part (of flat and fp16), are answered by
comparing with all that are left: measured, it is faster from there on."""

_EXCESS, _EXCESS_LEAST = 1.5, 16
_HARDER = 4  # k_factor where neighbours are far away: codes tell them apart less well


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
        self._top = _top(kind, codes, self._flat)
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
            scores, positions = self._widely(queries, k, effort)
            return self._completed(queries, scores[:, :k], positions[:, :k], self.size, effort)
        count = count_of(allowed, self.size)
        part = SCAN_EXACT_PART if self.kind in ("flat", "fp16") else EXACT_PART
        if count <= max(EXACT_BELOW, part * self.size):
            return compare(queries, k, self._vectors, positions_in(allowed, self.size))
        # Fetch in excess and drop: faster than FAISS with a bitmap, and recall does not suffer
        # where the filter leaves out just what is near the query; then too few are left.
        wide = int(_EXCESS * k * self.size / count) + _EXCESS_LEAST
        found = sifted(*self._widely(queries, wide, effort), allowed, k)
        return self._completed(queries, *found, count, effort, allowed)

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
        if not k:
            return nothing(len(queries), 0)
        return ordered(*self._flat.search(queries, k))

    def vectors(self, positions: Ids) -> Embeddings:
        """The full-precision vectors (N, D) at known positions (N,)."""
        found: Embeddings = np.asarray(self._vectors[positions])
        return found

    def close(self) -> None:
        """Free the GPU, if there is one; nothing else may be asked then."""
        if self._gpu is not None:
            self._gpu.close()

    def _widely(self, queries: Embeddings, k: int, effort: Effort) -> tuple[Scores, Ids]:
        """At least `k` answers if there are as many, in order."""
        k = min(max(k, TUNED_AT), self.size)
        if self._gpu is not None and k <= MAX_K and len(queries):
            return ordered(*self._gpu.search(queries, k, effort.value))
        return ordered(*self._approximate(queries, k, effort, None))

    def _approximate(
        self, queries: Embeddings, k: int, effort: Effort, allowed: Bits | None
    ) -> tuple[Scores, Ids]:
        if not k or not len(queries):
            return nothing(len(queries), k)
        asked = parameters(self.kind, self._codes, effort, k, allowed)
        found: tuple[Scores, Ids] = self._top.search(queries, k, params=asked)
        return found

    def _completed(
        self,
        queries: Embeddings,
        scores: Scores,
        positions: Ids,
        count: int,
        effort: Effort,
        allowed: Bits | None = None,
    ) -> tuple[Scores, Ids]:
        """The same answers, those that are too short though there are `count` found once more."""
        k = positions.shape[1]
        short = np.flatnonzero((positions[:, : min(k, count)] < 0).any(axis=1))
        if len(short):
            queries = queries[short]
            if allowed is None:
                again = self.exact(queries, k)
            elif self.nlist:
                hardest = Effort(self.nlist, _HARDER * effort.k_factor)
                again = ordered(*self._approximate(queries, k, hardest, allowed))
            else:
                again = compare(queries, k, self._vectors, positions_in(allowed, self.size))
            scores[short], positions[short] = again
        return scores, positions

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


def _top(kind: IndexKind, codes: faiss.Index | None, flat: faiss.IndexFlatIP) -> faiss.Index:
    """What is searched: codes whose candidates are compared at full precision."""
    if codes is None:
        return flat
    if kind == "cagra":
        _give_storage(codes, flat)
        return codes
    return faiss.IndexRefine(codes, flat)


def _give_storage(graph: faiss.IndexHNSWCagra, flat: faiss.IndexFlatIP) -> None:
    """Let the graph read the mapped vectors, in place of its own copy, which is freed."""
    own = graph.storage
    graph.storage = flat
    graph.own_fields = False
    add_to_referenced_objects(graph, flat)
    if own is not None:
        own.this.own(True)


def _on_gpu(kind: IndexKind, vectors: Embeddings, codes: faiss.Index | None) -> GpuIndex:
    return GpuIndex.cagra(codes) if kind == "cagra" else GpuIndex.flat(vectors)
