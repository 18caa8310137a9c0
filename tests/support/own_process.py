"""A service in processes of its own, started as `kinlens-serve` is, for tests from outside."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
SERVE = ("-m", "kinlens.service")


@dataclass
class OwnProcess:
    """Where it answers, its process, the file with its log, and what it printed until its end."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    output: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def errors(self) -> str:
        """What it has logged."""
        return self.log.read_text("utf-8")

    def events(self, name: str) -> list[dict[str, Any]]:
        entries = [json.loads(line) for line in self.errors().splitlines()]
        return [entry for entry in entries if entry["event"] == name]

    def faults(self) -> list[str]:
        """The failures inside the service, from its log."""
        lines = self.errors().splitlines()
        return [line for line in lines if '"error"' in line or "Traceback" in line][:5]

    def serving(self) -> set[int]:
        """Process ids of the children that have not ended, without the interpreter's own helper."""
        commands = {pid: command_of(pid) for pid in children(self.pid)}
        return {pid for pid, text in commands.items() if text and "resource_tracker" not in text}

    @contextmanager
    def accepted_search(self, image: bytes) -> Iterator[Callable[[], int]]:
        """A search that is accepted and waits for its body; the function gives it, and the status
        of the answer.
        """
        built = httpx.Request("POST", f"{self.url}/search", files={"image": image})
        head = "".join(f"{name}: {value}\r\n" for name, value in built.headers.items())

        def finish() -> int:
            client.sendall(built.read())
            return int(client.recv(64).split()[1])

        with socket.create_connection(self.address, timeout=30) as client:
            client.sendall(f"POST /search HTTP/1.1\r\n{head}Expect: 100-continue\r\n\r\n".encode())
            assert client.recv(64).startswith(b"HTTP/1.1 100 ")
            yield finish

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def memory_mb(self) -> float:
        """Memory of the process and its children, without pages of files."""
        return sum(map(_memory_mb, _tree(self.pid)))


@contextmanager
def own_process(
    log: Path,
    *arguments: str,
    code: Sequence[str] = SERVE,
    folder: Path = ROOT,
    may_be_killed: bool = False,
    **settings: Any,
) -> Iterator[OwnProcess]:
    """Serve in `folder` with these settings until the end of the block; Ctrl-C must end it well,
    unless a test has ended it before.
    """
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, *code, "--port", "0", *arguments],
            cwd=folder,
            env=environment(**{"log_level": "warning"} | settings),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Kinlens is at "), log.read_text("utf-8")
        service = OwnProcess(line.split()[3].rstrip("/"), process, log)
        try:
            yield service
        finally:
            process.send_signal(signal.SIGINT)
            try:
                ended = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            # Not by `communicate`: it loses what `readline` has read ahead.
            service.output = process.stdout.read()
            assert ended == 0 or may_be_killed, f"{ended}: {log.read_text('utf-8')}"


def environment(**settings: Any) -> dict[str, str]:
    """That of this process with these settings, and no Redis unless they name one."""
    given = {"redis_url": ""} | settings
    return os.environ | {f"KINLENS_{name.upper()}": str(value) for name, value in given.items()}


def command_of(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def children(pid: int | str = "self") -> set[int]:
    """The process ids of the children of `pid`."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def _tree(pid: int) -> list[int]:
    return [pid, *(one for child in children(pid) for one in _tree(child))]


def _memory_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):
            return int(line.split()[1]) / 1024
    return 0.0
