"""The grid of a tournament, how it is played without training, its ranks and its report."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from kinlens.embedder.errors import JobError
from kinlens.training.config.job import Job, load_job
from kinlens.training.folder import RESULT
from kinlens.training.studies import tournament
from kinlens.training.studies.tournament import (
    Run,
    command,
    load_grid,
    play,
    rank,
    read_runs,
    run_in_process,
    write_report,
)
from tests.training.studies.published import LOSSES, RANKING, RECALL_AT_1
from tests.training.studies.runs import finished, played, tournament_run

EXAMPLE = Path(__file__).with_name("grid.toml")
BASE = """
[job]
name = "base"
data = {kind = "folder", root = "nowhere"}
model = {weights = "none"}
"""
ALL = [tournament_run(loss, seed=seed) for seed in (0, 1) for loss in "abc"]
JOB = ALL[0].job
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_grid(text: str, base: str = BASE) -> Path:
        path = tmp_path / "grid.toml"
        path.write_text(text + base)
        return path

    return write_grid


def test_a_grid_is_the_product_of_its_lists_less_what_it_excludes() -> None:
    found = load_grid(EXAMPLE)
    assert len(found) == 2 * 2 * (2 * 2 + 2)
    assert not [run for run in found if run.backbone == "resnet50" and run.regularizer != "none"]
    assert len({run.folder for run in found}) == len({run.job.name for run in found}) == len(found)
    assert [run.seed for run in found] == sorted(run.seed for run in found)


def test_entries_lay_their_settings_over_the_base_job() -> None:
    jobs = {run.job.name: run.job for run in load_grid(EXAMPLE)}
    job = jobs["wide-determinant-mobilenet_v2-32-s1"]
    assert (job.loss.margin, job.optimizer.lr_proxies, job.optimizer.lr_flows) == (0.3, 1e-5, 5e-4)
    assert (job.model.backbone, job.model.dim, job.model.weights) == ("mobilenet_v2", 32, "none")
    assert job.seed == 1
    job = jobs["proxy_anchor-none-resnet50-16-s0"]
    assert (job.model.pooling, job.optimizer.batch_size) == ("gap", 100)
    assert (job.optimizer.lr_proxies, job.optimizer.lr_flows) == (1e-2, 1e-3)


def test_losses_and_regularizers_of_the_base_give_way() -> None:
    for run in load_grid(EXAMPLE):
        assert run.job.loss.alpha == 32.0
        determinant = run.job.regularizers.determinant
        lambdas = None if determinant is None else determinant.lambda1
        assert lambdas == (None if run.regularizer == "none" else 0.05)


def test_lists_that_are_missing_are_those_of_the_base_job(write: Write) -> None:
    (only,) = load_grid(write(""))
    assert only.folder == Path("runs/mobilenet_v2-512/proxy_anchor/none/seed-0")
    path = write("", BASE + "regularizers = {determinant = {lambda1 = 0.5}}\n")
    (only,) = load_grid(path, ["seed=3", "optimizer.epochs=2"])
    assert only.regularizer == "determinant"
    assert only.job.regularizers.determinant.lambda1 == 0.5
    assert (only.seed, only.job.optimizer.epochs) == (3, 2)


def test_the_base_may_be_a_file_beside_the_grid_or_a_name(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(BASE.replace("[job]\n", ""))
    grid = tmp_path / "grid.toml"
    grid.write_text('job = "base.toml"\nseeds = [1, 2]')
    assert [run.seed for run in load_grid(grid)] == [1, 2]
    grid.write_text('job = "demo"')
    assert load_grid(grid)[0].job.data.kind == "rendered"


def test_only_keeps_what_one_of_its_tables_covers(write: Write) -> None:
    lists = "seeds = [0, 1]\ndims = [16, 32, 64]\n"
    found = load_grid(write(lists + "only = [{dim = [16, 32], seed = 0}, {dim = 64}]\n"))
    assert {(run.dim, run.seed) for run in found} == {(16, 0), (32, 0), (64, 0), (64, 1)}
    found = load_grid(write(lists + "only = [{seed = 0}]\nexclude = [{dim = 16}]\n"))
    assert {(run.dim, run.seed) for run in found} == {(32, 0), (64, 0)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = [1]\n", "seed: unknown key; a grid has job, losses"),
        ("seeds = []\n", "seeds: .* at least 1 item"),
        ("dims = [64, 64]\n", "dims: .* used twice"),
        ("dims = [true]\n", "dims.0: .* valid integer"),
        ("losses = [1]\n", r"losses.0: .* \(given: 1\)"),
        ('losses = ["a/b"]\n', r"losses.0.name: .* \(given: 'a/b'\)"),
        ('losses = ["proxy_anchor", "proxy_anchor"]\n', "used twice"),
        ('losses = ["proxy_ancor"]\n', "proxy_ancor-none-.* is not a valid job"),
        ('losses = [{name = "proxy_anchor", optimizer = {lr = 1}}]\n', "optimizer.lr: unknown key"),
        ('losses = [{name = "proxy_anchor", loss = "triplet"}]\n', "is not a valid job"),
        ("dims = [0, 16]\n", "(?s)proxy_anchor-none-mobilenet_v2-0-s0 is not.*model.dim"),
        ('exclude = [{los = "x"}]\n', "unknown axis 'los'; use"),
        ('exclude = [{loss = "x"}]\n', "no loss 'x' in this grid; use proxy_anchor"),
        ('only = {loss = "proxy_anchor"}\n', "only: .* valid list"),
        ('exclude = [{loss = "proxy_anchor"}]\n', "exclude every combination"),
        ("a = = b\n", "not valid TOML"),
    ],
)
def test_grids_that_make_no_sense_are_refused(write: Write, text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_grid(write(text))


def test_a_grid_without_a_base_or_a_file_is_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="job: Field required"):
        load_grid(write("", base=""))
    with pytest.raises(JobError, match="cannot be read"):
        load_grid(tmp_path / "absent.toml")


def fine(job: Job) -> float:
    return 50.0 + job.seed


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "runs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_finished_run_gives_one_row(tmp_path: Path) -> None:
    played(ALL, tmp_path, fine)
    found = rows(tmp_path)
    assert [(row["loss"], row["seed"]) for row in found] == [(r.loss, str(r.seed)) for r in ALL]
    assert (found[0]["R@1"], found[0]["chosen_by"], found[0]["best_epoch"]) == ("50.0", "last", "3")


def test_the_run_folders_alone_say_what_is_finished(tmp_path: Path) -> None:
    played(ALL[:4], tmp_path, fine)
    (tmp_path / "runs.csv").unlink()
    shutil.rmtree(tmp_path / ALL[3].folder)
    _, messages, launched = played(ALL, tmp_path, fine)
    assert launched == [run.job.name for run in ALL[3:]]
    assert messages[0].startswith("6 runs: 3 finished, 3 to go, 0 of them again")
    assert messages[1] == f"run 4 of 6: {ALL[3].job.name}"
    assert "R@1 51.00" in messages[2]
    assert len(rows(tmp_path)) == 6


def test_runs_on_other_images_are_not_ranked_together(tmp_path: Path) -> None:
    played(ALL[:2], tmp_path, fine)
    path = tmp_path / ALL[1].folder / RESULT
    path.write_text(json.dumps(json.loads(path.read_text()) | {"split_sha256": "0123"}))
    with pytest.raises(JobError, match="was trained on other images than"):
        read_runs(ALL, tmp_path)


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
    assert "1 of them again" in messages[0]
    assert all(run.result is not None and not run.reason for run in runs)


def test_an_interruption_keeps_what_is_finished(tmp_path: Path) -> None:
    def stop_at_third(job: Job) -> float:
        if job.name == ALL[2].job.name:
            raise KeyboardInterrupt
        return 50.0

    with pytest.raises(KeyboardInterrupt):
        played(ALL, tmp_path, stop_at_third)
    assert len(rows(tmp_path)) == 2
    runs, _, launched = played(ALL, tmp_path, fine)
    assert launched == [run.job.name for run in ALL[2:]]
    assert not [run for run in runs if run.reason]


def test_results_of_another_job_are_refused(tmp_path: Path) -> None:
    played([tournament_run("a")], tmp_path, fine)
    with pytest.raises(JobError, match=r"optimizer.epochs = 30, now 3\. Continue with"):
        played([tournament_run("a", optimizer={"epochs": 3})], tmp_path, fine)
    assert not played([tournament_run("a", runtime={"workers": 0})], tmp_path, fine)[2]


@pytest.mark.parametrize("changes", [{"recall_at": [2]}, {"protocol": {"evaluate_test": "never"}}])
def test_runs_without_recall_at_1_cannot_be_ranked(tmp_path: Path, changes: object) -> None:
    with pytest.raises(JobError, match="a tournament ranks R@1"):
        played([tournament_run("a", **changes)], tmp_path, fine)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets a test say which Python the run is."""

    def report(code: str) -> None:
        words = [sys.executable, "-c", code]
        monkeypatch.setattr(tournament, "command", lambda job, folder: words)

    return report


