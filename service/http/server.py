"""uvicorn with the limits and signals of this service."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from service.http.connections import guarded
from service.settings import Settings

_KEEP_ALIVE_S = 20
_HEADER_S = 10.0
_MOST_CONNECTIONS = 4096
_FEWEST_CONNECTIONS = 64
_WANTED_FILES = 4 * _MOST_CONNECTIONS
_INTERRUPTED = 130


class Server(uvicorn.Server):
    """Ends with code 0 after the first SIGINT or SIGTERM, and at once at the second."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving; unlike its parent it does not raise them again after."""
        with super().capture_signals():
            try:
                yield
            finally:
                self._captured_signals.clear()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish what was accepted; at the second signal, leave."""
        if self.should_exit:
            os._exit(_INTERRUPTED)
        super().handle_exit(sig, frame)


def build_server(app: ASGIApp, settings: Settings) -> Server:
    """A server for `app`; run it with `serve_on`."""
    body_s = settings.body_timeout_ms / 1e3
    config = uvicorn.Config(
        app,
        http=guarded(min(_HEADER_S, body_s), body_s, _connection_limit()),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the service reads them itself, from trusted_proxies alone
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=settings.shutdown_timeout_s,
    )
    return Server(config)


def serve_on(app: ASGIApp, listener: socket.socket, settings: Settings) -> None:
    """Answer on `listener` until a signal comes."""
    build_server(app, settings).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises: OSError that says what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named so that asyncio sets TCP_NODELAY on every connection; otherwise answers
    # on a kept-alive connection wait 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OSError(
            f"Cannot listen on {host}:{port} ({error.strerror}). Choose another --port or --host."
        ) from error
    return listener


def _connection_limit() -> int:
    """Half of the files that this process may open, which it first raises as far as it may."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return _MOST_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(_FEWEST_CONNECTIONS, min(_MOST_CONNECTIONS, soft // 2))
