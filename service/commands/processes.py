"""Several serving processes at one address: the parent supervises, its children serve.

parent ──spawn──► child: own app, own model; galleries memory-mapped, so their pages are shared
   │  pipe: "" each second while its event loop runs, or the reason why it cannot start
   └─ a child that ends or hangs is replaced, with exponential back-off
"""

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import typer

from kinlens.embedder.errors import KinlensError
from kinlens.service.app import create_app
from kinlens.service.http.server import (
    Server,
    config_of,
    listen,
    prepared,
    share_the_interpreter,
    url_of,
)
from kinlens.service.observe.logs import configure_logs
from kinlens.service.observe.metrics_shared import forget, restarts_counter, shared_folder
from kinlens.service.settings import Settings

GRACE_S = 10.0
"""Time that a child gets after its drain and shutdown times, before it is killed."""

HUNG_S = 30.0
"""A child whose event loop sends no report for this time is killed and replaced."""

_BEAT_S = 1.0
_TICKS_PER_BEAT = 10  # uvicorn ticks every 0.1 s
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0
_DOUBLINGS = 16  # more than the longest pause needs; caps the exponent, so it cannot overflow
_STABLE_S = 60.0


def serve_processes(settings: Settings, reserved: socket.socket, count: int) -> None:
    """Serve in `count` processes until SIGTERM or SIGINT; then each finishes its running requests.

    All listen on the address of `reserved`, which is closed at the end. Call it in the main thread.

    Raises: ChildProcessError with the child's reason if one of the first children does not start.
    """
    with shared_folder() as metrics:
        parent = _Parent(settings, reserved, count, metrics)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, parent.end)
        parent.run()


def pause_after(failures: int) -> float:
    """Seconds before a process is restarted after this number of consecutive failures."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(failures, _DOUBLINGS), _LONGEST_PAUSE_S)


@dataclass
class WorkerSlot:
    """The slot of one child process.

    Attributes:
        last_report: None before the first, "" while it serves, or why it cannot start.
        failures: the number of consecutive failures.
        start_at: the earliest time for the next start.
        silent_s: the time since the last report.
    """

    process: SpawnProcess | None = None
    pipe: Connection | None = None
    last_report: str | None = None
    failures: int = 0
    started_at: float = 0.0
    start_at: float = 0.0
    silent_s: float = 0.0

    def listen(self) -> None:
        """Read the reports of the child."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe is not None and self.pipe.poll():
                self.last_report = self.pipe.recv()
                self.silent_s = 0.0

    def reason(self) -> str:
        """The reason why the child ended."""
        assert self.process is not None
        if self.silent_s > HUNG_S:
            return f"A process did not respond for {HUNG_S:g} s and was killed."
        when = "starting" if self.last_report is None else "serving"
        code = self.process.exitcode
        return self.last_report or f"A process exited with status {code} while {when}; see its log."

    def clear(self, metrics: Path) -> None:
        """Remove a child that has ended."""
        child, self.process = self.process, None
        if child is not None and self.pipe is not None:
            child.join()
            forget(metrics, child.pid or 0)
            self.pipe.close()
            child.close()


