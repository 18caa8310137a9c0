"""A rolling restart of two processes behind the shipped proxies, under load."""

import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.support.own_process import OwnProcess, own_process
from tests.support.proxies import CHECK_MS, HOST, OPTIONS, Proxy, started
from tests.support.servers import WAIT_S, free_port
from tests.support.waiting import repeating, until
from tests.tiny import encoded, photo

CLIENTS = 2  # of each proxy
DRAIN_S = 10 * CHECK_MS / 1e3  # HAProxy sends nothing more after two checks


@contextmanager
def searching(proxy: Proxy) -> Iterator[list[int | str]]:
    """Searches without a pause over kept-alive connections; their statuses."""
    statuses: list[int | str] = []
    with ExitStack() as stack:
        clients = [stack.enter_context(proxy.client()) for _ in range(CLIENTS)]

        def search(number: int) -> None:
            files = {"image": encoded(photo(number))}
            try:
                statuses.append(clients[number].post("/search", files=files).status_code)
            except httpx.TransportError as error:
                statuses.append(repr(error))
            time.sleep(0.01)  # leaves the starts some of the cores

        with repeating(search, CLIENTS):
            yield statuses


def searches_of(url: str) -> float:
    """How many searches this process has answered since its start."""
    name = 'kinlens_requests_total{method="POST",route="/search",status="200"} '
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.mark.long
def test_a_rolling_restart_loses_no_request(tiny_settings, tmp_path) -> None:
    installed = [name for name in OPTIONS if shutil.which(name)]
    sys.stdout.write(f"behind {installed}; install nginx, caddy and haproxy to test all\n")
    if "haproxy" not in installed:
        pytest.skip("haproxy is not installed; install it to test a rolling restart")
    settings = tiny_settings | {
        "drain_s": DRAIN_S,
        "search_threads": 2,
        "trusted_proxies": "127.0.0.1",
        "allowed_hosts": f"{HOST},127.0.0.1",
    }
    ports = [free_port(), free_port()]

    def start(stack: ExitStack, number: int) -> OwnProcess:
        log = tmp_path / f"log-{number}-{time.monotonic_ns()}"
        arguments = ("--port", str(ports[number]))
        return stack.enter_context(own_process(log, *arguments, **settings))

    with ExitStack() as stack:
        first = [start(stack, number) for number in range(2)]
        urls = [process.url for process in first]
        proxies = [stack.enter_context(started(name, urls, tmp_path)) for name in installed]
        with ExitStack() as load:
            found = [load.enter_context(searching(proxy)) for proxy in proxies]
            for number, old in enumerate(first):
                until(lambda old=old: searches_of(old.url) > 0)
                os.kill(old.pid, signal.SIGTERM)
                assert old.process.wait(WAIT_S) == 0, old.errors()
                new = start(stack, number)
                until(lambda new=new: searches_of(new.url) > 0)
        for name, statuses in zip(installed, found, strict=True):
            assert set(statuses) == {200}, f"{name}: {Counter(statuses)}"
