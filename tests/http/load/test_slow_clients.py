"""Clients that are slow, or send and hold too much, block no other client, and are cut off."""

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from kinlens.service.http.server import listen, reserve, url_of
from tests.support.servers import STALLED, WAIT_S, FakeGallery
from tests.support.waiting import until

HEAD = b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
IN_CHUNKS = STALLED.replace(b"Content-Length: 5000", b"Transfer-Encoding: chunked")


def search(service: Any, data: bytes) -> int:
    """The status of a search on a connection of its own."""
    with httpx.Client(base_url=service.url, timeout=WAIT_S) as client:
        return client.post("/search", files={"image": data}).status_code


def is_closed(connection: socket.socket) -> bool:
    """Whether the server ends the connection without a word; waits for it."""
    with contextlib.suppress(ConnectionError):
        return connection.recv(1000) == b""
    return True


def answer_to(connection: socket.socket, end: bytes = b"}") -> bytes:
    """What comes up to `end`, or until the connection is closed."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while not answer.endswith(end) and (part := connection.recv(1000)):
            answer += part
    return answer


def test_a_dripping_head_is_cut_off(start_service) -> None:
    connection = start_service(body_timeout_ms=300).connect()
    sent = 0
    with contextlib.suppress(ConnectionError):
        for byte in HEAD + b"X-Filler: " + b"a" * 1000:
            connection.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.05)
    assert sent < 500
    assert is_closed(connection)


def test_a_silent_connection_is_closed(start_service) -> None:
    service = start_service(body_timeout_ms=200)
    silent = [service.connect(start) for start in (b"", HEAD, b"G")]
    again = service.connect(HEAD + b"\r\n")
    assert answer_to(again).startswith(b"HTTP/1.1 200")
    again.sendall(HEAD)
    assert all(is_closed(connection) for connection in (*silent, again))


@pytest.mark.parametrize(
    "start",
    [
        b"GET /" + b"a" * 10**6,
        HEAD + b"X-Filler: " + b"a" * 10**6,
        IN_CHUNKS.replace(b"--b\r\n", b"5\r\n--b\r\n\r\n0\r\nX-Trailer: " + b"a" * 10**6),
    ],
    ids=["address", "head", "trailer"],
)
def test_the_size_of_a_head_is_limited(running_service, start: bytes) -> None:
    connection = running_service.connect()
    with contextlib.suppress(ConnectionError):
        for part in range(0, len(start), 10_000):
            connection.sendall(start[part : part + 10_000])
    assert answer_to(connection, b"nothing of the kind").startswith(b"HTTP/1.1 431")


def test_a_client_that_does_not_read_is_cut_off(start_service, embedder, photos) -> None:
    gallery = FakeGallery(embedder, [photos[0] + bytes(16 * 2**20)])
    service = start_service(galleries={"shop": gallery}, body_timeout_ms=300)
    before = service.connections
    connection = service.connect(HEAD.replace(b"/live", b"/galleries/shop/items/0/image") + b"\r\n")
    assert connection.recv(10).startswith(b"HTTP/1.1 2")
    until(lambda: service.connections <= before)
    assert len(answer_to(connection, b"the whole of it")) < 16 * 2**20


def test_a_client_that_reads_slowly_gets_all(start_service, embedder, photos) -> None:
    data = photos[0] + bytes(16 * 2**20)
    service = start_service(galleries={"shop": FakeGallery(embedder, [data])}, body_timeout_ms=500)
    photo = HEAD.replace(b"/live", b"/galleries/shop/items/0/image") + b"Connection: close\r\n\r\n"
    connection, size, began = service.connect(photo), 0, time.monotonic()
    while part := connection.recv(2**20, socket.MSG_WAITALL):
        size += len(part)
        time.sleep(0.1)
    assert size > len(data)
    assert time.monotonic() - began > 3 * 0.5


def test_500_open_connections_block_no_search(start_service, photos) -> None:
    service = start_service(body_timeout_ms=30_000)
    for number in range(500):
        service.connect((b"", HEAD, HEAD + b"\r\n")[number % 3])
    until(lambda: service.connections >= 500)
    assert [search(service, data) for data in photos[:4]] == [200] * 4
    assert service.client.get("/ready").status_code == 200


def test_a_busy_connection_is_not_closed(start_service, embedder, photos) -> None:
    service = start_service(limits={"max_connections": 3})
    embedder.gate.clear()
    with ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(search, service, photos[0])
        assert embedder.entered.acquire(timeout=WAIT_S)  # the warm-up
        assert embedder.entered.acquire(timeout=WAIT_S)
        for _ in range(10):
            service.connect()
        until(lambda: service.connections <= 4)
        embedder.gate.set()
        assert waiting.result() == 200


def test_slow_uploads_end_at_their_limit(start_service, photos) -> None:
    service = start_service(body_timeout_ms=400)
    before = service.connections
    for connection in [service.connect(STALLED) for _ in range(16)]:
        answer = answer_to(connection)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body-too-slow" in answer
        assert b"0.4 s" in answer
    until(lambda: search(service, photos[0]) == 200)
    until(lambda: service.connections <= before)


def test_a_shared_address_is_refused_to_a_second_service() -> None:
    with contextlib.closing(reserve("127.0.0.1", 0)) as reserved:
        host, port = reserved.getsockname()
        assert url_of(reserved) == f"http://127.0.0.1:{port}/"
        with contextlib.closing(listen(host, port, shared=True)):
            for refused in (reserve, listen):
                with pytest.raises(OSError, match="Choose another --port"):
                    refused(host, port)


GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"

LATE = GET.replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\n")  # answered without its body


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
