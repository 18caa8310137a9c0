"""JSON logs on stderr, one event per line, with the request id; never uploads, file names or keys.

All events of the process are written here, including those of uvicorn and other libraries. A
separate thread writes, so a blocked stderr does not delay requests.
"""

import contextlib
import json
import logging
import math
import os
import re
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from select import PIPE_BUF
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_REPORT_EVERY_S = 30.0
_SECRETS = (  # text that a line must contain for the pattern to be tried, pattern, replacement
    ("kl_", re.compile(r"\b(kl_[0-9a-f]+_)[0-9a-f]+"), r"\1***"),
    ("@", re.compile(r"(\w://)[^/\s\"@]+@"), r"\1***@"),
    ("earer ", re.compile(r"\b([Bb]earer +)[^\s\"\\]+"), r"\1***"),
    (
        '"',
        re.compile(
            r"(\"(?:authorization|cookie|set-cookie|x-api-key|password|secret|token)\": *)"
            r"(?:\"(?:[^\"\\]|\\.)*\"|[^\",{}\[\]]+)",
            re.IGNORECASE,
        ),
        r'\1"***"',
    ),
)
_ENCODE = json.JSONEncoder(default=str, ensure_ascii=False).encode
_MAX_LINES = 10_000
_WRITE_EVERY_S = 0.05
_CLOSE_S = 1.0
_opened: "list[weakref.ref[_Lines]]" = []


class _Lines:
    """A thread that writes lines in batches; lines that cannot be written are dropped and counted.

    Waking the thread for each line would double the CPU time of logging. A full disk, or a pipe
    without a reader, can work again later, so the thread continues after each error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: deque[str] = deque()
        self._total_dropped = self._reported = 0
        self._is_cut = False  # whether the last line that was written is incomplete
        self._closed = threading.Event()
        self._writer = threading.Thread(target=self._write, name="kinlens-logs", daemon=True)
        self._writer.start()

    @property
    def dropped(self) -> int:
        """Number of lines that were dropped so far."""
        return self._total_dropped

    def add(self, line: str) -> None:
        """Queue a line without waiting or locking, since signal handlers and finalizers may log."""
        if len(self._lines) < _MAX_LINES:
            self._lines.append(line)
        else:
            self._total_dropped += 1

    debug = info = warning = error = critical = add  # structlog calls the method of the level

    def close(self) -> None:
        """Write the remaining lines, for up to a second."""
        self._closed.set()
        self._writer.join(_CLOSE_S)

    def _write(self) -> None:
        while not self._closed.wait(_WRITE_EVERY_S):
            self._write_waiting()
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._lines or self._total_dropped > self._reported:
            missing = self._total_dropped - self._reported
            batch = [_report(missing)] if missing else []
            self._take(batch)
            written = self._send(batch)
            if missing and written:
                self._reported += missing
            unsent = len(batch) - max(written, 1 if missing else 0)
            self._total_dropped += unsent
            if written < len(batch):
                return  # try again later

    def _take(self, batch: list[str]) -> None:
        """Take the next lines: at least one, and at most as many as a pipe writes atomically.

        Worker processes share a pipe, where longer writes could interleave.
        """
        size = sum(len(line.encode()) + 1 for line in batch)
        while self._lines:
            size += len(self._lines[0].encode()) + 1
            if size > PIPE_BUF and batch:
                break
            batch.append(self._lines.popleft())

    def _send(self, batch: Sequence[str]) -> int:
        """Write lines; the number of those that were written whole."""
        data = b"".join(line.encode() + b"\n" for line in batch)
        data = b"\n" + data if self._is_cut else data
        sent = 0
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):  # closed, or a stream of a test
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(data.decode())
                sent = len(data)
            return len(batch) if sent else 0
        # Not through the buffer of the stream: it keeps what it could not write, and fails again.
        while sent < len(data):
            try:
                sent += os.write(descriptor, data[sent:])
            except BlockingIOError:  # a pipe that does not block, with a slow reader
                select.select([], [descriptor], [], _WRITE_EVERY_S)
            except (OSError, ValueError):
                break
        if sent:
            self._is_cut = data[sent - 1 : sent] != b"\n"
        return data[:sent].count(b"\n") - data[:sent].startswith(b"\n")


def _report(dropped: int) -> str:
    event = {"event": "log lines dropped", "level": "warning", "times": dropped}
    return _ENCODE(event | {"detail": f"{dropped:,} lines were dropped."})


class _Handler(logging.Handler):
    """The handler of the standard library; `logging` closes it when the process ends."""

    def __init__(self, lines: _Lines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.add(self.format(record))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        self._lines.close()
        super().close()


def configure_logs(level: str) -> None:
    """Send structlog and the standard library's loggers to stderr as JSON lines.

    level: `debug`, `info`, `warning` or `error`; less important events are dropped.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    lines = _Lines(sys.stderr)
    _opened.append(weakref.ref(lines))
    handler = _Handler(lines)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _line],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name != "uvicorn.access"  # a request is logged once, by us
    structlog.configure(  # our events bypass logging records, which would double the cost
        processors=[*shared, _line],
        logger_factory=lambda *_: lines,
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )


def dropped_lines() -> int:
    """Number of log lines of this process that could not be written."""
    return sum(lines.dropped for opened in _opened if (lines := opened()) is not None)


def masked(text: str) -> str:
    """`text` with API keys, passwords in URLs and credentials in headers replaced by `***`."""
    for sign, pattern, replacement in _SECRETS:
        if sign in text:
            text = pattern.sub(replacement, text)
    return text


def _line(_: WrappedLogger, __: str, event: EventDict) -> str:
    return masked(_ENCODE(event)).encode(errors="replace").decode()


class Repeats:
    """Counts an event for reports at most once per `every_s`."""

    def __init__(
        self, every_s: float = _REPORT_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every_s = every_s
        self._clock = clock
        self._count = 0
        self._reported_at = -math.inf

    def add(self) -> None:
        """Count one event."""
        self._count += 1

    def due(self) -> int:
        """The number of events since the last report, if a report is due; otherwise 0."""
        now = self._clock()
        if now - self._reported_at < self._every_s:
            return 0
        count, self._count = self._count, 0
        if count:
            self._reported_at = now
        return count
