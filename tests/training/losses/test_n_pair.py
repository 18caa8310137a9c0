import math

import pytest
import torch
from pytorch_metric_learning.distances import DotProductSimilarity
from pytorch_metric_learning.losses import NPairsLoss as Reference
from torch.nn import functional as F

from tests.training.losses.cases import batch, doubled, value
from training.losses.n_pair import NPairLoss


def test_it_is_the_formula_over_every_positive_pair() -> None:
    loss, embeddings, labels = doubled(NPairLoss(l2=0.3))
    x, y = 2 * embeddings.numpy(), labels.tolist()
    terms = []
    for a in range(len(y)):
        for p in range(len(y)):
            if a != p and y[a] == y[p]:
                others = (n for n in range(len(y)) if y[n] != y[a])
                terms.append(math.log(1 + sum(math.exp(x[a] @ x[n] - x[a] @ x[p]) for n in others)))
    norms = sum(float(row @ row) for row in x) / len(y)
    expected = sum(terms) / len(terms) + 0.3 * norms
    assert value(loss, 2 * embeddings, labels).item() == pytest.approx(expected, rel=1e-9)


def test_one_pair_per_class_is_the_formula_of_the_paper() -> None:
    loss, embeddings, labels = doubled(NPairLoss(l2=0.0, pairs="one_per_class"))
    x, y = 2 * embeddings.numpy(), labels.tolist()
    tuples = [[i for i, c in enumerate(y) if c == k][:2] for k in sorted(set(y))]
    tuples = [pair for pair in tuples if len(pair) == 2]
    total = 0.0
    for a, p in tuples:
        others = [q for _, q in tuples if q != p]
        total += math.log(1 + sum(math.exp(x[a] @ x[q] - x[a] @ x[p]) for q in others))
    expected = total / len(tuples)
    assert value(loss, 2 * embeddings, labels).item() == pytest.approx(expected, rel=1e-9)


def test_one_pair_per_class_equals_pytorch_metric_learning_without_normalization() -> None:
    # It normalises by default and has no term of squared norms.
    embeddings, labels = batch(30)
    reference = Reference(distance=DotProductSimilarity(normalize_embeddings=False))
    ours = value(NPairLoss(l2=0.0, pairs="one_per_class"), 3 * embeddings, labels)
    torch.testing.assert_close(ours, reference(3 * embeddings, labels))


def test_one_pair_per_class_ignores_the_other_samples_and_all_pairs_do_not() -> None:
    embeddings, labels = batch()
    labels = torch.tensor([0] * 7 + [1] * 7)
    changed = embeddings.clone()
    changed[6] = -changed[6]
    one = NPairLoss(pairs="one_per_class")
    assert value(one, changed, labels) == value(one, embeddings, labels)
    assert value(NPairLoss(), changed, labels) != value(NPairLoss(), embeddings, labels)


def test_normalize_takes_unit_vectors() -> None:
    embeddings, labels = batch()
    loss = NPairLoss(normalize=True)
    torch.testing.assert_close(
        value(loss, 5 * embeddings, labels), value(loss, F.normalize(embeddings, dim=1), labels)
    )
