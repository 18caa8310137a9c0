import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from embedder.errors import JobError
from tests.training.tournament.fakes import combination
from training.config.job import load_job
from training.tournament import process
from training.tournament.process import FAILURE, alone_in, command, keep_failure, run_in_process

JOB = combination("a").job


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch):
    """Lets a test say which Python the run is."""

    def say(code: str) -> None:
        monkeypatch.setattr(process, "command", lambda job, folder: [sys.executable, "-c", code])

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
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("print('error: no images'); print('bye'); exit(1)", "exit code 1: no images"),
        ("raise RuntimeError('CUDA out of memory')", "exit code 1: RuntimeError: CUDA out of"),
        ("exit(3)", "exit code 3: it printed nothing"),
        (r"print('\x1b[31merror: red\x1b[0m'); exit(1)", "exit code 1: red"),
    ],
)
def test_however_a_run_dies_we_live_and_say_why(
    tmp_path: Path, child, code: str, reason: str
) -> None:
    child(code)
    found = run_in_process(JOB, tmp_path)
    assert found is not None
    assert found.startswith(reason)


def test_a_failure_keeps_the_end_of_the_output_and_counts(tmp_path: Path, child) -> None:
    child("print('first'); raise ValueError('why')")
    for attempts in (1, 2):
        reason = run_in_process(JOB, tmp_path)
        assert reason is not None
        keep_failure(tmp_path, reason)
        content = json.loads((tmp_path / FAILURE).read_text())
        assert content["attempts"] == attempts
        assert content["reason"] == "exit code 1: ValueError: why"
        assert {"first", "Traceback (most recent call last):"} <= set(content["output"])


def test_a_run_goes_on_from_its_checkpoint_and_is_told_who_chooses(tmp_path: Path) -> None:
    words = command(JOB, tmp_path)
    assert words[1:4] == ["-m", "training", "fit"]
    assert words[words.index("--out") + 1] == str(tmp_path)
    assert "--resume" not in words
    assert "--choose-by-test" not in words
    (tmp_path / "checkpoint.pt").touch()
    by_test = combination("a", protocol={"choose_by": "test"}).job
    assert command(by_test, tmp_path)[-2:] == ["--resume", "--choose-by-test"]


def test_interrupting_us_stops_the_run_too(tmp_path: Path, child) -> None:
    child(
        "import pathlib, time\n"
        f"mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "mark.write_text('running')\n"
        "try: time.sleep(60)\n"
        "except KeyboardInterrupt: mark.write_text('saved')"
    )

    def interrupt() -> None:
        while not (tmp_path / "mark").exists() or not (tmp_path / "mark").read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    # Where the tests run in the background of a shell, this signal is ignored from the start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_process(JOB, tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "mark").read_text() == "saved"
    assert time.monotonic() - started < 30


def test_a_run_that_outlives_its_tournament_keeps_the_lock(tmp_path: Path) -> None:
    with alone_in(tmp_path):
        orphan = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False
        )
    with pytest.raises(JobError, match="or a run of one, is at work"), alone_in(tmp_path):
        pass
    orphan.communicate(b"\n")
    with alone_in(tmp_path):
        assert (tmp_path / ".lock").exists()
