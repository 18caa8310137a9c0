"""Losses of pairs and triplets against their formulas and pytorch-metric-learning."""

import math

import pytest
import torch
from pytorch_metric_learning import losses as reference
from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from pytorch_metric_learning.miners import BatchHardMiner, MultiSimilarityMiner
from pytorch_metric_learning.reducers import MeanReducer, SumReducer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.training.losses.cases import CLASSES, DIM, batch, value
from training.losses.binomial_deviance import BinomialDevianceLoss
from training.losses.contrastive import ContrastiveLoss
from training.losses.lifted_structure import LiftedStructureLoss
from training.losses.margin import MarginLoss
from training.losses.multi_similarity import MultiSimilarityLoss
from training.losses.n_pair import NPairLoss
from training.losses.triplet import TripletLoss
from training.miners import distance_weighted


def products(embeddings: Tensor, labels: Tensor) -> list[tuple[int, list[float], list[float]]]:
    """The class of each anchor, its inner products with its positives and with its negatives."""
    x, y = embeddings.numpy(), labels.tolist()
    found = []
    for i in range(len(y)):
        others = [(float(x[i] @ x[j]), y[j] == y[i]) for j in range(len(y)) if j != i]
        positive, negative = ([s for s, same in others if same == want] for want in (True, False))
        found.append((y[i], positive, negative))
    return found


def hard(positive: list[float], negative: list[float]) -> tuple[list[float], list[float]]:
    """What Multi-Similarity's mining leaves of an anchor's cosines, epsilon 0.1."""
    if not positive or not negative:
        return [], []
    easiest, hardest = max(negative) + 0.1, min(positive) - 0.1
    return [s for s in positive if s < easiest], [s for s in negative if s > hardest]


def is_the_formula(loss: nn.Module, expected: float, scale: float = 1, rel: float = 1e-9) -> None:
    embeddings, labels = batch()
    result = value(loss.double(), scale * embeddings.double(), labels)
    assert result.item() == pytest.approx(expected, rel=rel)


def doubled(scale: float = 1) -> list[tuple[int, list[float], list[float]]]:
    embeddings, labels = batch()
    return products(scale * embeddings.double(), labels)


def test_contrastive_is_the_formula_over_ordered_pairs() -> None:
    total = sum(
        -sum(positive) + sum(max(s - 0.2, 0) for s in negative)
        for _, positive, negative in doubled()
    )
    is_the_formula(ContrastiveLoss(margin=0.2), total / 14)


def test_contrastive_differs_from_pytorch_metric_learning_by_a_constant() -> None:
    # Its positive term is [1 - s]+: 1 more for each positive pair, and it does not divide by B.
    embeddings, labels = batch()
    theirs = reference.ContrastiveLoss(1, 0.5, distance=CosineSimilarity(), reducer=SumReducer())
    same = labels[:, None] == labels[None, :]
    ours = value(ContrastiveLoss(), embeddings, labels)
    torch.testing.assert_close(
        ours * len(labels) + same.sum() - len(labels), theirs(embeddings, labels)
    )


def test_contrastive_with_hard_mining_leaves_out_easy_pairs() -> None:
    # Two tight classes far apart: every pair is easy, and nothing is left to learn.
    embeddings, labels = torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 1])
    assert value(ContrastiveLoss(), embeddings, labels) == -1
    assert value(ContrastiveLoss(mining="hard"), embeddings, labels) == 0


@pytest.mark.parametrize("mining", ["all", "semi_hard"])
@pytest.mark.parametrize("margin", [0.0, 0.1, 0.7, 2.5])
def test_triplet_is_the_formula_of_the_paper(mining: str, margin: float) -> None:
    terms = []
    for _, positive, negative in doubled():
        for ap in positive:
            below = sorted(an for an in negative if an < ap)[-1:]
            mined = negative if mining == "all" else below
            terms += [max(an - ap + margin, 0.0) for an in mined]
    is_the_formula(TripletLoss(margin, mining), sum(terms) / len(terms))


def test_all_triplets_equal_pytorch_metric_learning_with_a_mean() -> None:
    # Its defaults differ: unsquared distances, and a mean over the terms above 0. A margin in
    # squared distances is twice a margin in cosines.
    embeddings, labels = batch(30)
    for distance, scale in ((CosineSimilarity(), 1), (LpDistance(power=2), 2)):
        theirs = reference.TripletMarginLoss(0.1, distance=distance, reducer=MeanReducer())
        ours = value(TripletLoss(margin=0.1 / scale, mining="all"), embeddings, labels)
        torch.testing.assert_close(scale * ours, theirs(embeddings, labels))