class _Parent:
    def __init__(
        self, settings: Settings, reserved: socket.socket, count: int, metrics: Path
    ) -> None:
        self._settings = settings
        self._reserved = reserved
        self._metrics = metrics
        self._count_restart = restarts_counter()
        self._slots = [WorkerSlot() for _ in range(count)]
        self._is_serving = False
        self._is_ending = False
        self._woken, self._wake = multiprocessing.Pipe(duplex=False)

    def end(self, *_: object) -> None:
        """Shut down; a second call kills the children."""
        if self._is_ending:
            for child in self._children():
                child.kill()
        self._is_ending = True
        self._wake.send(None)

    def run(self) -> None:
        """Keep a child running in each slot until the shutdown."""
        try:
            while not self._is_ending:
                self._start_due()
                waited_s = self._wait()
                for slot in self._slots:
                    self._check(slot, waited_s)
                    if slot.process is not None and not slot.process.is_alive():
                        slot.listen()
                        self._replace(slot, slot.reason())
                if not self._is_serving and all(slot.last_report == "" for slot in self._slots):
                    self._is_serving = True
                    typer.echo(f"Kinlens is at {url_of(self._reserved)} (Ctrl-C ends it)")
        finally:
            self._end_all()

    def _start_due(self) -> None:
        for slot in self._slots:
            if slot.process is None and time.monotonic() >= slot.start_at:
                slot.last_report, slot.silent_s, slot.started_at = None, 0.0, time.monotonic()
                try:
                    self._start(slot)
                except OSError as error:  # out of memory or processes, maybe temporarily
                    self._replace(slot, f"A process cannot be started ({error}).")

    def _start(self, slot: WorkerSlot) -> None:
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        child = context.Process(
            target=serve_child,
            args=(self._settings, self._reserved.getsockname()[1], theirs, self._metrics),
            name="kinlens-serve",
        )
        try:
            child.start()
        except OSError:
            pipe.close()
            raise
        finally:
            theirs.close()
        slot.process, slot.pipe = child, pipe

    def _wait(self) -> float:
        """Wait until a child reports or ends, a start is due, or a signal arrives.

        Return the time in seconds, at most one beat: if the whole service was suspended, its
        children must not count as hung.
        """
        sources: list[Any] = [self._woken, *(child.sentinel for child in self._children())]
        sources += [slot.pipe for slot in self._slots if slot.process]
        began = time.monotonic()
        due = [slot.start_at - began for slot in self._slots if slot.process is None]
        wait(sources, timeout=max(0.0, min([_BEAT_S, *due])))
        return min(time.monotonic() - began, _BEAT_S)

    def _check(self, slot: WorkerSlot, waited_s: float) -> None:
        """Read the reports of a child, and kill it if it hangs."""
        if slot.last_report == "":
            slot.silent_s += waited_s
        slot.listen()
        if slot.process is not None and slot.silent_s > HUNG_S:
            slot.process.kill()
            slot.process.join()

    def _replace(self, slot: WorkerSlot, reason: str) -> None:
        if not self._is_serving:
            raise ChildProcessError(reason)
        if time.monotonic() - slot.started_at > _STABLE_S:
            slot.failures = 0
        pause_s = pause_after(slot.failures)
        process = None if slot.process is None else slot.process.pid
        structlog.get_logger().error(
            "process ended", process=process, reason=reason, pause_s=pause_s
        )
        slot.failures += 1
        slot.start_at = time.monotonic() + pause_s
        self._count_restart()
        slot.clear(self._metrics)

    def _children(self) -> list[SpawnProcess]:
        return [slot.process for slot in self._slots if slot.process is not None]

    def _end_all(self) -> None:
        """Terminate all children, and kill those that do not end within the limit."""
        self._reserved.close()
        for child in self._children():
            child.terminate()
        deadline = time.monotonic() + _limit_s(self._settings)
        for child in self._children():
            child.join(max(0.0, deadline - time.monotonic()))
            child.kill()
        for slot in self._slots:
            slot.clear(self._metrics)


class _Child(Server):
    """A server whose event loop calls `report` each second; its parent shuts it down."""

    report: Callable[[], None]

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn every 0.1 s while it serves."""
        if counter % _TICKS_PER_BEAT == 0:
            self.report()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Shut down only on SIGTERM; the parent also gets a Ctrl-C and then sends SIGTERM."""
        if not self.begin_drain(sig):
            self.should_exit = self.should_exit or sig == signal.SIGTERM


def serve_child(settings: Settings, port: int, parent: Connection, metrics: Path) -> None:
    """Serve until SIGTERM or the end of the parent; send "" to it each second.

    A process that cannot start sends the reason instead, and exits with status 1.
    """

    def report(text: str) -> None:
        with contextlib.suppress(OSError):  # the parent may have ended
            parent.send(text)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logs(settings.log_level)
    try:
        app = create_app(settings)
        listener = listen(settings.host, port, shared=True)
    except (KinlensError, OSError) as error:
        report(" ".join(str(error).split()) or type(error).__name__)
        raise SystemExit(1) from None
    server = prepared(_Child(config_of(app, settings)), app, settings)
    server.report = lambda: report("")
    signal.signal(signal.SIGTERM, server.handle_exit)
    limit_s = _limit_s(settings)
    watcher = threading.Thread(
        target=_end_with_parent, args=(parent, server, limit_s, metrics), daemon=True
    )
    watcher.start()
    share_the_interpreter()
    server.run([listener])


def _limit_s(settings: Settings) -> float:
    """The time that a child has from the signal to its end."""
    return settings.drain_s + settings.shutdown_timeout_s + GRACE_S


def _end_with_parent(parent: Connection, server: _Child, limit_s: float, metrics: Path) -> None:
    """Shut down when the parent ends, for any reason: its end of the pipe is closed then."""
    with contextlib.suppress(EOFError, OSError):
        parent.recv()
    server.should_exit = True
    shutil.rmtree(metrics, ignore_errors=True)
    time.sleep(limit_s)
    logging.shutdown()  # `os._exit` would lose buffered lines
    os._exit(1)
