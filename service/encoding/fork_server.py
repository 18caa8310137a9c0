"""A process that loads a model once and forks workers, which decode images and embed them.

    service ──► fork server: model loaded ──fork──► worker: image in, vector out
       └───────────────── one socket per worker ───────┘

A fork takes milliseconds and shares the weights, so a killed worker is replaced at once. The fork
server itself decodes only golden images, so no hostile image reaches the process that all workers
are copies of.

Messages on the socket of the fork server, each one packet of text:

    "first", with a socket              ──► process id of a worker that serves this socket
    "again LAYER ...", with a socket    ──► process id of a worker that enters these layers
    "end PID"                           ──► exit code of the worker, after killing it
"""

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import kinlens
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.decoding.formats import load_all
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import BundleMismatchError, KinlensError
from kinlens.embedder.manifest import Mode
from kinlens.embedder.preprocess import ImageLimits
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.types import SHORT
from kinlens.service.encoding import decode_worker
from kinlens.service.encoding.sandbox import Layer, active_names

_START_S = 60.0
_ANSWER_S = 10.0
_PACKET_BYTES = 4096
_REASON_CHARACTERS = 1000
_READY = "ready"
_MOST_CRASHES = 8
"""Workers share the memory layout of their server. After this number of crashes the server is
replaced, so that no attacker can find addresses by trial and error.
"""
_DIE_WITH_PARENT = 1  # prctl: PR_SET_PDEATHSIG
_MIB = 2**20
CODE = "from kinlens.service.encoding.fork_server import main; main(arguments)"

_PATH = (
    "import sys; count = int(sys.argv[1]); sys.path[:] = sys.argv[2:2 + count]; "
    "arguments = sys.argv[2 + count:]; "
)
_ENVIRONMENT = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYDANTIC_DISABLE_PLUGINS"), "1"
)
_PASSED_ON = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")


def spawn(
    code: str, connection: socket.socket, arguments: Sequence[str]
) -> "subprocess.Popen[bytes]":
    """Start a fresh interpreter in its own session that runs `code` with the list `arguments`. It
    inherits no environment and no files except `connection`, which is its standard input.

    Raises: OSError.
    """
    path = [str(Path(kinlens.__path__[0]).parent), *(entry for entry in sys.path if entry)]
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PATH + code, str(len(path)), *path, *arguments],
        stdin=connection.fileno(),
        stdout=subprocess.DEVNULL,
        cwd="/",
        env=_ENVIRONMENT | passed_on,
        start_new_session=True,
    )


@dataclass(frozen=True, slots=True)
class ForkedWorker:
    """A worker that a fork server started."""

    pid: int
    server: "ForkServer"

    def end(self) -> int | None:
        """Kill it and return its exit code, if the server still knows it."""
        return self.server.end(self.pid)


