"""One of several processes that serve: builds its own app and accepts from the shared socket."""

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

from fastapi import FastAPI

from embedder.errors import KinlensError
from service.app import create_app
from service.http.server import Server, build_server
from service.observe.logs import configure_logs
from service.settings import Settings

GRACE_S = 10.0
_QUEUE = 1024


class Child(Server):
    """A server that calls `on_started`, ends when its parent says so, and shares the connections.

    It takes one connection each time it is woken: a process that emptied the queue of the socket
    would leave nothing to its idle siblings.
    """

    def __init__(self, app: FastAPI, settings: Settings, on_started: Callable[[], None]) -> None:
        config = build_server(app, settings).config
        config.backlog = 1
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept from `sockets`, whose queue stays long."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(_QUEUE)
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Ctrl-C also reaches the parent, which says SIGTERM."""
        if sig == signal.SIGTERM:
            self.end()

    def end(self, *_: object) -> None:
        """Finish what was accepted, then return from `run`."""
        self.should_exit = True


def serve_child(
    settings: Settings, listener: socket.socket, parent: Connection, metrics: Path
) -> None:
    """Serve until SIGTERM or the end of the parent; tell it "" once it serves.

    A process that cannot start tells why instead, and ends with code 1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logs(settings.log_level)
    try:
        app = create_app(settings)
    except (KinlensError, OSError) as error:
        _tell(parent, " ".join(str(error).split()) or type(error).__name__)
        raise SystemExit(1) from None
    server = Child(app, settings, lambda: _tell(parent, ""))
    signal.signal(signal.SIGTERM, server.end)
    threading.Thread(
        target=_end_with_parent,
        args=(parent, server, settings.shutdown_timeout_s + GRACE_S, metrics),
        daemon=True,
    ).start()
    server.run([listener])


def _tell(parent: Connection, text: str) -> None:
    with contextlib.suppress(OSError):  # it may be gone
        parent.send(text)


def _end_with_parent(parent: Connection, server: Child, limit_s: float, metrics: Path) -> None:
    """The other end of `parent` closes when that process ends, however it ends."""
    with contextlib.suppress(EOFError, OSError):
        parent.recv()
    server.end()
    shutil.rmtree(metrics, ignore_errors=True)
    time.sleep(limit_s)
    os._exit(1)