def test_a_run_that_ends_well_has_its_job_and_its_output_beside_it(tmp_path: Path, child) -> None:
    child("print('epoch 1')")
    assert run_in_process(JOB, tmp_path / "run") is None
    assert load_job(tmp_path / "run" / "job.toml") == JOB
    assert (tmp_path / "run" / "output.log").read_text() == "epoch 1\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL (out of"),
        ("print('error: no images'); print('bye'); exit(1)", "exit code 1: no images"),
        ("raise RuntimeError('CUDA out of memory')", "exit code 1: RuntimeError: CUDA out of"),
        ("exit(3)", "exit code 3: it printed nothing"),
    ],
)
def test_the_reason_of_a_dead_run_is_kept(tmp_path: Path, child, code: str, reason: str) -> None:
    child(code)
    assert str(run_in_process(JOB, tmp_path)).startswith(reason)


def test_a_run_goes_on_from_its_checkpoint_and_is_told_who_chooses(tmp_path: Path) -> None:
    words = command(JOB, tmp_path)
    assert words[1:4] == ["-m", "kinlens.training", "fit"]
    assert words[words.index("--out") + 1] == str(tmp_path)
    assert not {"--resume", "--choose-by-test"} & set(words)
    (tmp_path / "checkpoint.pt").touch()
    by_test = tournament_run("a", protocol={"choose_by": "test"}).job
    assert command(by_test, tmp_path)[-2:] == ["--resume", "--choose-by-test"]


