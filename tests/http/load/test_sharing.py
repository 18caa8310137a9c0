"""Processes that listen on one socket: none takes all connections that come together."""

import socket
from types import SimpleNamespace

import pytest

from service.http import server
from service.http.server import SharedListener, listen


def test_after_each_connection_a_process_leaves_the_next_one_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=1.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(server, "time", clock)
    with listen("127.0.0.1", 0) as first:
        first.setblocking(False)
        address = first.getsockname()
        one, other = (SharedListener(fileno=first.dup().detach()) for _ in range(2))
        clients = [socket.create_connection(address) for _ in range(3)]
        accepted = [one.accept()[0]]
        with pytest.raises(BlockingIOError):
            one.accept()
        accepted.append(other.accept()[0])
        clock.now += 0.1
        accepted.append(one.accept()[0])
        assert [each.getpeername() for each in accepted] == [each.getsockname() for each in clients]
        for each in (*clients, *accepted, one, other):
            each.close()
