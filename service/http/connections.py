"""Connections that cannot be held open for nothing: HTTP/1.1 with limits that uvicorn lacks."""

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle


class GuardedProtocol(H11Protocol):
    """Closes connections whose head does not arrive, or whose client does not read its answer.

    A connection counts as idle while no request of it is being answered. Above `max_connections`
    a new one takes the place of the longest idle one of the address that has most of them, so
    that idle connections, however many, keep nobody out.
    """

    header_timeout_s = 10.0
    write_timeout_s = 30.0
    max_connections = 1024

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.idle_since = time.monotonic()
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        return cycle is None or cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for the head of a request."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._make_room()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Go on waiting, or answer."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Let the wait for a next request be that of kept-alive connections."""
        super().on_response_complete()
        self.idle_since = time.monotonic()
        _cancel(self._head_timer)
        self._head_timer = None

    def pause_writing(self) -> None:
        """The client reads too slowly for what is sent; wait for it for a while."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        _cancel(self._write_timer)
        self._write_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all waiting."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        _cancel(self._head_timer)
        self._head_timer = None
        _cancel(self._write_timer)
        self._write_timer = None

    def _watch(self) -> None:
        # One wait from the first byte to the last of a head: each byte does not begin it anew.
        if not self.is_idle:
            _cancel(self._head_timer)
            self._head_timer = None
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _make_room(self) -> None:
        idle = [
            other
            for other in self.connections
            if isinstance(other, GuardedProtocol) and other.is_idle and other is not self
        ]
        if not idle:
            self.transport.close()
            return
        held: dict[str, int] = {}
        for other in idle:
            held[_host(other)] = held.get(_host(other), 0) + 1
        greediest = max(held, key=lambda host: held[host])
        oldest = min((o for o in idle if _host(o) == greediest), key=lambda o: o.idle_since)
        oldest.connections.discard(oldest)
        oldest.transport.close()


def guarded(
    header_timeout_s: float, write_timeout_s: float, max_connections: int
) -> type[GuardedProtocol]:
    """The protocol with these limits."""
    limits = {
        "header_timeout_s": header_timeout_s,
        "write_timeout_s": write_timeout_s,
        "max_connections": max_connections,
    }
    return type("LimitedProtocol", (GuardedProtocol,), limits)


def _host(connection: GuardedProtocol) -> str:
    return connection.client[0] if connection.client else ""


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
