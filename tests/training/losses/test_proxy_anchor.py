import math

import pytest
import torch
from pytorch_metric_learning.losses import ProxyAnchorLoss as Reference
from torch import Tensor
from torch.nn import functional as F

from training.losses.proxy_anchor import ProxyAnchorLoss


def batch(count: int = 12, dim: int = 6, classes: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    embeddings = F.normalize(torch.randn(count, dim, generator=generator), dim=1)
    return embeddings, torch.randint(0, classes - 1, (count,), generator=generator)


def loss_of(classes: int = 5, dim: int = 6) -> ProxyAnchorLoss:
    torch.manual_seed(1)
    return ProxyAnchorLoss(classes, dim)


def naive(loss: ProxyAnchorLoss, embeddings: Tensor, labels: Tensor) -> float:
    """Equation 4 of the paper, term by term."""
    proxies = F.normalize(loss.proxies, dim=1)
    present = sorted(set(labels.tolist()))
    pull = push = 0.0
    for c, proxy in enumerate(proxies):
        positive = negative = 0.0
        for x, y in zip(embeddings, labels.tolist(), strict=True):
            s = float((x @ proxy).detach())
            if y == c:
                positive += math.exp(-loss.alpha * (s - loss.margin))
            else:
                negative += math.exp(loss.alpha * (s + loss.margin))
        pull += math.log(1 + positive) / len(present) if c in present else 0.0
        push += math.log(1 + negative) / len(proxies)
    return pull + push


def test_it_is_the_formula_of_the_paper() -> None:
    loss, (embeddings, labels) = loss_of(), batch()
    assert float(loss(embeddings, labels).detach()) == pytest.approx(
        naive(loss, embeddings, labels), rel=1e-5
    )


def test_it_equals_pytorch_metric_learning() -> None:
    loss, (embeddings, labels) = loss_of(), batch()
    reference = Reference(num_classes=5, embedding_size=6, margin=0.1, alpha=32)
    reference.proxies.data = loss.proxies.data.clone()
    torch.testing.assert_close(loss(embeddings, labels), reference(embeddings, labels))


def test_it_is_invariant_to_the_order_of_the_batch() -> None:
    loss, (embeddings, labels) = loss_of(), batch()
    order = torch.randperm(len(labels))
    torch.testing.assert_close(loss(embeddings[order], labels[order]), loss(embeddings, labels))


def test_the_gradient_reaches_every_proxy_and_every_sample() -> None:
    loss, (embeddings, labels) = loss_of(), batch()
    embeddings.requires_grad_()
    loss(embeddings, labels).backward()
    assert loss.proxies.grad is not None
    assert embeddings.grad is not None
    assert (loss.proxies.grad.norm(dim=1) > 0).all()
    assert (embeddings.grad.norm(dim=1) > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_it_computes_in_float32_or_wider_and_keeps_its_parameters(dtype: torch.dtype) -> None:
    loss, (embeddings, labels) = loss_of(), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(embeddings.to(dtype), labels)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.proxies.dtype == torch.float32
    assert float(value.detach()) == pytest.approx(
        float(loss(embeddings, labels).detach()), rel=0.05
    )


def test_an_empty_batch_gives_zero() -> None:
    value = loss_of()(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
    assert float(value.detach()) == 0.0


def test_a_batch_of_one_class_is_finite() -> None:
    loss, (embeddings, _) = loss_of(), batch()
    assert torch.isfinite(loss(embeddings, torch.zeros(12, dtype=torch.int64)))


def test_large_exponents_do_not_overflow() -> None:
    torch.manual_seed(0)
    loss = ProxyAnchorLoss(3, 4, alpha=1000.0)
    embeddings = F.normalize(-loss.proxies.detach(), dim=1)
    assert torch.isfinite(loss(embeddings, torch.arange(3)))
