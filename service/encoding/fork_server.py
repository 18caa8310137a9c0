"""The fork server: a process that loads a model once and forks workers.

    service ──► fork server: model loaded ──fork──► worker: image in, vector out
       └───────────────── one socket per worker ───────┘

A fork takes milliseconds and shares the weights, so a killed worker is replaced at once. The fork
server itself decodes only golden images, so no hostile image reaches the process that all workers
are copies of. Where the model runs on a GPU, the fork server has none, and its workers only decode.

Messages on the socket of the fork server, each one packet of text:

    the arguments of `main` as JSON     ──► the choice of the model as JSON, or an error
    "fork LAYER ...", with a socket     ──► process id of a worker that serves this socket in these
                                            layers of the sandbox, or in those that it finds
    "end PID"                           ──► exit code of the worker, after killing it
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from kinlens.embedder import errors
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.decoding.formats import load_all
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import BundleMismatchError, KinlensError
from kinlens.embedder.manifest import Mode
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.types import SHORT
from kinlens.embedder.views.boxes import Detector
from kinlens.service.encoding import worker
from kinlens.service.encoding.sandbox import Layer, active_names
from kinlens.service.encoding.spawn import PACKET_BYTES, Interpreter, interpreter

_START_S = 60.0
_ANSWER_S = 10.0
_TEXT_CHARACTERS = 1000
_MOST_CRASHES = 8
"""Workers share the memory layout of their server. After this number of crashes the server is
replaced, so that no attacker can find addresses by trial and error.
"""
_DIE_WITH_PARENT = 1  # prctl: PR_SET_PDEATHSIG
_MIB = 2**20


class Choice(NamedTuple):
    """The mode and provider that a model runs with, and why."""

    mode: Mode
    provider: str
    reason: str


class ForkServer:
    """The fork server of a bundle, or of workers that only decode.

    A worker may allocate `memory_mb` in addition to the model; `alarm_s` limits its decoding.
    Without a `session` the model runs elsewhere, and workers have only the detector of the bundle.
    """

    def __init__(
        self,
        memory_mb: int,
        alarm_s: float,
        bundle: Bundle | None = None,
        session: SessionSettings | None = None,
    ) -> None:
        self.memory_mb = memory_mb
        self.choice: Choice | None = None
        self._alarm_s = alarm_s
        # Resolve the path: a symlink to the newest bundle may have changed by the next start.
        self._bundle = (
            None if bundle is None else (str(bundle.path.resolve()), bundle.manifest.bundle_id)
        )
        self._session = session
        self._lock = threading.Lock()
        self._interpreter: Interpreter | None = None
        self._is_up = self._is_closed = False
        self._crashes = 0

    @property
    def is_running(self) -> bool:
        """Whether it can fork."""
        own = self._interpreter
        return self._is_up and own is not None and own.process.poll() is None

    def start(self) -> None:
        """Start the process and wait until it has loaded the model. One thread at a time. A later
        start runs the model in the same mode as the first.

        Raises: OSError with the reason; BundleError if the model cannot run.
        """
        self.stop()
        session = None if self._session is None else asdict(self._session)
        arguments = self.memory_mb, self._alarm_s, session, self._bundle
        self._interpreter = interpreter(json.dumps(arguments, default=sorted))
        ours = self._interpreter.connection
        try:
            if self._is_closed:
                raise ConnectionError("the service is shutting down")
            ours.settimeout(_START_S)
            if not (packet := ours.recv(PACKET_BYTES)):
                raise ConnectionError("it exited at its start")
            answer = json.loads(packet)
            if isinstance(answer, dict):
                raise getattr(errors, answer["error"], KinlensError)(answer["text"])
        except BaseException:
            self.stop()
            raise
        if answer and self._session is not None:
            mode, provider, reason = answer
            self.choice = Choice(Mode(*mode), provider, reason)
            engine, precision = self.choice.mode
            self._session = replace(self._session, engine=engine, precision=precision)
        self._crashes, self._is_up = 0, True

    def fork(self, connection: socket.socket, layers: Sequence[Layer] = ()) -> int:
        """Fork a worker that serves the other end of `connection`, and return its process id.
        `layers` are the sandbox layers of the worker that it replaces.

        Raises: OSError if no worker can be started.
        """
        return self._ask(" ".join(["fork", *active_names(layers)]), [connection.fileno()])

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
        if self._interpreter is not None:
            self._interpreter.end()
            self._interpreter = None

    def _ask(self, text: str, descriptors: Sequence[int] = ()) -> int:
        """Send a message and return the answer.

        Raises: OSError, after which the server is stopped unless it reported the reason.
        """
        with self._lock:
            own = self._interpreter
            if own is None or not self.is_running:
                raise ConnectionError("the fork server is not running")
            try:
                own.connection.settimeout(_ANSWER_S)
                socket.send_fds(own.connection, [text.encode()], descriptors)
                answer = own.connection.recv(PACKET_BYTES).decode()
            except OSError:
                self.stop()  # a late answer would be taken for the answer to the next message
                raise
        if not answer.removeprefix("-").isdecimal():
            raise ConnectionError(answer or "the fork server ended")
        return int(answer)


def main() -> None:
    """Load the model, then fork a worker for each order until the service closes the socket.

    The first packet is a list of arguments in JSON: the memory of a worker in addition to the model
    in MB, the limit of decoding an image in seconds, the session settings, which are null if the
    model runs elsewhere, and the folder and the id of the bundle; if that is null, workers only
    decode.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the service decides when this ends
    warnings.simplefilter("ignore")
    orders = socket.socket(fileno=0)
    load_all()
    if not (packet := orders.recv(PACKET_BYTES)):
        return  # the service has ended
    memory_mb, alarm_s, settings, bundle = json.loads(packet)
    model = choice = detector = None
    try:
        if bundle:
            opened = _opened(*bundle)
            if opened.manifest.boxes is not None:
                detector = Detector.open(opened)
            if settings is not None:
                model = OnnxEmbedder.open(opened, SessionSettings(**settings))
                choice = Choice(model.mode, model.provider, model.precision_reason)
    except KinlensError as error:
        answer = {"error": type(error).__name__, "text": str(error)[:_TEXT_CHARACTERS]}
        with contextlib.suppress(ConnectionError):
            orders.send(json.dumps(answer).encode())
        return
    memory_bytes = _address_space_bytes() + memory_mb * _MIB
    if model is not None and settings["threads"] != 1:
        model.load_in_forks(SessionSettings(**settings))  # its threads would not survive a fork
    gc.freeze()  # otherwise a collection in a worker writes to, and so copies, all these pages
    server = os.getpid()

    def work(layers: Sequence[str]) -> None:
        _die_with(server)
        embed = None if model is None else model.embed
        connection = socket.socket(fileno=0)
        worker.serve(connection, memory_bytes, alarm_s, layers, embed, detector)

    with contextlib.suppress(ConnectionError):  # the service has ended
        orders.send(json.dumps(choice).encode())
        _serve(orders, work)


def _opened(path: str, bundle_id: str) -> Bundle:
    """Raises: BundleError, BundleMismatchError."""
    bundle = Bundle.open(path)
    if bundle.manifest.bundle_id != bundle_id:
        found = bundle.manifest.bundle_id[:SHORT]
        raise BundleMismatchError(f"{path} has become the bundle {found}.")
    return bundle


def _serve(orders: socket.socket, work: Callable[[Sequence[str]], None]) -> None:
    """Raises: ConnectionError."""
    workers = set[int]()
    while True:
        text, descriptors, *_ = socket.recv_fds(orders, PACKET_BYTES, 1)
        if not text:
            return
        command, *words = text.decode().split()
        if command == "end":
            pid = int(words[0])
            answer = "0"
            if pid in workers:  # otherwise the id may have been reused
                workers.remove(pid)
                os.kill(pid, signal.SIGKILL)
                answer = str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        else:
            [connection] = descriptors
            try:
                pid = os.fork()
            except OSError as error:  # no memory, or too many processes
                answer = str(error)
            else:
                if not pid:
                    _become_worker(connection, partial(work, words))
                workers.add(pid)
                answer = str(pid)
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


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")
