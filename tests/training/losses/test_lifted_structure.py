import math

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import GeneralizedLiftedStructureLoss as Reference

from tests.training.losses.cases import batch, doubled, value
from training.losses.lifted_structure import LiftedStructureLoss


@pytest.mark.parametrize("mining", ["all", "hard"])
def test_it_is_the_formula_of_the_benchmark(mining: str) -> None:
    loss, embeddings, labels = doubled(LiftedStructureLoss(margin=0.3, mining=mining))
    x, y = embeddings.numpy(), labels.tolist()
    total = 0.0
    for i in range(len(y)):
        positive = [float(x[i] @ x[k]) for k in range(len(y)) if k != i and y[k] == y[i]]
        negative = [float(x[i] @ x[k]) for k in range(len(y)) if y[k] != y[i]]
        if mining == "hard" and positive and negative:
            easiest, hardest = max(negative) + 0.1, min(positive) - 0.1
            positive = [s for s in positive if s < easiest]
            negative = [s for s in negative if s > hardest]
        if not positive or not negative:
            continue
        pull = math.log(sum(math.exp(0.3 - s) for s in positive))
        push = math.log(sum(math.exp(s) for s in negative))
        total += max(pull + push, 0.0)
    assert value(loss, embeddings, labels).item() == pytest.approx(total / len(y), rel=1e-9)


def test_on_all_pairs_it_equals_pytorch_metric_learnings_generalized_form() -> None:
    # Given that every anchor has both kinds: without positives, the reference takes their
    # logarithm for 0 instead of -inf. Its LiftedStructureLoss is another, per positive pair.
    embeddings, labels = batch(30)
    labels[0] = labels[1]
    reference = Reference(pos_margin=0.5, neg_margin=0, distance=CosineSimilarity())
    ours = value(LiftedStructureLoss(mining="all"), embeddings, labels)
    torch.testing.assert_close(ours, reference(embeddings, labels))
