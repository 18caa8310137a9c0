"""Two processes behind the shipped proxies are restarted one after the other, under load."""

import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from kinlens.embedder.bundle import Bundle
from tests.support.own_process import OwnProcess, own_process
from tests.support.proxies import CHECK_MS, HOST, OPTIONS, Proxy, started
from tests.support.servers import WAIT_S, free_port
from tests.support.waiting import until
from tests.tiny import encoded, photo

CLIENTS = 2  # of each proxy
DRAIN_S = 10 * CHECK_MS / 1e3  # HAProxy sends nothing more after two checks


class Searchers:
    """Threads that search without a pause over kept-alive connections, and their answers."""

    def __init__(self, proxy: Proxy) -> None:
        self.statuses: list[int | str] = []
        self._proxy = proxy
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._search, args=(n,)) for n in range(CLIENTS)]

    def _search(self, number: int) -> None:
        files = {"image": encoded(photo(number))}
        with self._proxy.client() as client:
            while not self._is_over.is_set():
                try:
                    self.statuses.append(client.post("/search", files=files).status_code)
                except httpx.TransportError as error:
                    self.statuses.append(repr(error))
                time.sleep(0.01)  # leaves the starts some of the cores

    @contextmanager
    def searching(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join()


def searches_of(url: str) -> float:
    """How many searches this process has answered since its start."""
    name = 'kinlens_requests_total{method="POST",route="/search",status="200"} '
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_a_rolling_restart_behind_the_shipped_proxies_loses_no_request(
    tiny_bundle: Bundle, tiny_gallery: Path, tmp_path: Path
) -> None:
    installed = [name for name in OPTIONS if shutil.which(name)]
    sys.stdout.write(f"behind {installed}; install nginx, caddy and haproxy to test all\n")
    if "haproxy" not in installed:
        pytest.skip("haproxy is not installed; install it to test a rolling restart")
    settings = {
        "bundle": tiny_bundle.path,
        "galleries": f"shop={tiny_gallery}",
        "drain_s": DRAIN_S,
        "search_threads": 2,
        "decode_isolation": False,
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
        searchers = [Searchers(proxy) for proxy in proxies]
        with ExitStack() as searching:
            for each in searchers:
                searching.enter_context(each.searching())
            for number, old in enumerate(first):
                until(lambda old=old: searches_of(old.url) > 0)
                os.kill(old.pid, signal.SIGTERM)
                assert old.process.wait(WAIT_S) == 0, old.errors()
                new = start(stack, number)
                until(lambda new=new: searches_of(new.url) > 0)
        for name, each in zip(installed, searchers, strict=True):
            assert set(each.statuses) == {200}, f"{name}: {Counter(each.statuses)}"
