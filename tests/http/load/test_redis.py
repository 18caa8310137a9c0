"""The shared cache level in a real redis-server: it saves work, its values are checked, and when it
is paused, killed, slow or full every search is answered.
"""

import contextlib
import itertools
import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import structlog
from typer.testing import CliRunner

from kinlens.embedder.fake import FakeEmbedder
from kinlens.service.commands.program import app
from tests.support.market import post, text_of
from tests.support.seams import KeyStore, Limits
from tests.support.servers import render
from tests.support.waiting import repeating, until
from tests.tiny import encoded

pytestmark = pytest.mark.redis
OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
CALM_MS = 5_000  # for tests of everything but the timeout, on a busy machine


def connected(server: Any) -> Any:
    return closing(redis.Redis.from_url(server.url, protocol=2))


@pytest.fixture
def start_shared(start_service, redis_server):
    def start(**options: Any) -> Any:
        settings = {"redis_timeout_ms": CALM_MS} | options
        return start_service(redis_url=redis_server.url, **settings)

    return start


def search_and_store(service: Any, data: bytes) -> Any:
    """A search whose values have reached Redis when it returns."""
    response = service.search(data)
    until(lambda: service.runtime.redis.pending_writes == 0)
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
    search_and_store(start_shared(), photos[0])
    with connected(redis_server) as client:
        keys = client.keys("kinlens:*")
        assert len(keys) == 2
        assert all(0 < client.ttl(key) <= 86_400 for key in keys)
        assert all(client.get(key)[16:18] != b"\x80\x04" for key in keys)


@pytest.mark.parametrize("garbage", [b"", bytes(144)])
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


CLIENTS = 8
NUMBERS = itertools.count(1_000)


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
    settings = {"redis_url": redis_server.url, "redis_timeout_ms": 50}
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
        until(lambda: service.runtime.redis.pending_writes == 0)
        return other.search(data).json()["cached"]

    until(is_shared)  # on a busy machine an answer may take Redis 50 ms, and is not kept then


def test_the_default_timeout_is_below_200_ms(start_service, redis_server) -> None:
    """No time is measured: a limit of 200 ms or more would let the answers come."""
    service = start_service(redis_url=redis_server.url)
    until(lambda: is_up(service))
    with connected(redis_server) as client:

        def is_away_once_paused() -> bool:
            client.execute_command("CLIENT PAUSE", 200)
            assert service.search(new_photo()).status_code == 200
            return is_down(service)

        until(is_away_once_paused)


def test_a_full_redis_is_no_outage(start_service, redis_server, photos) -> None:
    with connected(redis_server) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        service = start_service(redis_url=redis_server.url, redis_timeout_ms=5_000)
        with load(service, photos) as searched:
            searched(30)
        assert client.dbsize() == 0
        until(lambda: is_down(service))
        assert "allkeys-lru" in service.client.get("/ready").json()["redis_fault"]
        client.config_set("maxmemory", 0)
        until(lambda: is_up(service))
        service.search(new_photo())
        until(lambda: client.dbsize() > 0)


def user(*rules: str) -> Any:
    """Makes a user with these permissions, and returns its part of the URL."""

    def make(client: Any) -> str:
        client.execute_command("ACL", "SETUSER", "kin", "on", ">hunter2", *rules)
        return "kin:hunter2@"

    return make


def password(client: Any) -> str:
    client.config_set("requirepass", "hunter2")
    return ""


def cannot_save(client: Any) -> str:
    client.config_set("dir", "/proc")
    client.config_set("save", "1 1")
    client.set("kinlens:x", 1)
    with contextlib.suppress(redis.ResponseError):
        client.bgsave()
    until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
    return ""


