"""Decoders: each turns images into pixels, in a process of its own that can be killed.

An image can cost another nothing: a decoding process that takes too long, takes too much memory or
crashes is replaced, and its image alone is refused. A process that was forked with a model embeds
the image as well.
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
from kinlens.service.encoding.sandbox import Layer, held_names

Pixels = NDArray[np.uint8]
Vector = NDArray[np.float32]

_START_S = 30.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_REAP_S = 5.0
_ALARM_GRACE_S = 1.0
_ATTEMPTS = 2  # a process that was dead before the image came costs no image
_NOTHING = np.empty(0, dtype=np.uint8)
_NO_VECTOR = np.zeros(1, dtype=np.float32)
_OFF_UNIT = 1e-2
_JPEG = b"\xff\xd8\xff"
_SEND_BUFFER_BYTES = 2**20
_CODE = "from kinlens.service.encoding.decode_worker import main; main(arguments)"


class Child(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int: ...

    def end(self) -> int | None:
        """Kill it; its exit code, if that is known."""


Start = Callable[[socket.socket, Sequence[Layer]], Child]
"""Starts a process that serves the socket, in the sandbox of an earlier one. Raises: OSError."""


class InlineDecoder:
    """Decodes in the calling thread, for tests and small machines; nothing can be killed."""

    restarts = kills = 0
    pid: int | None = None
    layers: Sequence[Layer] = (
        Layer(
            "process",
            False,
            "Images are decoded in the service itself. Set KINLENS_DECODE_ISOLATION to true.",
        ),
    )

    def enter_layers(self, layers: Sequence[Layer]) -> None:
        """There is no process that could."""

    def start(self) -> None:
        """Nothing needs to start."""

    def close(self) -> None:
        """Nothing needs to end."""

    def rest(self) -> None:
        """Nothing needs to end."""

    def decode(
        self, data: bytes, spec: Preprocessing, limits: ImageLimits, box: Box | None = None
    ) -> Pixels:
        """`kinlens.embedder.preprocess.preprocess`. Raises: ImageError, InvalidParameterError."""
        try:
            return preprocess(data, spec, limits, box)
        except MemoryError as error:
            raise _too_much_memory() from error

    def render(self, data: bytes, limits: ImageLimits, side_px: int = MAX_SIDE_PX) -> bytes:
        """`kinlens.embedder.preprocess.render_jpeg`. Raises: ImageError."""
        try:
            return render_jpeg(data, limits, side_px)
        except MemoryError as error:
            raise _too_much_memory() from error


class NoProcessError(SearchError):
    """There is no process that can do it now."""


class _Outcome(enum.Enum):
    """How one attempt to decode an image ended; the log gives it as the cause of a new process."""

    DONE = "done"
    REFUSED = "refused the image"
    LATE = "took too long"
    FULL = "out of memory"
    ENDED = "ended by itself"
    NONSENSE = "answered nonsense"
    UNREADY = "did not get ready"
    FAILED = "could not run the model"


_OUTCOMES = {
    DONE: _Outcome.DONE,
    REFUSED: _Outcome.REFUSED,
    ENDING: _Outcome.FULL,
    FAILED: _Outcome.FAILED,
}
_NOT_ABOUT_THE_IMAGE = (_Outcome.ENDED, _Outcome.NONSENSE, _Outcome.UNREADY)
"""It is sent once more after these: the process may have been dead before the image came."""


class _LostError(Exception):
    """The process is gone or answers nonsense; `outcome` is which."""

    def __init__(self, outcome: _Outcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


class ProcessDecoder:
    """Decodes in a process of its own, which has `memory_mb` of address space and `timeout_s` of
    wall-clock time for each image.
    """

    def __init__(self, memory_mb: int, timeout_s: float, start: Start | None = None) -> None:
        """`start` starts its processes; by default each is a fresh interpreter without a model."""
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
        """The layers of its sandbox; none before its first process is up."""
        return self._layers

    @property
    def pid(self) -> int | None:
        """The number of its process."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the process; it need not be up when this returns."""
        try:
            self._process = _Process(self._start_process, self._timeout_s, self._layers)
        except OSError as error:
            self._not_started(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the process, also in the middle of an image of another thread."""
        self._closed = True
        if self._process is not None:
            self._process.end()

    def rest(self) -> None:
        """End the process; the next image starts one."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def enter_layers(self, layers: Sequence[Layer]) -> None:
        """Let its process enter the sandbox of another one without a rehearsal, which could fail
        where the machine is overloaded.
        """
        self._layers = layers

    def decode(
        self, data: bytes, spec: Preprocessing, limits: ImageLimits, box: Box | None = None
    ) -> Pixels:
        """`kinlens.embedder.preprocess.preprocess` in the process: uint8 (3, S, S).

        Raises: ImageError (ImageCostError if the process was killed or crashed),
            InvalidParameterError for the box, NoProcessError if no process can be started.
        """
        side_px = spec.crop_px
        content = self._ask(pack_order(spec, limits, box), data, 3 * side_px**2)
        if len(content) != 3 * side_px**2:
            self._replace(_Outcome.NONSENSE)
            raise _crashed()
        return content.reshape(3, side_px, side_px)

    def embed(
        self, data: bytes, spec: Preprocessing, limits: ImageLimits, box: Box | None, dim: int
    ) -> tuple[Vector, float]:
        """The unit vector (dim,) of an image, and the milliseconds that decoding it took. Only for
        a process that has a model of `dim` numbers.

        Raises: as `decode`.
        """
        order = pack_order(spec, limits, box, embed=True)
        content = self._ask(order, data, 4 * (dim + 1), EMBED_S)
        found = content.view(np.float32) if len(content) == 4 * (dim + 1) else _NO_VECTOR
        vector, decode_ms = found[:-1], float(found[-1])
        if not abs(float(vector @ vector) - 1.0) < _OFF_UNIT:
            self._replace(_Outcome.NONSENSE)
            raise _crashed()
        return vector, decode_ms if 0 <= decode_ms <= 1e3 * self._timeout_s else 0.0

    def render(self, data: bytes, limits: ImageLimits, side_px: int = MAX_SIDE_PX) -> bytes:
        """`kinlens.embedder.preprocess.render_jpeg` in the process. Raises: as `decode`."""
        content = self._ask(pack_rendering(limits, side_px), data, 3 * side_px**2).tobytes()
        if not content.startswith(_JPEG):
            self._replace(_Outcome.NONSENSE)
            raise _crashed()
        return content

    def _ask(self, order: bytes, data: bytes, room: int, more_s: float = 0.0) -> Pixels:
        """The content of the answer, which may come `more_s` after the limit of decoding.

        Raises: as `decode`.
        """
        for _ in range(_ATTEMPTS):
            outcome, content = self._attempt(order, data, room, more_s)
            if outcome not in _NOT_ABOUT_THE_IMAGE:
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
                raise NoProcessError("The model cannot run in a decoding process; try again.")
            case _Outcome.UNREADY:
                self._not_started("it ended at its start")
                raise self._cannot_start()
            case _Outcome.ENDED | _Outcome.NONSENSE:
                raise _crashed()

    def _attempt(
        self, order: bytes, data: bytes, room: int, more_s: float
    ) -> tuple[_Outcome, Pixels]:
        """Send the image once; a process that is of no more use is replaced."""
        process = self._started()
        outcome, content = process.ask(order, data, room, more_s)
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
            self._replace(_Outcome.NONSENSE)
            return _crashed()

    def _started(self) -> "_Process":
        """The process, started again if there is none."""
        if self._closed:
            raise SearchError("The service is being stopped and decodes no images any more.")
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
            f"The process that decodes images cannot be started ({self._last_failure}); it is "
            "tried again. The log of the service has more."
        )