def test_hard_triplets_equal_those_of_pytorch_metric_learning() -> None:
    embeddings, labels = batch(30)
    distance = CosineSimilarity()
    theirs = reference.TripletMarginLoss(0.1, distance=distance, reducer=MeanReducer())
    mined = BatchHardMiner(distance=distance)(embeddings, labels)
    ours = value(TripletLoss(mining="hard"), embeddings, labels)
    torch.testing.assert_close(ours, theirs(embeddings, labels, mined))


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


@pytest.mark.parametrize("mining", ["all", "hard"])
def test_lifted_structure_is_the_formula_of_the_benchmark(mining: str) -> None:
    total = 0.0
    for _, positive, negative in doubled():
        if mining == "hard":
            positive, negative = hard(positive, negative)
        if positive and negative:
            pull = math.log(sum(math.exp(0.3 - s) for s in positive))
            total += max(pull + math.log(sum(math.exp(s) for s in negative)), 0.0)
    is_the_formula(LiftedStructureLoss(margin=0.3, mining=mining), total / 14)


def test_lifted_structure_on_all_pairs_is_pytorch_metric_learnings_generalized_form() -> None:
    # Given that every anchor has both kinds: without positives, the reference takes their
    # logarithm for 0 instead of -inf. Its LiftedStructureLoss is another, per positive pair.
    embeddings, labels = batch(30)
    labels[0] = labels[1]
    theirs = reference.GeneralizedLiftedStructureLoss(0, 0.5, distance=CosineSimilarity())
    ours = value(LiftedStructureLoss(mining="all"), embeddings, labels)
    torch.testing.assert_close(ours, theirs(embeddings, labels))


@pytest.mark.parametrize("mining", ["all", "hard"])
def test_multi_similarity_is_the_formula_of_the_paper(mining: str) -> None:
    total = 0.0
    for _, positive, negative in doubled():
        if mining == "hard":
            positive, negative = hard(positive, negative)
        total += math.log(1 + sum(math.exp(-2 * (s - 0.5)) for s in positive)) / 2
        total += math.log(1 + sum(math.exp(50 * (s - 0.5)) for s in negative)) / 50
    is_the_formula(MultiSimilarityLoss(mining=mining), total / 14)


def test_multi_similarity_equals_pytorch_metric_learning() -> None:
    embeddings, labels = batch(30)
    theirs = reference.MultiSimilarityLoss(alpha=2, beta=50, base=0.5)
    ours = value(MultiSimilarityLoss(mining="all"), embeddings, labels)
    torch.testing.assert_close(ours, theirs(embeddings, labels))
    for epsilon in (0.0, 0.1, 0.5):
        mined = MultiSimilarityMiner(epsilon=epsilon)(embeddings, labels)
        ours = value(MultiSimilarityLoss(epsilon=epsilon), embeddings, labels)
        torch.testing.assert_close(ours, theirs(embeddings, labels, mined))


def test_binomial_deviance_is_the_formula_of_the_paper() -> None:
    total = 0.0
    for _, positive, negative in doubled():
        total += sum(math.log(1 + math.exp(-2 * (s - 0.5))) for s in positive)
        total += sum(math.log(1 + math.exp(2 * (s - 0.5) * 25)) for s in negative)
    is_the_formula(BinomialDevianceLoss(), total / 14)


def test_binomial_deviance_costs_log_two_at_beta_and_does_not_overflow() -> None:
    embeddings = torch.tensor([[1.0, 0.0], [0.5, math.sqrt(0.75)]])
    for labels in ([0, 0], [0, 1]):
        result = value(BinomialDevianceLoss(beta=0.5), embeddings, torch.tensor(labels))
        assert result.item() == pytest.approx(math.log(2), abs=1e-5)
    assert torch.isfinite(value(BinomialDevianceLoss(negative_cost=1e4), *batch()))


def test_n_pair_is_the_formula_over_every_positive_pair() -> None:
    terms = [
        math.log(1 + sum(math.exp(an - ap) for an in negative))
        for _, positive, negative in doubled(scale=2)
        for ap in positive
    ]
    norms = 2**2  # of unit vectors times 2
    is_the_formula(NPairLoss(l2=0.3), sum(terms) / len(terms) + 0.3 * norms, scale=2, rel=1e-6)


