"""Clients that are slow on purpose block no other client, and are cut off."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.servers import STALLED, WAIT_S, FakeGallery
from tests.support.waiting import until

HEAD = b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
IN_CHUNKS = STALLED.replace(b"Content-Length: 5000", b"Transfer-Encoding: chunked")


def client(service: Any, source: str) -> httpx.Client:
    transport = httpx.HTTPTransport(local_address=source)
    return httpx.Client(base_url=service.url, transport=transport, timeout=WAIT_S)


def search(service: Any, data: bytes, source: str = "127.0.0.1") -> int:
    with client(service, source) as other:
        return other.post("/search", files={"image": data}).status_code


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
    answer = answer_to(connection, b"nothing of the kind")
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


def test_a_body_of_many_small_chunks_is_no_long_head(running_service) -> None:
    head = IN_CHUNKS.removesuffix(b"--b\r\n")
    connection = running_service.connect(head + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n")
    assert b"The form cannot be read" in answer_to(connection)


def test_an_offer_of_h2c_is_answered_in_http_1(running_service) -> None:
    """Java's own client offers h2c with its first request and then continues."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n"
    connection = running_service.connect()
    for head in (HEAD + offer, HEAD):
        connection.sendall(head + b"\r\n")
        assert answer_to(connection).startswith(b"HTTP/1.1 200")


def test_the_limit_of_a_head_does_not_cut_off_answers(start_service, embedder, photos) -> None:
    service = start_service(body_timeout_ms=500)
    embedder.gate.clear()
    threading.Timer(1.0, embedder.gate.set).start()
    assert search(service, photos[0]) == 200


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


def test_idle_connections_above_the_limit_are_closed(start_service) -> None:
    service = start_service(limits={"max_connections": 20})
    held = [service.connect() for _ in range(60)]
    with client(service, "127.0.0.2") as other:
        assert [other.get("/live").status_code for _ in range(3)] == [200] * 3
    until(lambda: service.connections <= 20)
    assert is_closed(held[0])


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
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")
    until(lambda: search(service, photos[0]) == 200)
    until(lambda: service.connections <= before)
