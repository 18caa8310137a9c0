"""Locks between processes; the kernel lets go of them when a process dies."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def exclusive(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock file `path` alone; False if somebody has it and this does not `wait`."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield True


@contextlib.contextmanager
def shared(path: Path) -> Iterator[bool]:
    """Hold the lock file `path` together with others; False if one process has it alone."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def holder(path: Path) -> str:
    """The number of the process that holds `path` alone, as far as is known."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip() or "unknown"
    return "unknown"


def hold(folder: Path) -> int:
    """Mark a folder as being read, until the returned descriptor is closed. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks; pruning then does not wait
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # `in_use` holds it for a moment
    return descriptor


def in_use(folder: Path) -> bool:
    """Whether a process reads this folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
