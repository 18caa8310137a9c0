"""Losses with proxies against their formulas and pytorch-metric-learning, and their centres."""

import itertools
import math

import pytest
import torch
from pytorch_metric_learning import losses as reference
from pytorch_metric_learning.regularizers import SparseCentersRegularizer
from torch.nn import functional as F

from embedder.errors import TrainingError
from tests.training.losses.cases import CLASSES, DIM, PROXY_LOSSES, batch, make, value
from training.losses import proxy_separation
from training.losses.arcface import ArcFaceLoss
from training.losses.proxies import ProxyLoss
from training.losses.proxy_anchor import ProxyAnchorLoss
from training.losses.proxy_nca import ProxyNCALoss
from training.losses.proxy_separation import push_apart
from training.losses.soft_triple import SoftTripleLoss


def proxy_loss(name: str) -> ProxyLoss:
    loss = make(name)
    assert isinstance(loss, ProxyLoss)
    return loss


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_centres_are_unit_rows_with_a_label_each(name: str) -> None:
    loss = proxy_loss(name)
    centres, labels = loss.centres(), loss.centre_labels()
    torch.testing.assert_close(centres.norm(dim=1), torch.ones(len(centres)))
    assert labels.shape == (len(centres),)
    assert labels.unique().tolist() == list(range(CLASSES))


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_the_centre_of_a_sample_is_the_nearest_of_its_class(name: str) -> None:
    loss, (embeddings, labels) = proxy_loss(name), batch()
    chosen = loss.centre_of(embeddings, labels)
    for x, y, centre in zip(embeddings, labels, chosen, strict=True):
        own = loss.centres()[loss.centre_labels() == y]
        torch.testing.assert_close(centre, own[(own @ x).argmax()])


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_gradients_flow_through_centres(name: str) -> None:
    loss, (embeddings, labels) = proxy_loss(name), batch()
    towards = torch.randn(DIM, generator=torch.Generator().manual_seed(2))
    (loss.centres() @ towards).sum().backward()
    assert (loss.proxies.grad.norm(dim=1) > 0).all()
    loss.proxies.grad = None
    (loss.centre_of(embeddings, labels) @ towards).sum().backward()
    touched = loss.centre_labels()[loss.proxies.grad.norm(dim=1) > 0]
    assert touched.unique().tolist() == labels.unique().tolist()


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_the_centre_of_no_class_is_refused(name: str) -> None:
    with pytest.raises(TrainingError, match=r"not in 0\.\.4"):
        proxy_loss(name).centre_of(torch.zeros(1, DIM), torch.tensor([CLASSES]))


@pytest.mark.parametrize("name", PROXY_LOSSES)
def test_centres_are_float32_under_autocast(name: str) -> None:
    loss, (embeddings, labels) = proxy_loss(name), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss.centres().dtype == torch.float32
        assert loss.centre_of(embeddings.bfloat16(), labels).dtype == torch.float32


def test_soft_triple_keeps_the_centres_of_a_class_together() -> None:
    assert SoftTripleLoss(2, 4, 3).centre_labels().tolist() == [0, 0, 0, 1, 1, 1]


def doubled(loss: ProxyLoss) -> tuple[ProxyLoss, torch.Tensor, torch.Tensor]:
    """The loss, embeddings and labels in float64, for a comparison to many digits."""
    embeddings, labels = batch()
    return loss.double(), embeddings.double(), labels


def anchor(alpha: float = 32.0) -> ProxyAnchorLoss:
    torch.manual_seed(1)
    return ProxyAnchorLoss(CLASSES, DIM, alpha)


