"""The grid of a tournament, how it is played without training, its ranks and its report."""

import csv
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from kinlens.embedder.errors import JobError
from kinlens.training.config.job import Job, load_job
from kinlens.training.folder import RESULT
from kinlens.training.studies import tournament
from kinlens.training.studies.tournament import (
    GridRun,
    command,
    load_grid,
    rank,
    read_runs,
    run_in_process,
    write_report,
)
from tests.training.studies.runs import finished, played, tournament_run

EXAMPLE = Path(__file__).with_name("grid.toml")
BASE = """
[job]
name = "base"
data = {kind = "folder", root = "nowhere"}
model = {weights = "none", batch_norm = "train"}
"""
ALL = [tournament_run(loss, seed=seed) for seed in (0, 1) for loss in "abc"]
JOB = ALL[0].job
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_grid(text: str) -> Path:
        path = tmp_path / "grid.toml"
        path.write_text(text + BASE)
        return path

    return write_grid


def test_a_grid_lays_the_product_of_its_lists_over_the_base_job() -> None:
    found = load_grid(EXAMPLE)
    assert len(found) == 2 * 2 * 2 * 2 * 2
    assert len({run.folder for run in found}) == len({run.job.name for run in found}) == len(found)
    assert [run.seed for run in found] == sorted(run.seed for run in found)
    jobs = {run.job.name: run.job for run in found}
    job = jobs["wide-determinant-mobilenet_v2-32-s1"]
    assert (job.loss.margin, job.optimizer.lr_proxies, job.optimizer.lr_flows) == (0.3, 1e-5, 5e-4)
    assert (job.model.backbone, job.model.dim, job.model.weights) == ("mobilenet_v2", 32, "none")
    assert job.seed == 1
    job = jobs["proxy_anchor-none-resnet50-16-s0"]
    assert (job.model.pooling, job.optimizer.batch_size) == ("gap", 100)
    assert (job.optimizer.lr_proxies, job.optimizer.lr_flows) == (1e-2, 1e-3)
    for run in found:  # losses and regularizers of the base give way
        determinant = run.job.regularizers.determinant
        assert run.job.loss.alpha == 32.0
        assert (determinant and determinant.lambda1) == (
            None if run.regularizer == "none" else 0.05
        )


def test_what_is_missing_in_a_grid_is_of_its_base_a_file_or_a_name(
    write: Write, tmp_path: Path
) -> None:
    (only,) = load_grid(write(""))
    assert only.folder == Path("runs/mobilenet_v2-512/proxy_anchor/none/seed-0")
    (tmp_path / "base.toml").write_text(BASE.replace("[job]\n", ""))
    grid = tmp_path / "grid.toml"
    grid.write_text('job = "base.toml"\nseeds = [1, 2]')
    changes = ["regularizers.determinant.lambda1=0.5", "optimizer.epochs=2"]
    found = load_grid(grid, changes)
    assert [(run.seed, run.regularizer) for run in found] == [(n, "determinant") for n in (1, 2)]
    assert found[0].job.regularizers.determinant.lambda1 == 0.5
    assert found[0].job.optimizer.epochs == 2
    grid.write_text('job = "demo"')
    assert load_grid(grid)[0].job.data.kind == "rendered"


