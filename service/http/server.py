"""uvicorn with this service's limits and signals, and protection against slow HTTP/1.1 clients."""

import asyncio
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar
from uuid import uuid4

import httptools
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kinlens.service.http.bodies import Connection
from kinlens.service.http.edge import SECURITY_HEADERS
from kinlens.service.problems import BAD_REQUEST, HEAD_TOO_LARGE, ProblemType, problem
from kinlens.service.settings import Settings

_KEEP_ALIVE_S = 20
_HEADER_S = 10.0
_LINGER_S = 2.0
_HEAD_BYTES = 16 * 2**10
_MOST_CONNECTIONS = 4096
_FEWEST_CONNECTIONS = 64
_MAX_UNREAD_BYTES = 256 * 2**20
_WANTED_FILES = 4 * _MOST_CONNECTIONS
_INTERRUPTED = 130
_QUEUE = 1024
_SWITCH_S = 5e-4
_LEAST_READ = 16 * 2**10  # bytes a second
_MAX_PIPELINED = 8  # queued behind the request that is being answered; browsers send none
_STATUS_LINE = b"HTTP/1.1 "
_CONTINUE = b"HTTP/1.1 100 "
_CODING = b"transfer-encoding"
_ADDRESS_TEXT = "The address of the request is not valid. Send a path that begins with /."
_VERSION_TEXT = "The service speaks HTTP/1.0 and 1.1, without CONNECT. Send such a request."
_HEAD_TEXT = f"The head of the request has more than {_HEAD_BYTES // 2**10} KiB. Shorten it."


ServerType = TypeVar("ServerType", bound="Server")


class Server(uvicorn.Server):
    """A uvicorn server with callbacks for its start and its drain.

    - It calls `on_start` once it accepts requests.
    - The first SIGINT or SIGTERM shuts it down with exit status 0; the second exits at once.
    - With `drain_s`, SIGTERM first calls `on_drain`. The server then answers as before for
      `drain_s` seconds, while load balancers see that it is not ready. A second signal ends the
      drain.
    """

    on_start: Callable[[], None] = staticmethod(lambda: None)
    on_drain: Callable[[], None] = staticmethod(lambda: None)
    drain_s: float = 0.0
    _ends_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and accept requests on `sockets`."""
        await super().startup(sockets)
        self.on_start()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving; unlike the base class, do not re-raise them afterwards."""
        with super().capture_signals():
            try:
                yield
            finally:
                self._captured_signals.clear()

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn every 0.1 s; return whether to shut down."""
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            self.should_exit = True
        return await super().on_tick(counter)

    def begin_drain(self, sig: int) -> bool:
        """Start the drain if this signal does; return whether it did."""
        if sig != signal.SIGTERM or not self.drain_s or self._ends_at is not None:
            return False
        self._ends_at = time.monotonic() + self.drain_s
        self.on_drain()
        return True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down gracefully at the first signal, and at once at the second."""
        if self.begin_drain(sig):
            return
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)  # a third signal does not wait for the log
            logging.shutdown()  # `os._exit` would lose buffered lines
            os._exit(_INTERRUPTED)
        super().handle_exit(sig, frame)


class _HeadBuffer:
    """A transport that buffers the head of an answer and sends it together with the body."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(_STATUS_LINE) and not data.startswith(_CONTINUE):
            self._head = data
        else:
            self._transport.write(self._head + data)
            self._head = b""

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Send a buffered head without a body."""
        if self._head:
            self._transport.write(self._head)
            self._head = b""


