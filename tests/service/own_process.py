"""A service in a process of its own, started as `kinlens-serve` is, for tests from outside."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
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
