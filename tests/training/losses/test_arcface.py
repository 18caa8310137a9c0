import itertools
import math

import pytest
import torch
from pytorch_metric_learning.losses import ArcFaceLoss as Reference
from torch.nn import functional as F

from tests.training.losses.cases import CLASSES, DIM, batch, doubled, value
from training.losses.arcface import ArcFaceLoss


def loss_of(margin_degrees: float = 28.6, scale: float = 64.0) -> ArcFaceLoss:
    torch.manual_seed(1)
    return ArcFaceLoss(CLASSES, DIM, margin_degrees, scale)


@pytest.mark.parametrize(("degrees", "scale"), [(28.6, 64.0), (80.0, 4.0), (0.0, 10.0)])
def test_it_is_the_formula_of_the_paper(degrees: float, scale: float) -> None:
    loss, embeddings, labels = doubled(loss_of(degrees, scale))
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
def test_it_equals_pytorch_metric_learning(degrees: float) -> None:
    loss, (embeddings, labels) = loss_of(degrees), batch()
    reference = Reference(CLASSES, DIM, margin=degrees, scale=64)
    reference.W.data = loss.proxies.data.T.clone()
    ours = value(loss, embeddings, labels)
    torch.testing.assert_close(ours, reference(embeddings, labels).detach())


def test_the_loss_rises_with_the_angle_up_to_the_opposite_direction() -> None:
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