def test_interrupting_us_stops_the_run_too(tmp_path: Path, child) -> None:
    child(
        "import os, signal\n"
        "print(os.getpid(), flush=True)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "signal.pause()"
    )
    # Where the tests run in the background of a shell, this signal is ignored from the start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_process(JOB, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "output.log").read_text()), 0)


def test_a_folder_has_one_tournament_and_a_run_that_outlives_it_keeps_it(tmp_path: Path) -> None:
    orphans = []

    def outlive(job: Job, place: Path) -> str:
        place.mkdir(parents=True)
        with pytest.raises(JobError, match="Another training is running in"):
            play(ALL, tmp_path, str)
        words = [sys.executable, "-c", "input()"]
        orphans.append(subprocess.Popen(words, stdin=subprocess.PIPE, close_fds=False))
        return "we were killed"

    play(ALL[:1], tmp_path, str, launch=outlive)
    with pytest.raises(JobError, match="Another training is running in"):
        played(ALL, tmp_path, fine)
    orphans[0].communicate(b"\n")
    assert len(played(ALL, tmp_path, fine)[2]) == 6


def table(rows: dict[str, dict[str, float | None]]) -> pd.DataFrame:
    return pd.DataFrame(rows, dtype=float).T


def averages(scores: pd.DataFrame, missing_last: bool = False) -> dict[str, float]:
    return dict(rank(scores, missing_last)["average rank"])


def test_ties_share_the_average_of_their_ranks_and_rounding_makes_no_difference() -> None:
    ranks = rank(table({"x": {"a": 50.0, "b": 60.0, "c": 50.0, "d": 40.0}}))
    assert dict(ranks["average rank"]) == {"b": 1, "a": 2.5, "c": 2.5, "d": 4}
    assert ranks["standard deviation"].isna().all()
    assert averages(table({"x": {"a": (0.1 + 0.2) * 10, "b": 3.0}})) == {"a": 1.5, "b": 1.5}


def test_incomplete_experiments_are_left_out_or_rank_what_they_lack_last() -> None:
    incomplete = table(
        {
            "x": {"a": 3.0, "b": 2.0, "c": 1.0, "dead": None},
            "y": {"a": 1.0, "b": 2.0, "c": None, "dead": None},
            "z": {"a": 1.0, "b": None, "c": None, "dead": None},
        }
    )
    assert averages(incomplete) == {"a": 1, "b": 2, "c": 3}
    ranks = rank(incomplete, missing_last=True)[["x", "y", "z"]]
    assert ranks.T.to_dict("list") == {"a": [1, 2, 1], "b": [2, 1, 2.5], "c": [3, 3, 2.5]}


