"""The centres that losses with proxies offer to regularizers."""

import pytest
import torch

from embedder.errors import TrainingError
from tests.training.losses.cases import CLASSES, DIM, PROXY_LOSSES, batch, make
from training.losses.proxies import ProxyLoss
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
    assert loss.proxies.grad is not None
    assert (loss.proxies.grad.norm(dim=1) > 0).all()
    loss.proxies.grad = None
    (loss.centre_of(embeddings, labels) @ towards).sum().backward()
    assert loss.proxies.grad is not None
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
