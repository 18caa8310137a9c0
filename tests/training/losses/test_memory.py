"""Pairs of a batch with embeddings of earlier batches."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.embedder.errors import JobError
from kinlens.training.losses.memory import CrossBatchMemory
from kinlens.training.losses.table import WITH_PAIRS, build_loss
from kinlens.training.state import create_run
from tests.training.jobs import step_job
from tests.training.losses.cases import CASES, DIM, make

PAIRED = [name for name in CASES if name.split()[0] in WITH_PAIRS]


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = F.normalize(torch.randn(count, DIM, generator=generator, dtype=torch.float64), dim=1)
    return x, torch.randint(0, 3, (count,), generator=generator)


@pytest.mark.parametrize("name", PAIRED)
def test_a_memory_of_an_epoch_gives_all_pairs_of_the_images(name: str) -> None:
    loss, (x, labels) = make(name), images(12)
    memory = CrossBatchMemory(loss, 8, DIM).double()
    batches = [*zip(x.split(4), labels.split(4), strict=True)]
    torch.testing.assert_close(memory(*batches[0]), loss(*batches[0]))  # nothing is in it yet
    for batch in batches[1:]:
        memory(*batch)
    values = [memory(*batch) for batch in batches]
    torch.testing.assert_close(torch.stack(values).mean(), loss(x, labels))


def test_earlier_embeddings_get_no_gradient_and_evaluation_adds_none() -> None:
    memory = CrossBatchMemory(make("contrastive"), 6, DIM)
    first, labels = (part.clone() for part in images(4))
    first.requires_grad_()
    memory.eval()(first, labels)
    assert (memory.queue_labels == -1).all()
    memory.train()(first, labels)
    other = images(8)[0][4:].clone().requires_grad_()
    memory(other, labels).backward()
    assert first.grad is None
    assert other.grad is not None
    assert memory.queue_labels.tolist() == [*labels.tolist()[2:], *labels.tolist()]


def test_a_job_without_memory_has_the_plain_loss_and_others_say_what_they_need() -> None:
    def job(**loss: Any) -> Any:
        return step_job({}, loss=loss)

    assert build_loss(job(name="contrastive", memory=0).loss, 4, 16).state_dict() == {}
    state = create_run(job(name="contrastive", memory=5), 4).objective.checkpoint()
    assert state["loss.queue"].shape == (5, 16)
    with pytest.raises(JobError, match=r"loss.memory = 5 pairs .* use one of contrastive, lifted"):
        job(name="proxy_anchor", memory=5)
    with pytest.raises(JobError, match=r"omit loss\.matryoshka"):
        job(name="contrastive", memory=5, matryoshka=[4])
