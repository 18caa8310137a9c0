"""A service in a process of its own, started as `kinlens-serve` is, for tests from outside."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class OwnProcess:
    """Where it answers, its process, and the file with its log."""

    url: str
    pid: int
    log: Path

    def faults(self) -> list[str]:
        """What its log says of failures inside."""
        lines = self.log.read_text("utf-8").splitlines()
        return [line for line in lines if '"error"' in line or "Traceback" in line][:5]

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def memory_mb(self) -> float:
        """Memory of the process and its children, without pages of files."""
        return sum(map(_memory_mb, _tree(self.pid)))


def _tree(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += _tree(int(child))
    return found


def _memory_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) / 1024
    return 0.0


@contextmanager
def _started(
    command: Sequence[str], settings: Mapping[str, str], errors: IO[str], end: signal.Signals
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves, and its address; it is told to end at the end of the block."""
    with subprocess.Popen(
        [sys.executable, *command, "--port", "0"],
        cwd=ROOT,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("Kinlens is at "):
            errors.seek(0)
            raise AssertionError(line + errors.read())
        try:
            yield process, line.split()[3].rstrip("/")
        finally:
            process.send_signal(end)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@contextmanager
def own_process(log: Path, *, may_be_killed: bool = False, **settings: Any) -> Iterator[OwnProcess]:
    """Serve with these settings until the end of the block; it must end well, unless a test kills
    it before.
    """
    given = {"log_level": "warning", "redis_url": ""} | settings
    given = {f"KINLENS_{name.upper()}": str(value) for name, value in given.items()}
    with (
        log.open("w+") as errors,
        _started(["-m", "service"], given, errors, signal.SIGINT) as (process, url),
    ):
        yield OwnProcess(url, process.pid, log)
    assert process.returncode == 0 or (may_be_killed and process.returncode == -signal.SIGKILL)


@dataclass
class Group:
    """A parent with its children; `errors` is what all of them said until their end."""

    parent: subprocess.Popen[str]
    url: str
    errors: str = ""

    def serving(self) -> set[int]:
        """Process ids of the children that have not ended, without the interpreter's own helper."""
        listed = Path(f"/proc/{self.parent.pid}/task/{self.parent.pid}/children").read_text()
        commands = {int(pid): command_of(pid) for pid in listed.split()}
        return {pid for pid, text in commands.items() if text and "resource_tracker" not in text}

    def events(self, name: str) -> list[dict[str, object]]:
        entries = [json.loads(line) for line in self.errors.splitlines()]
        return [entry for entry in entries if entry["event"] == name]


def command_of(process_id: str | int) -> str:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def environment(bundle: Path, gallery: Path) -> dict[str, str]:
    given = {"KINLENS_BUNDLE": str(bundle), "KINLENS_GALLERIES": f"shop={gallery}"}
    given |= {"KINLENS_LANES": "1", "KINLENS_REDIS_URL": "", "OMP_NUM_THREADS": "1"}
    return os.environ | given


@contextmanager
def group(
    bundle: Path, gallery: Path, code: Sequence[str] = ("-m", "service"), **more: str
) -> Iterator[Group]:
    """Two processes that serve; stopped by SIGTERM in the end."""
    settings = environment(bundle, gallery) | more
    command = [*code, "--workers", "2"]
    with tempfile.TemporaryFile("w+") as errors:
        with _started(command, settings, errors, signal.SIGTERM) as (parent, url):
            yield (started := Group(parent, url))
        errors.seek(0)
        started.errors = errors.read()