class _Process:
    """A process at the other end of a socket."""

    def __init__(self, start: Start, timeout_s: float, layers: Sequence[Layer] = ()) -> None:
        """`layers` are those of the process that it replaces. Raises: OSError."""
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
        self, order: bytes, data: bytes, room: int, more_s: float = 0.0
    ) -> tuple[_Outcome, Pixels]:
        """What became of the image, and the content of the reply."""
        try:
            self._wait_ready()
        except (TimeoutError, _LostError):
            return _Outcome.UNREADY, _NOTHING
        due = time.monotonic() + self._timeout_s
        try:
            self._send(REQUEST.pack(len(order), len(data)) + order, data)
            status, content = self._receive(room, due + more_s)
        except TimeoutError:
            return _Outcome.FAILED if more_s else _Outcome.LATE, _NOTHING
        except _LostError as error:
            late_s = time.monotonic() - due
            if more_s and error.outcome is _Outcome.ENDED and 0 <= late_s < _ALARM_GRACE_S:
                return _Outcome.LATE, _NOTHING  # its own alarm ended it
            return error.outcome, _NOTHING
        return _OUTCOMES.get(status, _Outcome.NONSENSE), content

    def _wait_ready(self) -> None:
        """Raises: TimeoutError, _LostError."""
        if not self.is_ready:
            status, content = self._receive(0, time.monotonic() + _START_S)
            try:
                self.layers = unpack_layers(content.tobytes())
            except (TypeError, ValueError) as error:
                raise _LostError(_Outcome.NONSENSE) from error
            if status != READY:
                raise _LostError(_Outcome.NONSENSE)
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
        """Kill it if it still lives; how it ended."""
        code = self._process.end()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it
        self._socket.close()
        return code

    def _receive(self, room: int, deadline: float) -> tuple[int, Pixels]:
        buffer = np.empty(REPLY.size + max(room, ERROR_BYTES), dtype=np.uint8)
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
                    raise _LostError(_Outcome.NONSENSE)
        return REPLY.unpack_from(buffer.data)[0], buffer[REPLY.size : length]