def test_proxy_anchor_is_the_formula_of_the_paper() -> None:
    loss, embeddings, labels = doubled(anchor())
    proxies = F.normalize(loss.proxies.detach(), dim=1).numpy()
    pull = push = 0.0
    for c, proxy in enumerate(proxies):
        pairs = list(zip((embeddings.numpy() @ proxy).tolist(), labels.tolist(), strict=True))
        pull += math.log(1 + sum(math.exp(-32 * (s - 0.1)) for s, y in pairs if y == c))
        push += math.log(1 + sum(math.exp(32 * (s + 0.1)) for s, y in pairs if y != c))
    expected = pull / len(set(labels.tolist())) + push / CLASSES
    assert value(loss, embeddings, labels).item() == pytest.approx(expected, rel=1e-9)


def test_proxy_anchor_equals_pytorch_metric_learning() -> None:
    loss, (embeddings, labels) = anchor(), batch()
    theirs = reference.ProxyAnchorLoss(CLASSES, DIM, margin=0.1, alpha=32)
    theirs.proxies.data = loss.proxies.data.clone()
    torch.testing.assert_close(loss(embeddings, labels), theirs(embeddings, labels))


def test_the_gradient_of_proxy_anchor_reaches_every_sample() -> None:
    loss, (embeddings, labels) = anchor(), batch()
    embeddings.requires_grad_()
    loss(embeddings, labels).backward()
    assert (embeddings.grad.norm(dim=1) > 0).all()


def test_large_exponents_of_proxy_anchor_do_not_overflow() -> None:
    loss = anchor(alpha=1000.0)
    embeddings = F.normalize(-loss.proxies.detach(), dim=1)
    assert torch.isfinite(loss(embeddings, torch.arange(CLASSES)))


def nca(scale: float = 1.0) -> ProxyNCALoss:
    torch.manual_seed(1)
    return ProxyNCALoss(CLASSES, DIM, scale)


@pytest.mark.parametrize("scale", [0.5, 1.0, 9.0])
def test_proxy_nca_is_the_formula_of_the_paper_without_the_own_proxy_below(scale: float) -> None:
    loss, embeddings, labels = doubled(nca(scale))
    proxies = F.normalize(loss.proxies.detach(), dim=1).numpy()
    total = 0.0
    for x, y in zip(embeddings.numpy(), labels.tolist(), strict=True):
        similar = [math.exp(-scale * float(((x - p) ** 2).sum())) for p in proxies]
        total += -math.log(similar[y] / (sum(similar) - similar[y]))
    assert value(loss, embeddings, labels).item() == pytest.approx(total / len(labels), rel=1e-9)


def test_pytorch_metric_learning_has_the_own_proxy_below_which_is_softplus_of_ours() -> None:
    loss, embeddings, labels = doubled(nca())
    theirs = reference.ProxyNCALoss(CLASSES, DIM)
    theirs.proxies.data = loss.proxies.data.clone()
    for i in range(len(labels)):
        row, label = embeddings[i : i + 1], labels[i : i + 1]
        torch.testing.assert_close(F.softplus(value(loss, row, label)), theirs(row, label).detach())


def test_a_sample_whose_probability_underflows_still_counts() -> None:
    # Two samples on a wrong proxy at scale 64: the probability e^-256 is 0 in float32.
    loss = ProxyNCALoss(2, 4, scale=64.0)
    with torch.no_grad():
        loss.proxies.copy_(torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]]))
    embeddings = torch.tensor([[-1.0, 0, 0, 0], [1.0, 0, 0, 0]]).requires_grad_()
    result = loss(embeddings, torch.tensor([0, 1]))
    assert result.item() == pytest.approx(256.0)
    result.backward()
    assert (embeddings.grad.norm(dim=1) > 0).all()


def arcface(margin_degrees: float = 28.6, scale: float = 64.0) -> ArcFaceLoss:
    torch.manual_seed(1)
    return ArcFaceLoss(CLASSES, DIM, margin_degrees, scale)


