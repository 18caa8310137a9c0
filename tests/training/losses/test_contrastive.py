import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import ContrastiveLoss as Reference
from pytorch_metric_learning.reducers import SumReducer

from tests.training.losses.cases import batch, doubled, value
from training.losses.contrastive import ContrastiveLoss


def test_it_is_the_formula_of_the_benchmark() -> None:
    loss, embeddings, labels = doubled(ContrastiveLoss(margin=0.2))
    x, y = embeddings.numpy(), labels.tolist()
    total = 0.0
    for i in range(len(y)):
        for j in range(len(y)):
            if i == j:
                continue
            s = float(x[i] @ x[j])
            total += -s if y[i] == y[j] else max(s - 0.2, 0.0)
    assert value(loss, embeddings, labels).item() == pytest.approx(total / len(y), rel=1e-9)


def test_on_cosines_and_summed_pytorch_metric_learning_differs_by_a_constant() -> None:
    # Its positive term is [1 - s]+: 1 more for each positive pair, and it does not divide by B.
    embeddings, labels = batch()
    reference = Reference(
        pos_margin=1, neg_margin=0.5, distance=CosineSimilarity(), reducer=SumReducer()
    )
    same = labels[:, None] == labels[None, :]
    constant = same.sum() - len(labels)
    ours = value(ContrastiveLoss(), embeddings, labels)
    torch.testing.assert_close(ours * len(labels) + constant, reference(embeddings, labels))


def test_hard_mining_leaves_out_easy_pairs() -> None:
    # Two tight classes far apart: every pair is easy, and nothing is left to learn.
    embeddings = torch.eye(2)[[0, 0, 1, 1]]
    labels = torch.tensor([0, 0, 1, 1])
    assert value(ContrastiveLoss(), embeddings, labels) == -1
    assert value(ContrastiveLoss(mining="hard"), embeddings, labels) == 0
