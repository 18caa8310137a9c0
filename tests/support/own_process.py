"""A service in a process of its own, started as `kinlens-serve` is, for tests from outside."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
def own_process(log: Path, *, may_be_killed: bool = False, **settings: Any) -> Iterator[OwnProcess]:
    """Serve with these settings until the end of the block; it must end well, unless a test kills
    it before.
    """
    settings = {"log_level": "warning", "redis_url": ""} | settings
    environment = {f"KINLENS_{name.upper()}": str(value) for name, value in settings.items()}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "service", "--port", "0"],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text("utf-8")
        try:
            yield OwnProcess(line.split()[3].rstrip("/"), process.pid, log)
        finally:
            process.send_signal(signal.SIGINT)
            ended = process.wait(60)
            assert ended == 0 or (may_be_killed and ended == -signal.SIGKILL)


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
    given |= {f"KINLENS_{work}_WORKERS": "1" for work in ("EMBED", "SEARCH", "DECODE")}
    return os.environ | given | {"KINLENS_REDIS_URL": "", "OMP_NUM_THREADS": "1"}


@contextmanager
def group(
    bundle: Path, gallery: Path, code: Sequence[str] = ("-m", "service"), **more: str
) -> Iterator[Group]:
    """Two processes that serve; stopped by SIGTERM in the end unless the parent is gone."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, *code, "--port", "0", "--workers", "2"],
            cwd=ROOT,
            env=environment(bundle, gallery) | more,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as parent,
    ):
        assert parent.stdout is not None
        line = parent.stdout.readline()
        assert line.startswith("Kinlens is at "), line
        started = Group(parent, line.split()[3].rstrip("/"))
        try:
            yield started
        finally:
            parent.send_signal(signal.SIGTERM)
            try:
                parent.wait(timeout=40)
            except subprocess.TimeoutExpired:
                parent.kill()
                raise
            errors.seek(0)
            started.errors = errors.read()
