"""A decoding process that was taken over: it makes attempts in place of decoding.

It is the real process with its real sandbox; only its decoder is another one. With the functions of
this module a test starts it with the name of an attempt.
"""

import encodings.idna  # noqa: F401 (an address needs it, and later it cannot be loaded)
import errno
import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kinlens.embedder.preprocess import ImageLimits
from kinlens.service.encoding import sandbox, worker

START = """
from tests.support.hostile import take_over
take_over({layers!r}, {fault!r})
from kinlens.service.encoding.fork_server import main
main()
"""
"""What a worker runs in place of its own start; its arguments are those of `take_over`."""

_ORDER = b"attempt "
_JPEG = b"\xff\xd8\xff"
_MEMORY_BYTES = 64


def attempt(decoder: Any, name: str, *arguments: object) -> str:
    """`done`, or the class of the error that the attempt ended with."""
    order = _ORDER + json.dumps([name, *arguments]).encode()
    return str(decoder.render(order, ImageLimits()).removeprefix(_JPEG).decode())


def take_over(layers: Sequence[str], fault: str) -> None:
    """In the worker: decode what is no attempt, and enter these layers alone.

    A `fault` is what the kernel has: `lacking` no layer, `foreign` other system calls.
    """
    render, enter = worker.render_jpeg, sandbox.enter

    def taken_over(data: bytes, *options: Any) -> bytes:
        if not data.startswith(_ORDER):
            return render(data, *options)
        name, *arguments = json.loads(data.removeprefix(_ORDER))
        try:
            ATTEMPTS[name](*arguments)
        except Exception as error:
            return _JPEG + type(error).__name__.encode()
        return _JPEG + b"done"

    worker.render_jpeg = taken_over
    worker.enter = lambda rehearse: enter(rehearse, layers) if layers else []
    if fault == "lacking":
        sandbox.system_call = _lacking
    elif fault == "foreign":
        sandbox.ALLOWED_CALLS = ""


def _lacking(number: int, *arguments: object) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _connect(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), 5).close()


def _new_socket() -> None:
    socket.socket(socket.AF_UNIX).close()


def _read(path: str) -> None:
    assert Path(path).read_bytes()


def _list(path: str) -> None:
    assert next(Path(path).iterdir())


def _memory_of_parent() -> None:
    parent = Path("/proc", str(os.getppid()))
    start = int((parent / "maps").read_text().split("-")[0], 16)
    with (parent / "mem").open("rb", buffering=0) as memory:
        memory.seek(start)
        assert memory.read(_MEMORY_BYTES)


def _write(path: str) -> None:
    Path(path).open("wb").close()


def _execute() -> None:
    os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", "exit 0"], {}), 0)


def _fork() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def _signal_parent() -> None:
    os.kill(os.getppid(), signal.SIGURG)  # which is ignored where it arrives


ATTEMPTS: dict[str, Callable[..., None]] = {
    "connect": _connect,
    "new socket": _new_socket,
    "read": _read,
    "list": _list,
    "memory of parent": _memory_of_parent,
    "write": _write,
    "remove": os.unlink,
    "execute": _execute,
    "fork": _fork,
    "signal parent": _signal_parent,
}
