"""Types that several packages exchange."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import InvalidParameterError
from kinlens.values import AttributeValue

Images = NDArray[np.uint8]
"""Preprocessed images, shape (N, 3, S, S), RGB, 0..255."""

Embeddings = NDArray[np.float32]
"""Embeddings, shape (N, D), each row of unit norm."""

Embed = Callable[[Images], Embeddings]
"""Images (N, 3, S, S) to embeddings (N, D)."""

Maps = NDArray[np.float32]
"""Contribution of each image position to the embedding, shape (N, D, h, w). The sum over the
positions is the embedding."""

ItemId = int
"""Id of an item inside one gallery; never reused for another item or content."""

SHORT = 12
"""Number of hex digits of an id in messages and names."""


@dataclass(slots=True)  # not frozen: creating ten frozen hits would cost 10 % of the search time
class Hit:
    """One result of a search: an item and its cosine similarity to the query, in [-1, 1]."""

    id: ItemId
    key: str
    score: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    has_image: bool = True


def first_numbers(vectors: Embeddings, n: int) -> Embeddings:
    """The first `n` numbers of vectors (..., D) with unit norm: (..., n)."""
    if n == vectors.shape[-1]:
        return vectors
    cut = vectors[..., :n]
    norms = np.linalg.norm(cut, axis=-1, keepdims=True)
    unit: Embeddings = cut / np.maximum(norms, np.finfo(np.float32).tiny)
    return unit


def check_dims(n: int, dim: int) -> None:
    """Raises: InvalidParameterError unless vectors of `dim` numbers have `n` first ones."""
    if not 1 <= n <= dim:
        raise InvalidParameterError(
            f"dims = {n} is not one of 1 to {dim}, the numbers of a vector of this bundle."
        )
