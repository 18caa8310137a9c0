"""The smallest vocabulary of the project: what rooms hand to each other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kinlens.values import AttributeValue

Images = NDArray[np.uint8]
"""Preprocessed images, shape (N, 3, S, S), RGB, 0..255."""

Embeddings = NDArray[np.float32]
"""Embeddings, shape (N, D), each row of unit norm."""

Embed = Callable[[Images], Embeddings]
"""Images (N, 3, S, S) to embeddings (N, D)."""

Maps = NDArray[np.float32]
"""What each position of an image adds to its embedding, shape (N, D, h, w): they sum to it."""

ItemId = int
"""Id of an item inside one gallery; never reused for another item or content."""

SHORT = 12
"""Hex digits of an id that are shown and used as names."""


@dataclass(slots=True)  # frozen, making the ten of a search would take a tenth of its own time
class Hit:
    """One answer of a search: an item and its cosine similarity to the query, in [-1, 1]."""

    id: ItemId
    key: str
    score: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
