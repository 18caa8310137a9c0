"""Each miner against a search sample by sample."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.miners import (
    Triplets,
    all_pairs,
    batch_hard,
    distance_weighted,
    hard_pairs,
    negative_probabilities,
    semi_hard,
)

DIM = 6


def samples(count: int = 20, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Unit vectors (B, 6) and labels of 4 classes, the last with a single sample."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (count,), generator=generator)
    labels[7] = 3
    noise = spread * torch.randn(count, DIM, generator=generator)
    return F.normalize(torch.eye(DIM)[labels] + noise, dim=1), labels


def batch(spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Similarities (B, B) of these samples, and their labels."""
    vectors, labels = samples(spread=spread)
    return vectors @ vectors.T, labels


def rows(triplets: Triplets) -> set[tuple[int, ...]]:
    """(anchor, positive, negative) of each triplet."""
    return {(a, p, int(triplets.negative[a, p])) for a, p in triplets.mined.nonzero().tolist()}


def test_pairs_are_split_by_class_and_leave_out_the_diagonal() -> None:
    _, labels = batch()
    pairs = all_pairs(labels)
    for i, a in enumerate(labels.tolist()):
        for j, b in enumerate(labels.tolist()):
            assert pairs.positive[i, j] == (a == b and i != j)
            assert pairs.negative[i, j] == (a != b)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_semi_hard_is_the_most_similar_negative_below_the_positive(spread: float) -> None:
    s, labels = batch(spread=spread)
    expected = set()
    for a in range(len(labels)):
        for p in range(len(labels)):
            if a == p or labels[a] != labels[p]:
                continue
            below = [
                (s[a, n].item(), n)
                for n in range(len(labels))
                if labels[n] != labels[a] and s[a, n] < s[a, p]
            ]
            if below:
                expected.add((a, p, max(below)[1]))
    assert rows(semi_hard(s, labels)) == expected


def test_a_tie_is_not_semi_hard() -> None:
    s = torch.tensor([[1.0, 0.5, 0.5], [0.5, 1.0, 0.2], [0.5, 0.2, 1.0]])
    assert rows(semi_hard(s, torch.tensor([0, 0, 1]))) == {(1, 0, 2)}


def test_hard_is_the_farthest_positive_and_the_nearest_negative() -> None:
    s, labels = batch()
    expected = set()
    for a in range(len(labels)):
        positive = [p for p in range(len(labels)) if p != a and labels[p] == labels[a]]
        negative = [n for n in range(len(labels)) if labels[n] != labels[a]]
        if positive:
            farthest = min(positive, key=lambda p: s[a, p].item())
            expected.add((a, farthest, max(negative, key=lambda n: s[a, n].item())))
    assert rows(batch_hard(s, labels)) == expected


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.6])
def test_multi_similarity_compares_with_the_hardest_opposite_pair(epsilon: float) -> None:
    s, labels = batch(spread=0.6)
    pairs = hard_pairs(s, labels, epsilon)
    for i in range(len(labels)):
        positive = [j for j in range(len(labels)) if j != i and labels[j] == labels[i]]
        negative = [j for j in range(len(labels)) if labels[j] != labels[i]]
        for j in range(len(labels)):
            hard_positive = j in positive and s[i, j] < max(s[i, n] for n in negative) + epsilon
            hard_negative = (
                j in negative
                and len(positive) > 0
                and s[i, j] > min(s[i, p] for p in positive) - epsilon
            )
            assert pairs.positive[i, j] == hard_positive
            assert pairs.negative[i, j] == hard_negative


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