def report(folder: Path, runs: list[Run], missing_last: bool = False) -> str:
    write_report(folder, runs, missing_last)
    return (folder / "report.md").read_text()


def row_of(markdown: str, name: str) -> list[str]:
    """The cells of the first table row of a competitor."""
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_published_figures_give_the_published_tournament(tmp_path: Path) -> None:
    runs = [
        finished(tournament_run(loss, network, dim), score)
        for network, sizes in RECALL_AT_1.items()
        for dim, scores in sizes.items()
        for loss, score in zip(LOSSES, scores, strict=True)
    ]
    page = report(tmp_path, runs)
    for name, (total, average, deviation) in RANKING.items():
        cells = [float(cell) for cell in row_of(page, name)]
        assert len(cells) == 12 + 3
        # The paper cuts digits off.
        assert cells[-3:] == pytest.approx([total, average, deviation], abs=0.0101)
    order = [page.index(f"| {name} |") for name in RANKING]
    assert order == sorted(order)
    assert page.count("\n## ") == 1 + 12
    assert report(tmp_path, runs) == page


def test_competitors_are_ranked_by_their_mean_over_seeds(tmp_path: Path) -> None:
    scores = {"a": (60.0, 61.0, 65.0), "b": (61.0, 61.5, None), "c": (None, None, None)}
    runs = [
        run if score is None else finished(run, score)
        for loss, values in scores.items()
        for seed, score in enumerate(values)
        for run in [tournament_run(loss, seed=seed)]
    ]
    page = report(tmp_path, runs)
    ranks, figures = page.split("## net-64")
    assert row_of(ranks, "a") == ["1", "1", "1", ""]
    assert row_of(figures, "a")[:4] == ["3", "", "62.0 ± 2.6", "63.0"]
    assert row_of(figures, "b")[:3] == ["2", "", "61.2 ± 0.4"]
    assert "not ranked, no finished run: c" in page


def test_a_regularizer_makes_another_competitor(tmp_path: Path) -> None:
    runs = [finished(tournament_run("a", regularizer=name), 50.0) for name in ("none", "nir")]
    assert row_of(report(tmp_path, runs), "a + nir")[0] == "1.5"


def test_texts_from_outside_are_escaped_and_failed_runs_listed(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script> a|b *c* `d`\nnext & line'
    runs = [tournament_run("a", seed=seed) for seed in (0, 1)]
    played(runs, tmp_path, lambda job: evil if job.seed else 60.0)
    page = (tmp_path / "report.md").read_text()
    assert "1 of 2 runs finished, 1 failed" in page
    assert "<script" not in page
    assert "a\\|b \\*c\\* \\`d\\` next &amp; line" in page


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    runs = [finished(tournament_run(loss, dim=dim), 60.0) for dim in (16, 32) for loss in "ab"]
    runs[-1] = tournament_run("b", dim=32)
    assert "net-32 lacks b: so it is omitted" in report(tmp_path, runs)
    page = report(tmp_path, runs, missing_last=True)
    assert "net-32 lacks b: ranked last" in page
    assert row_of(page, "b") == ["1.5", "2", "3.5", "1.75", "0.3536"]
    runs[0] = tournament_run("a", dim=16)
    assert "there is no ranking" in report(tmp_path, runs)
    assert "0 of 2 runs finished" in report(tmp_path, [runs[0], runs[-1]])


def test_the_page_says_how_epochs_were_chosen(tmp_path: Path) -> None:
    def page(*protocols: dict[str, object]) -> str:
        runs = [tournament_run("a", seed=n, protocol=p) for n, p in enumerate(protocols)]
        return report(tmp_path, [finished(run, 50.0) for run in runs])

    last: dict[str, object] = {}
    held = {"choose_by": "validation", "validation_fraction": 0.1}
    by_test = {"choose_by": "test"}
    assert "no epoch was chosen by its test recall" in page(last)
    assert "best R@1 on validation classes" in page(held)
    assert "CHOSEN BY TEST" in page(by_test)
    assert "CHOSEN BY TEST" not in page(last, held)
    assert "MIXED" in page(last, by_test)
    assert "MIXED" not in page(last, last)
