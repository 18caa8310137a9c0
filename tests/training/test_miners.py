"""Distance-weighted mining, and the edges of the others: tests/training/losses has their rules."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.losses.miners import (
    all_pairs,
    batch_hard,
    distance_weighted,
    hard_pairs,
    negative_probabilities,
    semi_hard,
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


def test_a_tie_is_not_semi_hard() -> None:
    s = torch.tensor([[1.0, 0.5, 0.5], [0.5, 1.0, 0.2], [0.5, 0.2, 1.0]])
    mined, negative = semi_hard(s, torch.tensor([0, 0, 1]))
    assert mined.nonzero().tolist() == [[1, 0]]
    assert negative[1, 0] == 2


def naive_probabilities(s: np.ndarray, labels: list[int], dim: int) -> np.ndarray:
    """Inverse of the density of distances on the sphere, negative by negative."""
    result = np.zeros_like(s)
    for a in range(len(labels)):
        for n in range(len(labels)):
            distance = np.sqrt(max(2 - 2 * s[a, n], 0))
            if labels[n] != labels[a] and distance < 1.4:
                d = max(distance, 0.5)
                result[a, n] = d ** (2 - dim) * (1 - d**2 / 4) ** ((3 - dim) / 2)
        if result[a].sum() == 0:
            result[a] = [label != labels[a] for label in labels]
        result[a] /= max(result[a].sum(), 1e-300)
    return result


@pytest.mark.parametrize("dim", [2, 6, 64, 512])
def test_probabilities_are_the_inverse_density_of_distances(dim: int) -> None:
    s, labels = batch()
    expected = naive_probabilities(s.double().numpy(), labels.tolist(), dim)
    actual = negative_probabilities(s, labels, dim)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_an_anchor_whose_negatives_are_all_far_draws_among_them_evenly() -> None:
    embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    labels = torch.tensor([0, 0, 1, 1])
    probabilities = negative_probabilities(embeddings @ embeddings.T, labels, 2)
    torch.testing.assert_close(
        probabilities[0], torch.tensor([0.0, 0.0, 0.5, 0.5], dtype=torch.float64)
    )


def test_every_positive_pair_draws_one_negative_by_these_probabilities() -> None:
    s, labels = batch()
    torch.manual_seed(0)
    counts = torch.zeros(s.shape, dtype=torch.float64)
    for _ in range(400):
        mined, negatives = distance_weighted(s, labels, DIM)
        assert mined.equal(all_pairs(labels).positive)
        anchor, negative = mined.nonzero()[:, 0], negatives[mined]
        assert (labels[anchor] != labels[negative]).all()
        counts.index_put_((anchor, negative), torch.ones(len(anchor)).double(), accumulate=True)
    drawn = counts.sum(dim=1, keepdim=True)
    expected = negative_probabilities(s, labels, DIM)
    frequencies = counts / drawn.clamp(min=1)
    has_pair = drawn[:, 0] > 0
    deviation = (expected * (1 - expected) / drawn.clamp(min=1)).sqrt()
    assert ((frequencies - expected).abs() <= 5 * deviation + 1e-9)[has_pair].all()
    assert has_pair.sum() == len(labels) - 1


@pytest.mark.parametrize("labels", [[], [0], [0, 1], [1, 1]], ids=str)
def test_a_batch_without_both_kinds_has_no_triplet(labels: list[int]) -> None:
    s, given = torch.eye(len(labels)), torch.tensor(labels, dtype=torch.int64)
    for triplets in (semi_hard(s, given), batch_hard(s, given), distance_weighted(s, given, DIM)):
        assert not triplets.mined.any()
        assert ((triplets.negative >= 0) & (triplets.negative < max(len(labels), 1))).all()
    pairs = hard_pairs(s, given)
    assert not pairs.positive.any()
    assert not pairs.negative.any()


def test_miners_pass_no_gradient_on() -> None:
    s, labels = batch()
    s.requires_grad_()
    assert not negative_probabilities(s, labels, DIM).requires_grad
    for mined in (*semi_hard(s, labels), *batch_hard(s, labels), *hard_pairs(s, labels)):
        assert not mined.requires_grad
