"""The shared cache level in a real redis-server: it saves work, and its values are checked."""

from contextlib import closing
from typing import Any

import pytest
import redis

from kinlens.embedder.fake import FakeEmbedder
from tests.support.seams import KeyStore, Limits
from tests.support.waiting import until

pytestmark = pytest.mark.redis
CALM_MS = 5_000  # for tests of everything but the timeout, on a busy machine


def connected(server: Any) -> Any:
    return closing(redis.Redis.from_url(server.url, protocol=2))


@pytest.fixture
def start_shared(start_service, redis_server):
    def start(**options: Any) -> Any:
        settings = {"redis_timeout_ms": CALM_MS, "redis_retry_ms": 100} | options
        return start_service(redis_url=redis_server.url, **settings)

    return start


def search_and_store(service: Any, data: bytes) -> Any:
    """A search whose values have reached Redis when it returns."""
    response = service.search(data)
    until(lambda: service.runtime.cache.pending_writes == 0)
    return response


def hits_by_level(service: Any, level: str) -> float:
    kinds = ("answer", "embedding")
    return sum(service.metric("kinlens_cache_lookups_total", kind=k, level=level) for k in kinds)


def test_answers_and_vectors_survive_a_restart(start_shared, embedder, photos) -> None:
    before = start_shared()
    first = before.search(photos[0], k=3).json()
    before.close()
    after = start_shared()
    inferences = len(embedder.batches)
    again = after.search(photos[0], k=3).json()
    assert (first["cached"], again["cached"]) == (False, True)
    assert again["hits"] == first["hits"]
    assert hits_by_level(after, "redis") == 2  # the answer, and in the same call the vector
    other = after.search(photos[0], k=5).json()
    assert (other["cached"], other["timings_ms"]["embed"]) == (False, 0)
    assert other["hits"][:3] == first["hits"]
    assert len(embedder.batches) == inferences
    assert after.client.get("/ready").json()["redis"] == "up"


def test_another_bundle_never_gets_a_hit(start_shared, gallery, photos) -> None:
    search_and_store(start_shared(), photos[0])
    other = FakeEmbedder(bundle_id="other")
    twin = type(gallery)(other, photos)  # same name, same version
    service = start_shared(embedder=other, galleries={"shop": twin})
    answer = service.search(photos[0]).json()
    assert not answer["cached"]
    assert answer["bundle_id"] == "other"
    assert hits_by_level(service, "redis") == 0


def test_values_expire_and_are_not_pickled(start_shared, redis_server, photos) -> None:
    search_and_store(start_shared(redis_ttl_s=77), photos[0])
    with connected(redis_server) as client:
        keys = client.keys("kinlens:*")
        assert len(keys) == 2
        assert all(0 < client.ttl(key) <= 77 for key in keys)
        assert all(client.get(key)[16:18] != b"\x80\x04" for key in keys)


@pytest.mark.parametrize("garbage", [b"", b"garbage", bytes(144), b"\x80\x04\x95pickle"])
def test_garbage_is_ignored_and_replaced(start_shared, redis_server, photos, garbage) -> None:
    search_and_store(start_shared(), photos[0])
    with connected(redis_server) as client:
        for key in client.keys("kinlens:*"):
            client.set(key, garbage)
        service = start_shared()
        answer = search_and_store(service, photos[0]).json()
        assert not answer["cached"]
        assert answer["hits"][0]["id"] == 0
        assert hits_by_level(service, "invalid") == 2
        assert all(client.get(key) != garbage for key in client.keys("kinlens:*"))


def test_values_under_the_wrong_key_are_ignored(start_shared, redis_server, photos) -> None:
    first = start_shared()
    search_and_store(first, photos[0])
    search_and_store(first, photos[1])
    with connected(redis_server) as client:
        for kind in ("a", "e"):
            one, other = client.keys(f"kinlens:3:{kind}:*")
            values = client.mget(one, other)
            client.mset({one: values[1], other: values[0]})
    service = start_shared()
    assert service.search(photos[0]).json()["hits"][0]["id"] == 0
    assert hits_by_level(service, "invalid") == 2


def test_processes_share_daily_units(start_shared, redis_server, photos, tmp_path) -> None:
    """Its units outlive a restart, and an outage of Redis refuses no caller."""
    store = KeyStore(tmp_path / "keys.json")
    sent = {"X-API-Key": store.create("shop7", ["search"], limits=Limits(daily_units=4))}
    services = [start_shared(state=tmp_path), start_shared(state=tmp_path)]

    def ask(service: Any) -> int:
        files = {"image": photos[0]}
        return int(service.client.post("/search", headers=sent, files=files).status_code)

    assert [ask(services[n % 2]) for n in range(5)] == [200, 200, 200, 200, 429]
    later = start_shared(state=tmp_path)
    assert ask(later) == 429
    redis_server.kill()
    assert [ask(later) for _ in range(5)] == [200, 200, 200, 200, 429], "by its own count"
