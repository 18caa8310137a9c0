"""Batches that pass the network in chunks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kinlens.embedder.errors import JobError
from kinlens.training.state import create_run
from tests.training.jobs import step_job
from tests.training.ranks import REGULARIZERS, gradients

LABELS = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])
IMAGES = torch.arange(8 * 3 * 32 * 32).mul(7919).remainder(256).to(torch.uint8)


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
@pytest.mark.parametrize("name", ["none", "all"])
def test_the_gradient_is_that_of_the_whole_batch(weights: Path, name: str, chunk: int) -> None:
    tables = {"none": {}, **REGULARIZERS}[name]
    whole = gradients(step_job(tables, weights))
    parts = gradients(step_job(tables, weights, optimizer={"chunk": chunk}))
    assert parts.keys() == whole.keys()
    for key, gradient in whole.items():
        torch.testing.assert_close(parts[key], gradient, rtol=1e-6, atol=1e-12, msg=key)


def test_both_passes_of_a_chunk_draw_the_same_random_numbers(weights: Path) -> None:
    def trained(**optimizer: Any) -> tuple[Any, list[int]]:
        torch.manual_seed(0)
        run = create_run(step_job({}, weights, optimizer=optimizer), 2)
        run.net.pool = nn.Sequential(run.net.pool, nn.Dropout(0.5))
        seen: list[int] = []
        run.net.pool.register_forward_hook(lambda _, x, y: seen.append(len(y)))
        return run.begin_epoch(trunk_frozen=False).train(), seen

    images = IMAGES.reshape(8, 3, 32, 32)
    model, seen = trained(chunk=3)
    torch.manual_seed(1)
    model(images, LABELS).total.backward()
    assert sorted(seen) == [2, 2, 3, 3, 3, 3]
    after = torch.rand(1)

    plain, _ = trained()
    torch.manual_seed(1)
    features: list[Tensor] = [plain.net.features(part) for part in images.split(3)]
    plain.objective(plain.net, torch.cat(features), LABELS).total.backward()
    assert after == torch.rand(1)
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad)


def test_chunks_are_refused_where_batch_norm_sees_the_batch() -> None:
    model = {"backbone": "mobilenet_v2", "weights": "none", "batch_norm": "train"}
    with pytest.raises(JobError, match=r"optimizer.chunk = 3 cuts .* set model.batch_norm"):
        step_job({}, model=model, optimizer={"chunk": 3})