class SharedLimits:
    """Limits over all connections of a server.

    A connection is idle while it waits for its client: for a request, for the rest of a body, or
    for the client to read an answer. Above `max_connections` a new connection replaces the one that
    has been idle longest, so idle clients cannot block others. Unread answers stay in memory; above
    `max_unread_bytes` the connection with the oldest one is aborted, so slow readers use a bounded
    amount of memory.
    """

    def __init__(self, max_connections: int, max_unread_bytes: int) -> None:
        self.max_connections = max_connections
        self.max_unread_bytes = max_unread_bytes
        self._idle: dict[GuardedProtocol, None] = {}  # longest idle first
        self._unread: dict[GuardedProtocol, int] = {}  # longest unread first
        self._unread_bytes = 0

    def begin_idle(self, connection: "GuardedProtocol") -> None:
        """Mark `connection` as idle."""
        self._idle[connection] = None
        if len(connection.connections) > self.max_connections:
            oldest = next(iter(self._idle))
            self.end_idle(oldest)
            oldest.connections.discard(oldest)
            if oldest.transport.get_write_buffer_size():
                oldest.transport.abort()  # `close` would wait until the client has read the answer
            else:
                oldest.transport.close()

    def end_idle(self, connection: "GuardedProtocol") -> None:
        """Mark `connection` as active."""
        self._idle.pop(connection, None)

    def begin_unread(self, connection: "GuardedProtocol", unread_bytes: int) -> None:
        """Count the bytes that the client of `connection` has not read yet."""
        self._unread[connection] = unread_bytes
        self._unread_bytes += unread_bytes
        while self._unread_bytes > self.max_unread_bytes and len(self._unread) > 1:
            slowest = next(iter(self._unread))
            self.end_unread(slowest)
            slowest.transport.abort()

    def end_unread(self, connection: "GuardedProtocol") -> None:
        """The client of `connection` has read everything or disconnected."""
        self._unread_bytes -= self._unread.pop(connection, 0)


