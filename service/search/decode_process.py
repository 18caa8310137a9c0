"""One decoding process as the event loop sees it: a socket, at most one job, one end."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import embedder
from embedder.errors import ImageCostError
from service.search.decode_wire import (
    DONE,
    ENDING,
    READY,
    REFUSED,
    REPLY,
    REQUEST,
    reply_buffer,
    unpack_error,
)

START_S = 30.0
_JPEG = b"\xff\xd8\xff"
_ALARM_GRACE_S = 1.0
_SEND_BUFFER_BYTES = 2**20
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_PASSED_ON = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
_CODE = (
    "import sys; count = int(sys.argv[1]); sys.path[:] = sys.argv[2:2 + count]; "
    "from service.search.decode_worker import main; main(sys.argv[2 + count:])"
)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one image may cost: address space of the process, wall-clock time."""

    memory_mb: int
    timeout_s: float


@dataclass(slots=True)
class Job:
    """An image on its way: what is to be sent, the side of the result in pixels, who waits.

    The result is (3, S, S), or the bytes of a JPEG where one `is_jpeg`.
    """

    parts: Sequence[bytes]
    crop_px: int
    result: asyncio.Future[NDArray[np.uint8]]
    sent: bool = False
    is_jpeg: bool = False

    def shaped(self, content: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """What came, as it was asked for; None if it is something else."""
        if self.is_jpeg:
            return content if content[: len(_JPEG)].tobytes() == _JPEG else None
        if len(content) != 3 * self.crop_px**2:
            return None
        return content.reshape(3, self.crop_px, self.crop_px)


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A spawned process; `on_idle` when it can take a job, `on_end` once when it is gone.

    A job that was never sent is still in `job` when `on_end` is called.
    """

    limits: WorkerLimits
    on_idle: Callable[["WorkerProcess"], None]
    on_end: Callable[["WorkerProcess"], None]
    job: Job | None = None
    ready: bool = False
    killed: bool = False
    cause: str = ""
    _ended: bool = False
    _process: subprocess.Popen[bytes] = field(init=False)
    _socket: socket.socket = field(init=False)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _timer: asyncio.TimerHandle | None = None
    _outgoing: list[memoryview] = field(default_factory=list)
    _writing: bool = False
    _buffer: NDArray[np.uint8] = field(default_factory=lambda: reply_buffer(0))
    _received: int = 0

    def start(self) -> None:
        """Spawn it in the running loop. Raises: OSError."""
        self._socket, theirs = socket.socketpair()
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        with theirs:
            try:
                self._process = _spawn(theirs, self.limits)
            except BaseException:
                self._socket.close()
                raise
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._receive)
        self._timer = self._loop.call_later(START_S, self.end, f"not ready after {START_S:g} s")

    @property
    def pid(self) -> int:
        """Its number in the operating system."""
        return self._process.pid

    def returncode(self) -> int | None:
        """How it ended; None while it has not. Asking takes a zombie away."""
        return self._process.poll()

    def give(self, job: Job) -> None:
        """Let it decode; it must be idle."""
        self.job = job
        self._buffer, self._received = reply_buffer(job.crop_px), 0
        self._timer = self._loop.call_later(self.limits.timeout_s, self._expire)
        self._outgoing = [memoryview(part) for part in job.parts]
        self._send()

    def end(self, cause: str, error: Exception | None = None) -> None:
        """Kill it if it still lives; its job gets `error`."""
        if self._ended:
            return
        self._ended, self.cause = True, cause
        self._stop_timer()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._outgoing = []
        self._socket.close()
        self._process.kill()
        if self.job is not None and self.job.sent:
            self._settle(error or _crashed())
        self.on_end(self)

    def _expire(self) -> None:
        self.killed = True
        self.end(
            "took too long",
            ImageCostError(
                f"Decoding the image took longer than {self.limits.timeout_s:g} s, which is the "
                "limit. Resize it, or save it as a plain JPEG."
            ),
        )

    def _send(self) -> None:
        try:
            count = self._socket.sendmsg(self._outgoing)
        except (BlockingIOError, InterruptedError):
            count = 0
        except OSError:
            self.end("gone")
            return
        if self.job is not None:
            self.job.sent = True
        self._outgoing = _rest(self._outgoing, count)
        if self._outgoing and not self._writing:
            self._writing = True
            self._loop.add_writer(self._socket, self._send)
        elif self._writing and not self._outgoing:
            self._writing = False
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            count = self._socket.recv_into(self._buffer[self._received :].data)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if count == 0:
            self.end("ended by itself")
            return
        self._received += count
        if self._received >= REPLY.size:
            status, length = REPLY.unpack_from(self._buffer.data)
            if self._received > REPLY.size + length or length > len(self._buffer) - REPLY.size:
                self.end("answered nonsense")
            elif self._received == REPLY.size + length:
                self._take(status, self._buffer[REPLY.size : self._received])

    def _take(self, status: int, content: NDArray[np.uint8]) -> None:
        if status == ENDING:
            self.killed = True
            self.end("out of memory", _too_much_memory(self.limits))
            return
        if status == READY and not self.ready:
            self.ready, self._received = True, 0
        elif status == DONE and self.job and (done := self.job.shaped(content)) is not None:
            self._settle(done)
        elif status == REFUSED and self.job and (error := _error(content)):
            self._settle(error)
        else:
            self.end("answered nonsense")
            return
        self._stop_timer()
        self.on_idle(self)

    def _settle(self, outcome: NDArray[np.uint8] | Exception) -> None:
        job, self.job = self.job, None
        if job is None or job.result.done():
            return
        if isinstance(outcome, Exception):
            job.result.set_exception(outcome)
        else:
            job.result.set_result(outcome)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def request_parts(order: bytes, data: bytes) -> list[bytes]:
    """What is sent to have `data` decoded as `order` says."""
    return [REQUEST.pack(len(order), len(data)) + order, data]


def _spawn(connection: socket.socket, limits: WorkerLimits) -> subprocess.Popen[bytes]:
    """A fresh interpreter in its own session, with nothing of our environment or files."""
    path = [str(Path(embedder.__path__[0]).parent), *(entry for entry in sys.path if entry)]
    alarm_s = limits.timeout_s + _ALARM_GRACE_S
    code = [sys.executable, "-I", "-S", "-c", _CODE, str(len(path)), *path]
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return subprocess.Popen(
        [*code, str(limits.memory_mb), str(alarm_s)],
        stdin=connection.fileno(),
        stdout=subprocess.DEVNULL,
        cwd="/",
        env=_ONE_THREAD | passed_on,
        start_new_session=True,
    )


def _error(content: NDArray[np.uint8]) -> Exception | None:
    try:
        return unpack_error(content.tobytes())
    except (TypeError, ValueError):
        return None


def _rest(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `parts` after their first `count` bytes."""
    rest = []
    for part in parts:
        if count < len(part):
            rest.append(part[count:])
        count = max(0, count - len(part))
    return rest


def _crashed() -> ImageCostError:
    return ImageCostError(
        "The process that decoded the image ended in the middle of it. Export the image again "
        "from its source; if it is a good one, send it again."
    )


def _too_much_memory(limits: WorkerLimits) -> ImageCostError:
    return ImageCostError(
        f"Decoding the image needs more memory than the limit of {limits.memory_mb:,} MB. "
        "Resize it, or save it as a plain JPEG."
    )