def test_a_loss_may_bring_regularizers_of_its_own(write: Write) -> None:
    regularized = (
        '{name = "own", loss.name = "proxy_anchor", regularizers.skewed_mean.weight = 3.0}'
    )
    plain, own = load_grid(write(f'losses = ["proxy_anchor", {regularized}]\n'))
    assert (plain.competitor, own.competitor) == ("proxy_anchor", "own")
    assert plain.job.regularizers.wanted() == {}
    assert own.job.regularizers.skewed_mean.weight == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = [1]\n", "seed: unknown key; a grid has job, grids"),
        ("seeds = []\n", "seeds has 0 entries; use 1 or more"),
        ("dims = [64, 64]\n", "dims: .* used twice"),
        ('losses = ["a/b"]\n', r"losses.0.name = 'a/b' does not have the right form"),
        ('losses = ["proxy_ancor"]\n', "proxy_ancor-none-.* is not a valid job"),
        ('losses = [{name = "proxy_anchor", optimizer = {lr = 1}}]\n', "optimizer.lr: unknown key"),
        ("dims = [0, 16]\n", "(?s)proxy_anchor-none-mobilenet_v2-0-s0 is not.*model.dim"),
        ("a = = b\n", "not valid TOML"),
    ],
)
def test_grids_that_make_no_sense_are_refused(write: Write, text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_grid(write(text))


@pytest.mark.parametrize(
    ("losses", "setting", "is_refused"),
    [
        ('["triplet"]', "optimizer.lr_proxies", True),
        ('["triplet", "proxy_anchor"]', "optimizer.lr_proxies", False),
        ('[{name = "triplet", optimizer.lr_proxies = 1e-3}, "proxy_anchor"]', "", True),
        ('["triplet", {name = "proxy_anchor", optimizer.lr_proxies = 1e-3}]', "", False),
    ],
)
def test_a_setting_that_acts_in_none_of_its_runs_is_refused(
    write: Write, losses: str, setting: str, is_refused: bool
) -> None:
    grid, changes = write(f"losses = {losses}\n"), [f"{setting}=1e-3"] if setting else []
    if not is_refused:
        assert len(load_grid(grid, changes)) == 2
        return
    with pytest.raises(JobError, match=r"optimizer.lr_proxies = 0.001 has no effect here: the los"):
        load_grid(grid, changes)


def fine(job: Job) -> float:
    return 50.0 + job.seed


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_run_folders_alone_say_what_is_finished(tmp_path: Path) -> None:
    played(ALL[:4], tmp_path, fine)
    (tmp_path / "runs.csv").unlink()
    shutil.rmtree(tmp_path / ALL[3].folder)
    _, messages, launched = played(ALL, tmp_path, fine)
    assert launched == [run.job.name for run in ALL[3:]]
    assert messages[0].startswith("6 runs: 3 finished, 3 to go, 0 of them after a failure")
    assert messages[1] == f"run 4 of 6: {ALL[3].job.name}"
    assert "R@1 51.00" in messages[2]
    found = rows(tmp_path)
    assert [(row["loss"], row["seed"]) for row in found] == [(r.loss, str(r.seed)) for r in ALL]
    assert (found[0]["R@1"], found[0]["chosen_by"], found[0]["best_epoch"]) == ("50.0", "last", "3")


def test_results_of_another_job_or_on_other_images_are_refused(tmp_path: Path) -> None:
    runs = [tournament_run(loss) for loss in "ab"]
    played(runs, tmp_path, fine)
    with pytest.raises(JobError, match=r"optimizer.epochs = 30, now 3\. Continue with"):
        played([tournament_run("a", optimizer={"epochs": 3})], tmp_path, fine)
    assert not played([tournament_run("a", runtime={"workers": 0})], tmp_path, fine)[2]
    path = tmp_path / runs[1].folder / RESULT
    path.write_text(json.dumps(json.loads(path.read_text()) | {"split_sha256": "0123"}))
    with pytest.raises(JobError, match="was trained on other images than"):
        read_runs(runs, tmp_path)


def test_a_run_that_fails_is_kept_and_tried_again_on_the_next_call(tmp_path: Path) -> None:
    ill = ALL[1].job.name
    for outcome, reason in (("died", "died"), (None, "wrote no result")):
        outcomes = {ill: outcome}
        runs, messages, _ = played(ALL, tmp_path, lambda job, o=outcomes: o.get(job.name, 60.0))
        (failed,) = [run for run in runs if run.result is None]
        assert failed.job.name == ill
        assert reason in failed.reason
        assert f"  failed: {failed.reason} (output.log in {tmp_path / ALL[1].folder})" in messages
        assert len(rows(tmp_path)) == 5
    runs, messages, launched = played(ALL, tmp_path, fine)
    assert launched == [ill]
    assert "1 of them after a failure" in messages[0]
    assert all(run.result is not None and not run.reason for run in runs)


def test_a_run_goes_on_from_its_checkpoint_and_is_told_who_chooses(tmp_path: Path) -> None:
    words = command(JOB, tmp_path)
    assert words[1:4] == ["-m", "kinlens.training", "fit"]
    assert words[words.index("--out") + 1] == str(tmp_path)
    assert not {"--resume", "--choose-by-test"} & set(words)
    (tmp_path / "checkpoint.pt").touch()
    by_test = tournament_run("a", protocol={"choose_by": "test"}).job
    assert command(by_test, tmp_path)[-2:] == ["--resume", "--choose-by-test"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL (out of memory?)"),
        ("print('error: no images'); print('bye'); exit(1)", "exit code 1: no images"),
        ("print('epoch 1')", None),
    ],
)
def test_a_run_leaves_its_job_its_output_and_why_it_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str | None
) -> None:
    monkeypatch.setattr(tournament, "command", lambda job, folder: [sys.executable, "-c", code])
    assert run_in_process(JOB, tmp_path) == reason
    assert load_job(tmp_path / "job.toml") == JOB
    assert reason or (tmp_path / "output.log").read_text() == "epoch 1\n"


