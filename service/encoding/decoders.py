"""Decoders: each turns images into pixels in its own process, which can be killed.

One image cannot harm another: a decoding process that exceeds its time or memory or crashes is
replaced, and only its image is refused. A process that was forked with a model also embeds the
image.
"""

import contextlib
import enum
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from kinlens.embedder.errors import ImageCostError, SearchError
from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.preprocess import MAX_SIDE_PX, Box, ImageLimits, preprocess, render_jpeg
from kinlens.service.encoding.decode_worker import (
    DONE,
    EMBED_S,
    ENDING,
    ERROR_BYTES,
    FAILED,
    READY,
    REFUSED,
    REPLY,
    REQUEST,
    pack_order,
    pack_rendering,
    unpack_error,
    unpack_layers,
)
from kinlens.service.encoding.fork_server import spawn
from kinlens.service.encoding.sandbox import Layer, active_names

Pixels = NDArray[np.uint8]
Vector = NDArray[np.float32]

_START_S = 30.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_REAP_S = 5.0
_ALARM_GRACE_S = 1.0
_ATTEMPTS = 2  # no image is refused because its process had already died
_NOTHING = np.empty(0, dtype=np.uint8)
_NO_VECTOR = np.zeros(1, dtype=np.float32)
_OFF_UNIT = 1e-2
_JPEG = b"\xff\xd8\xff"
_SEND_BUFFER_BYTES = 2**20
_CODE = "from kinlens.service.encoding.decode_worker import main; main(arguments)"


class Child(Protocol):
    """A started process."""

    @property
    def pid(self) -> int: ...

    def end(self) -> int | None:
        """Kill it and return its exit code, if known."""


Start = Callable[[socket.socket, Sequence[Layer]], Child]
"""Starts a process that serves the socket, in a sandbox with these layers. Raises: OSError."""


class InlineDecoder:
    """Decodes in the calling thread, for tests and small machines. It cannot be killed."""

    restarts = kills = 0
    pid: int | None = None
    layers: Sequence[Layer] = (
        Layer(
            "process",
            False,
            "Images are decoded in the service itself. Set KINLENS_DECODE_ISOLATION to true.",
        ),
    )

    def reuse_layers(self, layers: Sequence[Layer]) -> None:
        """Do nothing: there is no process."""

    def start(self) -> None:
        """Do nothing: there is no process."""

    def close(self) -> None:
        """Do nothing: there is no process."""

    def stop(self) -> None:
        """Do nothing: there is no process."""

    def decode(
        self, data: bytes, spec: Preprocessing, limits: ImageLimits, box: Box | None = None
    ) -> Pixels:
        """Decode an image, or its part in `box`, as uint8 (3, S, S).

        Raises: ImageError, InvalidParameterError.
        """
        try:
            return preprocess(data, spec, limits, box)
        except MemoryError as error:
            raise _too_much_memory() from error

    def render(self, data: bytes, limits: ImageLimits, side_px: int = MAX_SIDE_PX) -> bytes:
        """Render an image as a JPEG of at most `side_px` a side. Raises: ImageError."""
        try:
            return render_jpeg(data, limits, side_px)
        except MemoryError as error:
            raise _too_much_memory() from error


class NoProcessError(SearchError):
    """No process can do the work now."""


class _Outcome(enum.Enum):
    """How one attempt to decode an image ended; logged as the cause of a new process."""

    DONE = "done"
    REFUSED = "refused the image"
    LATE = "took too long"
    FULL = "out of memory"
    ENDED = "exited"
    INVALID = "sent an invalid answer"
    UNREADY = "did not become ready"
    FAILED = "could not run the model"


_OUTCOMES = {
    DONE: _Outcome.DONE,
    REFUSED: _Outcome.REFUSED,
    ENDING: _Outcome.FULL,
    FAILED: _Outcome.FAILED,
}
_RETRIED = (_Outcome.ENDED, _Outcome.INVALID, _Outcome.UNREADY)
"""After these the image is sent once more: the process may have died before it got the image."""


