"""Many clients at once: some of them fail, leave or overload; the others get right answers."""

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinlens.embedder.errors import (
    BundleMismatchError,
    DeadlineExceededError,
    UnsupportedFormatError,
)
from kinlens.indexer.types import SearchOptions
from kinlens.service.concurrency import (
    DaemonThreads,
    KeyedThreads,
    SearchThreads,
    SingleFlight,
    in_thread,
)
from tests.support.seams import Batcher, LruCache
from tests.support.servers import (
    DEFAULTS,
    FakeGallery,
    GatedEmbedder,
    Running,
    create_app,
    run,
    settings_of,
    workers_of,
)
from tests.support.shops import assert_problem
from tests.support.waiting import until
from tests.tiny import encoded, photo

SLOW_LIMITS: dict[str, Any] = {
    "decode_timeout_ms": 60_000,
    "request_timeout_ms": 60_000,
}
NUMBERS = itertools.count()


def new(data: bytes) -> bytes:
    """The same PNG image as other bytes, so that no cache and no flight knows it."""
    return data + next(NUMBERS).to_bytes(4, "big")


def first_hits(responses: Any) -> list[int]:
    return [response.json()["hits"][0]["id"] for response in responses]


def send_raw(service: Running, data: bytes) -> socket.socket:
    """A request for a search, on a connection that the caller drops."""
    body = b"--b\r\nContent-Disposition: form-data; name=image; filename=q.png\r\n\r\n"
    body += data + b"\r\n--b--\r\n"
    head = (
        "POST /search HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return service.connect(head.encode() + body)


def decoding(service: Running) -> set[int]:
    """The processes that have allocated the 48 megapixels of `heavy`."""

    def resident_bytes(pid: int) -> int:
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
        return 0

    return {pid for pid in workers_of(service).pids if resident_bytes(pid) > 150e6}


def stop_one(service: Running, but: set[int]) -> int:
    """Stop a process in the middle of an image, another than those."""
    found = set[int]()
    until(lambda: found.update(decoding(service) - but) or found)
    os.kill(pid := found.pop(), signal.SIGSTOP)
    return pid


def in_flight(service: Running) -> float:
    return service.metric("kinlens_searches_in_flight")


@pytest.fixture(scope="module")
def gated() -> GatedEmbedder:
    return GatedEmbedder()


@pytest.fixture(scope="module")
def slow(gated: GatedEmbedder, photos: list[bytes]) -> Iterator[Running]:
    """A service for all tests of this file that decodes in processes."""
    galleries = {"shop": FakeGallery(gated, photos)}
    service = run(create_app(settings_of(**DEFAULTS | SLOW_LIMITS), gated, galleries))
    yield service
    service.close()


@pytest.fixture
def isolated(slow: Running) -> Iterator[Running]:
    """The same; checks that nothing is left of what was sent."""
    yield slow
    for gauge in ("kinlens_searches_in_flight", "kinlens_queue_depth"):
        until(lambda gauge=gauge: slow.metric(gauge) == 0)
    until(lambda: not decoding(slow))
    assert slow.client.get("/ready").status_code == 200
    assert slow.metric("kinlens_decoder_restarts") == workers_of(slow).restarts


def test_24_clients_are_answered_while_8_leave_mid_batch(isolated, gated, photos) -> None:
    gated.gate.clear()
    leaving = [send_raw(isolated, new(photos[n])) for n in range(8)]
    with ThreadPoolExecutor(24) as clients:
        staying = [clients.submit(isolated.search, new(photos[n % 12])) for n in range(24)]
        until(lambda: in_flight(isolated) == 32)
        for connection in leaving:
            connection.close()
        until(lambda: in_flight(isolated) == 24)
        gated.gate.set()
        answers = [client.result() for client in staying]
    assert [answer.status_code for answer in answers] == [200] * 24
    assert first_hits(answers) == [n % 12 for n in range(24)]


def test_one_truncated_jpeg_among_31_good_ones_fails_alone(isolated, photos) -> None:
    before = workers_of(isolated).pids
    uploads = [new(photos[n % 12]) for n in range(31)]
    uploads.insert(16, encoded(photo(1), "JPEG")[:-100])
    with ThreadPoolExecutor(32) as clients:
        responses = list(clients.map(isolated.search, uploads))
    assert_problem(responses.pop(16), 422, "corrupt-image")
    assert first_hits(responses) == [n % 12 for n in range(31)]
    assert workers_of(isolated).pids == before


def test_images_of_one_request_are_decoded_at_the_same_time(isolated, heavy) -> None:
    images = [("image", (f"{number}.png", new(heavy), "image/png")) for number in range(3)]
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(isolated.client.post, "/search", files=images)
        until(lambda: len(decoding(isolated)) == 2)
        assert answer.result().status_code == 200


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_killed_process_is_retried_once(isolated, photos, heavy, deaths: int) -> None:
    before, killed = workers_of(isolated).restarts, set()
    with ThreadPoolExecutor(13) as clients:
        doomed = clients.submit(isolated.search, new(heavy))
        for _ in range(deaths):
            killed.add(victim := stop_one(isolated, killed))
            for blow in [signal.SIGKILL] if deaths == 1 else [signal.SIGSEGV, signal.SIGCONT]:
                os.kill(victim, blow)  # one that is stopped takes the other once it continues
        others = [clients.submit(isolated.search, new(data)) for data in photos]
        assert first_hits(other.result() for other in others) == list(range(12))
        if deaths == 1:
            assert doomed.result().status_code == 200
        else:
            assert_problem(doomed.result(), 422, "image-too-costly")
    assert workers_of(isolated).restarts == before + deaths


@pytest.mark.parametrize(
    ("limit", "message"),
    [({"decode_memory_mb": 300}, "300 MB"), ({"decode_timeout_ms": 200}, "0.2 s")],
)
def test_a_costly_image_fails_alone(start_service, photos, heavy, limit, message: str) -> None:
    service = start_service(**SLOW_LIMITS | limit)
    with ThreadPoolExecutor(13) as clients:
        large = clients.submit(service.search, heavy)
        others = [clients.submit(service.search, data) for data in photos]
        assert message in assert_problem(large.result(), 422, "image-too-costly")["detail"]
        assert first_hits(other.result() for other in others) == list(range(12))
    assert workers_of(service).kills == workers_of(service).restarts >= 1


def test_a_client_that_leaves_the_queue_costs_no_inference(start_service, embedder, photos) -> None:
    service = start_service(search_threads=1)
    embedder.gate.clear()
    before = len(embedder.batches)
    with ThreadPoolExecutor(1) as clients:
        first = clients.submit(service.search, photos[0])
        until(lambda: len(embedder.batches) == before + 1)
        connection = send_raw(service, photos[1])
        until(lambda: service.runtime.search_threads.waiting == 1)
        connection.close()
        until(lambda: service.runtime.search_threads.waiting == 0)
        embedder.gate.set()
        assert first.result().json()["hits"][0]["id"] == 0
    assert len(embedder.batches) == before + 1


def test_a_full_queue_is_503_until_it_has_room(start_service, embedder, photos) -> None:
    service = start_service(queue_size=2, search_threads=1)
    embedder.gate.clear()
    before = len(embedder.batches)
    with ThreadPoolExecutor(3) as clients:
        held = [clients.submit(service.search, photos[0])]
        until(lambda: len(embedder.batches) == before + 1)
        for number in (1, 2):
            held.append(clients.submit(service.search, photos[number]))
            until(lambda depth=number: service.runtime.search_threads.waiting == depth)
        refused = service.search(photos[3])
        embedder.gate.set()
        assert [call.result().status_code for call in held] == [200, 200, 200]
    assert_problem(refused, 503, "overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    assert service.search(photos[3]).status_code == 200


def test_batches_have_a_limit_of_their_own(start_service, embedder, photos) -> None:
    service = start_service(queue_size=1, search_threads=1)

    def batch(data: bytes) -> Any:
        return service.client.post("/search/batch", files={"image": new(data)})

    embedder.gate.clear()
    with ThreadPoolExecutor(2) as clients:
        held = clients.submit(batch, photos[0])
        until(lambda: in_flight(service) == 1)
        refused = batch(photos[2])
        single = clients.submit(service.search, photos[1])  # has a place all the same
        until(lambda: in_flight(service) == 2)
        embedder.gate.set()
        assert [held.result().status_code, single.result().status_code] == [200, 200]
    assert_problem(refused, 503, "overloaded")
    assert batch(photos[2]).status_code == 200


def test_an_expired_search_frees_its_thread(start_service, embedder, gallery, photos) -> None:
    """Such a search checks its cancel token between steps, here for up to a minute."""
    reported = []

    class Endless(type(gallery)):
        def search(self, queries: Any, k: int, options: SearchOptions | None = None) -> Any:
            try:
                for _ in range(600):
                    options.checkpoint()
                    threading.Event().wait(0.1)
            except DeadlineExceededError:
                reported.append(True)
                raise

    galleries = {"shop": gallery, "endless": Endless(embedder, photos, "endless")}
    service = start_service(galleries=galleries, request_timeout_ms=500, search_threads=2)
    with ThreadPoolExecutor(4) as clients:
        ask = partial(service.search, gallery="endless")
        for answer in clients.map(ask, photos[:4]):
            assert "0.5 s" in assert_problem(answer, 503, "deadline-exceeded")["detail"]
    until(lambda: service.search(photos[5]).status_code == 200)
    until(lambda: len(reported) >= 2)


def test_one_time_limit_covers_a_search_that_is_repeated(
    start_service, embedder, gallery, photos
) -> None:
    """A gallery on Milvus may switch to another model between two searches."""
    switched = threading.Event()

    class Switching(type(gallery)):
        def search(self, queries: Any, k: int, options: SearchOptions | None = None) -> Any:
            if switched.is_set():
                switched.clear()
                threading.Event().wait(0.7)
                repeated.set()
                raise BundleMismatchError("another bundle")
            if repeated.is_set():
                threading.Event().wait(0.7)
            return super().search(queries, k, options)

    repeated = threading.Event()
    service = start_service(
        galleries={"shop": Switching(embedder, photos)}, request_timeout_ms=1_000
    )
    switched.set()
    answer = service.search(photos[0])
    assert "1 s" in assert_problem(answer, 503, "deadline-exceeded")["detail"]


def test_queued_images_share_a_call_and_a_bad_one_fails_alone() -> None:
    gate, entered, batches = threading.Event(), threading.Event(), []

    def embed(images: Any) -> Any:
        values = images[:, 0, 0, 0]
        batches.append(len(values))
        entered.set()
        assert gate.wait(10)
        if 13 in values:
            raise ValueError("a bad image")
        return values.astype(np.float32)[:, np.newaxis]

    def ask(value: int) -> float:
        return float(batcher.embed(np.full((1, 3, 2, 2), value, dtype=np.uint8)).item())

    batcher = Batcher(embed, batch_size=8)
    values = [*range(20, 29), 13]
    with ThreadPoolExecutor(len(values) + 1) as clients:
        first = clients.submit(ask, 0)
        assert entered.wait(10)
        *good, bad = [clients.submit(ask, value) for value in values]
        until(lambda: batcher.waiting == len(values))
        gate.set()
    assert [call.result() for call in (first, *good)] == [0, *values[:-1]]
    assert isinstance(bad.exception(), ValueError)
    assert batches[:2] == [1, 8]


def test_the_local_cache_evicts_the_least_recently_used() -> None:
    cache = LruCache(max_entries=5, max_bytes=200)
    kept: dict[str, bytes] = {}  # the least recently used first
    rng = np.random.default_rng(0)
    for _ in range(2_000):
        key, size = str(rng.integers(10)), int(rng.integers(0, 90)) if rng.random() < 0.9 else 200
        if rng.random() < 0.5:
            assert cache.get(key) == kept.get(key)
            if key in kept:
                kept[key] = kept.pop(key)
            continue
        cache.set(key, bytes(size))
        kept.pop(key, None)
        if size < 200:
            kept[key] = bytes(size)
        while len(kept) > 5 or sum(map(len, (*kept, *kept.values()))) > 200:
            del kept[next(iter(kept))]


WAYS = ("pool", "each", "thread", "keyed", "shared", "call")


@pytest.mark.parametrize("way", WAYS)
def test_what_a_failed_call_held_is_freed_without_a_garbage_collection(way: str) -> None:
    class Photo:
        """Unlike bytes it can be watched."""

    alive: list[weakref.ref[Photo]] = []

    async def fail() -> None:
        threads, photo = SearchThreads(2, 8), Photo()
        alive.append(weakref.ref(photo))

        def work(_: object = None) -> None:
            assert photo
            raise UnsupportedFormatError("no image")

        match way:
            case "pool":
                await threads.run(work)
            case "each":
                await threads.run(lambda: threads.each(work, "ab"))
            case "thread":
                await in_thread(work)
            case "keyed":
                await KeyedThreads(1).run("key", work, 5.0)
            case "shared":
                await SingleFlight[None]().run("key", lambda: threads.run(work))
            case "call":
                DaemonThreads("test", 1).call(work, 5.0)

    async def call() -> None:
        with pytest.raises(UnsupportedFormatError):
            await fail()
        await asyncio.to_thread(until, lambda: alive[0]() is None)

    gc.disable()
    try:
        asyncio.run(call())
    finally:
        gc.enable()
