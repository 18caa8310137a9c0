"""Several processes behind one listening socket: the parent only watches, its children serve.

parent ──spawn──► child: own app, own model; galleries memory-mapped, so their pages are shared
   │  pipe: "" once it serves, or why it cannot; closed by the end of either
   └─ a child that ends is replaced, after a pause that grows while it keeps ending
"""

import contextlib
import multiprocessing
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import typer

from service.http.child import GRACE_S, serve_child
from service.observe.metrics_shared import forget, restarts_counter, shared_folder
from service.settings import Settings

_TICK_S = 0.2
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0
_DOUBLINGS = 16  # beyond the longest pause; a power without a limit is no number in the end
_STABLE_S = 60.0


def serve_processes(settings: Settings, listener: socket.socket, count: int) -> None:
    """Serve in `count` processes until SIGTERM or SIGINT; then each finishes what it accepted.

    Closes `listener`. Must run in the main thread.

    Raises: ChildProcessError with the child's own reason if one of the first does not start.
    """
    with shared_folder() as metrics:
        parent = _Parent(settings, listener, count, metrics, restarts_counter())
        with _signals(parent.end):
            parent.run()


@dataclass
class _Place:
    """Where one child runs; `failures` in a row; `start_at` is when the next may start."""

    process: SpawnProcess | None = None
    connection: Connection | None = None
    serving: bool = False
    said: str = ""
    failures: int = 0
    started_at: float = 0.0
    start_at: float = 0.0


@dataclass
class _Parent:
    settings: Settings
    listener: socket.socket
    count: int
    metrics: Path
    on_replaced: Callable[[], None]
    ending: bool = False
    places: list[_Place] = field(default_factory=list)

    def end(self) -> None:
        """End soon; said twice, at once."""
        if self.ending:
            for child in self._children():
                child.kill()
        self.ending = True

    def run(self) -> None:
        self.places = [_Place() for _ in range(self.count)]
        try:
            self._start_all()
            if not self.ending:
                typer.echo(f"Kinlens is at {address_of(self.listener)} (Ctrl-C ends it)")
            while not self.ending:
                for place in self._ended():
                    self._plan_replacement(place)
                self._start_due()
        finally:
            self._end_all()

    def _start_all(self) -> None:
        """Start the first children and wait until each serves."""
        self._start_due()
        while not self.ending and not all(place.serving for place in self.places):
            for place in self._ended():
                raise ChildProcessError(_reason(place))

    def _start_due(self) -> None:
        for place in self.places:
            if not self.ending and place.process is None and time.monotonic() >= place.start_at:
                self._start(place)

    def _start(self, place: _Place) -> None:
        context = multiprocessing.get_context("spawn")
        place.connection, theirs = context.Pipe()
        place.process = context.Process(
            target=serve_child,
            args=(self.settings, self.listener, theirs, self.metrics),
            name="kinlens-serve",
        )
        place.process.start()
        theirs.close()
        place.serving, place.said, place.started_at = False, "", time.monotonic()

    def _ended(self) -> list[_Place]:
        """Those that have ended, after a moment in which they may tell something or end."""
        running = [place for place in self.places if place.process is not None]
        sources: list[Any] = [p.process.sentinel for p in running if p.process is not None]
        sources += [p.connection for p in running if not p.serving and not p.said]
        wait(sources, timeout=_TICK_S) if sources else time.sleep(_TICK_S)
        for place in running:
            _listen_to(place)
        return [p for p in running if p.process is not None and not p.process.is_alive()]

    def _plan_replacement(self, place: _Place) -> None:
        assert place.process is not None
        if time.monotonic() - place.started_at > _STABLE_S:
            place.failures = 0
        pause = min(_FIRST_PAUSE_S * 2 ** min(place.failures, _DOUBLINGS), _LONGEST_PAUSE_S)
        structlog.get_logger().error(
            "process ended", process=place.process.pid, reason=_reason(place), pause_s=pause
        )
        place.failures += 1
        self.on_replaced()
        place.start_at = time.monotonic() + pause
        self._bury(place)

    def _children(self) -> list[SpawnProcess]:
        return [place.process for place in self.places if place.process is not None]

    def _bury(self, place: _Place) -> None:
        child, place.process = place.process, None
        if child is not None and place.connection is not None:
            child.join()
            forget(self.metrics, child.pid or 0)
            place.connection.close()
            child.close()

    def _end_all(self) -> None:
        """Tell every child to finish, and kill what has not within the limit."""
        self.listener.close()
        children = self._children()
        for child in children:
            child.terminate()
        deadline = time.monotonic() + self.settings.shutdown_timeout_s + GRACE_S
        for child in children:
            child.join(max(0.0, deadline - time.monotonic()))
            child.kill()
        for place in self.places:
            self._bury(place)


def address_of(listener: socket.socket) -> str:
    """Where a browser finds the service."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _listen_to(place: _Place) -> None:
    connection = place.connection
    with contextlib.suppress(EOFError, OSError):
        while connection is not None and connection.poll():
            place.said = connection.recv()
            place.serving = not place.said


def _reason(place: _Place) -> str:
    assert place.process is not None
    code = place.process.exitcode
    when = "served" if place.serving else "started"
    return place.said or f"A process ended with code {code} while it {when}; its log says why."


@contextlib.contextmanager
def _signals(end: Callable[[], None]) -> Iterator[None]:
    def handle(_: int, __: FrameType | None) -> None:
        end()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
