"""What the benchmarks share: a real `kinlens-serve` process and the folder of real data."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
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


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def service(bundle: Path, gallery: Path, *flags: str) -> contextlib.AbstractContextManager[str]:
    """The URL of a `kinlens-serve` that is ready."""
    port = free_port()
    words = ["--bundle", bundle, "--gallery", f"g={gallery}", "--port", str(port)]
    words += flags or ("--log-level", "warning")
    return started([BIN / "kinlens-serve", *map(str, words)], f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def started(
    command: Sequence[Path | str], url: str, every_s: float = 0.1, ready: str = "/ready"
) -> Iterator[str]:
    """The URL of a service whose `ready` address answers; it is ended afterwards."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_ready(url + ready, process, every_s)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_ready(address: str, process: "subprocess.Popen[bytes]", every_s: float) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(address).status_code == 200:
                return
        time.sleep(every_s)
    raise SystemExit(f"{process.args!r} did not become ready; run it by hand to see why")