class GuardedProtocol(HttpToolsProtocol):
    """Closes connections whose request head does not arrive or whose client does not read.

    Each request gets one answer. Bytes after a request that cannot be read are ignored, and the
    connection closes, since nobody can know where the next request begins. An offer to upgrade is
    ignored: the parser would treat everything after the head as another protocol.
    """

    def __init__(
        self,
        *arguments: Any,
        header_timeout_s: float,
        write_timeout_s: float,
        limits: SharedLimits,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.header_timeout_s = header_timeout_s
        self.write_timeout_s = write_timeout_s
        self.limits = limits
        self.connection = Connection()
        self._head_buffer: _HeadBuffer
        self._unused_bytes = 0
        self._is_in_head = True  # also between two requests
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        return cycle is None or cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the head of a request."""
        self._head_buffer = _HeadBuffer(transport)
        super().connection_made(self._head_buffer)  # type: ignore[arg-type]
        # Makes uvicorn call `pause_writing` for any unread bytes.
        transport.set_write_buffer_limits(high=0)
        self.limits.begin_idle(self)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Parse received data; limit the size of heads and trailers."""
        self._unset_keepalive_if_required()
        self._unused_bytes += len(data)
        while data and not self._is_refused and not self.transport.is_closing():
            data = self._parse(data)
        # The parser buffers heads and trailers without a limit.
        if self._unused_bytes > _HEAD_BYTES:
            self._refuse(HEAD_TOO_LARGE, _HEAD_TEXT)
        self._watch()

    def _parse(self, data: bytes) -> bytes:
        """Feed the parser; return the rest after the head of an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._head_without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError:
            self._refuse(*(self._refusal_of_head() or (BAD_REQUEST, _ADDRESS_TEXT)))
        except httptools.HttpParserError as error:
            self._refuse(BAD_REQUEST, f"The request is not valid HTTP/1.1: {error}. Correct it.")
        return b""

    def _head_without_upgrade(self) -> bytes:
        """The head that the parser has just read, for a new parser."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        kept = (b"%b: %b\r\n" % each for each in self.headers if each[0] != b"upgrade")
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(kept))

    def _refuse(self, kind: ProblemType, text: str) -> None:
        """Answer a request that cannot be read, unless others are still being answered, and close.

        Its predecessors get their answers first.
        """
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        is_answered = not self._is_in_head and self.cycle.response_started
        if self._is_in_head and not self.is_idle:
            self.cycle.keep_alive = False  # closes after the last answer
        elif self.pipeline:
            self.cycle.disconnected = True
            self.pipeline[0] = (self.cycle, self._close)
        elif is_answered:
            self.transport.close()
        else:
            self._send_refusal(kind, text)

    async def _close(self, *_: Any) -> None:
        self.transport.close()

    def _send_refusal(self, kind: ProblemType, text: str) -> None:
        request_id = uuid4().hex
        self.logger.warning("%s (request_id %s)", text, request_id)
        answer = problem(kind, text, request_id=request_id, instance="")
        answer.headers.update(SECURITY_HEADERS)
        answer.headers.update({"X-Request-ID": request_id, "Connection": "close"})
        head = b"".join(b"%b: %b\r\n" % header for header in answer.raw_headers)
        status = f"HTTP/1.1 {kind.status} {kind.title}\r\n".encode()
        self.transport.write(b"%b%b\r\n%b" % (status, head, bytes(answer.body)))
        self._head_buffer.flush()
        # The service reads on for a moment: `close` resets the connection of a client that is still
        # sending, and a reset discards the answer.
        self._head_buffer.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)
        if not self._is_in_head:
            self.cycle.disconnected = True  # ends the work for the body
            self.cycle.message_event.set()

    def on_message_begin(self) -> None:
        """A request starts."""
        self._is_in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header of the head; drop trailers after a chunked body.

        The parser reports trailers as headers. As such, a client could add an X-Forwarded-For after
        the one of the proxy and fake its address.
        """
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head has arrived."""
        self._unused_bytes = 0
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("CONNECT")  # as for an address that cannot be read
            return  # another parser gets this head
        # A request of 18 bytes uses 1 KB of objects, and one read can contain thousands of them.
        if len(self.pipeline) >= _MAX_PIPELINED:
            self.transport.abort()
            return
        if self.is_idle:  # was waiting for the head, now waits for the body
            self.limits.end_idle(self)
            self.limits.begin_idle(self)
        self.scope["state"]["connection"] = self.connection
        if (refusal := self._refusal_of_head()) is not None:
            self.scope["state"]["refusal"] = refusal
        super().on_headers_complete()
        self._is_in_head = False

    def _refusal_of_head(self) -> tuple[ProblemType, str] | None:
        """Why `Edge` refuses a request whose head the parser accepts, or None."""
        version = self.parser.get_http_version()
        coding = [value.strip().lower() for name, value in self.headers if name == _CODING]
        lines = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.url) + lines > _HEAD_BYTES:
            return HEAD_TOO_LARGE, _HEAD_TEXT
        if version not in ("1.0", "1.1") or self.parser.should_upgrade():
            return BAD_REQUEST, _VERSION_TEXT
        if coding and (coding != [b"chunked"] or version != "1.1"):
            return BAD_REQUEST, "Transfer-Encoding must be chunked, in HTTP/1.1."
        if version != "1.1":
            self.expect_100_continue = False  # would look like the answer
        return None

    def on_body(self, body: bytes) -> None:
        """A part of the body has arrived."""
        self._unused_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The whole request has arrived."""
        self._unused_bytes = 0
        if self._is_in_head:
            return  # another parser gets this head
        self._is_in_head = True
        if not self.flow.write_paused and not self.cycle.response_complete:
            self.limits.end_idle(self)
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start the next answer only after the client has read the last one; otherwise it would
        use memory that is not counted.
        """

        async def after_reading(*arguments: Any) -> None:
            await self.flow.drain()
            if not cycle.disconnected:
                await app(*arguments)

        super()._start_asgi_task(cycle, after_reading if self.flow.write_paused else app)

    def on_response_complete(self) -> None:
        """Mark the connection as idle; uvicorn's keep-alive timer limits the wait."""
        self._head_buffer.flush()
        super().on_response_complete()
        if self.is_idle or self.cycle.more_body:
            self.limits.begin_idle(self)
        self._stop_head_timer()

    def pause_writing(self) -> None:
        """The client has unread bytes; start the timer for its reading."""
        super().pause_writing()
        self.limits.begin_unread(self, self.transport.get_write_buffer_size())
        self.limits.begin_idle(self)
        self._watch_reader()

    def resume_writing(self) -> None:
        """The client has read everything."""
        super().resume_writing()
        self.limits.end_unread(self)
        if not self.is_idle and not self.cycle.more_body:
            self.limits.end_idle(self)
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the work for the client and stop all timers."""
        super().connection_lost(exc)
        self.connection.end()
        self.limits.end_idle(self)
        self.limits.end_unread(self)
        self._unset_keepalive_if_required()
        self._stop_head_timer()
        self._stop_write_timer()

    def _watch(self) -> None:
        # One timer for the whole head; single bytes do not restart it.
        if not self.is_idle:
            self._stop_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _watch_reader(self, unread: float = math.inf) -> None:
        remaining = self.transport.get_write_buffer_size()
        if remaining <= unread - _LEAST_READ * self.write_timeout_s:
            again = partial(self._watch_reader, remaining)
            self._write_timer = self.loop.call_later(self.write_timeout_s, again)
        else:
            self.transport.abort()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def config_of(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """The uvicorn configuration for `app`."""
    body_s = settings.body_timeout_ms / 1e3
    protocol = partial(
        GuardedProtocol,
        header_timeout_s=min(_HEADER_S, body_s),
        write_timeout_s=body_s,
        limits=SharedLimits(connection_limit(), _MAX_UNREAD_BYTES),
    )
    return uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        loop="asyncio",
        backlog=_QUEUE,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the service reads them itself, only from trusted_proxies
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=settings.shutdown_timeout_s,
    )


def prepared(server: ServerType, app: FastAPI, settings: Settings) -> ServerType:
    """Connect a server to the drain of the application, and return it."""
    server.drain_s = settings.drain_s
    server.on_drain = app.state.runtime.health.end
    return server


def serve_on(
    app: FastAPI,
    listener: socket.socket,
    settings: Settings,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Serve on `listener` until a signal arrives; call `on_start` once it accepts requests."""
    server = prepared(Server(config_of(app, settings)), app, settings)
    server.on_start = on_start
    share_the_interpreter()
    server.run(sockets=[listener])


