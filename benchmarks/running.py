"""What the benchmarks share: a real `kinlens-serve` process and the folder of real data."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

BIN = Path(sys.executable).parent
READY_S = 60


def shared_folder() -> Path | None:
    """The folder with real photographs and weights, if this machine has it."""
    root = Path(os.environ.get("KINLENS_SHARED", Path(__file__).parents[2] / "shared"))
    return root if (root / "data").is_dir() else None


def run(command: str, *arguments: object) -> None:
    """Run one of the console scripts and print it."""
    words = [str(argument) for argument in arguments]
    print(f"$ {command} {' '.join(words)}", flush=True)
    subprocess.run([BIN / command, *words], check=True)


@contextlib.contextmanager
def service(bundle: Path, gallery: Path) -> Iterator[str]:
    """The URL of a service that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--bundle", bundle, "--gallery", f"g={gallery}", "--port", str(port)]
    process = subprocess.Popen([BIN / "kinlens-serve", *arguments, "--log-level", "warning"])
    try:
        _wait(f"http://127.0.0.1:{port}/ready", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def _wait(address: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(address).status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit("kinlens-serve did not become ready; its message is above")
