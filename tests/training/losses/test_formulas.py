"""Each loss against its formula, term by term in float64, and against pytorch-metric-learning."""

import math
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from kinlens.training.losses.base import MetricLoss
from kinlens.training.losses.miners import all_pairs, distance_weighted, negative_probabilities
from kinlens.training.losses.proxy_anchor import BatchProxySeparationLoss
from tests.training.losses.cases import CLASSES, DIM, batch, make, value

Array = NDArray[np.float64]
Anchor = tuple[int, list[float], list[float]]


def anchors(x: Array, y: list[int]) -> list[Anchor]:
    """The class of each anchor, its inner products with its positives and with its negatives."""
    found = []
    for i in range(len(y)):
        others = [(float(x[i] @ x[j]), y[j] == y[i]) for j in range(len(y)) if j != i]
        positive, negative = ([s for s, same in others if same == want] for want in (True, False))
        found.append((y[i], positive, negative))
    return found


def mined(loss: MetricLoss, x: Array, y: list[int]) -> list[tuple[list[float], list[float]]]:
    """The cosines of positives and negatives that a loss of pairs looks at, by anchor."""
    found = []
    for _, positive, negative in anchors(x, y):
        if loss.mining == "hard":
            easiest = max(negative, default=-2) + loss.epsilon
            hardest = min(positive, default=2) - loss.epsilon
            positive = [s for s in positive if s < easiest]
            negative = [s for s in negative if s > hardest]
        found.append((positive, negative))
    return found


def contrastive(loss: MetricLoss, x: Array, y: list[int]) -> float:
    pairs = mined(loss, x, y)
    return sum(-sum(p) + sum(max(s - 0.5, 0) for s in n) for p, n in pairs) / len(y)


def triplet(loss: MetricLoss, x: Array, y: list[int]) -> float:
    terms = []
    for _, positive, negative in anchors(x, y):
        for ap in positive:
            below = sorted(an for an in negative if an < ap)[-1:]
            found = negative if loss.mining == "all" else below
            terms += [max(an - ap + loss.margin, 0.0) for an in found]
    return sum(terms) / len(terms)


def binomial_deviance(_: MetricLoss, x: Array, y: list[int]) -> float:
    total = 0.0
    for _, positive, negative in anchors(x, y):
        total += sum(math.log(1 + math.exp(-2 * (s - 0.5))) for s in positive)
        total += sum(math.log(1 + math.exp(2 * (s - 0.5) * 25)) for s in negative)
    return total / len(y)


def n_pair(_: MetricLoss, x: Array, y: list[int]) -> float:
    terms = [
        math.log(1 + sum(math.exp(an - ap) for an in negative))
        for _, positive, negative in anchors(x, y)
        for ap in positive
    ]
    return sum(terms) / len(terms) + 0.3 * float((x**2).sum()) / len(y)


def units(loss: MetricLoss) -> Array:
    return F.normalize(loss.proxies.detach(), dim=1).numpy()


def separation(loss: MetricLoss, x: Array, y: list[int]) -> float:
    w, labels = units(loss), np.array(y)
    similar = x @ w.T  # (B, C)
    pull = [np.exp(-32 * (similar[labels == c, c] - 0.1)).sum() for c in range(CLASSES)]
    alike = w @ w.T
    if isinstance(loss, BatchProxySeparationLoss):
        alike = similar.T @ similar
    push = (np.exp(32 * (alike + 0.1)) * (1 - np.eye(CLASSES))).sum(axis=1)
    return np.log1p(pull).sum() / len(set(y)) + np.log1p(push).mean()


def proxy_nca(loss: MetricLoss, x: Array, y: list[int]) -> float:
    total = 0.0
    for row, c in zip(x, y, strict=True):
        similar = [math.exp(-loss.scale * float(((row - p) ** 2).sum())) for p in units(loss)]
        total += -math.log(similar[c] / (sum(similar) - similar[c]))
    return total / len(y)


@pytest.mark.parametrize(
    ("formula", "name", "options"),
    [
        (contrastive, "contrastive", {}),
        (contrastive, "contrastive hard", {}),
        (triplet, "triplet", {"margin": 0.7}),
        (triplet, "triplet all", {"margin": 2.5}),
        (binomial_deviance, "binomial_deviance", {}),
        (n_pair, "n_pair", {"l2": 0.3}),
        (separation, "loss1", {}),
        (separation, "loss2", {}),
        (proxy_nca, "proxy_nca", {}),
        (proxy_nca, "proxy_nca", {"scale": 9.0}),
    ],
)
def test_a_loss_is_the_formula_of_its_paper(
    formula: Callable[..., float], name: str, options: dict[str, object]
) -> None:
    loss, (embeddings, labels) = make(name, **options).double(), batch()
    embeddings = embeddings.double()
    if formula is n_pair:
        embeddings = 2 * embeddings  # of any length
    expected = formula(loss, embeddings.numpy(), labels.tolist())
    assert value(loss, embeddings, labels).item() == pytest.approx(expected, rel=1e-7)


def peer(part: str) -> ModuleType:
    """A module of pytorch-metric-learning, whose import takes seconds: not for each process."""
    return import_module(f"pytorch_metric_learning.{part}")