def share_the_interpreter() -> None:
    """Reduce the effect of one request on others, in a process that only serves.

    Threads release the GIL after 0.5 ms instead of 5 ms, so a long parse delays other requests
    less. Imported objects are frozen, which halves the time of a full garbage collection.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Open a listening socket; `shared` if other processes listen on the same address.

    The kernel distributes connections over the sockets that share an address.

    Raises: OSError with a message that includes what to do.
    """
    listener = _bound(host, port, shared)
    listener.listen(_QUEUE)
    return listener


def reserve(host: str, port: int) -> socket.socket:
    """Reserve an address for processes that share it; the socket itself gets no connections.

    Raises: OSError with a message that includes what to do, also if another service uses it.
    """
    reserved = _bound(host, port, shared=False)
    # Set only after `bind`: before it, two services could silently share an address.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return reserved


def _bound(host: str, port: int, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit protocol, asyncio sets TCP_NODELAY on every connection. Otherwise answers on
    # kept-alive connections wait 40 ms for the client's delayed acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(
            f"Cannot listen on {host}:{port} ({error.strerror}). Choose another --port or --host."
        ) from error
    return bound


def url_of(listener: socket.socket) -> str:
    """The URL of the service for a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def connection_limit() -> int:
    """Raise the limit of open files as far as allowed, and return half of it, within bounds."""
    unlimited = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == unlimited else min(hard, _WANTED_FILES)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = _WANTED_FILES if soft == unlimited else soft
    return max(_FEWEST_CONNECTIONS, min(_MOST_CONNECTIONS, files // 2))
