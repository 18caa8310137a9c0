"""Clients that are slow on purpose: they hold up nobody but themselves, and not for long."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from service.app import create_app
from service.http.server import GuardedProtocol, Server, config_of
from service.settings import Settings

WAIT_S = 20.0
HEAD = b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
UPLOAD = (
    b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n"
    b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
)


class Served:
    """A server in a thread, with the connections that it holds."""

    def __init__(self, server: uvicorn.Server, stack: ExitStack) -> None:
        self.server = server
        self._stack = stack
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        self.port = int(listener.getsockname()[1])
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        stack.callback(thread.join, WAIT_S)
        stack.callback(lambda: setattr(server, "should_exit", True))
        with self.client() as client:
            client.get("/live").raise_for_status()

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        address = ("127.0.0.1", self.port)
        connection = socket.create_connection(address, WAIT_S, source_address=(source, 0))
        return self._stack.enter_context(connection)

    def client(self, source: str = "127.0.0.1") -> httpx.Client:
        transport = httpx.HTTPTransport(local_address=source)
        url = f"http://127.0.0.1:{self.port}"
        return httpx.Client(base_url=url, transport=transport, timeout=WAIT_S)


@pytest.fixture
def serve(embedder: Any, gallery: Any) -> Iterator[Callable[..., Served]]:
    """Serve the real app as kinlens-serve does."""
    with ExitStack() as stack:

        def start(**options: Any) -> Served:
            settings = Settings(lanes=2, **options)
            app = create_app(settings, embedder, {"shop": gallery})
            return Served(Server(config_of(app, settings)), stack)

        yield start


@pytest.fixture
def serve_with() -> Iterator[Callable[..., Served]]:
    """Serve a small app on connections with these limits."""

    def text(request: Any) -> Response:
        return PlainTextResponse("here")

    def large(request: Any) -> Response:
        return Response(bytes(64 * 2**20))

    with ExitStack() as stack:

        def start(header_s: float = 60, write_s: float = 60, connections: int = 1000) -> Served:
            app = Starlette(routes=[Route("/live", text), Route("/large", large)])
            limits = (header_s, write_s, connections)
            names = ("header_timeout_s", "write_timeout_s", "max_connections")
            protocol: Any = partial(GuardedProtocol, **dict(zip(names, limits, strict=True)))
            config = uvicorn.Config(app, http=protocol, log_config=None, timeout_keep_alive=60)
            return Served(uvicorn.Server(config), stack)

        yield start


def search(served: Served, data: bytes, source: str = "127.0.0.1") -> httpx.Response:
    with served.client(source) as client:
        return client.post("/search", files={"image": data})


def is_closed(connection: socket.socket) -> bool:
    """Whether the server ends the connection without a word; waits for it."""
    with contextlib.suppress(ConnectionError):
        return connection.recv(1000) == b""
    return True


def test_a_head_that_drips_is_cut_off_although_every_byte_comes_soon(serve_with) -> None:
    served = serve_with(header_s=0.4)
    connection = served.connect()
    sent = 0
    with contextlib.suppress(ConnectionError):
        for byte in HEAD + b"X-Filler: " + b"a" * 1000:
            connection.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.05)
    assert sent < 500
    assert is_closed(connection)


@pytest.mark.parametrize("start", [b"", HEAD, b"G"])
def test_a_connection_that_says_nothing_more_is_closed(serve_with, start: bytes) -> None:
    connection = serve_with(header_s=0.2).connect()
    connection.sendall(start)
    assert is_closed(connection)


def test_a_second_request_on_a_connection_may_drip_no_longer_than_the_first(serve_with) -> None:
    connection = serve_with(header_s=0.3).connect()
    connection.sendall(HEAD + b"\r\n")
    answer = b""
    while not answer.endswith(b"here"):
        answer += connection.recv(1000)
    connection.sendall(HEAD)
    assert is_closed(connection)


@pytest.mark.parametrize(
    "start",
    [
        b"GET /" + b"a" * 10**6,
        HEAD + b"X-Filler: " + b"a" * 10**6,
        UPLOAD.replace(b"Content-Length: 5000", b"Transfer-Encoding: chunked").replace(
            b"--b\r\n", b"5\r\n--b\r\n\r\n0\r\nX-Trailer: " + b"a" * 10**6
        ),
    ],
    ids=["address", "head", "trailer"],
)
def test_what_is_kept_of_a_head_has_a_limit(serve, start: bytes) -> None:
    connection = serve().connect()
    with contextlib.suppress(ConnectionError):
        for part in range(0, len(start), 10_000):
            connection.sendall(start[part : part + 10_000])
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part_of_it := connection.recv(1000):
            answer += part_of_it
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


def test_a_body_of_many_small_chunks_is_no_long_head(serve) -> None:
    head = UPLOAD.replace(b"Content-Length: 5000", b"Transfer-Encoding: chunked")
    head = head.replace(b"Host:", b"Connection: close\r\nHost:").removesuffix(b"--b\r\n")
    connection = serve().connect()
    connection.sendall(head + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n")
    assert b"The form cannot be read" in connection.makefile("rb").read()


def test_a_client_that_offers_another_protocol_is_answered_in_this_one(serve_with) -> None:
    """Java's own client offers h2c with its first request and then goes on."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n"
    connection = serve_with(header_s=5).connect()
    for head in (HEAD + offer, HEAD):
        connection.sendall(head + b"\r\n")
        answer = b""
        while not answer.endswith(b"here"):
            received = connection.recv(1000)
            assert received, f"closed after {answer!r}"
            answer += received


