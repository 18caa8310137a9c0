import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kinlens.embedder.errors import JobError, TrainingError
from kinlens.training.config.job import load_job
from kinlens.training.data.load import load_split
from kinlens.training.folder import read_result
from kinlens.training.runner import run_job
from kinlens.training.state import create_run
from tests.training.jobs import Silent, calibrated_weights, called, small_job, write_job
from tests.training.ranks import cases, gradients

ROOT = Path(__file__).parents[2]


RATES = {"lr_trunk": 1e-6, "lr_head": 1e-5, "lr_proxies": 1e-3, "lr_flows": 1e-5}
"""Small steps, so that rounding does not grow from step to step."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes on the CPU found and trained, see ranks.py."""
    folder = tmp_path_factory.mktemp("ranks")
    weights = calibrated_weights(folder / "weights.pth")
    job = small_job(folder / "products", weights=weights, epochs=2, **RATES)
    write_job(folder / "job.toml", job)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.ranks", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.long
def test_gradients_of_two_ranks_equal_those_of_one_process(two_ranks: Path) -> None:
    ranks = [torch.load(two_ranks / f"rank{number}.pt") for number in range(2)]
    for case, job in cases(two_ranks / "weights.pth").items():
        expected = gradients(job)
        assert sum(g.abs().sum() for g in expected.values()) > 0, f"{case} has no gradient"
        for found in ranks:
            assert found[case].keys() == expected.keys(), case
            for name, gradient in expected.items():
                difference = (found[case][name] - gradient).norm()
                bound = 1e-8 * max(1.0, float(gradient.norm()))
                assert difference <= bound, f"{case}: {name} differs by {difference:.1e}"


def epochs(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "epoch"]


@pytest.mark.long
def test_a_run_of_two_ranks_learns_what_one_process_learns(two_ranks: Path, tmp_path: Path) -> None:
    job = load_job(str(two_ranks / "job.toml"))
    run_job(job, load_split(job.data), tmp_path, Silent())
    two, one = epochs(two_ranks / "two"), epochs(tmp_path)
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-4)
    assert two[-1]["loss"] < two[0]["loss"]
    assert two[-1]["uniformity"] == pytest.approx(one[-1]["uniformity"], rel=1e-3)
    assert read_result(two_ranks / "two") is not None


def test_batch_norm_that_trains_is_refused_on_several_cpu_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinlens.training.state.world", lambda: 2)
    with pytest.raises(TrainingError, match="synchronised batch statistics"):
        create_run(small_job(tmp_path), 3)


@pytest.mark.parametrize("words", ["evaluate run", "export run", "adapt --data . --out b"])
def test_commands_of_one_process_refuse_torchrun(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(JobError, match="without torchrun"):
        called(*words.split())