def test_interrupting_a_tournament_stops_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another thread may get a signal, and `wait` then sleeps on: it is sent again.
    code = (
        "import os, signal, time\n"
        "print(os.getpid(), flush=True)\n"
        "while True:\n    os.kill(os.getppid(), signal.SIGINT)\n    time.sleep(5)\n"
    )
    monkeypatch.setattr(tournament, "command", lambda job, folder: [sys.executable, "-c", code])
    # Where the tests run in the background of a shell, this signal is ignored from the start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_process(JOB, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "output.log").read_text()), 0)


def report(folder: Path, runs: list[GridRun]) -> str:
    write_report(folder, runs)
    return (folder / "report.md").read_text()


def row_of(markdown: str, name: str) -> list[str]:
    """The cells of the first table row of a competitor."""
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


PUBLISHED = """
contrastive 60.28 62.64 64.87 66.51 58.88 61.24 63.28 64.43 56.36 57.73 61.01 62.05
triplet 57.56 60.48 63.52 63.55 55.82 58.56 61.98 62.45 52.12 55.06 57.60 58.54
lifted_structure 58.36 60.16 65.92 66.34 58.29 61.60 64.28 64.86 55.18 58.07 60.89 61.77
n_pair 57.28 58.91 61.36 61.83 54.17 56.90 59.90 60.76 48.76 50.30 54.22 55.40
proxy_nca 60.25 62.76 65.22 65.12 56.98 60.15 63.84 64.10 51.01 55.77 57.46 57.60
margin 59.66 63.00 64.99 65.48 56.80 60.80 63.48 64.08 54.27 57.88 60.61 59.55
arcface 58.32 61.33 64.40 65.82 55.77 59.94 62.36 63.07 52.92 56.94 61.60 62.24
multi_similarity 60.84 63.96 68.69 68.72 57.24 61.92 65.24 66.22 53.47 55.66 59.57 61.16
soft_triple 61.28 64.16 67.27 67.42 58.07 63.44 66.76 67.44 55.00 57.00 60.90 61.55
proxy_anchor 62.93 66.71 69.48 69.82 61.06 63.88 68.11 68.47 58.07 60.23 63.84 64.47
"""  # R@1 on CUB: ResNet50, BN-Inception and GoogLeNet, each with 64, 128, 512 and 1,024 dimensions


def test_the_published_ranking_of_the_benchmark_follows_from_its_tables() -> None:
    rows = (line.split() for line in PUBLISHED.split("\n") if line)
    ranks = rank(pd.DataFrame({name: map(float, values) for name, *values in rows}))
    assert [*ranks["total"]] == [12, 38, 51, 52, 54, 70, 79, 81, 103, 120]
    assert [*ranks.index[:3]] == ["proxy_anchor", "soft_triple", "multi_similarity"]
    spreads = [0, 1.19, 2.05, 1.72, 1.88, 1.27, 2.31, 1.66, 0.51, 0]  # one is printed as 1.89
    assert [*ranks["standard deviation"]] == pytest.approx(spreads, abs=0.005)


