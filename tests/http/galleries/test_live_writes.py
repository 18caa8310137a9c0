"""Writes during searches, and killed processes: no acknowledged write is lost."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from tests.support.own_process import own_process
from tests.support.servers import WAIT_S
from tests.support.shops import start_shop
from tests.support.waiting import repeating, until
from tests.tiny import encoded, photo

CHANGES = 60
WRITERS = 3
SEARCHERS = 4
SEARCHES_PER_S = 50
KILLS = 20 if os.environ.get("KINLENS_LONG_TESTS") else 1


def test_adds_and_deletes_are_visible_at_once_to_searches(tmp_path, closes) -> None:
    shop = closes(start_shop(tmp_path))
    kept = {f"kept/{n}": encoded(photo(10_000 + n)) for n in range(20)}
    shop.put(kept)
    photos = [encoded(photo(n, (24, 20))) for n in range(CHANGES)]
    deleted: set[int] = set()
    rng = np.random.default_rng(0)

    def found(data: bytes) -> set[int]:
        before = set(deleted)
        response = shop.search(data, k=5)
        assert response.status_code == 200, response.text
        hits = {hit["id"] for hit in response.json()["hits"]}
        assert not hits & before, "deleted items were returned"
        return hits

    def change(number: int) -> None:
        [item] = shop.put({f"live/{number}": photos[number]})["items"]
        assert item["id"] in found(photos[number]), "acknowledged and not found"
        assert shop.remove(f"live/{number}") == 1
        deleted.add(item["id"])

    def search(_: int) -> None:
        time.sleep(SEARCHERS / SEARCHES_PER_S)
        found(photos[int(rng.integers(CHANGES))])

    with repeating(search, SEARCHERS), ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(change, range(CHANGES)))
    assert shop.items()["total"] == len(kept)
    assert len(shop.compacted()) == len(kept)


@dataclass
class Writer:
    """Puts, patches and deletes until its service dies; knows what was acknowledged."""

    items: dict[str, int] = field(default_factory=dict)
    """The stock of each item that is there."""
    doubted: set[str] = field(default_factory=set)
    """Items whose last change nobody acknowledged."""
    acknowledged: int = 0
    _turn: int = 0

    def run(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            is_alive = True
            while is_alive:
                key, old = f"k/{self._turn}", f"k/{self._turn - 2}"
                parts = [("image", ("x", _photo(key))), ("key", (None, key))]
                stock = {"changes": {key: {"stock": self._turn}}}
                is_alive = (
                    self._change(client, "PUT", key, 0, files=parts)
                    and self._change(client, "PATCH", key, self._turn, json=stock)
                    and self._change(client, "DELETE", old, None, params={"key": old})
                )
                self._turn += 1

    def _change(
        self, client: httpx.Client, method: str, key: str, stock: int | None, **sent: Any
    ) -> bool:
        """Whether the service lives."""
        try:
            answer = client.request(method, "/galleries/shop/items", **sent)
        except httpx.TransportError:
            self.doubted.add(key)
            return False
        assert answer.status_code == 200, answer.text
        self.items.pop(key, None)
        if stock is not None:
            self.items[key] = stock
        self.acknowledged += 1
        return True


def test_a_killed_service_loses_no_write(tmp_path, tiny_bundle) -> None:
    writer = Writer()
    settings = {"bundle": tiny_bundle.path, "state": tmp_path, "anonymous_scopes": "admin"}
    for round_ in range(KILLS + 1):
        with own_process(tmp_path / "log", may_be_killed=True, **settings) as process:
            with httpx.Client(base_url=process.url, timeout=WAIT_S) as client:
                client.post("/galleries", json={"name": "shop"})
                _check(client, writer)
            if round_ == KILLS:
                break
            thread = threading.Thread(target=writer.run, args=(process.url,))
            enough = writer.acknowledged + 8 + 7 * round_ % 20
            thread.start()
            until(lambda enough=enough: writer.acknowledged >= enough)
            os.kill(process.pid, signal.SIGKILL)
            thread.join(WAIT_S)
    assert len(writer.items) < writer.acknowledged / 3, "most were removed again"


def _check(client: httpx.Client, writer: Writer) -> None:
    items: dict[str, dict[str, Any]] = {}
    while len(items) < client.get("/galleries/shop").json()["size"]:
        query = {"limit": 200, "offset": len(items)}
        page = client.get("/galleries/shop/items", params=query).json()
        items |= {item["key"]: item for item in page["items"]}
    sure = writer.items.keys() - writer.doubted
    assert sure <= items.keys() <= writer.items.keys() | writer.doubted
    assert {key: items[key]["attributes"].get("stock", 0) for key in sure} == {
        key: writer.items[key] for key in sure
    }
    for key, item in items.items():
        assert client.get(item["image"]).content == _photo(key), key


def _photo(key: str) -> bytes:
    return encoded(photo(int(key.partition("/")[2]), (24, 20)))
