"""Interpreters for fork servers, one of which may begin its imports before it is needed."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import kinlens

CODE = "from kinlens.service.encoding.fork_server import main; main()"
PACKET_BYTES = 2**14

_PATH = "import sys; sys.path[:] = sys.argv[1:]; "
_ENVIRONMENT = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYDANTIC_DISABLE_PLUGINS"), "1"
)
_PASSED_ON = ("LD_LIBRARY_PATH", "HOME", "XDG_CACHE_HOME")  # the last two for measured speeds


class Interpreter(NamedTuple):
    """A process that waits for the arguments of a fork server, and our end of its socket."""

    process: "subprocess.Popen[bytes]"
    connection: socket.socket

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


_prepared: list[Interpreter] = []


def prepare() -> None:
    """Start an interpreter in advance. It is a matter of speed alone: one that nobody takes ends
    with this process.
    """
    with contextlib.suppress(OSError):  # the fork server reports it when it starts
        _prepared.append(_spawned())


def interpreter(arguments: str) -> Interpreter:
    """An interpreter that runs `fork_server.main` with these arguments in JSON. Raises: OSError."""
    found = _prepared.pop() if _prepared else _spawned()
    if found.process.poll() is not None:  # killed meanwhile, perhaps for lack of memory
        found.end()
        found = _spawned()
    try:
        found.connection.send(arguments.encode())
    except BaseException:
        found.end()
        raise
    return found


def _spawned() -> Interpreter:
    """A fresh interpreter in its own session. It inherits no environment and no files except its
    end of the socket, which is its standard input.

    Raises: OSError.
    """
    path = [str(Path(kinlens.__path__[0]).parent), *(entry for entry in sys.path if entry)]
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PATH + CODE, *path],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env=_ENVIRONMENT | passed_on,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return Interpreter(process, ours)