Decoder = InlineDecoder | ProcessDecoder
"""Turns image bytes into pixels, or into a JPEG; one thread at a time. `restarts` and `kills` count
processes that were replaced, and ended for time or memory."""


def create_decoder(isolated: bool, memory_mb: int, timeout_s: float) -> Decoder:
    """In a process of its own, if it is to be `isolated`."""
    return ProcessDecoder(memory_mb, timeout_s) if isolated else InlineDecoder()


def _spawn(
    memory_mb: int, alarm_s: float, connection: socket.socket, layers: Sequence[Layer]
) -> "_Spawned":
    """A process that has no model. Raises: OSError."""
    held = [" ".join(held_names(layers))] if layers else []
    return _Spawned(spawn(_CODE, connection, [str(memory_mb), str(alarm_s), *held]))


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
        "The process that decoded the image ended in the middle of it. Export the image again "
        "from its source; if it is a good one, send it again."
    )


def _too_much_memory(limit: str = "there is") -> ImageCostError:
    return ImageCostError(
        f"Decoding the image needs more memory than {limit}. Resize it, or save it as a plain JPEG."
    )


class DecoderPool:
    """Decoders, of which each call takes one; up to `count` are kept for later calls."""

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
        """Start all processes; none need be up when this returns."""
        for _ in range(self._count - len(self.decoders)):
            decoder = self._new()
            decoder.start()
            self._idle.append(decoder)

    def add(self, decoder: Decoder) -> None:
        """Keep this one, whose process is up, for later calls."""
        self.decoders.append(decoder)
        self._layers = decoder.layers
        self._idle.append(decoder)

    @contextlib.contextmanager
    def one(self) -> Iterator[Decoder]:
        """A decoder that no other call uses: the last used one, whose memory is in the caches."""
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

    def rest(self) -> None:
        """End the idle processes; the next call starts one."""
        rested: list[Decoder] = []
        while len(rested) < self._count:
            try:
                rested.append(self._idle.pop())
            except IndexError:
                break
            rested[-1].rest()
        self._idle += rested

    def close(self) -> None:
        """End all processes, also in the middle of an image."""
        for decoder in list(self.decoders):
            decoder.close()

    def _new(self) -> Decoder:
        decoder = self._make()
        decoder.enter_layers(self._layers)
        self.decoders.append(decoder)
        return decoder