class ForkServer:
    """The fork server of one bundle in one mode.

    A worker may allocate `memory_mb` in addition to the model; `alarm_s` limits its decoding.
    """

    def __init__(self, bundle: Bundle, mode: Mode, memory_mb: int, alarm_s: float) -> None:
        # Resolve the path: a symlink to the newest bundle may have changed by the next start.
        path, bundle_id = str(bundle.path.resolve()), bundle.bundle_id
        self._arguments = [path, bundle_id, *mode, str(memory_mb), str(alarm_s)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_up = self._is_closed = False
        self._crashes = 0

    @property
    def is_running(self) -> bool:
        """Whether it can fork."""
        process = self._process
        return self._is_up and process is not None and process.poll() is None

    def start(self) -> None:
        """Start the process and wait until it has loaded the model. One thread at a time.

        Raises: OSError with the reason.
        """
        self.stop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = spawn(CODE, theirs, self._arguments)
            except BaseException:
                ours.close()
                raise
        self._socket = ours
        try:
            if self._is_closed:
                raise ConnectionError("the service is shutting down")
            ours.settimeout(_START_S)
            answer = ours.recv(_PACKET_BYTES).decode()
            if answer != _READY:
                raise ConnectionError(answer or "it exited at its start")
        except OSError:
            self.stop()
            raise
        self._crashes, self._is_up = 0, True

    def fork(self, connection: socket.socket, layers: Sequence[Layer] = ()) -> ForkedWorker:
        """Fork a worker that serves the other end of `connection`. `layers` are the sandbox layers
        of the worker that it replaces.

        Raises: OSError if no worker can be started.
        """
        order = " ".join(["again", *active_names(layers)]) if layers else "first"
        return ForkedWorker(self._ask(order, [connection.fileno()]), self)

    def end(self, pid: int) -> int | None:
        """Kill a worker and return its exit code; None if it has ended with its server."""
        try:
            code = self._ask(f"end {pid}")
        except OSError:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)  # as PID 1 of a container, the service inherits the worker
            return None
        if code < 0 and code != -signal.SIGKILL:
            self._crashes += 1
            if self._crashes >= _MOST_CRASHES:
                self.stop()
        return code

    def close(self) -> None:
        """Kill the server and all its workers, and refuse later starts."""
        self._is_closed = True
        self.stop()

    def stop(self) -> None:
        """Kill the server and all its workers."""
        self._is_up = False
        if self._process is not None and self._socket is not None:
            self._process.kill()
            self._process.wait()
            self._socket.close()

    def _ask(self, text: str, descriptors: Sequence[int] = ()) -> int:
        """Send a message and return the answer.

        Raises: OSError, after which the server is stopped unless it reported the reason.
        """
        with self._lock:
            if not self.is_running or self._socket is None:
                raise ConnectionError("the fork server is not running")
            try:
                self._socket.settimeout(_ANSWER_S)
                socket.send_fds(self._socket, [text.encode()], descriptors)
                answer = self._socket.recv(_PACKET_BYTES).decode()
            except OSError:
                self.stop()  # a late answer would be taken for the answer to the next message
                raise
        if not answer.removeprefix("-").isdecimal():
            raise ConnectionError(answer or "the fork server ended")
        return int(answer)


def main(arguments: Sequence[str]) -> None:
    """Load the model, then fork a worker for each order until the service closes the socket."""
    path, bundle_id, engine, precision, memory_mb, alarm_s = arguments
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the service decides when this ends
    warnings.simplefilter("ignore")
    orders = socket.socket(fileno=0)
    load_all()
    mode = Mode(engine, precision)  # type: ignore[arg-type]
    try:
        bundle = Bundle.open(path)
        if bundle.bundle_id != bundle_id:
            raise BundleMismatchError(f"{path} has become the bundle {bundle.bundle_id[:SHORT]}.")
        model = OnnxEmbedder.checked(bundle, SessionSettings(), ImageLimits(), mode)
    except KinlensError as error:
        with contextlib.suppress(ConnectionError):
            orders.send(str(error)[:_REASON_CHARACTERS].encode())
        return
    gc.freeze()  # otherwise a collection in a worker writes to, and so copies, all these pages
    server = os.getpid()

    def work(layers: Sequence[str] | None) -> None:
        _die_with(server)
        limit = _address_space_bytes() + int(memory_mb) * _MIB
        decode_worker.serve(socket.socket(fileno=0), limit, float(alarm_s), layers, model.embed)

    with contextlib.suppress(ConnectionError):  # the service has ended
        _serve(orders, work)


def _serve(orders: socket.socket, work: Callable[[Sequence[str] | None], None]) -> None:
    """Raises: ConnectionError."""
    workers = set[int]()
    orders.send(_READY.encode())
    while True:
        text, descriptors, *_ = socket.recv_fds(orders, _PACKET_BYTES, 1)
        if not text:
            return
        command, *words = text.decode().split()
        if command == "end":
            pid = int(words[0])
            answer = str(_ended(pid) if pid in workers else 0)  # the id may have been reused
            workers.discard(pid)
        else:
            [connection] = descriptors
            try:
                worker = os.fork()
            except OSError as error:  # no memory, or too many processes
                answer = str(error)
            else:
                if not worker:
                    layers = words if command == "again" else None
                    _become_worker(connection, partial(work, layers))
                workers.add(worker)
                answer = str(worker)
            os.close(connection)
        orders.send(answer.encode())


def _become_worker(connection: int, work: Callable[[], None]) -> NoReturn:
    """Do `work` with `connection` as standard input and no other file of the server, then exit."""
    status = 1
    try:
        os.dup2(connection, 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        with contextlib.suppress(ConnectionError):  # the service has ended
            work()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def _die_with(server: int) -> None:
    """Exit when the server does; otherwise workers would remain that no process can kill."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:  # it ended before the call
        os._exit(1)


def _ended(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")