@pytest.mark.parametrize(("degrees", "scale"), [(28.6, 64.0), (80.0, 4.0), (0.0, 10.0)])
def test_arcface_is_the_formula_of_the_paper(degrees: float, scale: float) -> None:
    loss, embeddings, labels = doubled(arcface(degrees, scale))
    weights = F.normalize(loss.proxies.detach(), dim=1).numpy()
    margin, beyond, total = math.radians(degrees), 0, 0.0
    for x, y in zip(embeddings.numpy(), labels.tolist(), strict=True):
        logits = [scale * float(x @ w) for w in weights]
        theta = math.acos(float(x @ weights[y]))
        logits[y] = scale * math.cos(theta + margin)
        if theta > math.pi - margin:
            logits[y] = scale * (math.cos(theta) - margin * math.sin(margin))
            beyond += 1
        total += math.log(sum(math.exp(z - logits[y]) for z in logits))
    assert value(loss, embeddings, labels).item() == pytest.approx(total / len(labels), rel=1e-9)
    assert beyond > 0 or degrees < 80.0


@pytest.mark.parametrize("degrees", [28.6, 80.0])
def test_arcface_equals_pytorch_metric_learning(degrees: float) -> None:
    loss, (embeddings, labels) = arcface(degrees), batch()
    theirs = reference.ArcFaceLoss(CLASSES, DIM, margin=degrees, scale=64)
    theirs.W.data = loss.proxies.data.T.clone()
    ours = value(loss, embeddings, labels)
    torch.testing.assert_close(ours, theirs(embeddings, labels).detach())


def test_arcface_rises_with_the_angle_up_to_the_opposite_direction() -> None:
    loss = ArcFaceLoss(2, 3)
    with torch.no_grad():
        loss.proxies.copy_(torch.tensor([[1.0, 0, 0], [0, 0, 1.0]]))
    angles = torch.linspace(0, math.pi, 60)
    rows = torch.stack([angles.cos(), angles.sin(), torch.zeros(60)], dim=1)
    losses = [value(loss, row[None], torch.tensor([0])).item() for row in rows]
    assert all(later >= earlier for earlier, later in itertools.pairwise(losses))
    assert losses[-1] > losses[30] + 30  # negative cosines are not cut off


def test_negative_cosines_of_other_classes_count() -> None:
    loss = ArcFaceLoss(2, 2, margin_degrees=0.0, scale=1.0)
    with torch.no_grad():
        loss.proxies.copy_(torch.tensor([[1.0, 0], [-1.0, 0]]))
    result = value(loss, torch.tensor([[1.0, 0]]), torch.tensor([0]))
    assert result.item() == pytest.approx(math.log(1 + math.exp(-2)))


def soft_triple(centres_per_class: int = 3, tau: float = 0.2) -> SoftTripleLoss:
    torch.manual_seed(1)
    return SoftTripleLoss(CLASSES, DIM, centres_per_class, tau=tau)


@pytest.mark.parametrize("count", [1, 3])
def test_soft_triple_is_the_formula_of_the_paper(count: int) -> None:
    loss, embeddings, labels = doubled(soft_triple(count))
    w = F.normalize(loss.proxies.detach(), dim=1).numpy().reshape(CLASSES, count, DIM)
    total = 0.0
    for x, y in zip(embeddings.numpy(), labels.tolist(), strict=True):
        logits = []
        for c in range(CLASSES):
            weights = [math.exp(10 * float(x @ w[c, k])) for k in range(count)]
            s = sum(weights[k] * float(x @ w[c, k]) for k in range(count)) / sum(weights)
            logits.append(20 * (s - (0.1 if c == y else 0.0)))
        total += -math.log(math.exp(logits[y]) / sum(math.exp(z) for z in logits))
    spread = 0.0
    for c in range(CLASSES):
        for k in range(count):
            for other in range(k + 1, count):
                spread += math.sqrt(2 + 1e-5 - 2 * float(w[c, k] @ w[c, other]))
    spread /= max(CLASSES * count * (count - 1), 1)
    expected = total / len(labels) + 0.2 * spread
    assert value(loss, embeddings, labels).item() == pytest.approx(expected, rel=1e-9)


