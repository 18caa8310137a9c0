"""Request bodies: refused by their announced size, their real size and their duration; and long
filters, which are slow to parse, so that no route parses them on the event loop.
"""

import asyncio
import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import structlog

from kinlens.service.api import fields
from tests.support.servers import STALLED
from tests.support.shops import assert_problem, start_shop
from tests.support.waiting import until


@contextlib.contextmanager
def readers_held(service: Any) -> Any:
    """All threads that read bodies are busy inside this block."""
    pool, gate = service.runtime.pools["body"], threading.Event()
    started = threading.Semaphore(0)

    def hold() -> None:
        started.release()
        gate.wait()

    with ThreadPoolExecutor(2) as threads:
        held = [threads.submit(asyncio.run, pool.run(hold)) for _ in range(2)]
        try:
            for _ in held:
                started.acquire()
            yield
        finally:
            gate.set()


LEFT = (
    *(b"POST /search", b"POST /search/batch", b"POST /galleries"),
    *(b"PUT /galleries/shop/items", b"POST /galleries/shop/golden"),
)
ASKING = STALLED.replace(b"Content-Type", b"Expect: 100-continue\r\nContent-Type")


def test_a_60_mb_body_is_413_naming_size_and_limit(running_service, photos) -> None:
    response = running_service.search(bytes(60 * 2**20))
    detail = assert_problem(response, 413, "body-too-large")["detail"]
    assert f"{int(response.request.headers['content-length']):,}" in detail
    assert f"{20 * 2**20 + 64 * 2**10:,}" in detail
    assert "nosniff" in response.headers["x-content-type-options"]
    assert running_service.search(photos[0]).status_code == 200


def test_a_body_that_does_not_say_its_size_is_cut_off_at_the_limit(start_service, photos) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"--b\r\nContent-Disposition: form-data; name=image; filename=a\r\n\r\n"
        for _ in range(30):
            yield bytes(10_000)
        yield b"\r\n--b--\r\n"

    service = start_service(max_upload_bytes=100_000)
    headers = {"content-type": "multipart/form-data; boundary=b"}
    response = service.client.post("/search", content=chunks(), headers=headers)
    detail = assert_problem(response, 413, "body-too-large")["detail"]
    assert f"more than {100_000 + 64 * 2**10:,} bytes" in detail
    assert service.search(photos[0]).status_code == 200


def test_a_large_body_is_refused_on_every_route(start_service) -> None:
    service = start_service(max_upload_bytes=1000)
    for path, status in (("/search", 413), ("/jobs/train", 403), ("/nowhere", 404), ("/live", 405)):
        assert service.client.post(path, content=bytes(200_000)).status_code == status


def test_an_announced_body_is_refused_before_it_is_sent(running_service) -> None:
    asking = ASKING.replace(b"Content-Length: 5000", b"Content-Length: 99999999")
    head, _, _ = asking.partition(b"--b")
    answer = running_service.connect(head).makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"100 Continue" not in answer


def test_an_aborted_body_leaves_nothing_behind(photos, tmp_path, closes) -> None:
    shop = closes(start_shop(tmp_path / "state"))
    service = shop.running
    with structlog.testing.capture_logs() as events:
        for start in LEFT:
            service.connect(STALLED.replace(b"POST /search", start)).close()
        until(lambda: sum(event["event"] == "request" for event in events) == len(LEFT))
    assert [event.get("status") for event in events] == [499] * len(LEFT), events
    assert service.search(photos[0]).status_code == 200
    assert service.metric("kinlens_searches_in_flight") == 0


SMALL = {"max_upload_bytes": 100_000, "max_batch_bytes": 1_000, "max_held_bytes": 400_000}


def padded(data: bytes) -> bytes:
    return data + bytes(90_000)


def test_bodies_are_counted_until_they_are_answered(start_service, embedder, photos) -> None:
    service = start_service(**SMALL, search_threads=1)
    embedder.gate.clear()
    with ThreadPoolExecutor(4) as clients:
        held = [clients.submit(service.search, padded(data)) for data in photos[:4]]
        until(lambda: service.metric("kinlens_searches_in_flight") == 4)
        refused = service.search(padded(photos[4]))
        small = service.client.post("/search/batch", json={})
        embedder.gate.set()
        assert [call.result().status_code for call in held] == [200] * 4
    detail = assert_problem(refused, 503, "overloaded")["detail"]
    assert "400,000 bytes" in detail
    assert int(refused.headers["retry-after"]) >= 1
    assert small.status_code == 422, "a small body still fits"
    assert service.search(padded(photos[4])).status_code == 200


def test_announced_bodies_reserve_no_memory(start_service, photos) -> None:
    service = start_service(**SMALL)
    for _ in range(100):
        announced = service.connect(ASKING.replace(b"Length: 5000", b"Length: 99999"))
        assert b" 100 Continue" in announced.recv(100)
    assert service.search(padded(photos[0])).status_code == 200


def test_a_full_budget_refuses_new_bodies_until_others_end(start_service, photos) -> None:
    service = start_service(**SMALL)
    unfinished = STALLED.replace(b"Length: 5000", b"Length: 99999") + bytes(95_000)
    held = []

    def is_full() -> bool:
        held.append(service.connect(unfinished))
        return bool(service.search(padded(photos[0])).status_code == 503)

    until(is_full)
    for connection in held:
        connection.close()
    until(lambda: service.search(padded(photos[0])).status_code == 200)


