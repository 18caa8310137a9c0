"""The shared cache level against a real redis-server: it saves work, and its loss costs none."""

import contextvars
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from embedder.fake import FakeEmbedder
from tests.support.seams import Cache, Lookup, LruCache, RedisStore

pytestmark = pytest.mark.redis
CALM_MS = 5_000  # for tests of everything but the timeout, on a busy machine


@contextmanager
def connected(server: Any) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(server.url, protocol=2)
    yield client
    client.close()


@pytest.fixture
def start_shared(start_service, redis_server):
    def start(**options: Any) -> Any:
        settings = {"redis_timeout_ms": CALM_MS, "redis_retry_ms": 100} | options
        return start_service(redis_url=redis_server.url, **settings)

    return start


@pytest.fixture
def search_and_store(until):
    """A search whose values have reached Redis when it returns."""

    def search(service: Any, data: bytes, **fields: Any) -> Any:
        response = service.search(data, **fields)
        until(lambda: service.runtime.cache.pending_writes == 0)
        return response

    return search


def store(url: str, **options: Any) -> RedisStore:
    defaults = {"timeout_s": 5.0, "retry_s": 0.1, "ttl_s": 60, "max_value_bytes": 1000}
    return RedisStore(url, **(defaults | options))


def hits_by_level(service: Any, level: str) -> float:
    kinds = ("answer", "embedding")
    return sum(service.metric("kinlens_cache_lookups_total", kind=k, level=level) for k in kinds)


def test_an_answer_survives_a_restart_of_the_service(start_shared, embedder, pictures) -> None:
    before = start_shared()
    first = before.search(pictures[0], k=3).json()
    before.close()
    inferences = len(embedder.batches)
    after = start_shared()
    again = after.search(pictures[0], k=3).json()
    assert not first["cached"]
    assert again["cached"]
    assert again["hits"] == first["hits"]
    assert hits_by_level(after, "redis") == 2  # the answer, and in the same call the vector
    assert len(embedder.batches) == inferences + 1  # the warm-up of the second start
    assert after.client.get("/ready").json()["redis"] == "up"


def test_a_vector_survives_a_restart_and_serves_other_parameters(
    start_shared, embedder, pictures
) -> None:
    before = start_shared()
    before.search(pictures[0], k=3)
    before.close()
    after = start_shared()
    inferences = len(embedder.batches)
    answer = after.search(pictures[0], k=5).json()
    assert not answer["cached"]
    assert answer["hits"][0]["id"] == 0
    assert answer["timings_ms"]["embed"] == 0
    assert len(embedder.batches) == inferences


def test_another_bundle_never_gets_a_hit(start_shared, gallery, pictures, search_and_store) -> None:
    search_and_store(start_shared(), pictures[0])
    other = FakeEmbedder(bundle_id="other")
    twin = type(gallery)(other, pictures)  # same name, same version
    service = start_shared(embedder=other, galleries={"shop": twin})
    answer = service.search(pictures[0]).json()
    assert not answer["cached"]
    assert answer["bundle_id"] == "other"
    assert hits_by_level(service, "redis") == 0


def test_values_expire_and_are_no_pickles(
    start_shared, redis_server, pictures, search_and_store
) -> None:
    search_and_store(start_shared(redis_ttl_s=77), pictures[0])
    with connected(redis_server) as client:
        keys = client.keys("kinlens:*")
        assert len(keys) == 2
        assert all(0 < client.ttl(key) <= 77 for key in keys)
        assert all(client.get(key)[16:18] != b"\x80\x04" for key in keys)


@pytest.mark.parametrize("garbage", [b"", b"garbage", bytes(144), b"\x80\x04\x95pickle"])
def test_garbage_in_redis_is_ignored_and_replaced(
    start_shared, redis_server, pictures, search_and_store, garbage: bytes
) -> None:
    search_and_store(start_shared(), pictures[0])
    with connected(redis_server) as client:
        for key in client.keys("kinlens:*"):
            client.set(key, garbage)
        service = start_shared()
        answer = search_and_store(service, pictures[0]).json()
        assert not answer["cached"]
        assert answer["hits"][0]["id"] == 0
        assert hits_by_level(service, "invalid") == 2
        assert all(client.get(key) != garbage for key in client.keys("kinlens:*"))


def test_values_that_were_swapped_between_keys_are_ignored(
    start_shared, redis_server, pictures, search_and_store
) -> None:
    first = start_shared()
    search_and_store(first, pictures[0])
    search_and_store(first, pictures[1])
    with connected(redis_server) as client:
        for kind in ("a", "e"):
            one, other = client.keys(f"kinlens:3:{kind}:*")
            values = client.mget(one, other)
            client.mset({one: values[1], other: values[0]})
    service = start_shared()
    assert service.search(pictures[0]).json()["hits"][0]["id"] == 0
    assert hits_by_level(service, "invalid") == 2


def test_a_paused_redis_costs_one_call_in_all_and_comes_back_by_itself(
    start_shared, redis_server, pictures, search_and_store, until
) -> None:
    service = start_shared(redis_timeout_ms=200)
    search_and_store(service, pictures[0])
    with connected(redis_server) as client:
        client.config_resetstat()
    redis_server.send(signal.SIGSTOP)
    try:
        for number, data in enumerate(pictures[1:9], start=1):
            assert service.search(data).json()["hits"][0]["id"] == number
        assert service.client.get("/ready").status_code == 200
        assert service.client.get("/ready").json()["redis"] == "down"
        assert service.metric("kinlens_redis_up") == 0
    finally:
        redis_server.send(signal.SIGCONT)
    until(lambda: service.client.get("/ready").json()["redis"] == "up")
    with connected(redis_server) as client:
        assert client.info("commandstats")["cmdstat_mget"]["calls"] == 1
    search_and_store(service, pictures[10])
    assert start_shared().search(pictures[10]).json()["cached"]


def test_a_killed_redis_is_not_missed_and_a_new_one_is_used(
    start_shared, redis_server, pictures, search_and_store, until
) -> None:
    service = start_shared()
    service.search(pictures[0])
    redis_server.kill()
    for number, data in enumerate(pictures[:6]):
        assert service.search(data).json()["hits"][0]["id"] == number
    assert service.client.get("/ready").json()["redis"] == "down"
    redis_server.start()
    until(lambda: service.client.get("/ready").json()["redis"] == "up")
    search_and_store(service, pictures[7])
    assert start_shared().search(pictures[7]).json()["cached"]


def test_a_server_that_accepts_and_says_nothing_is_treated_as_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        cache = Cache(LruCache(9, 999), store(f"redis://127.0.0.1:{port}/0", timeout_s=0.05))
        cache.start()
        assert cache.remote_state == "down"
        lookup = Lookup("answer", "key", bytes)
        assert contextvars.Context().run(cache.get, lookup) is None
        cache.set("key", b"value")
        assert contextvars.Context().run(cache.get, lookup) == b"value"
        cache.close()
