"""The recall of an index, as tests measure it."""

import numpy as np

from kinlens.indexer.types import Ids


def recall_at(found: Ids, truth: Ids) -> float:
    """Share of the true neighbours (Q, k) that are among those found (Q, any width)."""
    if not truth.size:
        return 1.0
    hits = sum(len(np.intersect1d(*rows)) for rows in zip(found, truth, strict=True))
    return hits / truth.size
