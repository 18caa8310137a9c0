"""Clients that are slow, or send and hold too much, block no other client.

What the server itself does not end, the shipped proxies do (test_proxies.py).
"""

import contextlib
import socket
import time
from typing import Any

import httpx
import pytest

from tests.support.servers import STALLED, WAIT_S, FakeGallery
from tests.support.waiting import until

HEAD = b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
GET = HEAD + b"\r\n"
IN_CHUNKS = STALLED.replace(b"Content-Length: 5000", b"Transfer-Encoding: chunked")


def search(service: Any, data: bytes) -> int:
    """The status of a search on a connection of its own."""
    with httpx.Client(base_url=service.url, timeout=WAIT_S) as client:
        return client.post("/search", files={"image": data}).status_code


def answer_to(connection: socket.socket, end: bytes = b"}") -> bytes:
    """What comes up to `end`, or until the connection is closed."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while not answer.endswith(end) and (part := connection.recv(2**16)):
            answer += part
    return answer


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
    assert answer_to(connection, b"nothing of the kind")[:12] in (b"HTTP/1.1 400", b"")


def test_a_client_that_reads_slowly_gets_all(start_service, embedder, photos) -> None:
    data = photos[0] + bytes(16 * 2**20)
    service = start_service(galleries={"shop": FakeGallery(embedder, [data])}, body_timeout_ms=500)
    photo = HEAD.replace(b"/live", b"/galleries/shop/items/0/image") + b"Connection: close\r\n\r\n"
    connection, size = service.connect(photo), 0
    while part := connection.recv(2**20, socket.MSG_WAITALL):
        size += len(part)
        time.sleep(0.1)
    assert size > len(data)


def test_500_open_connections_block_no_search(start_service, photos) -> None:
    service = start_service(body_timeout_ms=30_000)
    for number in range(500):
        service.connect((b"", HEAD, GET)[number % 3])
    assert [search(service, data) for data in photos[:4]] == [200] * 4
    assert service.client.get("/ready").status_code == 200


def test_slow_uploads_end_at_their_limit(start_service, photos) -> None:
    service = start_service(body_timeout_ms=400)
    for connection in [service.connect(STALLED) for _ in range(16)]:
        answer = answer_to(connection)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body-too-slow" in answer
        assert b"0.4 s" in answer
    until(lambda: search(service, photos[0]) == 200)


def test_clients_that_pipeline_thousands_of_requests_block_no_other(running_service) -> None:
    clients = [running_service.connect() for _ in range(10)]
    for client in clients:
        client.settimeout(0.5)
        with contextlib.suppress(OSError):
            client.sendall(GET * 5_000)
    assert running_service.client.get("/live").status_code == 200
    for client in clients:
        client.close()
