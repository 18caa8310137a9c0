"""The smallest vocabulary of the project: what rooms hand to each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]
"""Preprocessed images, shape (N, 3, S, S), RGB, 0..255."""

Embeddings = NDArray[np.float32]
"""Embeddings, shape (N, D), each row of unit norm."""

Maps = NDArray[np.float32]
"""What each position of an image adds to its embedding, shape (N, D, h, w): they sum to it."""

ItemId = int
"""Number of an item inside one gallery; never given to another item or content."""

AttributeValue = str | int | float | bool
"""What an attribute of an item can be."""


AttributeKind = Literal["text", "number", "boolean"]
"""What the values of an attribute are; whole and decimal numbers are of one kind."""

SHORT = 12
"""Hex digits of an id that are shown and used as names."""


@dataclass(slots=True)  # frozen, making the ten of a search would take a tenth of its own time
class Hit:
    """One answer of a search: an item and its cosine similarity to the query, in [-1, 1]."""

    id: ItemId
    key: str
    score: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
