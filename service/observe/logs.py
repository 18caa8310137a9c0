"""JSON logs on stderr, one event per line, with the request id; never uploads, file names or keys.

All events of the process are written here, including those of uvicorn and other libraries. A
separate thread writes, so a blocked stderr does not delay requests.
"""

import json
import logging
import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Callable
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

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


class _Lines(QueueHandler):
    """Queues lines without waiting or locking, since signal handlers and finalizers may log; a line
    that does not fit is dropped and counted.
    """

    def __init__(self, stream: TextIO) -> None:
        self._lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        super().__init__(self._lines)
        self._dropped = 0
        self._writer = _Writer(self._lines, stream, lambda: self.dropped)
        self._writer.start()

    @property
    def dropped(self) -> int:
        """Number of lines that were dropped so far."""
        return self._dropped + self._writer.failed

    def prepare(self, record: logging.LogRecord) -> str:
        return self.format(record)

    def enqueue(self, line: Any) -> None:
        if self._lines.qsize() < _MAX_LINES:
            self._lines.put_nowait(line)
        else:
            self._dropped += 1

    debug = info = warning = error = critical = enqueue  # structlog calls the method of the level

    def close(self) -> None:
        """Write the remaining lines, for up to a second; `logging` calls this at the exit."""
        written = threading.Event()
        self._lines.put_nowait(written)
        if written.wait(_CLOSE_S):
            self._writer.stop()
        super().close()


class _Writer(QueueListener):
    """Writes the queued lines in a thread. A full disk, or a pipe without a reader, can work again
    later, so it continues after each error, and the next line states how many are missing.
    """

    def __init__(
        self, lines: queue.SimpleQueue[Any], stream: TextIO, count_dropped: Callable[[], int]
    ) -> None:
        super().__init__(lines)
        self.failed = 0
        self._lines = lines
        self._stream = stream
        self._count_dropped = count_dropped
        self._reported = 0
        self._is_cut = False  # whether the last line that was written is incomplete

    def dequeue(self, block: bool) -> Any:
        if not self._lines.empty():
            return self._lines.get(block)
        line = self._lines.get(block)
        time.sleep(_WRITE_EVERY_S)  # waking for each line would double the CPU time of logging
        return line

    def handle(self, line: Any) -> None:
        if isinstance(line, threading.Event):
            line.set()
            return
        missing = self._count_dropped() - self._reported
        if missing and self._write(_report(missing)):
            self._reported += missing
        if not self._write(line):
            self.failed += 1

    def _write(self, line: str) -> bool:
        """Whether a line was written whole. Each is one write of the system: processes that share a
        pipe do not mix their lines.
        """
        data = (b"\n" if self._is_cut else b"") + line.encode() + b"\n"
        sent = 0
        # Not through the buffer of the stream: it keeps what it could not write, and fails again.
        while sent < len(data):
            try:
                sent += os.write(self._stream.fileno(), data[sent:])
            except BlockingIOError:  # a pipe that does not block, with a slow reader
                select.select([], [self._stream], [], _WRITE_EVERY_S)
            except (OSError, ValueError):  # such as a closed stream
                break
        if sent:
            self._is_cut = data[sent - 1 : sent] != b"\n"
        return sent == len(data)


def _report(dropped: int) -> str:
    event = {"event": "log lines dropped", "level": "warning", "times": dropped}
    return _ENCODE(event | {"detail": f"{dropped:,} lines were dropped."})


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
    lines.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _line],
        )
    )
    logging.basicConfig(handlers=[lines], level=level.upper(), force=True)
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
    return sum(one.dropped for one in logging.getLogger().handlers if isinstance(one, _Lines))


def masked(text: str) -> str:
    """`text` with API keys, passwords in URLs and credentials in headers replaced by `***`."""
    for sign, pattern, replacement in _SECRETS:
        if sign in text:
            text = pattern.sub(replacement, text)
    return text


def _line(_: WrappedLogger, __: str, event: EventDict) -> str:
    return masked(_ENCODE(event)).encode(errors="replace").decode()
