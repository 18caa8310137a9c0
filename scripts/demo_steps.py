"""Shared steps of the demos: the project's commands, a running service, lists as CSV."""

import contextlib
import csv
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
READY_S = 180


class DemoError(Exception):
    """An error that the user can fix; the message is one line."""


def kinlens(command: str, *arguments: str) -> None:
    """Print and run one of the three commands."""
    print(f"\n$ kinlens-{command} {shlex.join(arguments)}", flush=True)
    code = subprocess.run([BIN / f"kinlens-{command}", *arguments], check=False).returncode
    if code:
        raise DemoError(f"kinlens-{command} exited with status {code}; its message is above.")


@contextlib.contextmanager
def served(port: int, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a service, wait until it is ready, and stop it at the end of the block."""
    server = serve(port, *arguments)
    try:
        yield server
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)


def keep_open(server: "subprocess.Popen[bytes]", port: int) -> None:
    """Wait for Ctrl-C, or until the service exits."""
    show(f"The page is open at http://127.0.0.1:{port}/ until you press Ctrl-C.")
    with contextlib.suppress(KeyboardInterrupt):
        server.wait()


def serve(port: int, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start the service and wait until it is ready."""
    require_free(port)
    arguments = (*arguments, "--port", str(port), "--log-level", "warning")
    print(f"\n$ kinlens-serve {shlex.join(arguments)}", flush=True)
    server = subprocess.Popen([BIN / "kinlens-serve", *arguments])
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise DemoError("kinlens-serve did not start; its message is above.")
        try:
            fetch(urllib.request.Request(f"http://127.0.0.1:{port}/ready"))
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
        else:
            return server
    server.kill()
    raise DemoError(f"kinlens-serve was not ready after {READY_S} s.")


def require_free(port: int) -> None:
    """Raises: DemoError if something listens on the port."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise DemoError(
                f"Port {port} is in use. Stop that program, or choose another port: PORT=8001 "
                "with make, --port 8001 without."
            )


def search(url: str, image: Path, k: int, **fields: object) -> dict[str, Any]:
    """POST /search, using only the standard library."""
    boundary = uuid.uuid4().hex
    head = "".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in {"k": k, **fields}.items()
    )
    head += (
        f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="query"\r\n\r\n'
    )
    body = head.encode() + image.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    try:
        answer: dict[str, Any] = fetch(urllib.request.Request(f"{url}/search", body, headers))
    except urllib.error.HTTPError as error:
        raise DemoError(f"{image}: HTTP {error.code} {error.read().decode()}") from error
    return answer


def fetch(request: urllib.request.Request) -> Any:
    """The JSON response to a request."""
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def read_list(path: Path) -> list[dict[str, str]]:
    """Rows of a list."""
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def write_list(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows of a list; the first row defines the columns."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def free_port() -> int:
    """A port that no process uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show(text: str) -> None:
    print(f"\n== {text}", flush=True)
