"""Redis that is paused, killed, slow or full under load: every search is answered all the same."""

import asyncio
import contextlib
import contextvars
import itertools
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
import redis
import structlog

from tests.support.seams import RateLimits, RedisStore, SharedCounts
from tests.support.servers import render
from tests.tiny import encoded

pytestmark = pytest.mark.redis
CROWD = 8
TIMEOUT_S = 0.3


class SlowProxy:
    """Passes bytes on to a Redis server; what comes back is held for `delay_s`."""

    def __init__(self, port: int, delay_s: float) -> None:
        self.delay_s = delay_s
        self._target = port
        self._ended = threading.Event()
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self._threads: list[threading.Thread] = []
        self.url = f"redis://127.0.0.1:{self._sockets[0].getsockname()[1]}/0"
        self._start(self._accept)

    def close(self) -> None:
        self._ended.set()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()

    def _start(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._sockets[0].accept()
                self._sockets.append(client)
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets.append(server)
                self._start(self._pass, client, server, False)
                self._start(self._pass, server, client, True)

    def _pass(self, source: socket.socket, target: socket.socket, is_held: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if is_held:
                    self._ended.wait(self.delay_s)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(redis_server) -> Iterator[SlowProxy]:
    slow = SlowProxy(redis_server.port, 0.0)
    yield slow
    slow.close()


def store(url: str, **options: Any) -> RedisStore:
    defaults = {"timeout_s": TIMEOUT_S, "retry_s": 0.1, "ttl_s": 60, "max_value_bytes": 10**6}
    return RedisStore(url, **(defaults | options))


@contextmanager
def load(service: Any, pictures: list[bytes]) -> Iterator[list[Any]]:
    """Searches of a crowd for pictures old and new in this block; what is wrong with answers."""
    wrong: list[Any] = []
    done = threading.Event()

    def search(seed: int) -> None:
        while not done.is_set():
            number = seed % len(pictures)
            for data, first in ((pictures[number], number), (encoded(render(seed)), None)):
                response = service.search(data, k=3)
                hits = response.json().get("hits")
                if response.status_code != 200 or (first is not None and hits[0]["id"] != first):
                    wrong.append(response.text)
            seed += CROWD

    with ThreadPoolExecutor(CROWD) as crowd:
        futures = [crowd.submit(search, seed) for seed in range(1_000, 1_000 + CROWD)]
        try:
            yield wrong
        finally:
            done.set()
            for future in futures:
                future.result()


def waits_above(service: Any, bound: str) -> float:
    """How many requests spent more than `bound` seconds on their caches."""
    name = "kinlens_stage_seconds"
    below = service.metric(f"{name}_bucket", stage="cache", le=bound)
    return service.metric(f"{name}_count", stage="cache") - below


def searched(service: Any, count: int, until: Any) -> None:
    """Wait until `count` more searches have been answered."""
    name = "kinlens_stage_seconds_count"
    goal = service.metric(name, stage="total") + count
    until(lambda: service.metric(name, stage="total") >= goal)


def state(service: Any) -> str:
    return service.runtime.cache.remote_state


def test_pausing_and_killing_redis_under_load_costs_no_answer_and_it_recovers(
    start_service, redis_server, pictures, until
) -> None:
    service = start_service(redis_url=redis_server.url, redis_retry_ms=100, redis_timeout_ms=50)
    with load(service, pictures) as wrong:
        searched(service, 20, until)
        redis_server.send(signal.SIGSTOP)
        until(lambda: state(service) == "down")
        searched(service, 20, until)
        redis_server.send(signal.SIGCONT)
        until(lambda: state(service) == "up")
        searched(service, 20, until)
        redis_server.kill()
        until(lambda: state(service) == "down")
        searched(service, 20, until)
        redis_server.start()
        until(lambda: state(service) == "up")
        searched(service, 20, until)
    assert not wrong
    assert waits_above(service, "2.5") == 0


def test_a_slow_redis_is_waited_for_no_longer_than_its_timeout(
    start_service, redis_server, proxy, pictures, until
) -> None:
    service = start_service(redis_url=proxy.url, redis_retry_ms=100, redis_timeout_ms=50)
    proxy.delay_s = 0.03
    with load(service, pictures) as wrong:
        searched(service, 30, until)
        proxy.delay_s = 6.0
        until(lambda: state(service) == "down")
        searched(service, 30, until)
        proxy.delay_s = 0.0
        until(lambda: state(service) == "up")
        searched(service, 30, until)
    assert not wrong
    assert waits_above(service, "2.5") == 0


def test_by_default_nobody_waits_for_an_answer_that_takes_four_times_the_limit(
    start_service, proxy, until
) -> None:
    """No time is measured: a limit of 200 ms or more would let the answers come."""
    service = start_service(redis_url=proxy.url)
    until(lambda: state(service) == "up")
    proxy.delay_s = 0.2
    new = itertools.count(2_000)

    def given_up() -> bool:
        service.search(encoded(render(next(new)))).raise_for_status()
        return state(service) == "down"

    until(given_up)


def test_a_full_redis_refuses_to_store_and_is_no_outage(
    start_service, redis_server, pictures, until
) -> None:
    with closing(redis.Redis.from_url(redis_server.url, protocol=2)) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        service = start_service(redis_url=redis_server.url, redis_timeout_ms=5_000)
        with load(service, pictures) as wrong:
            searched(service, 30, until)
        assert not wrong
        assert client.dbsize() == 0
        assert state(service) == "up"
        client.config_set("maxmemory", 0)
        service.search(encoded(render(7_777)))
        until(lambda: client.dbsize() > 0)


def test_all_lookups_of_one_request_share_its_time(redis_server, proxy, until) -> None:
    shared = store(proxy.url)
    shared.start()
    shared.set("key", b"value")
    until(lambda: shared.pending_writes == 0)

    def request() -> None:
        proxy.delay_s = 0.6 * TIMEOUT_S
        started = time.monotonic()
        found = [shared.get(["key"]) for _ in range(12)]
        waited = time.monotonic() - started
        assert found == [[b"value"]] + [[None]] * 11
        assert waited < 6 * proxy.delay_s
        assert shared.state == "up"  # it answers, if one lets it

    contextvars.Context().run(request)
    shared.close()


async def both(url: str, count: int = 1) -> tuple[float, float, float]:
    """Longest seconds that rates, cache and both took of one of `count` requests."""
    timings = []
    shared = SharedCounts(url, timeout_s=TIMEOUT_S, retry_s=0.01, connections=2)
    limits, cache = RateLimits({"key": "9/hour;99/hour"}, shared), store(url, retry_s=0.01)
    cache.start()

    async def request() -> None:
        started = time.monotonic()
        await limits.hit("key", "till")
        counted = time.monotonic()
        cache.get(["one"])
        cache.get(["other"])
        timings.append((counted - started, time.monotonic() - counted, time.monotonic() - started))

    for _ in range(count):
        await asyncio.create_task(request())
        await asyncio.sleep(0.05)
    await limits.close()
    cache.close()
    return max(timings, key=lambda timing: timing[-1])


@pytest.mark.parametrize("share", [0.4, 0.7, 10.0])
def test_rates_and_cache_of_one_request_together_wait_no_longer_than_one(
    proxy: SlowProxy, monkeypatch, share: float
) -> None:
    monkeypatch.setitem(globals(), "TIMEOUT_S", 1.0)
    asyncio.run(both(proxy.url, 2))
    proxy.delay_s = share * TIMEOUT_S
    rates_s, cache_s, all_s = asyncio.run(both(proxy.url))
    assert all_s < 1.6 * TIMEOUT_S, f"rates {rates_s:.2f} s and cache {cache_s:.2f} s"


def test_a_flapping_redis_is_told_once_a_while_and_so_is_its_return(proxy, until) -> None:
    with structlog.testing.capture_logs() as events:
        shared = store(proxy.url, retry_s=0.01, timeout_s=0.05)
        shared.start()
        for _ in range(6):
            proxy.delay_s = 0.5
            contextvars.Context().run(shared.get, ["key"])
            assert shared.state == "down"
            proxy.delay_s = 0.0
            until(lambda: shared.state == "up")
        shared.close()
    assert [event["event"] for event in events] == ["redis is away", "redis is back"]
