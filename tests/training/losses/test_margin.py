import pytest
import torch
from pytorch_metric_learning.losses import MarginLoss as Reference
from torch import nn

from tests.training.losses.cases import CLASSES, DIM, batch, doubled, value
from training.losses.margin import MarginLoss
from training.mining.distance_weighted import distance_weighted


def varied(**options: object) -> MarginLoss:
    """A loss whose betas differ from class to class."""
    loss = MarginLoss(classes=CLASSES, **options)
    with torch.no_grad():
        loss.beta.add_(0.1 * torch.arange(CLASSES))
    return loss


def test_over_all_pairs_it_is_the_formula_of_the_paper() -> None:
    loss, embeddings, labels = doubled(varied(margin=0.2, mining="all", nu=0.3))
    x, y, beta = embeddings.numpy(), labels.tolist(), loss.beta.tolist()
    terms, betas = [], []
    for i in range(len(y)):
        for j in range(len(y)):
            if i == j:
                continue
            sign = 1 if y[i] == y[j] else -1
            distance = float(((x[i] - x[j]) ** 2).sum()) ** 0.5
            terms.append(max(0.2 + sign * (distance - beta[y[i]]), 0.0))
            betas += [beta[y[i]]] if sign == 1 else []
    active = sum(term > 0 for term in terms)
    expected = sum(terms) / active + 0.3 * sum(betas) / len(betas)
    assert value(loss, embeddings, labels).item() == pytest.approx(expected, rel=1e-7)


def test_over_the_mined_triplets_it_equals_pytorch_metric_learning() -> None:
    embeddings, labels = batch(30)
    torch.manual_seed(3)
    mined = distance_weighted(embeddings @ embeddings.T, labels, DIM)
    reference = Reference(margin=0.5, beta=1.2, nu=0.1, learn_beta=True)
    ours = value(MarginLoss(nu=0.1), embeddings, labels, seed=3)
    torch.testing.assert_close(ours, reference(embeddings, labels, tuple(mined)).detach())


def test_beta_grows_when_positives_lie_outside() -> None:
    embeddings, labels = torch.eye(4)[:2].repeat(2, 1), torch.tensor([0, 0, 0, 0])
    loss = MarginLoss(mining="all", beta=0.7, margin=0.1)
    loss(embeddings, labels).backward()
    assert loss.beta.grad.item() < 0


def test_a_fixed_beta_is_kept_in_the_state_but_not_learnt() -> None:
    loss = MarginLoss(beta=0.9, learn_beta=False)
    assert list(loss.parameters()) == []
    assert loss.state_dict()["beta"].item() == pytest.approx(0.9)
    assert isinstance(MarginLoss().beta, nn.Parameter)


def test_the_same_seed_draws_the_same_and_another_draws_other_negatives() -> None:
    embeddings, labels = batch(30)
    loss = MarginLoss()
    assert value(loss, embeddings, labels, seed=3) == value(loss, embeddings, labels, seed=3)
    assert value(loss, embeddings, labels, seed=3) != value(loss, embeddings, labels, seed=4)