def test_no_route_parses_a_long_filter_on_the_event_loop(
    tmp_path, photos, monkeypatch, closes
) -> None:
    shop = closes(start_shop(tmp_path / "state"))
    shop.put({"a": photos[0], "b": photos[1]}, price=1)
    on_the_loop: list[bool] = []

    def watched(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def look(value: Any) -> Any:
            on_the_loop.append(asyncio._get_running_loop() is not None)
            return parse(value)

        return look

    for name in ("parse_filter", "filter_from_json"):
        monkeypatch.setattr(fields, name, watched(getattr(fields, name)))
    text = f"price in ({','.join(['1'] * 800)})"
    hidden = json.dumps({"positives": ["a"], "filter": text}).replace("filter", "\\u0066ilter")
    as_json = {"content-type": "application/json"}
    tree = {"filter": {"price": {"in": [7] * 800}}}
    for number, answer in enumerate(
        (
            shop.search(photos[2], filter=text),
            shop.client.post("/search", content=hidden, headers=as_json),
            shop.client.get(f"{shop.url}/items", params={"filter": text}),
            shop.client.post(f"{shop.url}/items/delete", json=tree),
        )
    ):
        assert answer.status_code == 200, answer.text
        assert len(on_the_loop) > number
    assert not any(on_the_loop)


def test_json_has_a_larger_limit_than_an_upload(start_service) -> None:
    service = start_service(max_upload_bytes=100_000, max_batch_bytes=400_000)

    def status(size: int, kind: str) -> int:
        headers = {"content-type": kind}
        answer = service.client.post("/search", content=b"[" * size, headers=headers)
        return int(answer.status_code)

    assert status(300_000, "application/json") in (400, 422)
    assert status(600_000, "application/json") == status(300_000, "image/png") == 413


def test_the_queue_of_bodies_is_bounded(start_service) -> None:
    service = start_service(queue_size=2)
    with ThreadPoolExecutor(2) as clients, readers_held(service):
        pool = service.runtime.pools["body"]
        waiting = [clients.submit(service.search, bytes(2**20)) for _ in range(2)]
        until(lambda: pool.waiting == 2)
        refused = service.search(bytes(2**20))
        assert "body stage" in assert_problem(refused, 503, "overloaded")["detail"]
    assert {call.result().status_code for call in waiting} == {415}


@pytest.mark.parametrize("kind", ["form", "JSON"])
def test_a_queued_body_respects_the_time_limit(start_service, kind: str) -> None:
    service = start_service(request_timeout_ms=300)
    sent: dict[str, Any] = {"files": {"image": bytes(2**20)}}
    if kind == "JSON":
        sent = {"json": {"images": [{"data": "A" * 2**20}]}}
    with readers_held(service):
        refused = service.client.post("/search", **sent)
    assert "0.3 s" in assert_problem(refused, 503, "deadline-exceeded")["detail"]
    until(lambda: service.client.post("/search", **sent).status_code != 503)  # on a busy machine


@pytest.mark.parametrize("path", ["/search", "/search/batch", "/v1/embeddings"])
def test_parsing_and_what_follows_share_one_limit(
    start_service, embedder, photos, path: str
) -> None:
    service = start_service(request_timeout_ms=3_000, anonymous_scopes=("search", "embed"))
    data = base64.b64encode(photos[0] + bytes(2**18)).decode()
    sent = {"queries": [{"images": [{"data": data}]}], "input": data, "images": [{"data": data}]}
    name = {"/search": "images", "/search/batch": "queries"}.get(path, "input")
    embedder.gate.clear()
    with ThreadPoolExecutor(1) as client:
        with readers_held(service):
            begun = time.monotonic()
            answer = client.submit(service.client.post, path, json={name: sent[name]})
            until(lambda: service.runtime.pools["body"].waiting)
            time.sleep(begun + 2 - time.monotonic())  # of its 3 s it waits two to be parsed
        refused = answer.result()
    took_s = time.monotonic() - begun
    embedder.gate.set()
    assert "3 s" in refused.text
    assert "deadline-exceeded" in refused.text
    assert took_s < 4.5, "each had a limit of its own"


def test_a_body_that_waits_twice_to_be_read_has_one_limit(start_service, photos) -> None:
    service = start_service(request_timeout_ms=3_000)
    pool, again = service.runtime.pools["body"], threading.Event()
    sent = {"images": [{"data": base64.b64encode(photos[0] + bytes(2**18)).decode()}]}
    with ThreadPoolExecutor(3) as threads:
        try:
            with readers_held(service):
                begun = time.monotonic()
                answer = threads.submit(service.client.post, "/search", json=sent)
                until(lambda: pool.waiting == 1)
                for _ in range(2):  # they begin before its images are decoded
                    threads.submit(asyncio.run, pool.run(again.wait))
                until(lambda: pool.waiting == 3)
                time.sleep(begun + 2 - time.monotonic())
            refused = answer.result()
            took_s = time.monotonic() - begun
        finally:
            again.set()
    assert "3 s" in assert_problem(refused, 503, "deadline-exceeded")["detail"]
    assert took_s < 4.5, "each wait had a limit of its own"
