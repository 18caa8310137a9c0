import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from embedder.errors import JobError
from tests.training.studies.fakes import combination, played
from training.config.job import Job, load_job
from training.result import RESULT
from training.studies import runs as module
from training.studies.runs import command, play, read_runs, run_in_process

ALL = [combination(loss, seed=seed) for seed in (0, 1) for loss in "abc"]
JOB = ALL[0].job


def fine(job: Job) -> float:
    return 50.0 + job.seed


def rows(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_every_run_gives_one_row_in_both_tables(tmp_path: Path) -> None:
    played(ALL, tmp_path, fine)
    found = rows(tmp_path)
    assert [(row["loss"], row["seed"]) for row in found] == [(c.loss, c.seed) for c in ALL]
    assert (found[0]["R@1"], found[0]["chosen_by"], found[0]["best_epoch"]) == (50.0, "last", 3)
    with (tmp_path / "runs.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [{k: str(v) for k, v in row.items()} for row in found] == table


def test_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    played(ALL[:4], tmp_path, fine)
    _, said, launched = played(ALL, tmp_path, fine)
    assert launched == [c.job.name for c in ALL[4:]]
    assert said[0].startswith("6 runs: 4 finished, 2 to go, 0 of them failed before")
    assert said[1:3] == [
        f"run 5 of 6: {ALL[4].job.name}",
        "  R@1 51.00  R@2 52.00  R@4 53.00  R@8 54.00",
    ]
    assert len(rows(tmp_path)) == 6


def test_the_run_folders_alone_say_what_is_finished(tmp_path: Path) -> None:
    played(ALL, tmp_path, fine)
    (tmp_path / "rows.jsonl").write_text('{"loss": "b')
    (tmp_path / "runs.csv").unlink()
    shutil.rmtree(tmp_path / ALL[0].folder)
    assert played(ALL, tmp_path, fine)[2] == [ALL[0].job.name]
    assert len(rows(tmp_path)) == 6


def test_runs_on_other_images_are_not_ranked_together(tmp_path: Path) -> None:
    played(ALL[:2], tmp_path, fine)
    path = tmp_path / ALL[1].folder / RESULT
    path.write_text(json.dumps(json.loads(path.read_text()) | {"split_sha256": "0123"}))
    with pytest.raises(JobError, match="was trained on other images than"):
        read_runs(ALL, tmp_path)


def test_a_run_that_fails_is_kept_and_tried_again_on_the_next_call(tmp_path: Path) -> None:
    ill = ALL[1].job.name
    for attempts, outcome, reason in ((1, "died", "died"), (2, None, "left no result")):
        outcomes = {ill: outcome}
        runs, said, _ = played(ALL, tmp_path, lambda job, o=outcomes: o.get(job.name, 60.0))
        (failed,) = [run for run in runs if run.result is None]
        assert (failed.combination.job.name, failed.attempts) == (ill, attempts)
        assert reason in failed.reason
        assert f"  failed: {failed.reason} (output.log in {tmp_path / ALL[1].folder})" in said
        assert len(rows(tmp_path)) == 5
    runs, said, launched = played(ALL, tmp_path, fine)
    assert launched == [ill]
    assert "1 of them failed before" in said[0]
    assert all(run.result is not None and not run.attempts for run in runs)


def test_an_interruption_keeps_what_is_finished(tmp_path: Path) -> None:
    def stop_at_third(job: Job) -> float:
        if job.name == ALL[2].job.name:
            raise KeyboardInterrupt
        return 50.0

    with pytest.raises(KeyboardInterrupt):
        played(ALL, tmp_path, stop_at_third)
    assert len(rows(tmp_path)) == 2
    runs, _, launched = played(ALL, tmp_path, fine)
    assert launched == [c.job.name for c in ALL[2:]]
    assert not [run for run in runs if run.attempts]


def test_results_of_another_job_are_refused(tmp_path: Path) -> None:
    played([combination("a")], tmp_path, fine)
    with pytest.raises(JobError, match=r"optimizer.epochs = 30, now 3\. Go on with"):
        played([combination("a", optimizer={"epochs": 3})], tmp_path, fine)
    assert not played([combination("a", runtime={"workers": 0})], tmp_path, fine)[2]


@pytest.mark.parametrize("changes", [{"recall_at": [2]}, {"protocol": {"evaluate_test": "never"}}])
def test_runs_without_recall_at_1_cannot_be_ranked(tmp_path: Path, changes: object) -> None:
    with pytest.raises(JobError, match="a tournament ranks R@1"):
        played([combination("a", **changes)], tmp_path, fine)


def test_the_report_is_written_before_and_after_every_run(tmp_path: Path) -> None:
    seen: list[int] = []
    play(ALL, tmp_path, str, lambda job, place: "died", lambda runs: seen.append(len(runs)))
    assert seen == [6] * 7


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets a test say which Python the run is."""

    def say(code: str) -> None:
        monkeypatch.setattr(module, "command", lambda job, folder: [sys.executable, "-c", code])

    return say


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
def test_however_a_run_dies_we_live_and_say_why(
    tmp_path: Path, child, code: str, reason: str
) -> None:
    child(code)
    found = run_in_process(JOB, tmp_path)
    assert found is not None
    assert found.startswith(reason)


def test_a_run_goes_on_from_its_checkpoint_and_is_told_who_chooses(tmp_path: Path) -> None:
    words = command(JOB, tmp_path)
    assert words[1:4] == ["-m", "training", "fit"]
    assert words[words.index("--out") + 1] == str(tmp_path)
    assert not {"--resume", "--choose-by-test"} & set(words)
    (tmp_path / "checkpoint.pt").touch()
    by_test = combination("a", protocol={"choose_by": "test"}).job
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
        with pytest.raises(JobError, match="or a run of one, is at work in"):
            play(ALL, tmp_path, str)
        words = [sys.executable, "-c", "input()"]
        orphans.append(subprocess.Popen(words, stdin=subprocess.PIPE, close_fds=False))
        return "we were killed"

    play(ALL[:1], tmp_path, str, outlive)
    with pytest.raises(JobError, match="or a run of one, is at work in"):
        played(ALL, tmp_path, fine)
    orphans[0].communicate(b"\n")
    assert len(played(ALL, tmp_path, fine)[2]) == 6
