"""Several replicas over one Milvus and one Redis, all real processes: `make scale-check`."""

import itertools
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.session import OnnxEmbedder
from tests.support.milvus_server import MilvusServer, started_server
from tests.support.own_process import OwnProcess, own_process
from tests.support.seams import MilvusStore
from tests.support.servers import WAIT_S, RedisServer, render
from tests.support.waiting import repeating, until
from tests.tiny import encoded

pytestmark = [pytest.mark.milvus, pytest.mark.redis]

REPLICAS = 3
ITEMS = 120
AT_ONCE = 40
CLIENTS = 6
REDIS_TIMEOUT_S = 0.2
SLACK_S = 1.0  # of a busy machine


@dataclass
class Fleet:
    """Replicas, and what they share."""

    replicas: list[OwnProcess]
    milvus: MilvusServer
    redis: RedisServer
    settings: dict[str, Any]


def search(url: str, data: bytes, **fields: Any) -> httpx.Response:
    files = {"image": ("query.png", data, "image/png")}
    return httpx.post(f"{url}/search", files=files, data=fields, timeout=WAIT_S)


def put(url: str, numbers: range) -> None:
    parts: list[Any] = [("image", ("x.png", encoded(render(n)))) for n in numbers]
    parts += [("key", (None, f"{n}.png")) for n in numbers]
    parts += [("attributes", (None, json.dumps({"number": n}))) for n in numbers]
    response = httpx.put(f"{url}/galleries/shop/items", files=parts, timeout=60)
    assert response.status_code == 200, response.text
    assert response.json()["failed"] == 0


@pytest.fixture(scope="module")
def fleet(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_bundle: Bundle,
) -> Iterator[Fleet]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed; install it to test replicas")
    folder = tmp_path_factory.mktemp("fleet")
    embedder = OnnxEmbedder.open(tiny_bundle)
    for milvus in started_server(request, folder / "milvus"):
        MilvusStore.publish(
            milvus.uri, "shop", dim=embedder.dim, bundle_id=embedder.bundle_id
        ).close()
        with ExitStack() as stack:
            redis = RedisServer(folder)
            redis.start()
            stack.callback(redis.kill)
            settings = {
                "bundle": tiny_bundle.path,
                "galleries": f"shop=milvus://{milvus.uri.removeprefix('http://')}/shop",
                "pictures": f"shop=file://{folder}/pictures",
                "redis_url": redis.url,
                "redis_timeout_ms": int(REDIS_TIMEOUT_S * 1e3),
                "anonymous_scopes": "admin",
                "search_threads": 2,
            }
            replicas = [
                stack.enter_context(own_process(folder / f"{n}.log", **settings))
                for n in range(REPLICAS)
            ]
            for start in range(0, ITEMS, AT_ONCE):
                put(replicas[0].url, range(start, start + AT_ONCE))
            yield Fleet(replicas, milvus, redis, settings)


def test_items_put_through_one_replica_are_found_by_others(fleet) -> None:
    others = itertools.cycle(replica.url for replica in fleet.replicas[1:])

    def key_found(number: int, url: str) -> str:
        answer = search(url, encoded(render(number)), k=1, filter=f"number = {number}").json()
        return str(answer["hits"][0]["key"])

    with ThreadPoolExecutor(CLIENTS) as clients:
        found = list(clients.map(key_found, range(ITEMS), others))
    assert found == [f"{n}.png" for n in range(ITEMS)]


def test_a_removal_is_visible_to_the_next_search_of_another_replica(fleet) -> None:
    one, other, third = (replica.url for replica in fleet.replicas)
    for number in range(ITEMS, ITEMS + 5):
        put(one, range(number, number + 1))
        asked = {"k": 1, "filter": f"number = {number}"}
        data = encoded(render(number))
        [hit] = search(other, data, **asked).json()["hits"]
        assert httpx.get(third + hit["image"]).content == data
        removed = httpx.delete(
            f"{third}/galleries/shop/items", params={"key": hit["key"]}, timeout=WAIT_S
        )
        assert removed.json()["removed"] == 1
        assert search(other, data, **asked).json()["hits"] == []
        assert httpx.get(one + hit["image"]).status_code == 404


def test_replicas_share_the_vectors_of_queries(fleet) -> None:
    data = encoded(render(10_000))
    one, other = (replica.url for replica in fleet.replicas[:2])
    search(one, data).raise_for_status()

    def from_redis() -> bool:
        search(other, data, k=7).raise_for_status()
        text = httpx.get(f"{other}/metrics").text
        return 'kinlens_cache_lookups_total{kind="embedding",level="redis"}' in text

    until(from_redis)


def test_a_killed_replica_loses_only_its_own_requests(fleet, tmp_path) -> None:
    """Each client cycles through the replicas and skips those that refuse connections."""
    outcomes: Counter[str] = Counter()
    numbers = itertools.count()
    with own_process(tmp_path / "log", may_be_killed=True, **fleet.settings) as fourth:
        urls = [replica.url for replica in (*fleet.replicas, fourth)]

        def ask(_: int) -> None:
            number = next(numbers)
            try:
                answer = search(urls[number % len(urls)], encoded(render(number % ITEMS)))
                outcomes[str(answer.status_code)] += 1
            except httpx.ConnectError:
                pass
            except httpx.TransportError:
                outcomes["lost"] += 1

        with repeating(ask, CLIENTS):
            until(lambda: outcomes["200"] >= 20)
            os.kill(fourth.pid, signal.SIGKILL)
            goal = outcomes["200"] + 40
            until(lambda: outcomes["200"] >= goal)
    assert set(outcomes) <= {"200", "lost"}, outcomes
    assert outcomes["lost"] <= CLIENTS


@pytest.mark.parametrize("stop", [signal.SIGSTOP, signal.SIGKILL])
def test_redis_that_stops_costs_at_most_its_timeout(fleet, stop: signal.Signals) -> None:
    fresh = itertools.count(20_000 if stop is signal.SIGSTOP else 30_000)

    def seconds() -> float:
        data = encoded(render(next(fresh)))
        started = time.perf_counter()
        search(fleet.replicas[1].url, data).raise_for_status()
        return time.perf_counter() - started

    usual = max(seconds() for _ in range(5))
    fleet.redis.send(stop)
    try:
        assert max(seconds() for _ in range(10)) < usual + REDIS_TIMEOUT_S + SLACK_S
    finally:
        if stop is signal.SIGKILL:
            fleet.redis.kill()
            fleet.redis.start()
        else:
            fleet.redis.send(signal.SIGCONT)


def test_an_outage_of_milvus_is_a_503_until_it_is_back(fleet) -> None:
    data = encoded(render(0))
    fleet.milvus.kill()
    for replica in fleet.replicas:
        refused = search(replica.url, data)
        assert refused.status_code == 503
        assert refused.json()["type"] == "urn:kinlens:problem:gallery-unavailable"
        assert int(refused.headers["retry-after"]) >= 1
        assert httpx.get(f"{replica.url}/live").status_code == 200
    fleet.milvus.restart()
    for replica in fleet.replicas:
        until(lambda url=replica.url: search(url, data).status_code == 200)
        until(lambda url=replica.url: httpx.get(f"{url}/ready").status_code == 200)
    put(fleet.replicas[0].url, range(500, 501))
    hits = search(fleet.replicas[1].url, encoded(render(500)), k=1, filter="number = 500").json()[
        "hits"
    ]
    assert [hit["key"] for hit in hits] == ["500.png"]
