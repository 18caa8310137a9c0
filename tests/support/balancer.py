"""HAProxy with the file of deploy/, before services of a test."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.own_process import ROOT
from tests.support.servers import WAIT_S, free_port
from tests.support.waiting import until

CHECK_MS = 100
"""How often it asks /ready here; the shipped file is slower, since nobody waits for it."""


@contextmanager
def haproxy(urls: Sequence[str], folder: Path) -> Iterator[str]:
    """Its URL: the shipped settings, with the services at `urls` in place of Docker's names."""
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed; install it to test the load balancer")
    text, port = (ROOT / "deploy/haproxy/haproxy.cfg").read_text(), free_port()
    servers = "\n".join(
        f"  server replica{n} {url.removeprefix('http://')} check inter {CHECK_MS}ms fall 2 rise 1"
        for n, url in enumerate(urls)
    )
    text, names = re.subn(r"^  server-template .*$", servers, text, flags=re.MULTILINE)
    text, binds = re.subn(r"bind :8080", f"bind 127.0.0.1:{port}", text)
    assert (names, binds) == (1, 1)
    (folder / "haproxy.cfg").write_text(text)
    process = subprocess.Popen(["haproxy", "-dW", "-db", "-f", folder / "haproxy.cfg"])
    try:
        until(lambda: _answer(f"http://127.0.0.1:{port}/ready") == 200)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(WAIT_S)


def _answer(url: str) -> int | None:
    try:
        return httpx.get(url, timeout=WAIT_S).status_code
    except httpx.TransportError:
        return None
