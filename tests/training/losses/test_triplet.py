import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity, LpDistance
from pytorch_metric_learning.losses import TripletMarginLoss as Reference
from pytorch_metric_learning.miners import BatchHardMiner
from pytorch_metric_learning.reducers import MeanReducer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.training.losses.cases import batch, doubled, value
from training.losses.triplet import TripletLoss


def naive(x: list, y: list[int], margin: float, mining: str) -> float:
    """Triplets one by one; of each anchor and positive, all or the semi-hard negative."""
    terms = []
    for a in range(len(y)):
        for p in range(len(y)):
            if a == p or y[a] != y[p]:
                continue
            ap = float(x[a] @ x[p])
            negatives = [float(x[a] @ x[n]) for n in range(len(y)) if y[n] != y[a]]
            if mining == "semi_hard":
                negatives = sorted(an for an in negatives if an < ap)[-1:]
            terms += [max(an - ap + margin, 0.0) for an in negatives]
    return sum(terms) / len(terms)


@pytest.mark.parametrize("mining", ["all", "semi_hard"])
@pytest.mark.parametrize("margin", [0.0, 0.1, 0.7, 2.5])
def test_it_is_the_formula_of_the_paper(mining: str, margin: float) -> None:
    loss, embeddings, labels = doubled(TripletLoss(margin=margin, mining=mining))
    expected = naive(embeddings.numpy(), labels.tolist(), margin, mining)
    assert value(loss, embeddings, labels).item() == pytest.approx(expected, rel=1e-9)


def test_all_triplets_equal_pytorch_metric_learning_on_cosines_with_a_mean() -> None:
    # Its defaults differ: unsquared distances, and a mean over the terms above 0.
    embeddings, labels = batch(30)
    reference = Reference(margin=0.1, distance=CosineSimilarity(), reducer=MeanReducer())
    ours = value(TripletLoss(mining="all"), embeddings, labels)
    torch.testing.assert_close(ours, reference(embeddings, labels))


def test_a_margin_in_squared_distances_is_twice_a_margin_in_cosines() -> None:
    embeddings, labels = batch(30)
    reference = Reference(margin=0.1, distance=LpDistance(power=2), reducer=MeanReducer())
    ours = value(TripletLoss(margin=0.05, mining="all"), embeddings, labels)
    torch.testing.assert_close(2 * ours, reference(embeddings, labels))


def test_hard_triplets_equal_those_of_pytorch_metric_learning() -> None:
    embeddings, labels = batch(30)
    distance = CosineSimilarity()
    reference = Reference(margin=0.1, distance=distance, reducer=MeanReducer())
    mined = BatchHardMiner(distance=distance)(embeddings, labels)
    ours = value(TripletLoss(mining="hard"), embeddings, labels)
    torch.testing.assert_close(ours, reference(embeddings, labels, mined))


class LargestTensor(TorchDispatchMode):
    """Remembers how many numbers the largest result of any operation had."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return result


def test_all_triplets_need_no_cube_of_the_batch() -> None:
    embeddings, labels = batch(60)
    embeddings.requires_grad_()
    with LargestTensor() as largest:
        TripletLoss(mining="all")(embeddings, labels).backward()
    assert 60 * 59 <= largest.numbers <= 2 * 60**2