def with_proxies(theirs: torch.nn.Module, ours: MetricLoss) -> torch.nn.Module:
    """Their loss with our proxies, by whatever name and way round it holds them."""
    (parameter,) = theirs.parameters()
    proxies = ours.proxies.data
    parameter.data = (proxies if parameter.shape == proxies.shape else proxies.T).clone()
    return theirs


def test_losses_of_triplets_equal_those_of_pytorch_metric_learning() -> None:
    """Its defaults are unsquared distances and a mean over the terms above 0."""
    x, y = batch(30)
    reference, cosine = peer("losses"), peer("distances").CosineSimilarity()
    triplets = reference.TripletMarginLoss(
        0.1, distance=cosine, reducer=peer("reducers").MeanReducer()
    )
    mined = peer("miners").BatchHardMiner(distance=cosine)(x, y)
    torch.testing.assert_close(value(make("triplet all"), x, y), triplets(x, y))
    torch.testing.assert_close(value(make("triplet hard"), x, y), triplets(x, y, mined))
    torch.manual_seed(3)
    drawn, negative = distance_weighted(x @ x.T, y, DIM)
    anchor, positive = drawn.nonzero(as_tuple=True)
    mined = anchor, positive, negative[drawn]
    torch.testing.assert_close(
        value(make("triplet distance_weighted"), x, y), triplets(x, y, mined)
    )
    margin = reference.MarginLoss(margin=0.5, beta=1.2, learn_beta=True)
    expected = margin(x, y, mined).detach()
    torch.testing.assert_close(value(make("margin"), x, y), expected)


def test_losses_of_pairs_equal_those_of_pytorch_metric_learning() -> None:
    x, y = batch(30)
    y[0] = y[1]  # without positives, it takes the logarithm of their sum for 0 instead of -inf
    reference, cosine = peer("losses"), peer("distances").CosineSimilarity()
    lifted = reference.GeneralizedLiftedStructureLoss(0, 0.5, distance=cosine)
    torch.testing.assert_close(value(make("lifted_structure all"), x, y), lifted(x, y))
    similar = reference.MultiSimilarityLoss(alpha=2, beta=50, base=0.5)
    torch.testing.assert_close(value(make("multi_similarity all"), x, y), similar(x, y))
    mined = peer("miners").MultiSimilarityMiner(epsilon=0.1)(x, y)
    torch.testing.assert_close(value(make("multi_similarity"), x, y), similar(x, y, mined))


def test_losses_with_proxies_equal_those_of_pytorch_metric_learning() -> None:
    x, y = batch()
    reference, sizes = peer("losses"), (CLASSES, DIM)
    # Without it no term that joins centres.
    regularizer = peer("regularizers").SparseCentersRegularizer(CLASSES, 3)
    softly = {"la": 20, "gamma": 0.1, "margin": 0.1, "weight_regularizer": regularizer}
    softly |= {"centers_per_class": 3, "weight_reg_weight": 0.2}
    for ours, theirs in (
        (make("proxy_anchor"), reference.ProxyAnchorLoss(*sizes, margin=0.1, alpha=32)),
        (make("arcface"), reference.ArcFaceLoss(*sizes, margin=28.6, scale=64)),
        (
            make("arcface", margin_degrees=80.0, scale=4.0),  # some angles end beyond 180 degrees
            reference.ArcFaceLoss(*sizes, margin=80.0, scale=4.0),
        ),
        (make("soft_triple"), reference.SoftTripleLoss(*sizes, **softly)),  # its 1e-5 is smaller
    ):
        expected = with_proxies(theirs, ours)(x, y).detach()
        torch.testing.assert_close(value(ours, x, y), expected, rtol=1e-5, atol=1e-5)


def test_a_sample_whose_probability_underflows_still_counts() -> None:
    # Two samples on a wrong proxy at scale 64: the probability e^-256 is 0 in float32.
    loss = make("proxy_nca", classes=2, scale=64.0)
    rows = torch.eye(DIM)[[0, 0]] * torch.tensor([[1.0], [-1.0]])
    with torch.no_grad():
        loss.proxies.copy_(rows)
    embeddings = (-rows).requires_grad_()
    result = loss(embeddings, torch.tensor([0, 1]))
    assert result.item() == pytest.approx(256.0)
    result.backward()
    assert (embeddings.grad.norm(dim=1) > 0).all()


def test_large_exponents_and_large_batches_do_not_overflow() -> None:
    anchor = make("proxy_anchor", alpha=1000.0)
    opposite = F.normalize(-anchor.proxies.detach(), dim=1)
    assert torch.isfinite(value(anchor, opposite, torch.arange(CLASSES)))
    assert torch.isfinite(value(make("loss2"), *batch(1000)))
    assert torch.isfinite(value(make("binomial_deviance", negative_cost=1e4), *batch()))


def test_margins_beta_grows_if_positives_lie_outside() -> None:
    embeddings, labels = torch.eye(DIM)[:2].repeat(2, 1), torch.tensor([0, 0, 0, 0])
    loss = make("margin all", beta=0.7, margin=0.1)
    loss(embeddings, labels).backward()
    assert loss.beta.grad < 0


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
    x, labels = batch(20)
    s = x @ x.T
    expected = naive_probabilities(s.double().numpy(), labels.numpy(), dim)
    actual = negative_probabilities(s, labels, dim)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_every_positive_pair_draws_one_negative_by_these_probabilities() -> None:
    x, labels = batch(20)
    s = x @ x.T
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