def test_n_pair_of_one_pair_per_class_is_the_formula_of_the_paper() -> None:
    embeddings, labels = batch()
    x, y = 2 * embeddings.double().numpy(), labels.tolist()
    tuples = [[i for i, c in enumerate(y) if c == k][:2] for k in sorted(set(y))]
    tuples = [pair for pair in tuples if len(pair) == 2]
    total = 0.0
    for a, p in tuples:
        others = [q for _, q in tuples if q != p]
        total += math.log(1 + sum(math.exp(x[a] @ x[q] - x[a] @ x[p]) for q in others))
    is_the_formula(NPairLoss(l2=0.0, pairs="one_per_class"), total / len(tuples), scale=2)


def test_n_pair_of_one_pair_per_class_equals_pytorch_metric_learning() -> None:
    # It normalises by default and has no term of squared norms.
    embeddings, labels = batch(30)
    theirs = reference.NPairsLoss(distance=DotProductSimilarity(normalize_embeddings=False))
    ours = value(NPairLoss(l2=0.0, pairs="one_per_class"), 3 * embeddings, labels)
    torch.testing.assert_close(ours, theirs(3 * embeddings, labels))


def test_one_pair_per_class_ignores_the_other_samples_and_all_pairs_do_not() -> None:
    embeddings, _ = batch()
    labels = torch.tensor([0] * 7 + [1] * 7)
    changed = embeddings.clone()
    changed[6] = -changed[6]
    one = NPairLoss(pairs="one_per_class")
    assert value(one, changed, labels) == value(one, embeddings, labels)
    assert value(NPairLoss(), changed, labels) != value(NPairLoss(), embeddings, labels)


def test_n_pair_can_take_unit_vectors() -> None:
    embeddings, labels = batch()
    loss = NPairLoss(normalize=True)
    torch.testing.assert_close(
        value(loss, 5 * embeddings, labels), value(loss, F.normalize(embeddings, dim=1), labels)
    )


def test_margin_over_all_pairs_is_the_formula_of_the_paper() -> None:
    loss = MarginLoss(CLASSES, 0.2, mining="all", nu=0.3, beta_per_class=True).double()
    with torch.no_grad():
        loss.beta.add_(0.1 * torch.arange(CLASSES))
    beta, terms, betas = loss.beta.tolist(), [], []
    for y, positive, negative in doubled():
        terms += [max(0.2 + math.sqrt(2 - 2 * s) - beta[y], 0.0) for s in positive]
        terms += [max(0.2 - math.sqrt(2 - 2 * s) + beta[y], 0.0) for s in negative]
        betas += [beta[y]] * len(positive)
    active = sum(term > 0 for term in terms)
    is_the_formula(loss, sum(terms) / active + 0.3 * sum(betas) / len(betas), rel=1e-7)


def test_margin_over_the_mined_triplets_equals_pytorch_metric_learning() -> None:
    embeddings, labels = batch(30)
    torch.manual_seed(3)
    mined, negative = distance_weighted(embeddings @ embeddings.T, labels, DIM)
    anchor, positive = mined.nonzero(as_tuple=True)
    theirs = reference.MarginLoss(margin=0.5, beta=1.2, nu=0.1, learn_beta=True)
    ours = value(MarginLoss(CLASSES, nu=0.1), embeddings, labels, seed=3)
    expected = theirs(embeddings, labels, (anchor, positive, negative[mined])).detach()
    torch.testing.assert_close(ours, expected)


def test_margins_beta_grows_when_positives_lie_outside() -> None:
    embeddings, labels = torch.eye(4)[:2].repeat(2, 1), torch.tensor([0, 0, 0, 0])
    loss = MarginLoss(CLASSES, mining="all", beta=0.7, margin=0.1)
    loss(embeddings, labels).backward()
    assert loss.beta.grad.item() < 0


def test_a_fixed_beta_is_kept_in_the_state_but_not_learnt() -> None:
    loss = MarginLoss(CLASSES, beta=0.9, learn_beta=False)
    assert list(loss.parameters()) == []
    assert loss.state_dict()["beta"].item() == pytest.approx(0.9)
    assert isinstance(MarginLoss(CLASSES).beta, nn.Parameter)


def test_margins_seed_decides_which_negatives_are_drawn() -> None:
    embeddings, labels = batch(30)
    loss = MarginLoss(CLASSES)
    assert value(loss, embeddings, labels, seed=3) == value(loss, embeddings, labels, seed=3)
    assert value(loss, embeddings, labels, seed=3) != value(loss, embeddings, labels, seed=4)
