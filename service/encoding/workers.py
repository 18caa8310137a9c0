"""The workers of one fork server: processes that decode images and embed them.

One image cannot harm another: a worker that exceeds its time or memory or crashes is replaced, and
only its image is refused.
"""

import contextlib
import enum
import math
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from kinlens.embedder.errors import (
    ImageCostError,
    InvalidParameterError,
    KinlensError,
    SearchError,
)
from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.preprocess import MAX_SIDE_PX, Box, ImageLimits, check_box
from kinlens.embedder.types import Embeddings
from kinlens.embedder.views.boxes import FoundBox
from kinlens.service.concurrency import begin_in_thread
from kinlens.service.encoding.fork_server import Choice, ForkServer
from kinlens.service.encoding.sandbox import Layer
from kinlens.service.encoding.worker import (
    BOX,
    COUNT,
    DONE,
    EMBED_S,
    ENDING,
    ERROR_BYTES,
    FAILED,
    LAYERS,
    NO_ANSWER,
    READY,
    REFUSED,
    REPLY,
    REQUEST,
    Order,
    pack_order,
    unpack_error,
)

T = TypeVar("T")
Pixels = NDArray[np.uint8]
Vector = NDArray[np.float32]

_START_S = 30.0
_LEAST_S = 1e-3  # 0 would mean not to wait at all
_RESTART_S = 10.0  # how long an image waits for a new fork server
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0
_ALARM_GRACE_S = 1.0
_OFF_UNIT = 1e-2
_JPEG = b"\xff\xd8\xff"
_SEND_BUFFER_BYTES = 2**20


class _Outcome(enum.Enum):
    """Why a worker cannot be used again; logged as the cause of its end."""

    LATE = "took too long"
    FULL = "out of memory"
    ENDED = "exited"
    INVALID = "sent an invalid answer"
    UNREADY = "did not become ready"
    FAILED = "could not run the model"


_OUTCOMES = {ENDING: _Outcome.FULL, FAILED: _Outcome.FAILED}
_RETRIED = (_Outcome.ENDED, _Outcome.INVALID)
"""After these the image is sent once more: the worker may have died before it got the image."""