READ = ("~kinlens:*", "+ping", "+select", "+get", "+mget", "+time")
REFUSALS = [
    ("cluster", ("--cluster-enabled", "yes"), None, "", ["Redis Cluster"]),
    ("replica", ("--replicaof", "127.0.0.1 1"), None, "", ["SET", "primary"]),
    ("reader", (), user(*READ), "", ["cache (SET:", "+script|load", "rate limits (EVALSHA:"]),
    ("no script", (), user(*READ, "+set"), "", ["EVALSHA", "works for cache"]),
    ("other keys", (), user("~shop:*", "+@all"), "", ["~kinlens:*"]),
    ("no time", (), user(*READ, "+set", "+evalsha", "+script", "-time"), "", ["works for cache"]),
    ("no such database", (), None, "/99", ["number of the database"]),
    ("password", (), password, "", ["KINLENS_REDIS_URL"]),
    ("renamed", ("--rename-command", "EVALSHA", ""), None, "", ["EVALSHA", "works for cache"]),
    ("no disk", ("--enable-protected-configs", "yes"), cannot_save, "", ["save to its disk"]),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case[0])
def test_a_redis_that_refuses_commands_is_down_and_says_why(
    case: Any, start_service, redis_server, tiny_settings, monkeypatch
) -> None:
    """It answers PING. The service does without it; every way to look names command and cure."""
    _, options, prepare, database, texts = case
    redis_server.kill()
    redis_server.start(*options)
    with connected(redis_server) as client:
        login = prepare(client) if prepare else ""
    address = f"redis://127.0.0.1:{redis_server.port}{database or '/0'}"
    url = address.replace("//", f"//{login}")
    with structlog.testing.capture_logs() as events:
        service = start_service(redis_url=url, redis_timeout_ms=CALM_MS)
    assert is_down(service)
    assert "kinlens_redis_up 0.0" in service.client.get("/metrics").text
    fault = service.client.get("/ready").json()["redis_fault"]
    [logged] = [one for one in events if one["event"] in ("redis refuses", "redis is away")]
    for name, value in tiny_settings.items():
        monkeypatch.setenv(f"KINLENS_{name.upper()}", str(value))
    monkeypatch.setenv("KINLENS_REDIS_URL", url)
    checked = CliRunner().invoke(app, ["check", "--json", "--port", "0"])
    found = {one["subject"]: one for one in json.loads(checked.output)["findings"]}["redis"]
    assert found["verdict"] == "warning"
    assert logged["address"] == address
    for text in (fault, found["text"], f"{address} {logged['detail']}"):
        assert "hunter2" not in text
        assert all(part in text for part in (address, *texts)), text
    assert service.search(new_photo()).status_code == 200


def test_the_documented_permissions_are_enough(start_service, redis_server) -> None:
    rules = re.search(r"ACL SETUSER kinlens on >PASSWORD (.*)", OPERATIONS.read_text("utf-8"))
    assert rules
    with connected(redis_server) as client:
        login = user(*rules[1].split())(client)
    url = redis_server.url.replace("//", f"//{login}")
    service = start_service(
        redis_url=url, redis_timeout_ms=CALM_MS, rate_limit_per_address="3/minute"
    )
    assert is_up(service)
    statuses = [service.search(new_photo()).status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    until(lambda: service.runtime.redis.pending_writes == 0)
    with connected(redis_server) as client:
        assert len(client.keys("kinlens:*")) == 3 * 2 + 1


def test_one_request_waits_for_a_slow_redis_once(start_service, redis_server) -> None:
    """For its rate, and answers and vectors of its queries: each call alone is within the limit."""
    limit_s, pause_ms = 2.0, 800
    service = start_service(
        redis_url=redis_server.url, redis_timeout_ms=2_000, rate_limit_per_address="999/hour"
    )
    service.search(new_photo()).raise_for_status()
    queries = [{"images": [{"data": text_of(new_photo())}]} for _ in range(12)]
    with connected(redis_server) as client:

        def pause(_: int) -> None:
            client.execute_command("CLIENT PAUSE", pause_ms)
            time.sleep(pause_ms / 1e3)

        with repeating(pause):
            started = time.monotonic()
            answers = post(service, {"queries": queries}, "/search/batch").json()["answers"]
            assert time.monotonic() - started < 1.5 * limit_s
    assert [answer["status"] for answer in answers] == [200] * 12


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
