import csv
import json
import shutil
from pathlib import Path

import pytest

from embedder.errors import JobError
from tests.training.tournament.fakes import FakeLaunch, Notes, combination
from training.config.job import Job
from training.result import RESULT
from training.tournament.ledger import Ledger
from training.tournament.process import alone_in
from training.tournament.runs import play

ALL = [combination(loss, seed=seed) for seed in (0, 1) for loss in "abc"]


def fine(job: Job) -> float:
    return 50.0 + job.seed


def rows(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "rows.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_every_run_gives_one_row_in_both_tables(tmp_path: Path) -> None:
    play(ALL, tmp_path, Notes(), FakeLaunch(fine))
    found = rows(tmp_path)
    assert [(row["loss"], row["seed"]) for row in found] == [(c.loss, c.seed) for c in ALL]
    assert found[0]["R@1"] == 50.0
    assert found[0]["chosen_by"] == "last"
    assert found[0]["best_epoch"] == 3
    with (tmp_path / "runs.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [{k: str(v) for k, v in row.items()} for row in found] == table


def test_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    launch, notes = FakeLaunch(fine), Notes()
    play(ALL[:4], tmp_path, Notes(), launch)
    play(ALL, tmp_path, notes, launch)
    assert launch.calls == [c.job.name for c in ALL]
    assert notes.lines[0] == "planned 6 4 0"
    assert notes.lines[1] == f"started 5/6 {ALL[4].job.name}"
    assert len(rows(tmp_path)) == 6


def test_runs_on_other_images_are_not_ranked_together(tmp_path: Path) -> None:
    play(ALL[:2], tmp_path, Notes(), FakeLaunch(fine))
    path = tmp_path / ALL[1].folder / RESULT
    path.write_text(json.dumps(json.loads(path.read_text()) | {"split_sha256": "0123"}))
    with pytest.raises(JobError, match="was trained on other images than"):
        Ledger(tmp_path, ALL)


def test_a_run_that_fails_is_kept_and_tried_again_on_the_next_call(tmp_path: Path) -> None:
    ill = ALL[1].job.name
    failing = FakeLaunch(lambda job: "killed by SIGKILL" if job.name == ill else 60.0)
    for attempts in (1, 2):
        ledger = play(ALL, tmp_path, Notes(), failing)
        assert [(f.combination.job.name, f.reason, f.attempts) for f in ledger.failed()] == [
            (ill, "killed by SIGKILL", attempts)
        ]
        assert len(rows(tmp_path)) == 5
    notes = Notes()
    ledger = play(ALL, tmp_path, notes, FakeLaunch(fine))
    assert notes.lines == ["planned 6 5 1", f"started 6/6 {ill}", f"finished {ill}"]
    assert not ledger.failed()
    assert len(rows(tmp_path)) == 6


def test_a_run_that_ends_well_without_a_result_has_failed(tmp_path: Path) -> None:
    notes = Notes()
    ledger = play(ALL[:1], tmp_path, notes, FakeLaunch(lambda job: None))
    assert "left no result" in ledger.failed()[0].reason
    assert notes.lines[-1].startswith("failed")


def test_an_interruption_keeps_what_is_finished(tmp_path: Path) -> None:
    def stop_at_third(job: Job) -> float:
        if job.name == ALL[2].job.name:
            raise KeyboardInterrupt
        return 50.0

    with pytest.raises(KeyboardInterrupt):
        play(ALL, tmp_path, Notes(), FakeLaunch(stop_at_third))
    assert len(rows(tmp_path)) == 2
    launch = FakeLaunch(fine)
    ledger = play(ALL, tmp_path, Notes(), launch)
    assert launch.calls == [c.job.name for c in ALL[2:]]
    assert not ledger.failed()


def test_tables_lost_or_half_written_are_made_again_from_the_run_folders(tmp_path: Path) -> None:
    play(ALL, tmp_path, Notes(), FakeLaunch(fine))
    whole = (tmp_path / "rows.jsonl").read_text(), (tmp_path / "runs.csv").read_text()
    (tmp_path / "rows.jsonl").write_text(whole[0].splitlines(keepends=True)[0] + '{"loss": "b')
    (tmp_path / "runs.csv").unlink()
    shutil.rmtree(tmp_path / ALL[0].folder)
    Ledger(tmp_path, ALL).write()
    assert [row["folder"] for row in rows(tmp_path)] == [c.folder.as_posix() for c in ALL[1:]]
    play(ALL, tmp_path, Notes(), FakeLaunch(fine))
    assert len(rows(tmp_path)) == 6


def test_results_of_another_job_are_refused(tmp_path: Path) -> None:
    play([combination("a")], tmp_path, Notes(), FakeLaunch(fine))
    other = combination("a", optimizer={"epochs": 3})
    with pytest.raises(JobError, match=r"optimizer.epochs = 30, now 3\. Go on with"):
        play([other], tmp_path, Notes(), FakeLaunch(fine))
    play([combination("a", runtime={"workers": 0})], tmp_path, Notes(), FakeLaunch(fine))


def test_the_report_is_written_before_and_after_every_run(tmp_path: Path) -> None:
    seen: list[int] = []
    launch = FakeLaunch(fine)
    play(ALL, tmp_path, Notes(), launch, lambda ledger: seen.append(len(ledger.finished)))
    assert seen == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("changes", [{"recall_at": [2]}, {"protocol": {"evaluate_test": "never"}}])
def test_runs_without_recall_at_1_cannot_be_ranked(tmp_path: Path, changes: object) -> None:
    with pytest.raises(JobError, match="a tournament ranks R@1"):
        play([combination("a", **changes)], tmp_path, Notes(), FakeLaunch(fine))


def test_two_tournaments_do_not_work_in_one_folder(tmp_path: Path) -> None:
    with alone_in(tmp_path), pytest.raises(JobError, match="is at work in"):
        play(ALL, tmp_path, Notes(), FakeLaunch(fine))
    play(ALL, tmp_path, Notes(), FakeLaunch(fine))
