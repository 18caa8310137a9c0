"""What a gallery asks of a vector index."""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from embedder.types import Embeddings

Ids = NDArray[np.int64]
"""Item numbers, shape (N,) or (Q, k)."""

Scores = NDArray[np.float32]
"""Cosine similarities in [-1, 1], shape (Q, k)."""


class VectorStore(Protocol):
    """Unit vectors under item numbers. Searches may run at once; `add` runs alone."""

    @property
    def dim(self) -> int: ...
    @property
    def size(self) -> int: ...

    def add(self, ids: Ids, vectors: Embeddings) -> None:
        """Add vectors (N, D) under `ids` (N,). Raises: InvalidParameterError."""

    def search(self, queries: Embeddings, k: int) -> tuple[Scores, Ids]:
        """The `min(k, size)` best of each query (Q, D): best first, equal scores by id.

        Raises: InvalidParameterError for k < 1 or queries of another dimension.
        """

    def vectors(self, ids: Ids) -> Embeddings:
        """The stored vectors (N, D) of known `ids` (N,)."""

    def save(self, path: Path) -> None:
        """Write everything to the new file `path`. Raises: OSError."""
