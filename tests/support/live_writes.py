"""Adds and deletes while searches go on: what must hold meanwhile, for a test and for a soak."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import httpx
import numpy as np

from tests.tiny import encoded, picture

_SEARCHERS = 4
_WRITERS = 2


@dataclass
class Live:
    """What the writers know so far, and what the searchers saw."""

    deleted: set[int] = field(default_factory=set)
    searches: int = 0
    faults: list[str] = field(default_factory=list)

    def check(self, response: httpx.Response, deleted: set[int]) -> Any:
        """The answer; an error, or an item deleted before the search began, is a fault."""
        if not response.is_success:
            self.faults.append(f"{response.request.method} {response.status_code} {response.text}")
            return None
        answer = response.json()
        returned = {hit["id"] for hit in answer.get("hits", ())}
        if returned & deleted:
            self.faults.append(
                f"deleted items were returned: {sorted(returned & deleted)}, cached: "
                f"{answer['cached']}, version {answer['gallery_version'][:12]}"
            )
        return answer


def live_writes(
    url: str, gallery: str, adds: int, deletes: int, searches_per_s: float, seed: int = 0
) -> Live:
    """Add `adds` items and delete `deletes` of them while others search; what went wrong.

    Each added item must be found after its acknowledgement, and no deleted one ever again.
    """
    live = Live()
    pictures = [encoded(picture(seed + n, (24, 20))) for n in range(adds)]
    added: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
    with (
        httpx.Client(base_url=url, timeout=30) as client,
        _searching(client, gallery, pictures, searches_per_s, live),
        ThreadPoolExecutor(_WRITERS + 1) as pool,
    ):
        deleting = pool.submit(_delete, client, gallery, deletes, added, live)
        adding = [
            pool.submit(_add, client, gallery, number, data, added, live)
            for number, data in enumerate(pictures)
        ]
        for one in adding:
            one.result()
        added.put(None)
        deleting.result()
    return live


def _add(
    client: httpx.Client,
    gallery: str,
    number: int,
    data: bytes,
    added: "SimpleQueue[tuple[str, int] | None]",
    live: Live,
) -> None:
    key = f"live/{number}"
    parts: list[Any] = [("image", ("x", data)), ("key", (None, key))]
    answer = live.check(client.put(f"/galleries/{gallery}/items", files=parts), set())
    if answer is None:
        return
    item = answer["items"][0]
    deleted = set(live.deleted)
    found = live.check(_search(client, gallery, data), deleted)
    if found is not None and item["id"] not in [hit["id"] for hit in found["hits"]]:
        live.faults.append(f"{key} was acknowledged and not found")
    added.put((key, item["id"]))


def _delete(
    client: httpx.Client,
    gallery: str,
    count: int,
    added: "SimpleQueue[tuple[str, int] | None]",
    live: Live,
) -> None:
    for _ in range(count):
        item = added.get()
        if item is None:
            return
        key, number = item
        url = f"/galleries/{gallery}/items"
        answer = live.check(client.delete(url, params={"key": key}), set())
        if answer is not None and answer["removed"] != 1:
            live.faults.append(f"{key} was there and not removed")
        live.deleted.add(number)


@contextmanager
def _searching(
    client: httpx.Client, gallery: str, pictures: Sequence[bytes], per_s: float, live: Live
) -> Iterator[None]:
    over = threading.Event()

    def search(seed: int) -> None:
        rng = np.random.default_rng(seed)
        due = time.monotonic()
        while not over.is_set():
            deleted = set(live.deleted)
            data = pictures[int(rng.integers(len(pictures)))]
            live.check(_search(client, gallery, data), deleted)
            live.searches += 1
            due += _SEARCHERS / per_s
            over.wait(max(0.0, due - time.monotonic()))

    with ThreadPoolExecutor(_SEARCHERS) as pool:
        running = [pool.submit(search, seed) for seed in range(_SEARCHERS)]
        try:
            yield
        finally:
            over.set()
        for one in running:
            one.result()


def _search(client: httpx.Client, gallery: str, data: bytes) -> httpx.Response:
    files = {"image": ("query", data)}
    return client.post("/search", files=files, data={"gallery": gallery, "k": "5"})
