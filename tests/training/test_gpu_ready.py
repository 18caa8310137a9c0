"""What makes a GPU wait, proven without one: reads of its memory within a training step."""

import inspect
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kinlens.training.state import create_run
from kinlens.training.terms import LOSSES
from kinlens.training.trainer import train_step
from tests.training.jobs import step_job
from tests.training.ranks import REGULARIZERS

CLASSES = 6
ROOT = Path(__file__).parents[2]


def tables() -> Iterator[dict[str, str]]:
    """Every loss with every kind of mining that it has."""
    for name, loss in LOSSES.items():
        mining = inspect.signature(loss).parameters.get("mining")
        kinds = get_args(mining.annotation.__origin__) if mining else ()  # of Annotated
        yield from [{"name": name, "mining": kind} for kind in kinds] or [{"name": name}]


READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim"}
READS |= {"unique_consecutive", "equal", "is_nonzero"}
"""Each needs a number, or how many elements there are, on the host before it can go on."""


class Reads(TorchDispatchMode):
    """Counts the operations that wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        by_mask = name == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in READS or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def reads_of_a_step(regularizers: dict[str, Any], **tables: Any) -> list[str]:
    run = create_run(step_job(regularizers, **tables), CLASSES)
    run.net.train()
    model = run.begin_epoch(trunk_frozen=False)
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    labels = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])
    train_step(run, model, images, labels, 10)
    with Reads() as reads:
        train_step(run, model, images, labels, 10)
    return reads.found


@pytest.fixture(autouse=True)
def labels_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run checks its labels once; on a CPU each loss does."""
    monkeypatch.setattr("kinlens.training.losses.base.check_labels", lambda *_: None)


@pytest.mark.parametrize("loss", list(tables()), ids=lambda x: "-".join(x.values()))
def test_a_step_of_a_loss_reads_nothing_off_the_device(loss: dict[str, Any]) -> None:
    assert reads_of_a_step({}, loss=loss, optimizer={"average": 0.9}) == []


@pytest.mark.parametrize("name", REGULARIZERS)
def test_a_step_of_a_regularizer_reads_nothing_off_the_device(name: str) -> None:
    # How many classes a batch has decides the shape of its means.
    known = ["_unique2"] if name == "skewed_mean_of_the_batch" else []
    optimizer = {"average": 0.9, "clip_norm": 1.0}
    assert reads_of_a_step(REGULARIZERS[name], optimizer=optimizer) == known


def test_what_counts_reads_finds_one() -> None:
    with Reads() as reads:
        x = torch.ones(3)
        float(x.sum())
        x[x > 0]
    assert reads.found == ["_local_scalar_dense", "index"]


@pytest.mark.long
def test_the_script_for_a_gpu_runs_its_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU: that of a GPU differs in its device alone."""
    out = tmp_path / "gpu.json"
    words = ["--device", "cpu", "--quick", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts" / "gpu_check.py"), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().out
    assert json.loads(out.read_text())["failed"] == []