def test_competitors_are_ranked_by_their_mean_over_seeds(tmp_path: Path) -> None:
    scores = {"a": (60.0, 61.0, 65.0), "b": (61.0, 61.5, None), "c": (None, None, None)}
    runs = [
        run if score is None else finished(run, score)
        for loss, values in scores.items()
        for seed, score in enumerate(values)
        for run in [tournament_run(loss, seed=seed)]
    ]
    page = report(tmp_path, [*runs, finished(tournament_run("a", regularizer="nir"), 50.0)])
    ranks, figures = page.split("## net-64")
    assert row_of(ranks, "a") == ["1", "1", "1", ""]
    assert row_of(ranks, "a + nir")[0] == "3"
    assert row_of(figures, "a")[:4] == ["3", "", "62.0 ± 2.6", "63.0"]
    assert row_of(figures, "b")[:3] == ["2", "", "61.2 ± 0.4"]
    assert "not ranked, no finished run: c" in page


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    runs = [finished(tournament_run(loss, dim=dim), 60.0) for dim in (16, 32) for loss in "ab"]
    runs[-1] = tournament_run("b", dim=32)
    assert "net-32 lacks b, so it is omitted" in report(tmp_path, runs)
    runs[0] = tournament_run("a", dim=16)
    assert "there is no ranking" in report(tmp_path, runs)
    assert "0 of 2 runs finished" in report(tmp_path, [runs[0], runs[-1]])


def test_sizes_are_drawn_where_there_are_several(tmp_path: Path) -> None:
    runs = [
        finished(tournament_run(loss, backbone, dim, seed), 50.0 + seed)
        for loss in "ab"
        for backbone in ("net", "other")
        for dim in (16, 64)
        for seed in (0, 1)
    ]
    assert "sizes.png" in report(tmp_path, runs)
    with Image.open(tmp_path / "sizes.png") as plot:
        assert plot.width > 2 * plot.height  # a panel for each network
    assert "sizes.png" not in report(tmp_path, [run for run in runs if run.dim == 16])


def test_grids_of_several_data_sets_are_one_tournament(tmp_path: Path) -> None:
    for name in ("birds", "cars"):
        text = 'losses = ["arcface", "loss1"]' + BASE.replace("nowhere", name)
        (tmp_path / f"{name}.toml").write_text(text)
    grid, out = tmp_path / "both.toml", tmp_path / "out"
    grid.write_text('grids = ["birds.toml", "cars.toml"]')
    runs = load_grid(grid, ["optimizer.epochs=2"])
    assert {run.experiment: Path(run.job.data.root).name for run in runs} == {
        "birds-mobilenet_v2-512": "birds",
        "cars-mobilenet_v2-512": "cars",
    }
    assert {run.job.optimizer.epochs for run in runs} == {2}
    for run in played(runs, out, lambda job: 60.0 + len(job.loss.name))[0]:
        path = out / run.folder / RESULT  # each data set has images of its own
        content = json.loads(path.read_text()) | {"split_sha256": run.grid}
        path.write_text(json.dumps(content))
    ranks = report(out, read_runs(runs, out)).split("## birds")[0]
    assert row_of(ranks, "arcface")[:4] == ["1", "1", "2", "1"]
    path.write_text(json.dumps(content | {"split_sha256": "other"}))
    with pytest.raises(JobError, match="was trained on other images than"):
        read_runs(runs, out)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('grids = ["both.toml"]', "no job of its own"),
        ('grids = ["both.toml"]\ndims = [8]', "or grids and nothing else"),
        ("dims = [8]", "give a job"),
    ],
)
def test_grids_of_grids_that_make_no_sense_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    grid = tmp_path / "both.toml"
    grid.write_text(text)
    with pytest.raises(JobError, match=message):
        load_grid(grid)