class _LostError(Exception):
    """The worker cannot be used again, as `outcome` states."""

    def __init__(self, outcome: _Outcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


class Workers:
    """The workers of a fork server, each for one call at a time. Thread safe.

    The fork server is started again when it has ended, with pauses that double after each failure.

    Attributes:
        restarts: number of workers that ended, other than by `close`.
        kills: those of them that exceeded their time or memory.
        layers: the layers of their sandbox; empty before the first worker.
        fault: why there are no workers; None if there are.
    """

    def __init__(self, server: ForkServer, timeout_s: float, count: int) -> None:
        """An image may be decoded for `timeout_s`. Up to `count` idle workers are kept."""
        self.restarts = self.kills = 0
        self.layers: Sequence[Layer] = ()
        self.fault: str | None = "they have not been started"
        self._server = server
        self._timeout_s = timeout_s
        self._count = count
        self._workers = set[_Worker]()
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._starting: Future[None] = Future()
        self._starting.set_exception(SearchError(""))
        self._pause_s = _FIRST_PAUSE_S
        self._not_before = 0.0
        self._end = weakref.finalize(self, _end, server, self._workers)

    @property
    def choice(self) -> Choice:
        """How the model runs, if there is one. Only after `start`."""
        assert self._server.choice is not None
        return self._server.choice

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in list(self._workers)]

    def start(self) -> None:
        """Start the fork server and the first worker.

        Raises: BundleError if the model cannot run, SearchError if no process can be started.
        """
        if sys.platform != "linux":
            raise SearchError(
                f"The service needs Linux for its worker processes (got {sys.platform}). Run its "
                "container image."
            )
        try:
            try:
                self._start()
            except OSError:
                self._start()  # a busy machine may have delayed it
        except OSError as error:
            raise SearchError(f"No worker process can be started: {error}.") from error

    def close(self) -> None:
        """End all processes, also in the middle of an image."""
        self._end()

    def decode(
        self,
        data: bytes,
        spec: Preprocessing,
        limits: ImageLimits,
        boxes: Sequence[Box | None] = (None,),
    ) -> Pixels:
        """Decode an image, or its parts in `boxes`, as uint8 (N, 3, S, S).

        Raises: ImageError (ImageCostError if the worker was killed or crashed),
            InvalidParameterError for a box, SearchError if there is no worker.
        """
        shape = len(boxes), 3, spec.crop_px, spec.crop_px
        order = Order(limits, spec, tuple(boxes))
        return self._ask(order, data, math.prod(shape), lambda content: content.reshape(shape))

    def embed(
        self,
        data: bytes,
        spec: Preprocessing,
        limits: ImageLimits,
        boxes: Sequence[Box | None],
        dim: int,
    ) -> tuple[Embeddings, float]:
        """The unit vectors (N, dim) of the parts of an image in `boxes`, and the milliseconds for
        decoding it. The fork server must have a model with `dim` dimensions.

        Raises: ImageError (ImageCostError if the worker was killed or crashed),
            InvalidParameterError for a box, SearchError if there is no worker.
        """
        count = len(boxes)

        def read(content: Pixels) -> tuple[Embeddings, float]:
            return _vectors_in(content, count, dim)

        order = Order(limits, spec, tuple(boxes), embed=True)
        return self._ask(order, data, 4 * (count * dim + 1), read, EMBED_S)

    def find(
        self,
        data: bytes,
        spec: Preprocessing,
        limits: ImageLimits,
        most: int,
        dim: int = 0,
        parts: int = 0,
    ) -> tuple[list[FoundBox] | None, Embeddings, float]:
        """The boxes of up to `most` objects in an image, None if the detector failed on it; with
        `dim`, the unit vectors (1 + n, dim) of the whole image and of the first n boxes, of which
        there are up to `parts`, and the milliseconds for decoding and finding. The bundle of the
        fork server must have a detector.

        Raises: ImageError (ImageCostError if the worker was killed or crashed), SearchError if
            there is no worker.
        """

        def read(content: Pixels) -> tuple[list[FoundBox] | None, Embeddings, float]:
            found, rest = _found_in(content.tobytes(), most)
            if not dim:
                return found, np.empty((0, 0), np.float32), 0.0
            return found, *_vectors_in(rest, 1 + min(parts, len(found or ())), dim)

        order = Order(limits, spec, embed=dim > 0, find=most, parts=parts)
        max_bytes = COUNT.size + most * BOX.size + 4 * ((1 + parts) * dim + 1)
        return self._ask(order, data, max_bytes, read, EMBED_S)

    def render(self, data: bytes, limits: ImageLimits, side_px: int = MAX_SIDE_PX) -> bytes:
        """Render an image as a JPEG of at most `side_px` a side.

        Raises: ImageError (ImageCostError if the worker was killed or crashed), SearchError if
            there is no worker.
        """

        def read(content: Pixels) -> bytes:
            jpeg = content.tobytes()
            if not jpeg.startswith(_JPEG):
                raise ValueError
            return jpeg

        return self._ask(Order(limits, side_px=side_px), data, 3 * side_px**2, read)

    def _ask(
        self,
        order: Order,
        data: bytes,
        max_bytes: int,
        read: Callable[[Pixels], T],
        more_s: float = 0.0,
    ) -> T:
        """What `read` makes of the answer, at most `max_bytes`; it raises ValueError for an invalid
        one. `more_s` extends the limit of decoding.
        """
        for is_last in (False, True):
            # The second time a new one: with their server, all idle ones have died.
            worker = self._forked() if is_last else self._take()
            try:
                answer = worker.ask(order, data, max_bytes, read, self._timeout_s, more_s)
            except _LostError as lost:
                self._drop(worker, lost.outcome)
                if is_last or lost.outcome not in _RETRIED:
                    raise self._refusal(lost.outcome) from None
            except BaseException:  # the image is refused
                self._give_back(worker)
                raise
            else:
                self._give_back(worker)
                return answer
        raise AssertionError

    def _refusal(self, outcome: _Outcome) -> KinlensError:
        cure = "Resize it, or save it as a plain JPEG."
        if outcome is _Outcome.LATE:
            return ImageCostError(
                f"Decoding the image took longer than {self._timeout_s:g} s, which is the limit. "
                + cure
            )
        if outcome is _Outcome.FULL:
            return ImageCostError(
                "Decoding the image needs more memory than the limit of "
                f"{self._server.memory_mb:,} MB. {cure}"
            )
        if outcome is _Outcome.FAILED:
            return SearchError("The model cannot run in a worker process. Try again.")
        return ImageCostError(
            "The process that decoded the image crashed. Export the image again from its source; "
            "if the file is intact, send it again."
        )

    def _take(self) -> "_Worker":
        """The last used worker, whose memory is still in CPU caches, or a new one."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._forked()

    def _give_back(self, worker: "_Worker") -> None:
        if len(self._idle) < self._count and self._end.alive:
            self._idle.append(worker)
        else:
            self._workers.discard(worker)
            worker.end()

    def _drop(self, worker: "_Worker", outcome: _Outcome) -> None:
        self._workers.discard(worker)
        if not self._end.alive:
            return
        code = worker.end()
        with self._lock:
            self.restarts += 1
            self.kills += outcome in (_Outcome.LATE, _Outcome.FULL)
        structlog.get_logger().warning(
            "worker ended", pid=worker.pid, cause=outcome.value, returncode=code
        )

    def _forked(self) -> "_Worker":
        """A new worker, of a new fork server if that has ended. Raises: SearchError."""
        for _ in range(2):  # the fork server may end after it was asked
            if not self._server.is_running:
                self._restart()
            try:
                return self._fork()
            except OSError as error:
                cause = error
        raise SearchError(
            f"No worker process can be started ({cause}). Try again in a second; the log of the "
            "service has details."
        ) from cause

    def _restart(self) -> None:
        """Wait for a new fork server. Raises: SearchError."""
        if not self._end.alive:
            raise SearchError("The service is shutting down and decodes no more images.")
        with self._lock:
            if self._server.is_running:
                return
            if self._starting.done() and time.monotonic() >= self._not_before:
                self._starting = begin_in_thread(self._start)
        with contextlib.suppress(TimeoutError, OSError, KinlensError):
            self._starting.result(_RESTART_S)
            return
        raise SearchError(
            "No worker process runs, so no image can be decoded. The service starts them again; "
            "its log has the cause. Try again in a second."
        )

    def _start(self) -> None:
        """Start the fork server and a worker. Raises: OSError, BundleError."""
        log = structlog.get_logger()
        try:
            while self._idle:
                self._drop(self._idle.pop(), _Outcome.ENDED)
            self._server.start()
            self._idle.append(self._fork())
        except (OSError, KinlensError) as error:
            self._server.stop()
            self.fault = f"{type(error).__name__}: {error}"
            self._not_before = time.monotonic() + self._pause_s
            log.error("workers did not start", cause=self.fault, retry_in_s=self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            raise
        else:
            self.fault, self._pause_s = None, _FIRST_PAUSE_S
            log.info("workers started")

    def _fork(self) -> "_Worker":
        """Raises: OSError."""
        worker = _Worker(self._server, self.layers)
        self._workers.add(worker)
        try:
            layers = worker.wait_until_ready()
        except _LostError as error:
            self._drop(worker, error.outcome)
            raise ConnectionError("it exited at its start") from error
        self.layers = self.layers or layers
        return worker


class _Worker:
    """A worker process and the socket to it."""

    def __init__(self, server: ForkServer, layers: Sequence[Layer]) -> None:
        """`layers` are those of an earlier worker, which it enters without a rehearsal: that could
        fail on an overloaded machine. Raises: OSError.
        """
        self._server = server
        self._socket, theirs = socket.socketpair()
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        with theirs:
            try:
                self.pid = server.fork(theirs, layers)
            except BaseException:
                self._socket.close()
                raise

    def wait_until_ready(self) -> Sequence[Layer]:
        """The layers of its sandbox. Raises: _LostError."""
        try:
            status, content = self._receive(0, time.monotonic() + _START_S)
            layers = LAYERS.validate_json(content.tobytes())
        except (OSError, ValueError) as error:
            raise _LostError(_Outcome.UNREADY) from error
        if status != READY:
            raise _LostError(_Outcome.UNREADY)
        return layers

    def ask(
        self,
        order: Order,
        data: bytes,
        max_bytes: int,
        read: Callable[[Pixels], T],
        timeout_s: float,
        more_s: float,
    ) -> T:
        """Send an image; what `read` makes of the answer.

        Raises: _LostError; ImageError or InvalidParameterError if the image is refused.
        """
        due = time.monotonic() + timeout_s
        packed = pack_order(order)
        head = REQUEST.pack(len(packed), len(data)) + packed
        try:
            self._socket.settimeout(timeout_s)
            sent = self._socket.sendmsg([head, data])
            if sent < len(head) + len(data):
                self._socket.settimeout(max(_LEAST_S, due - time.monotonic()))
                self._socket.sendall(memoryview(head + data)[sent:])
            status, content = self._receive(max_bytes, due + more_s)
            if status == DONE:
                return read(content)
            if status != REFUSED:
                raise _LostError(_OUTCOMES.get(status, _Outcome.INVALID))
            raise unpack_error(content.tobytes())
        except TimeoutError:
            raise _LostError(_Outcome.FAILED if more_s else _Outcome.LATE) from None
        except OSError:
            is_by_alarm = 0 <= time.monotonic() - due < _ALARM_GRACE_S
            raise _LostError(_Outcome.LATE if is_by_alarm else _Outcome.ENDED) from None
        except (ValueError, TypeError, MemoryError):  # the rest of its answer may still come
            raise _LostError(_Outcome.INVALID) from None

    def end(self) -> int | None:
        """Kill the process if it still runs, and return its exit code, if known."""
        code = self._server.end(self.pid)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that is reading from it
        self._socket.close()
        return code

    def _receive(self, max_bytes: int, due: float) -> tuple[int, Pixels]:
        """Status and content of an answer. Raises: OSError; ValueError for an invalid one."""
        buffer = np.empty(REPLY.size + max(max_bytes, ERROR_BYTES), dtype=np.uint8)
        received, length = 0, REPLY.size
        while received < length:
            left_s = due - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            count = self._socket.recv_into(buffer[received:].data)
            if not count:
                raise ConnectionError
            received += count
            if received >= REPLY.size:
                length = REPLY.size + REPLY.unpack_from(buffer.data)[1]
                if received > length or length > len(buffer):
                    raise ValueError
        return REPLY.unpack_from(buffer.data)[0], buffer[REPLY.size : length]


def _vectors_in(content: Pixels | bytes, count: int, dim: int) -> tuple[Embeddings, float]:
    """Unit vectors (count, dim) and milliseconds in a reply. Raises: ValueError."""
    numbers = np.frombuffer(content, np.float32)
    vectors, decode_ms = numbers[:-1].reshape(count, dim), float(numbers[-1])
    if not (abs((vectors**2).sum(axis=1) - 1.0) < _OFF_UNIT).all():
        raise ValueError
    return vectors, decode_ms if 0 <= decode_ms < math.inf else 0.0


def _found_in(content: bytes, most: int) -> tuple[list[FoundBox] | None, bytes]:
    """Up to `most` boxes in a reply, and what follows them. Raises: ValueError."""
    try:
        [count] = COUNT.unpack_from(content)
        if count == NO_ANSWER:
            return None, content[COUNT.size :]
        end = COUNT.size + min(count, most) * BOX.size
        rows = list(BOX.iter_unpack(content[COUNT.size : end]))
        found = [FoundBox(check_box(row[:4]), row[4], int(row[5])) for row in rows]
    except (struct.error, InvalidParameterError, OverflowError) as error:
        raise ValueError from error
    if count > most or len(found) != count:
        raise ValueError
    if not all(0 <= one.score <= 1 and one.kind >= 0 for one in found):
        raise ValueError
    return found, content[end:]


def _end(server: ForkServer, workers: set[_Worker]) -> None:
    server.close()
    for worker in list(workers):
        worker.end()
