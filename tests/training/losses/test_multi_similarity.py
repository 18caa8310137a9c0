import math

import pytest
import torch
from pytorch_metric_learning.losses import MultiSimilarityLoss as Reference
from pytorch_metric_learning.miners import MultiSimilarityMiner

from tests.training.losses.cases import batch, doubled, value
from training.losses.multi_similarity import MultiSimilarityLoss


@pytest.mark.parametrize("mining", ["all", "hard"])
def test_it_is_the_formula_of_the_paper(mining: str) -> None:
    loss, embeddings, labels = doubled(MultiSimilarityLoss(mining=mining))
    x, y = embeddings.numpy(), labels.tolist()
    total = 0.0
    for i in range(len(y)):
        positive = [float(x[i] @ x[k]) for k in range(len(y)) if k != i and y[k] == y[i]]
        negative = [float(x[i] @ x[k]) for k in range(len(y)) if y[k] != y[i]]
        if mining == "hard":
            if not positive or not negative:
                continue
            easiest, hardest = max(negative) + 0.1, min(positive) - 0.1
            positive = [s for s in positive if s < easiest]
            negative = [s for s in negative if s > hardest]
        total += math.log(1 + sum(math.exp(-2 * (s - 0.5)) for s in positive)) / 2
        total += math.log(1 + sum(math.exp(50 * (s - 0.5)) for s in negative)) / 50
    assert value(loss, embeddings, labels).item() == pytest.approx(total / len(y), rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5])
def test_with_its_miner_it_equals_pytorch_metric_learning(epsilon: float) -> None:
    embeddings, labels = batch(30)
    reference = Reference(alpha=2, beta=50, base=0.5)
    mined = MultiSimilarityMiner(epsilon=epsilon)(embeddings, labels)
    ours = value(MultiSimilarityLoss(epsilon=epsilon), embeddings, labels)
    torch.testing.assert_close(ours, reference(embeddings, labels, mined))


def test_without_a_miner_it_equals_pytorch_metric_learning() -> None:
    embeddings, labels = batch(30)
    ours = value(MultiSimilarityLoss(mining="all"), embeddings, labels)
    torch.testing.assert_close(ours, Reference(alpha=2, beta=50, base=0.5)(embeddings, labels))
