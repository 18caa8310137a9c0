"""What every measure asks of its arrays: a label per embedding, finite numbers, blocks of rows."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from embedder.errors import DatasetError, EvaluationError

Vectors = NDArray[np.float32]
Labels = NDArray[np.int64]

_CHECK_ROWS = 8192


def check(embeddings: Vectors, labels: Labels) -> None:
    """Refuse what cannot be measured.

    Raises: ValueError if the shapes do not fit; EvaluationError if an embedding is not finite.
    """
    if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1]:
        raise ValueError(
            f"Embeddings are {embeddings.shape} and labels {labels.shape}; expected (N, D), (N,)."
        )
    broken = sum(
        int((~np.isfinite(embeddings[start : start + _CHECK_ROWS])).any(axis=1).sum())
        for start in range(0, len(embeddings), _CHECK_ROWS)
    )
    if broken:
        raise EvaluationError(
            f"{broken:,} of {len(embeddings):,} embeddings are not finite numbers. "
            "Train again with lower learning rates."
        )


def check_pairs(labels: Labels) -> None:
    """Refuse labels without a pair inside a class or without a pair across classes.

    Raises: DatasetError.
    """
    sizes = np.unique(labels, return_counts=True)[1]
    if len(sizes) < 2 or sizes.max() < 2:
        raise DatasetError(
            f"{len(labels):,} images of {len(sizes):,} classes, at most {sizes.max(initial=0):,} "
            "of one class: a structure needs at least 2 classes, one of them with 2 images. "
            "Give more test images."
        )


def unit_blocks(embeddings: Vectors, rows: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """The embeddings in blocks of `rows`, each row divided by its norm in float64: (r, D)."""
    for start in range(0, len(embeddings), rows):
        yield unit_block(embeddings, start, rows, dtype)


def unit_block(embeddings: Vectors, start: int, rows: int, dtype: torch.dtype) -> Tensor:
    """One of `unit_blocks`: (r, D)."""
    block = torch.from_numpy(embeddings[start : start + rows].astype(np.float64))
    return F.normalize(block, dim=1).to(dtype)
