"""The concurrent load on the service, and the checks of its answers."""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from soak_memory import Points, tree, tree_mb
from soak_shop import Shop

SEARCHERS = 3
KINDS = ("again", "new", "crop", "filter", "damaged", "like")
EXPECTED = {200, 202, 422, 429, 503}
JOB_S = 120.0
REFUSED = {429, 503}


@dataclass
class Tally:
    """Results of all threads. `period` is the number of seconds between faults."""

    period: float
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: Points = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str, status: int) -> None:
        """Count an answer; an unexpected status is a fault."""
        with self.lock:
            self.statuses[what, status] += 1
        if status not in EXPECTED:
            self.fault(f"{what} returned status {status}")

    def fault(self, text: str) -> None:
        """Record a wrong answer."""
        with self.lock:
            self.wrong.append(text)

    def answered(self, what: str) -> int:
        """The number of requests of a kind that were answered successfully."""
        return sum(
            n
            for (kind, status), n in self.statuses.items()
            if kind == what and status in (200, 422)
        )

    def refused(self) -> float:
        """The share of all requests that was refused."""
        refused = sum(n for (_, status), n in self.statuses.items() if status in REFUSED)
        return refused / max(1, self.statuses.total())

    @contextlib.contextmanager
    def requests(self, what: str) -> Iterator[None]:
        """A block of requests that must all be answered."""
        try:
            yield
        except (httpx.HTTPError, TimeoutError) as error:
            self.fault(f"{what}: {type(error).__name__} {error}")


def searches(shop: Shop, tally: Tally) -> None:
    """Search in a loop; an image of the gallery must find itself."""
    rng = random.Random(threading.get_ident())
    with shop.client() as client:
        for number in itertools.count():
            if tally.over.is_set():
                return
            kind, image = rng.choice(KINDS), rng.choice(shop.images)
            data, fields = _question(shop, kind, image, number.to_bytes(8, "big"))
            with tally.requests(kind):
                answer = client.post("/search", data=fields, files={"image": data})
                tally.count(kind, answer.status_code)
                if answer.status_code == 200:
                    _check(kind, shop.name(image), answer.json(), tally)


def _question(shop: Shop, kind: str, image: Path, mark: bytes) -> tuple[bytes, dict[str, str]]:
    data, fields = image.read_bytes(), {"k": "5", "gallery": "shop"}
    if kind == "new":
        data += mark + os.urandom(4)
    elif kind == "crop":
        fields["crop"] = "0.1,0.1,0.8,0.8"
    elif kind == "filter":
        fields["filter"] = f'class = "{image.parent.name}"'
    elif kind == "like":
        fields["positive"] = shop.name(image)
    elif kind == "damaged":
        data = data[: len(data) // 2]
    return data, fields


def _check(kind: str, name: str, answer: dict[str, Any], tally: Tally) -> None:
    keys = [hit["key"] for hit in answer["hits"]]
    if kind in ("again", "new", "filter") and name not in keys:
        tally.fault(f"{kind}: {name} did not find itself but {keys[:3]}")
    if kind == "damaged":
        tally.fault(f"{kind}: got only half of {name}")
    if kind == "like" and name in keys:
        tally.fault(f"{kind}: {name} was liked, but is in the answer")


def changes(shop: Shop, tally: Tally) -> None:
    """Add an item, find it, delete it, never find it again."""
    with shop.client() as client:
        for number in itertools.count():
            if tally.over.wait(0.2):
                return
            key, data = f"soak/{number}", shop.images[number % len(shop.images)].read_bytes()
            with tally.requests("change"):
                _change(client, key, data + key.encode(), tally)


def _change(client: httpx.Client, key: str, data: bytes, tally: Tally) -> None:
    fields = {"key": key, "attributes": '{"class": "soak"}'}
    put = client.put("/galleries/live/items", data=fields, files={"image": data})
    tally.count("put", put.status_code)
    if put.status_code != 200:
        return
    if key not in _found(client, data, tally):
        tally.fault(f"{key} was acknowledged, but is not found")
    deleted = client.delete("/galleries/live/items", params={"key": key})
    tally.count("delete", deleted.status_code)
    if deleted.status_code == 200 and key in _found(client, data, tally):
        tally.fault(f"{key} was deleted, but is found")


def _found(client: httpx.Client, data: bytes, tally: Tally) -> list[str]:
    fields = {"k": "3", "gallery": "live"}
    for _ in range(20):
        answer = client.post("/search", data=fields, files={"image": data})
        tally.count("find", answer.status_code)
        if answer.status_code == 200:
            return [hit["key"] for hit in answer.json()["hits"]]
        time.sleep(0.5)
    raise TimeoutError("no answer in twenty tries")


def rebuilds(shop: Shop, tally: Tally) -> None:
    """Rebuild one gallery next to the service, which reloads it; compact the other by a job."""
    with shop.client() as client:
        while not tally.over.wait(2 * tally.period):
            done = subprocess.run(shop.build, capture_output=True, text=True)
            tally.count("rebuild", 503 if done.returncode else 200)
            if done.returncode:
                tally.fault(f"rebuild: {done.stderr[-200:]}")
            with tally.requests("compact"):
                _compact(client, tally)


def _compact(client: httpx.Client, tally: Tally) -> None:
    """Compact, as removed items stay in memory until then, or until 10,000 further changes."""
    started = client.post("/galleries/live/compact")
    tally.count("compact", started.status_code)
    if started.status_code != 202:
        return
    address, deadline = started.headers["Location"], time.monotonic() + JOB_S
    while time.monotonic() < deadline:
        answer = client.get(address)
        tally.count("job", answer.status_code)
        job = answer.json() if answer.status_code == 200 else {"state": "unknown"}
        if job["state"] in ("succeeded", "failed", "cancelled"):
            if job["state"] != "succeeded":
                tally.fault(f"compact: {job['state']}, {job['error']}")
            return
        time.sleep(0.5)
    tally.fault(f"compact: {job['state']} after {JOB_S:g} s")


def faults(shop: Shop, tally: Tally) -> None:
    """Inject faults in rotation; the service must recover automatically."""
    for number in itertools.count():
        if tally.over.wait(tally.period):
            return
        if number % 3 == 2:
            for pid in decoders(shop.process.pid)[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif shop.redis is not None and number % 3 == 0:
            shop.redis.process.send_signal(signal.SIGSTOP)
            tally.over.wait(tally.period / 5)
            shop.redis.process.send_signal(signal.SIGCONT)
        elif shop.redis is not None:
            shop.redis.kill()
            tally.over.wait(tally.period / 5)
            shop.redis.start()


def samples(shop: Shop, tally: Tally) -> None:
    """Sample the memory of the process tree every few seconds."""
    started = time.monotonic()
    while not tally.over.wait(tally.period / 6):
        tally.memory.append((time.monotonic() - started, tree_mb(shop.process.pid)))


def decoders(pid: int) -> list[int]:
    """The decoding processes of a service."""
    named = []
    for child in tree(pid)[1:]:
        with contextlib.suppress(OSError):
            if b"kinlens.service.encoding" in Path(f"/proc/{child}/cmdline").read_bytes():
                named.append(child)
    return named
