"""Distance-weighted mining, and the edges of the others: tests/training/losses has their rules."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.losses.miners import (
    all_pairs,
    distance_weighted,
    negative_probabilities,
)

DIM = 6


def batch() -> tuple[Tensor, Tensor]:
    """Cosines (B, B) of 20 samples of 4 classes, the last with a single one, and their labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (20,), generator=generator)
    labels[7] = 3
    noise = torch.randn(20, DIM, generator=generator)
    vectors = F.normalize(torch.eye(DIM)[labels] + noise, dim=1)
    return vectors @ vectors.T, labels


def naive_probabilities(s: np.ndarray, labels: np.ndarray, dim: int) -> np.ndarray:
    """Inverse of the density of distances on the sphere; evenly where all negatives are far."""
    negative = labels[:, None] != labels
    distances = np.sqrt(np.maximum(2 - 2 * s, 0))
    d = distances.clip(0.5, 1.4)
    inverse = d ** (2.0 - dim) * (1 - d**2 / 4) ** ((3.0 - dim) / 2)
    result = np.where(negative & (distances < 1.4), inverse, 0)
    lone = result.sum(axis=1) == 0
    result[lone] = negative[lone]
    return result / np.maximum(result.sum(axis=1, keepdims=True), 1e-300)


@pytest.mark.parametrize("dim", [2, 6, 512])
def test_probabilities_are_the_inverse_density_of_distances(dim: int) -> None:
    s, labels = batch()
    expected = naive_probabilities(s.double().numpy(), labels.numpy(), dim)
    actual = negative_probabilities(s, labels, dim)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_every_positive_pair_draws_one_negative_by_these_probabilities() -> None:
    s, labels = batch()
    torch.manual_seed(0)
    counts = torch.zeros(s.shape, dtype=torch.float64)
    for _ in range(400):
        mined, negatives = distance_weighted(s, labels, DIM)
        assert mined.equal(all_pairs(labels).positive)
        pairs = mined.nonzero()[:, 0], negatives[mined]
        counts.index_put_(pairs, torch.ones(len(pairs[0])).double(), accumulate=True)
    drawn = counts.sum(dim=1, keepdim=True)
    assert (drawn > 0).sum() == len(labels) - 1
    expected = negative_probabilities(s, labels, DIM)
    deviation = (expected * (1 - expected) / drawn.clamp(min=1)).sqrt()
    missed = (counts / drawn.clamp(min=1) - expected).abs() > 5 * deviation + 1e-9
    assert not missed[drawn[:, 0] > 0].any()
