"""Processes that listen at one address share its connections without spinning."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kinlens.service.http.server import Server, config_of, listen, reserve, url_of
from tests.support.waiting import until

CLIENTS = 100


class CountingSocket(socket.socket):
    """Counts the calls of `accept`."""

    accepts = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.accepts += 1
        return super().accept()


@pytest.fixture
def reserved() -> Iterator[socket.socket]:
    with contextlib.closing(reserve("127.0.0.1", 0)) as held:
        yield held


def test_connections_are_spread_without_spinning(reserved, running_service) -> None:
    host, port = reserved.getsockname()
    config = config_of(running_service.app, running_service.runtime.settings)
    config.lifespan = "off"  # the app runs already
    listeners = [CountingSocket(fileno=listen(host, port, shared=True).detach()) for _ in range(2)]
    servers = [Server(config) for _ in listeners]
    threads = [
        threading.Thread(target=server.run, args=([listener],))
        for server, listener in zip(servers, listeners, strict=True)
    ]
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection((host, port))) for _ in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        until(lambda: sum(len(each.server_state.connections) for each in servers) == CLIENTS)
        held = [len(each.server_state.connections) for each in servers]
        for client in clients:
            client.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        accepts = sum(listener.accepts for listener in listeners)
        for server in servers:
            server.should_exit = True
    for thread in threads:
        thread.join()
    assert min(held) > CLIENTS / 10
    # One call in vain ends each round of accepting.
    assert accepts <= 2 * CLIENTS


def test_a_shared_address_is_refused_to_a_second_service(reserved) -> None:
    host, port = reserved.getsockname()
    assert url_of(reserved) == f"http://127.0.0.1:{port}/"
    with contextlib.closing(listen(host, port, shared=True)):
        for refused in (reserve, listen):
            with pytest.raises(OSError, match="Choose another --port"):
                refused(host, port)


def test_connections_disable_nagle(reserved) -> None:
    """asyncio does so if the listener names its protocol."""
    with contextlib.closing(listen(*reserved.getsockname(), shared=True)) as listener:
        assert listener.proto == socket.IPPROTO_TCP