def test_an_answer_that_takes_longer_than_the_head_may_is_not_cut_off(
    serve, embedder, pictures
) -> None:
    served = serve(body_timeout_ms=200)
    embedder.gate.clear()
    threading.Timer(1.0, embedder.gate.set).start()
    assert search(served, pictures[0]).status_code == 200


def test_a_client_that_does_not_read_its_answer_is_cut_off(serve_with, until) -> None:
    served = serve_with(write_s=0.3)
    until(lambda: served.connections == 0)
    connection = served.connect()
    connection.sendall(HEAD.replace(b"/live", b"/large") + b"\r\n")
    assert connection.recv(10).startswith(b"HTTP/1.1")
    until(lambda: served.connections == 0)


def test_500_open_connections_keep_nobody_out(serve, pictures, until) -> None:
    served = serve()
    held = [served.connect() for _ in range(500)]
    for number, connection in enumerate(held):
        connection.sendall((b"", HEAD, HEAD + b"\r\n")[number % 3])
    until(lambda: served.connections >= 500)
    for data in pictures[:4]:
        assert search(served, data).status_code == 200
    with served.client() as client:
        assert client.get("/ready").status_code == 200


def test_idle_connections_above_the_limit_make_room_for_others(serve_with, until) -> None:
    served = serve_with(connections=20)
    held = [served.connect() for _ in range(60)]
    with served.client("127.0.0.2") as other:
        for _ in range(3):
            assert other.get("/live").text == "here"
    until(lambda: served.connections <= 20)
    assert is_closed(held[0])


def test_a_connection_that_is_being_answered_is_not_closed_to_make_room(
    serve, embedder, pictures, until, monkeypatch
) -> None:
    monkeypatch.setattr("service.http.server.connection_limit", lambda: 3)
    served = serve()
    embedder.gate.clear()
    answers: list[int] = []
    waiting = threading.Thread(
        target=lambda: answers.append(search(served, pictures[0]).status_code)
    )
    waiting.start()
    assert embedder.entered.acquire(timeout=WAIT_S)  # the warm-up
    assert embedder.entered.acquire(timeout=WAIT_S)
    for _ in range(10):
        served.connect()
    until(lambda: served.connections <= 4)
    embedder.gate.set()
    waiting.join(WAIT_S)
    assert answers == [200]


def test_one_address_cannot_keep_all_places_for_uploads(serve, pictures, until) -> None:
    served = serve(max_concurrent_uploads=8)
    held = [served.connect() for _ in range(8)]
    for connection in held:
        connection.sendall(UPLOAD)
    until(lambda: search(served, pictures[0]).status_code == 503)  # its own address waits
    assert search(served, pictures[0], "127.0.0.2").status_code == 200
    assert held[0].recv(1000).startswith(b"HTTP/1.1 503")  # the oldest gave its place
    assert search(served, pictures[1]).status_code == 200  # which is free again


def test_many_slow_uploads_are_ended_by_their_time_and_leave_no_trace(
    serve, pictures, until
) -> None:
    served = serve(body_timeout_ms=400, max_concurrent_uploads=16)
    held = [served.connect() for _ in range(16)]
    for connection in held:
        connection.sendall(UPLOAD)
    for connection in held:
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")
    until(lambda: search(served, pictures[0]).status_code == 200)
    until(lambda: served.connections == 0)