class _LostError(Exception):
    """The process has ended or sent an invalid answer, as `outcome` states."""

    def __init__(self, outcome: _Outcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


class ProcessDecoder:
    """Decodes in its own process, which has `memory_mb` of address space, and `timeout_s` of
    wall-clock time for each image.
    """

    def __init__(self, memory_mb: int, timeout_s: float, start: Start | None = None) -> None:
        """`start` starts a process; by default a fresh interpreter without a model."""
        self.restarts = 0
        self.kills = 0
        self._memory_mb = memory_mb
        self._timeout_s = timeout_s
        self._start_process = start or partial(_spawn, memory_mb, timeout_s + _ALARM_GRACE_S)
        self._process: _Process | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._not_before = 0.0
        self._last_failure = ""
        self._closed = False
        self._layers: Sequence[Layer] = ()

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers of its sandbox; empty before its first process is ready."""
        return self._layers

    @property
    def pid(self) -> int | None:
        """The id of its process."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the process, without waiting until it is ready."""
        try:
            self._process = _Process(self._start_process, self._timeout_s, self._layers)
        except OSError as error:
            self._not_started(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Kill the process for good, even while another thread decodes an image."""
        self._closed = True
        if self._process is not None:
            self._process.end()

    def stop(self) -> None:
        """Kill the process; the next image starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def reuse_layers(self, layers: Sequence[Layer]) -> None:
        """Use the sandbox `layers` of another process, without a rehearsal: that could fail on an
        overloaded machine.
        """
        self._layers = layers

    def decode(
        self, data: bytes, spec: Preprocessing, limits: ImageLimits, box: Box | None = None
    ) -> Pixels:
        """Decode an image, or its part in `box`, in the process, as uint8 (3, S, S).

        Raises: ImageError (ImageCostError if the process was killed or crashed),
            InvalidParameterError for the box, NoProcessError if no process can be started.
        """
        side_px = spec.crop_px
        content = self._ask(pack_order(spec, limits, box), data, 3 * side_px**2)
        if len(content) != 3 * side_px**2:
            self._replace(_Outcome.INVALID)
            raise _crashed()
        return content.reshape(3, side_px, side_px)

    def embed(
        self, data: bytes, spec: Preprocessing, limits: ImageLimits, box: Box | None, dim: int
    ) -> tuple[Vector, float]:
        """The unit vector (dim,) of an image, and the milliseconds for decoding it. The process
        must have a model with `dim` dimensions.

        Raises: ImageError (ImageCostError if the process was killed or crashed),
            InvalidParameterError for the box, NoProcessError if no process can be started.
        """
        order = pack_order(spec, limits, box, embed=True)
        content = self._ask(order, data, 4 * (dim + 1), EMBED_S)
        found = content.view(np.float32) if len(content) == 4 * (dim + 1) else _NO_VECTOR
        vector, decode_ms = found[:-1], float(found[-1])
        if not abs(float(vector @ vector) - 1.0) < _OFF_UNIT:
            self._replace(_Outcome.INVALID)
            raise _crashed()
        return vector, decode_ms if 0 <= decode_ms <= 1e3 * self._timeout_s else 0.0

    def render(self, data: bytes, limits: ImageLimits, side_px: int = MAX_SIDE_PX) -> bytes:
        """Render an image as a JPEG of at most `side_px` a side.

        Raises: ImageError (ImageCostError if the process was killed or crashed), NoProcessError.
        """
        content = self._ask(pack_rendering(limits, side_px), data, 3 * side_px**2).tobytes()
        if not content.startswith(_JPEG):
            self._replace(_Outcome.INVALID)
            raise _crashed()
        return content

    def _ask(self, order: bytes, data: bytes, max_bytes: int, more_s: float = 0.0) -> Pixels:
        """The content of the answer, at most `max_bytes`; `more_s` extends the limit of decoding.

        Raises: ImageError, InvalidParameterError, NoProcessError, SearchError.
        """
        for _ in range(_ATTEMPTS):
            outcome, content = self._attempt(order, data, max_bytes, more_s)
            if outcome not in _RETRIED:
                break
        match outcome:
            case _Outcome.DONE:
                return content
            case _Outcome.REFUSED:
                raise self._refusal(content)
            case _Outcome.LATE:
                raise ImageCostError(
                    f"Decoding the image took longer than {self._timeout_s:g} s, which is the "
                    "limit. Resize it, or save it as a plain JPEG."
                )
            case _Outcome.FULL:
                raise _too_much_memory(f"the limit of {self._memory_mb:,} MB")
            case _Outcome.FAILED:
                raise NoProcessError("The model cannot run in a decoding process. Try again.")
            case _Outcome.UNREADY:
                self._not_started("it exited at its start")
                raise self._cannot_start()
            case _Outcome.ENDED | _Outcome.INVALID:
                raise _crashed()

    def _attempt(
        self, order: bytes, data: bytes, max_bytes: int, more_s: float
    ) -> tuple[_Outcome, Pixels]:
        """Send the image once; replace the process if it cannot be used again."""
        process = self._started()
        outcome, content = process.ask(order, data, max_bytes, more_s)
        self._layers = self._layers or process.layers
        if outcome in (_Outcome.LATE, _Outcome.FULL):
            self.kills += 1
        if outcome not in (_Outcome.DONE, _Outcome.REFUSED):
            self._replace(outcome)
        return outcome, content

    def _refusal(self, content: Pixels) -> Exception:
        try:
            return unpack_error(content.tobytes())
        except (TypeError, ValueError):
            self._replace(_Outcome.INVALID)
            return _crashed()

    def _started(self) -> "_Process":
        """The process, which is started if there is none."""
        if self._closed:
            raise SearchError("The service is shutting down and decodes no more images.")
        if self._process is None and time.monotonic() >= self._not_before:
            self.start()
        if self._process is None:
            raise self._cannot_start()
        return self._process

    def _replace(self, outcome: _Outcome) -> None:
        process, self._process = self._process, None
        if process is not None and not self._closed:
            code = process.end()
            structlog.get_logger().warning(
                "decoding process ended", pid=process.pid, cause=outcome.value, returncode=code
            )
            self._pause_s = _FIRST_PAUSE_S if process.is_ready else self._pause_s
            self.restarts += 1
            self.start()

    def _not_started(self, cause: str) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()
        self._last_failure = cause
        if not self._closed:
            structlog.get_logger().error("decoding process did not start", cause=cause)
        self._not_before = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _cannot_start(self) -> NoProcessError:
        return NoProcessError(
            f"The process that decodes images cannot be started ({self._last_failure}). The "
            "service keeps trying; its log has details."
        )


class _Process:
    """A decoding process and the socket to it."""

    def __init__(self, start: Start, timeout_s: float, layers: Sequence[Layer] = ()) -> None:
        """`layers` are the sandbox layers of the process that it replaces. Raises: OSError."""
        self._timeout_s = timeout_s
        self.is_ready = False
        self.layers: Sequence[Layer] = ()
        self._socket, theirs = socket.socketpair()
        for end in (self._socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        with theirs:
            try:
                self._process = start(theirs, layers)
            except BaseException:
                self._socket.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self, order: bytes, data: bytes, max_bytes: int, more_s: float = 0.0
    ) -> tuple[_Outcome, Pixels]:
        """Send an image; the outcome, and the content of the reply."""
        try:
            self._wait_ready()
        except (TimeoutError, _LostError):
            return _Outcome.UNREADY, _NOTHING
        due = time.monotonic() + self._timeout_s
        try:
            self._send(REQUEST.pack(len(order), len(data)) + order, data)
            status, content = self._receive(max_bytes, due + more_s)
        except TimeoutError:
            return _Outcome.FAILED if more_s else _Outcome.LATE, _NOTHING
        except _LostError as error:
            late_s = time.monotonic() - due
            if more_s and error.outcome is _Outcome.ENDED and 0 <= late_s < _ALARM_GRACE_S:
                return _Outcome.LATE, _NOTHING  # the alarm of the process has killed it
            return error.outcome, _NOTHING
        return _OUTCOMES.get(status, _Outcome.INVALID), content

    def _wait_ready(self) -> None:
        """Raises: TimeoutError, _LostError."""
        if not self.is_ready:
            status, content = self._receive(0, time.monotonic() + _START_S)
            try:
                self.layers = unpack_layers(content.tobytes())
            except (TypeError, ValueError) as error:
                raise _LostError(_Outcome.INVALID) from error
            if status != READY:
                raise _LostError(_Outcome.INVALID)
            self.is_ready = True

    def _send(self, head: bytes, data: bytes) -> None:
        """Raises: TimeoutError, _LostError."""
        try:
            self._socket.settimeout(self._timeout_s)
            sent = self._socket.sendmsg([head, data])
            if sent < len(head):
                self._socket.sendall(head[sent:])
            self._socket.sendall(memoryview(data)[max(0, sent - len(head)) :])
        except TimeoutError:
            raise
        except OSError as error:
            raise _LostError(_Outcome.ENDED) from error

    def end(self) -> int | None:
        """Kill the process if it still runs, and return its exit code, if known."""
        code = self._process.end()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that is reading from it
        self._socket.close()
        return code

    def _receive(self, max_bytes: int, deadline: float) -> tuple[int, Pixels]:
        buffer = np.empty(REPLY.size + max(max_bytes, ERROR_BYTES), dtype=np.uint8)
        received, length = 0, REPLY.size
        while received < length:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            try:
                self._socket.settimeout(left_s)
                count = self._socket.recv_into(buffer[received:].data)
            except TimeoutError:
                raise
            except OSError:
                count = 0
            if not count:
                raise _LostError(_Outcome.ENDED)
            received += count
            if received >= REPLY.size:
                length = REPLY.size + REPLY.unpack_from(buffer.data)[1]
                if received > length or length > len(buffer):
                    raise _LostError(_Outcome.INVALID)
        return REPLY.unpack_from(buffer.data)[0], buffer[REPLY.size : length]


Decoder = InlineDecoder | ProcessDecoder
"""Turns image bytes into pixels, or into a JPEG; for one thread at a time. `restarts` counts
replaced processes, `kills` those that exceeded their time or memory."""


def create_decoder(isolated: bool, memory_mb: int, timeout_s: float) -> Decoder:
    """A decoder with its own process if `isolated`, otherwise one that decodes in the thread."""
    return ProcessDecoder(memory_mb, timeout_s) if isolated else InlineDecoder()


def _spawn(
    memory_mb: int, alarm_s: float, connection: socket.socket, layers: Sequence[Layer]
) -> "_Spawned":
    """Start a process without a model. Raises: OSError."""
    names = [" ".join(active_names(layers))] if layers else []
    return _Spawned(spawn(_CODE, connection, [str(memory_mb), str(alarm_s), *names]))


class _Spawned:
    """A child process of the service."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid = process.pid

    def end(self) -> int | None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        return self._process.returncode


def _crashed() -> ImageCostError:
    return ImageCostError(
        "The process that decoded the image crashed. Export the image again from its source; if "
        "the file is intact, send it again."
    )


def _too_much_memory(limit: str = "is available") -> ImageCostError:
    return ImageCostError(
        f"Decoding the image needs more memory than {limit}. Resize it, or save it as a plain JPEG."
    )


class DecoderPool:
    """A pool of decoders, each used by one call at a time; up to `count` idle ones are kept."""

    def __init__(self, make: Callable[[], Decoder], count: int) -> None:
        self.decoders: list[Decoder] = []
        self._make = make
        self._count = count
        self._idle: list[Decoder] = []
        self._layers: Sequence[Layer] = ()

    @property
    def is_up(self) -> bool:
        """Whether one of its decoders has a process."""
        return any(decoder.pid is not None for decoder in self.decoders)

    def start(self) -> None:
        """Start all processes, without waiting until they are ready."""
        for _ in range(self._count - len(self.decoders)):
            decoder = self._new()
            decoder.start()
            self._idle.append(decoder)

    def add(self, decoder: Decoder) -> None:
        """Add an idle decoder whose process is ready."""
        self.decoders.append(decoder)
        self._layers = decoder.layers
        self._idle.append(decoder)

    @contextlib.contextmanager
    def one(self) -> Iterator[Decoder]:
        """A decoder for exclusive use: the last used one, whose memory is still in CPU caches."""
        try:
            decoder = self._idle.pop()
        except IndexError:
            decoder = self._new()
        try:
            yield decoder
        finally:
            self._layers = decoder.layers or self._layers
            if len(self._idle) < self._count:
                self._idle.append(decoder)
            else:
                self.decoders.remove(decoder)
                decoder.close()

    def stop_idle(self) -> None:
        """Kill the processes of idle decoders; the next call starts a new one."""
        stopped: list[Decoder] = []
        while len(stopped) < self._count:
            try:
                stopped.append(self._idle.pop())
            except IndexError:
                break
            stopped[-1].stop()
        self._idle += stopped

    def close(self) -> None:
        """Kill all processes for good, even while they decode images."""
        for decoder in list(self.decoders):
            decoder.close()

    def _new(self) -> Decoder:
        decoder = self._make()
        decoder.reuse_layers(self._layers)
        self.decoders.append(decoder)
        return decoder