def test_soft_triple_equals_pytorch_metric_learning_with_its_regularizer() -> None:
    # Without weight_regularizer the reference has no term that joins centres; its 1e-5 is smaller.
    loss, (embeddings, labels) = soft_triple(), batch()
    theirs = reference.SoftTripleLoss(
        CLASSES,
        DIM,
        centers_per_class=3,
        la=20,
        gamma=0.1,
        margin=0.1,
        weight_regularizer=SparseCentersRegularizer(CLASSES, 3),
        weight_reg_weight=0.2,
    )
    theirs.fc.data = loss.proxies.data.T.clone()
    ours = value(loss, embeddings, labels)
    torch.testing.assert_close(ours, theirs(embeddings, labels).detach(), rtol=1e-5, atol=1e-5)


def test_one_sharp_centre_of_soft_triple_is_chosen() -> None:
    torch.manual_seed(1)
    loss, (embeddings, labels) = SoftTripleLoss(CLASSES, DIM, 3, gamma=1e4, tau=0.0), batch()
    best = loss.cosines(embeddings).view(-1, CLASSES, 3).amax(dim=2)
    logits = 20 * (best - 0.1 * F.one_hot(labels, CLASSES))
    torch.testing.assert_close(value(loss, embeddings, labels), F.cross_entropy(logits, labels))


def test_the_regularizer_draws_the_centres_of_a_class_together() -> None:
    loss, (embeddings, labels) = soft_triple(tau=100.0), batch()

    def spread() -> float:
        own = loss.centres().detach().view(CLASSES, 3, DIM)
        return float(torch.cdist(own, own).mean())

    before = spread()
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        loss(embeddings, labels).backward()
        optimizer.step()
    assert spread() < before


@pytest.mark.parametrize("name", ["loss1", "loss2", "loss2_mean"])
def test_separation_is_the_formula_of_the_benchmark(name: str) -> None:
    loss, embeddings, labels = doubled(make(name))
    w = F.normalize(loss.proxies.detach(), dim=1).numpy()
    samples, y = embeddings.numpy(), labels.tolist()
    pull = push = 0.0
    for c in range(CLASSES):
        own = [x for x, label in zip(samples, y, strict=True) if label == c]
        pull += math.log(1 + sum(math.exp(-32 * (float(w[c] @ x) - 0.1)) for x in own))
        inner = 0.0
        for other in range(CLASSES):
            if other == c:
                continue
            alike = float(w[c] @ w[other])
            if name != "loss1":
                alike = sum(float(w[c] @ x) * float(x @ w[other]) for x in samples)
            if name == "loss2_mean":
                alike /= len(samples)
            inner += math.exp(32 * (alike + 0.1))
        push += math.log(1 + inner)
    expected = pull / len(set(y)) + push / CLASSES
    assert value(loss, embeddings, labels).item() == pytest.approx(expected, rel=1e-9)


def test_the_push_in_parts_equals_the_push_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = F.normalize(torch.randn(7, 4, dtype=torch.float64), dim=1).requires_grad_()
    whole = push_apart(rows, 32.0, 0.1)
    (gradient,) = torch.autograd.grad(whole, rows)
    monkeypatch.setattr(proxy_separation, "CHUNK", 3)
    parts = push_apart(rows, 32.0, 0.1)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts, rows)[0], gradient)


def test_descent_on_loss1_parts_the_proxies() -> None:
    loss: ProxyLoss = make("loss1")

    def closest() -> float:
        cosines = loss.centres() @ loss.centres().T
        return float(cosines.detach().fill_diagonal_(-1).max())

    embeddings, labels = batch()
    before = closest()
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        loss(embeddings[:0], labels[:0]).backward()
        optimizer.step()
    assert closest() < before


def test_sums_of_loss2_over_a_large_batch_do_not_overflow() -> None:
    loss = make("loss2")
    embeddings, labels = batch(1000)
    assert torch.isfinite(value(loss, embeddings, labels))
