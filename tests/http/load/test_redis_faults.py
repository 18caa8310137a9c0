"""Redis that is paused, killed, slow, silent or full: every search is answered."""

import itertools
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
import redis
import structlog

from tests.support.market import post, text_of
from tests.support.servers import render
from tests.support.waiting import repeating, until
from tests.tiny import encoded

pytestmark = pytest.mark.redis
CLIENTS = 8
NUMBERS = itertools.count(1_000)


class SlowProxy:
    """Passes bytes on to a Redis server; what comes back is held for `delay_s`."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self._target = port
        self._ended = threading.Event()
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self._threads: list[threading.Thread] = []
        self.url = f"redis://127.0.0.1:{self._sockets[0].getsockname()[1]}/0"
        self._start(self._accept)

    def close(self) -> None:
        self._ended.set()
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()

    def _start(self, work: Any, *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._sockets[0].accept()
                self._sockets.append(client)
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets.append(server)
                self._start(self._pass, client, server, False)
                self._start(self._pass, server, client, True)

    def _pass(self, source: socket.socket, target: socket.socket, is_held: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if is_held:
                    self._ended.wait(self.delay_s)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(redis_server) -> Iterator[SlowProxy]:
    slow = SlowProxy(redis_server.port)
    yield slow
    slow.close()


def new_photo() -> bytes:
    return encoded(render(next(NUMBERS)))


def is_up(service: Any) -> bool:
    """As /ready reports it; the service stays ready without Redis."""
    ready = service.client.get("/ready")
    assert ready.status_code == 200
    return bool(ready.json()["redis"] == "up")


def is_down(service: Any) -> bool:
    return not is_up(service)


@contextmanager
def load(service: Any, photos: list[bytes]) -> Iterator[Any]:
    """Concurrent searches for images old and new in this block, all of which must be right;
    gives a function that waits until that number more have been answered.
    """
    answered = 0

    def search(_: int) -> None:
        nonlocal answered
        number = next(NUMBERS) % len(photos)
        old, new = service.search(photos[number], k=3), service.search(new_photo(), k=3)
        assert (old.status_code, new.status_code) == (200, 200), old.text + new.text
        assert old.json()["hits"][0]["id"] == number
        answered += 2

    def wait_for(count: int) -> None:
        goal = answered + count
        until(lambda: answered >= goal)

    with repeating(search, CLIENTS):
        yield wait_for


def waits_above(service: Any, bound: str) -> float:
    """How many requests spent more than `bound` seconds on their caches."""
    name = "kinlens_stage_seconds"
    below = service.metric(f"{name}_bucket", stage="cache", le=bound)
    return service.metric(f"{name}_count", stage="cache") - below


def test_an_outage_under_load_costs_no_answer(start_service, redis_server, photos) -> None:
    settings = {"redis_url": redis_server.url, "redis_retry_ms": 100, "redis_timeout_ms": 50}
    service = start_service(**settings)
    with load(service, photos) as searched:
        searched(20)
        redis_server.send(signal.SIGSTOP)
        until(lambda: is_down(service))
        searched(20)
        redis_server.send(signal.SIGCONT)
        until(lambda: is_up(service))
        searched(20)
        redis_server.kill()
        until(lambda: is_down(service))
        searched(20)
        redis_server.start()
        until(lambda: is_up(service))
        searched(20)
    assert waits_above(service, "2.5") == 0
    other = start_service(**settings | {"redis_timeout_ms": 5_000})

    def is_shared() -> bool:
        service.search(data := new_photo())
        until(lambda: service.runtime.cache.pending_writes == 0)
        return other.search(data).json()["cached"]

    until(is_shared)  # on a busy machine an answer may take Redis 50 ms, and is not kept then


def test_a_paused_redis_costs_one_call_in_all(start_service, redis_server, photos) -> None:
    service = start_service(redis_url=redis_server.url, redis_timeout_ms=200, redis_retry_ms=100)
    redis_server.send(signal.SIGSTOP)
    for number, data in enumerate(photos[:8]):
        assert service.search(data).json()["hits"][0]["id"] == number
    assert is_down(service)
    assert service.metric("kinlens_redis_up") == 0
    redis_server.send(signal.SIGCONT)
    until(lambda: is_up(service))
    with closing(redis.Redis.from_url(redis_server.url, protocol=2)) as client:
        assert client.info("commandstats")["cmdstat_mget"]["calls"] == 1


def test_a_slow_redis_costs_at_most_its_timeout(start_service, proxy, photos) -> None:
    service = start_service(redis_url=proxy.url, redis_retry_ms=100, redis_timeout_ms=50)
    proxy.delay_s = 0.03
    with load(service, photos) as searched:
        searched(30)
        proxy.delay_s = 6.0
        until(lambda: is_down(service))
        searched(30)
        proxy.delay_s = 0.0
        until(lambda: is_up(service))
        searched(30)
    assert waits_above(service, "2.5") == 0


def test_the_default_timeout_is_below_200_ms(start_service, proxy) -> None:
    """No time is measured: a limit of 200 ms or more would let the answers come."""
    service = start_service(redis_url=proxy.url)
    until(lambda: is_up(service))
    proxy.delay_s = 0.2
    until(lambda: service.search(new_photo()).status_code == 200 and is_down(service))


def test_a_silent_server_is_down_from_the_start(start_service, photos) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        service = start_service(redis_url=url, redis_timeout_ms=50)
        assert is_down(service)
        answers = [service.search(photos[0]).json() for _ in range(2)]
        assert [answer["cached"] for answer in answers] == [False, True]


def test_a_full_redis_is_no_outage(start_service, redis_server, photos) -> None:
    with closing(redis.Redis.from_url(redis_server.url, protocol=2)) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        service = start_service(redis_url=redis_server.url, redis_timeout_ms=5_000)
        with load(service, photos) as searched:
            searched(30)
        assert client.dbsize() == 0
        assert is_up(service)
        client.config_set("maxmemory", 0)
        service.search(new_photo())
        until(lambda: client.dbsize() > 0)


@pytest.mark.parametrize("share", [0.4, 0.7, 10.0])
def test_one_request_waits_for_redis_once(start_service, proxy, share: float) -> None:
    """Its rate, and answers and vectors of each of its queries; `share` is of the limit. One for
    each call would be two limits at the least.
    """
    limit_s = 2.0
    service = start_service(
        redis_url=proxy.url, redis_timeout_ms=2_000, rate_limit_per_address="999/hour"
    )
    service.search(new_photo()).raise_for_status()
    queries = [{"images": [{"data": text_of(new_photo())}]} for _ in range(12)]
    proxy.delay_s = share * limit_s
    started = time.monotonic()
    answers = post(service, {"queries": queries}, "/search/batch").json()["answers"]
    assert time.monotonic() - started < 1.5 * limit_s
    assert [answer["status"] for answer in answers] == [200] * 12


def test_a_flapping_redis_is_logged_once_per_interval(start_service, proxy) -> None:
    service = start_service(redis_url=proxy.url, redis_timeout_ms=50, redis_retry_ms=10)
    with structlog.testing.capture_logs() as events:
        for _ in range(6):
            proxy.delay_s = 0.5
            until(lambda: service.search(new_photo()).is_success and is_down(service))
            proxy.delay_s = 0.0
            until(lambda: is_up(service))
    reported = [event["event"] for event in events if "redis" in event["event"]]
    assert reported == ["redis is away", "redis is back"]
