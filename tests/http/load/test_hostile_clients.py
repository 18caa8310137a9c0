"""Clients that send or hold too much: each is bounded, and others are answered."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.servers import STALLED, FakeGallery
from tests.support.shops import assert_problem
from tests.support.waiting import until

GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
LATE = GET.replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\n")  # answered without its body


def test_a_few_pipelined_requests_are_answered_in_their_order(running_service) -> None:
    lost = GET.replace(b"/live", b"/nowhere")
    sent = (GET + lost) * 4 + LAST
    answers = running_service.connect(sent).makefile("rb").read()
    statuses = [part.split()[0] for part in answers.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"404"] * 4 + [b"200"]


def test_a_connection_that_pipelines_thousands_of_requests_ends(running_service) -> None:
    before = running_service.connections
    clients = [running_service.connect() for _ in range(10)]
    for client in clients:
        with contextlib.suppress(ConnectionError):
            client.sendall(GET * 5_000)
    until(lambda: running_service.connections <= before)
    for client in clients:
        answered = b""
        with contextlib.suppress(ConnectionError):
            while part := client.recv(2**20):
                answered += part
        assert answered.count(b"HTTP/1.1 200") < 100
    assert running_service.client.get("/live").status_code == 200


def test_unread_answers_hold_a_bounded_number_of_bytes(start_service, embedder, photos) -> None:
    size, budget = 16 * 2**20, 40 * 2**20
    gallery = FakeGallery(embedder, [photos[0] + bytes(size)])
    service = start_service(galleries={"shop": gallery}, limits={"max_unread_bytes": budget})
    path = "/galleries/shop/items/0/image"
    sent = GET.replace(b"/live", path.encode())

    def unread() -> int:
        connections = list(service.server.server_state.connections)
        return sum(each.transport.get_write_buffer_size() for each in connections)

    clients = []
    for _ in range(15):
        clients.append(service.connect(sent))
        assert clients[-1].recv(12) == b"HTTP/1.1 200"
        until(lambda: unread() <= budget)  # the loop cuts one off right after it was written to
    assert unread() > 0
    assert len(service.client.get(path).content) > size
    assert len(service.server.server_state.connections) < len(clients)


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


@pytest.mark.parametrize("kind", ["form", "JSON"])
def test_a_queued_body_respects_the_time_limit(start_service, kind: str) -> None:
    service = start_service(request_timeout_ms=300)
    sent: dict[str, Any] = {"files": {"image": bytes(2**20)}}
    if kind == "JSON":
        sent = {"json": {"images": [{"data": "A" * 2**20}]}}
    with readers_held(service):
        refused = service.client.post("/search", **sent)
    assert "0.3 s" in assert_problem(refused, 503, "deadline-exceeded")["detail"]
    assert service.client.post("/search", **sent).status_code != 503


def test_the_queue_of_bodies_is_bounded(start_service) -> None:
    service = start_service(queue_size=2)
    with ThreadPoolExecutor(2) as clients, readers_held(service):
        pool = service.runtime.pools["body"]
        waiting = [clients.submit(service.search, bytes(2**20)) for _ in range(2)]
        until(lambda: pool.waiting == 2)
        refused = service.search(bytes(2**20))
        assert "body stage" in assert_problem(refused, 503, "overloaded")["detail"]
    assert {call.result().status_code for call in waiting} == {415}


def test_a_pipelined_request_waits(start_service, embedder, photos, monkeypatch) -> None:
    """Otherwise its answer would wait in memory behind the first one, outside the limit."""
    large = photos[0] + bytes(16 * 2**20)
    gallery = FakeGallery(embedder, [large, photos[1]])
    service = start_service(galleries={"shop": gallery})
    asked, item = [], gallery.item

    def recorded(number: int) -> Any:
        asked.append(number)
        return item(number)

    monkeypatch.setattr(gallery, "item", recorded)
    client = service.connect(GET.replace(b"/live", b"/galleries/shop/items/0/image"))
    answers = client.makefile("rb")
    assert answers.read(12) == b"HTTP/1.1 200"
    client.sendall(LAST.replace(b"/live", b"/galleries/shop/items/1/image"))
    assert service.client.get("/galleries/shop/items/1/image").content == photos[1]
    assert asked == [0, 1], "the one behind the answer waits"
    rest = answers.read()
    assert len(rest) > len(large)
    assert rest.endswith(photos[1])


@pytest.mark.parametrize("kind", ["bodies", "answers", "pipelined bodies", "late bodies"])
def test_slow_connections_are_replaced(start_service, embedder, photos, kind: str) -> None:
    gallery = FakeGallery(embedder, [photos[0] + bytes(8 * 2**20)])
    service = start_service(galleries={"shop": gallery}, limits={"max_connections": 20})
    sent = GET.replace(b"/live", b"/galleries/shop/items/0/image")
    if kind != "answers":
        sent = {"bodies": STALLED, "pipelined bodies": GET + STALLED[:-5]}.get(kind, LATE)
    slow = []
    for _ in range(40):
        slow.append(service.connect(sent))
        if kind != "bodies":
            assert slow[-1].recv(12) == b"HTTP/1.1 200"
        if kind == "late bodies":
            slow[-1].sendall(b"x")
    connections = service.server.server_state.connections

    def waits(one: Any) -> bool:
        """For its client: what is being answered is not closed."""
        return bool(one.is_idle or one.cycle.more_body or one.transport.get_write_buffer_size() > 0)

    until(lambda: len(connections) <= 20 and all(map(waits, list(connections))))
    held = [service.connect(GET) for _ in range(10)]
    for _ in range(2):  # none of them gives way to another one
        for fresh in held:
            assert fresh.recv(4096).startswith(b"HTTP/1.1 200")
            fresh.sendall(GET)
    for client in (*slow, *held):
        client.close()
