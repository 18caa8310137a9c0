"""Exact inner-product search with FAISS."""

from pathlib import Path

import faiss
import numpy as np

from embedder.errors import GalleryCorruptError, InvalidParameterError
from embedder.types import Embeddings
from indexer.cores import core_count
from indexer.engine import Ids, Scores


class FaissStore:
    """A flat index: every search compares with every vector, so answers are exact."""

    def __init__(self, index: faiss.IndexIDMap2) -> None:
        self._index = index

    @classmethod
    def create(cls, dim: int) -> "FaissStore":
        """An empty store for vectors of length `dim`."""
        return cls(faiss.IndexIDMap2(faiss.IndexFlatIP(dim)))

    @classmethod
    def load(cls, path: Path) -> "FaissStore":
        """Read what `save` wrote. FAISS trusts the file: check its hash before.

        Raises: GalleryCorruptError.
        """
        try:
            index = faiss.read_index(str(path))
        except (RuntimeError, MemoryError) as error:
            raise GalleryCorruptError(
                f"{path} is not a readable index: it is missing, truncated or damaged "
                f"({_last_line(error)}). Build the gallery again."
            ) from error
        if not isinstance(index, faiss.IndexIDMap2) or not _is_exact(index):
            raise GalleryCorruptError(
                f"{path} holds another kind of index than this version writes. "
                "Build the gallery again."
            )
        return cls(index)

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return int(self._index.d)

    @property
    def size(self) -> int:
        """Number of vectors."""
        return int(self._index.ntotal)

    def add(self, ids: Ids, vectors: Embeddings) -> None:
        """Add vectors (N, D) under `ids` (N,). Raises: InvalidParameterError."""
        self._index.add_with_ids(self._checked(vectors), np.ascontiguousarray(ids, dtype=np.int64))

    def search(self, queries: Embeddings, k: int) -> tuple[Scores, Ids]:
        """The `min(k, size)` best of each query (Q, D): best first, equal scores by id.

        Raises: InvalidParameterError for k < 1 or queries of another dimension.
        """
        if k < 1:
            raise InvalidParameterError(f"k = {k} is too small. Ask for at least 1 hit.")
        queries = self._checked(queries)
        k = min(k, self.size)
        if not len(queries) or not k:
            shape = (len(queries), k)
            return np.empty(shape, np.float32), np.empty(shape, np.int64)
        # A second OpenMP thread makes a single query ten times slower; the setting is per thread.
        faiss.omp_set_num_threads(min(len(queries), core_count()))
        rows = [self._ranked(query, k) for query in self._fetch(queries, k + 1)]
        return np.stack([scores for scores, _ in rows]), np.stack([ids for _, ids in rows])

    def vectors(self, ids: Ids) -> Embeddings:
        """The stored vectors (N, D) of known `ids` (N,)."""
        found: Embeddings = self._index.reconstruct_batch(np.ascontiguousarray(ids, dtype=np.int64))
        return found

    def save(self, path: Path) -> None:
        """Write everything to the new file `path`. Raises: OSError."""
        # Through a Python file, because FAISS' own writer does not notice a full disk on closing.
        with path.open("xb") as file:
            writer = faiss.PyCallbackIOWriter(file.write)  # type: ignore[attr-defined]
            faiss.write_index(self._index, writer)

    def _fetch(self, queries: Embeddings, count: int) -> list[tuple[Embeddings, Scores, Ids]]:
        scores, ids = self._index.search(queries, min(count, self.size))
        scores = np.clip(scores, -1.0, 1.0)
        return list(zip(queries, scores, ids, strict=True))

    def _ranked(self, row: tuple[Embeddings, Scores, Ids], k: int) -> tuple[Scores, Ids]:
        """Fetch more until no tie is cut at `k`; then equal scores can be ordered by id."""
        query, scores, ids = row
        while len(scores) < self.size and scores[-1] == scores[k - 1]:
            (_, scores, ids), *_ = self._fetch(query[None], 2 * len(scores))
        order = np.lexsort((ids, -scores))[:k]
        return scores[order], ids[order]

    def _checked(self, vectors: Embeddings) -> Embeddings:
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != self.dim:
            raise InvalidParameterError(
                f"Vectors of shape {vectors.shape} do not fit an index of dimension {self.dim}. "
                f"Give an array (N, {self.dim}) from the bundle of this gallery."
            )
        if not np.isfinite(vectors).all():
            raise InvalidParameterError("A vector holds numbers that are not finite.")
        return vectors


def _is_exact(index: faiss.IndexIDMap2) -> bool:
    flat = faiss.downcast_index(index.index)
    return (
        isinstance(flat, faiss.IndexFlat)
        and flat.metric_type == faiss.METRIC_INNER_PRODUCT
        and index.id_map.size() == index.ntotal == flat.ntotal
    )


def _last_line(error: BaseException) -> str:
    return str(error).rpartition("Error: ")[2].strip() or type(error).__name__
