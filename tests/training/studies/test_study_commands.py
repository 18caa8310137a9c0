"""crossval, search and tournament from the command line, on a few rendered products."""

import csv
import json
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
from typer.testing import CliRunner

from kinlens.embedder.errors import JobError
from kinlens.training.__main__ import app
from kinlens.training.config.job import parse_job
from kinlens.training.studies import tournament
from tests.training.jobs import called, small_job, write_job


class InThisProcess:
    """A Popen that runs kinlens-train here, since a process of its own loads torch for seconds."""

    def __init__(self, words: list[str], stdout: BinaryIO, **_: object) -> None:
        done = CliRunner().invoke(app, words[3:])
        stdout.write(done.output.encode())
        self.code = done.exit_code

    def wait(self) -> int:
        return self.code

    def kill(self) -> None: ...


def job_file(folder: Path) -> Path:
    """A small job on 8 products with two views, also the base of a grid in its folder."""
    content = small_job(folder / "products", regularized=False).as_dict()
    content["data"] |= {"products": 8, "views": 2}
    return write_job(folder / "job.toml", parse_job(content))


def test_cross_validation_prints_mean_and_deviation_and_goes_on(tmp_path: Path) -> None:
    words = "crossval", job_file(tmp_path), "--folds", 2, "--out", tmp_path / "out"
    first = called(*words)
    assert "R@1 " in first
    assert " ± " in first
    assert called(*words).count("already finished") == 2
    assert "R@1 " in called("evaluate", tmp_path / "out" / "fold-01")
    with pytest.raises(JobError, match="has a run with other settings"):
        called(*words, "--seed", 1)


def test_a_search_prints_the_best_values_and_leaves_a_job(tmp_path: Path) -> None:
    space = tmp_path / "space.toml"
    space.write_text("loss.margin = {low = 0.05, high = 0.2}")
    out = tmp_path / "out"
    words = "search", job_file(tmp_path), "--space", space, "--trials", 1, "--out", out
    output = called(*words, "--validation", 0.5, "--set", "loss.name=proxy_anchor")
    assert "best: trial 0, R@1 " in output
    assert "loss.margin = 0." in output
    assert "0.5" in (out / "best.toml").read_text()
    assert json.loads((out / "trial-000" / "result.json").read_text())["figures"] == {}
    assert not list(out.rglob("*.pt")), "a trial is only worth its score"
    with pytest.raises(JobError, match="does not exist"):
        called(*words, "--space", tmp_path / "absent.toml")


def test_a_tournament_trains_ranks_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_file(tmp_path)
    grid, out = tmp_path / "grid.toml", tmp_path / "out"
    grid.write_text('job = "job.toml"\nlosses = ["proxy_anchor"]\nseeds = [7]')
    assert "1 runs, 0 finished" in called("tournament", grid, "--out", out, "--plan")
    assert not out.exists()
    with monkeypatch.context() as patch:
        words = [sys.executable, "-c", "print('error: no images'); exit(1)"]
        patch.setattr(tournament, "command", lambda job, folder: words)
        called("tournament", grid, "--out", out, code=1)
    assert "exit code 1: no images" in (out / "report.md").read_text()
    monkeypatch.setattr(tournament.subprocess, "Popen", InThisProcess)
    called("tournament", grid, "--out", out)
    with (out / "runs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["loss"], row["seed"]) == ("proxy_anchor", "7")
    assert 0 <= float(row["R@1"]) <= 100
    assert "1 of 1 runs finished, 0 failed" in (out / "report.md").read_text()
    assert "1 runs, 1 finished" in called("tournament", grid, "--out", out, "--plan")
    by_test = "tournament", grid, "--plan", "--set", "protocol.choose_by=test"
    with pytest.raises(JobError, match="--choose-by-test"):
        called(*by_test)
