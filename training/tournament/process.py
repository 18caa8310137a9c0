"""One run in a process of its own: whatever kills it leaves the tournament alive."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from embedder.errors import JobError
from training.checkpoint import FILE
from training.config.job import Job
from training.config.protocol import CHOOSE_BY_TEST
from training.config.toml import job_toml
from training.files import replace_json, replace_text

OUTPUT, FAILURE = "output.log", "failure.json"
_SECONDS_TO_STOP = 20
_TAIL_LINES = 40
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_in_process(job: Job, folder: Path) -> str | None:
    """Train `job` in `folder` with `kinlens-train fit`; goes on from a checkpoint if there is one.

    Its output goes to `output.log`. Returns None, or why it failed. When we are interrupted the run
    is stopped too; its checkpoint stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "job.toml", job_toml(job, "A run of a tournament."))
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            command(job, folder), stdout=output, stderr=subprocess.STDOUT, close_fds=False
        )
        try:
            code = process.wait()
        except BaseException:
            _stop(process)
            raise
    return None if code == 0 else reason_of(code, folder / OUTPUT)


def command(job: Job, folder: Path) -> list[str]:
    """The command line of a run."""
    words = [sys.executable, "-m", "training", "fit", str(folder / "job.toml")]
    words += ["--out", str(folder)]
    if (folder / FILE).exists():
        words.append("--resume")
    if job.protocol.choose_by == "test":
        words.append(CHOOSE_BY_TEST)
    return words


def reason_of(code: int, output: Path) -> str:
    """One line on why a process ended with `code`: its signal, or the last line that it printed."""
    if code < 0:
        name = signal.Signals(-code).name
        cure = " (out of memory?)" if name == "SIGKILL" else ""
        return f"killed by {name}{cure}"
    lines = [line for line in tail(output) if line]
    faults = [line for line in lines if line.startswith("error: ")]
    said = (faults or lines or ["it printed nothing"])[-1]
    return f"exit code {code}: {said.removeprefix('error: ')}"


def tail(output: Path) -> list[str]:
    """The last lines of a log, without colours."""
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    lines = _TERMINAL_CODES.sub("", text).replace("\r", "\n").splitlines()
    return [line.strip() for line in lines][-_TAIL_LINES:]


def keep_failure(folder: Path, reason: str) -> None:
    """Write `failure.json`: the reason, the number of attempts and the end of the output."""
    path = folder / FAILURE
    attempts = json.loads(path.read_text(encoding="utf-8"))["attempts"] if path.exists() else 0
    content = {"reason": reason, "attempts": attempts + 1, "output": tail(folder / OUTPUT)}
    replace_json(path, content)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock `folder`; runs inherit the lock, so one that outlives a killed tournament keeps it.

    Raises: JobError if another tournament, or a run of one, is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.set_inheritable(descriptor, True)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise JobError(
                f"A tournament, or a run of one, is at work in {folder}. Wait for it, stop it, or "
                "use another --out."
            ) from error
        yield
    finally:
        os.close(descriptor)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let the run save and end; Ctrl-C in a terminal has reached it already."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_SECONDS_TO_STOP)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()
