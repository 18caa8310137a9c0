"""Replicas over one Milvus, all real processes: `make scale-check`."""

import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.session import OnnxEmbedder
from tests.support.milvus_server import MilvusServer, imported, started_server
from tests.support.own_process import OwnProcess, own_process
from tests.support.servers import WAIT_S, render
from tests.support.waiting import repeating, until
from tests.tiny import encoded

pytestmark = [pytest.mark.milvus, pytest.mark.long]

REPLICAS = 2
ITEMS = 20
CLIENTS = 4


@dataclass
class Fleet:
    """Replicas, and what they share."""

    replicas: list[OwnProcess]
    milvus: MilvusServer
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
    folder = tmp_path_factory.mktemp("fleet")
    embedder = OnnxEmbedder.open(tiny_bundle)
    for milvus in started_server(request, folder / "milvus"):
        imported(milvus.uri, "shop", dim=embedder.dim, bundle_id=embedder.bundle_id).close()
        with ExitStack() as stack:
            settings = {
                "bundle": tiny_bundle.path,
                "galleries": f"shop=milvus://{milvus.uri.removeprefix('http://')}/shop",
                "pictures": f"shop=file://{folder}/pictures",
                "anonymous_scopes": "admin",
                "search_threads": 2,
            }
            replicas = [
                stack.enter_context(own_process(folder / f"{n}.log", **settings))
                for n in range(REPLICAS)
            ]
            yield Fleet(replicas, milvus, settings)


def test_puts_and_removals_through_one_replica_are_visible_through_the_other(fleet) -> None:
    one, other = (replica.url for replica in fleet.replicas)
    put(one, range(ITEMS))
    for number in range(ITEMS):
        asked = {"k": 1, "filter": f"number = {number}"}
        data = encoded(render(number))
        [hit] = search(other, data, **asked).json()["hits"]
        assert hit["key"] == f"{number}.png"
        assert httpx.get(one + hit["image"]).content == data
        if number % 4:
            continue
        removed = httpx.delete(
            f"{one}/galleries/shop/items", params={"key": hit["key"]}, timeout=WAIT_S
        )
        assert removed.json()["removed"] == 1
        assert search(other, data, **asked).json()["hits"] == []
        assert httpx.get(other + hit["image"]).status_code == 404


def test_a_killed_replica_loses_only_its_own_requests(fleet, tmp_path) -> None:
    """Each client cycles through the replicas and skips those that refuse connections."""
    outcomes: Counter[str] = Counter()
    numbers = itertools.count()
    with own_process(tmp_path / "log", may_be_killed=True, **fleet.settings) as third:
        urls = [replica.url for replica in (*fleet.replicas, third)]

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
            os.kill(third.pid, signal.SIGKILL)
            goal = outcomes["200"] + 40
            until(lambda: outcomes["200"] >= goal)
    assert set(outcomes) <= {"200", "lost"}, outcomes
    assert outcomes["lost"] <= CLIENTS


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
