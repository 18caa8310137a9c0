"""Files that survive a crash: synced steps, locks between processes, hashes made while writing."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Hook = Callable[[str], None]
"""Called with the name of a step, before and after it; it may raise or end the process."""

_hooks: list[Hook] = []
_STAGE = ".stage-"
_STALE_S = 3600.0


def set_fault_hook(hook: Hook | None) -> None:
    """Call `hook` at every step from now on; None takes it away. For tests."""
    _hooks[:] = [] if hook is None else [hook]


def crash_point(point: str) -> None:
    """Say that the step `point` is reached."""
    for hook in _hooks:
        hook(point)


def sync(path: Path, step: str) -> None:
    """Bring a file, or the names in a folder, to the disk. Raises: OSError."""
    crash_point(f"{step}: before sync of {path.name}")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    crash_point(f"{step}: after sync of {path.name}")


def sync_tree(folder: Path, step: str) -> None:
    """Bring everything below `folder` to the disk. Raises: OSError."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            sync_tree(entry, step)
        else:
            sync(entry, step)
    sync(folder, step)


def make_folder(folder: Path, step: str) -> None:
    """Create a folder and the parents that it lacks, for good. Raises: OSError."""
    if not folder.is_dir():
        if not folder.parent.exists():
            make_folder(folder.parent, step)
        folder.mkdir(exist_ok=True)
        sync(folder.parent, step)


def rename(source: Path, target: Path, step: str) -> None:
    """Give `source` the name `target`, whatever had it, for good. Raises: OSError."""
    crash_point(f"{step}: before rename")
    source.replace(target)
    crash_point(f"{step}: after rename")
    sync(target.parent, step)


def write_whole(path: Path, data: bytes, step: str) -> None:
    """Put `data` into `path` for good, readable by this user alone: who reads it finds the old
    content or the new. Raises: OSError.
    """
    descriptor, name = tempfile.mkstemp(prefix=_STAGE, dir=path.parent)
    stage = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        sync(stage, step)
        rename(stage, path, step)
    finally:
        stage.unlink(missing_ok=True)


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


def sweep(parent: Path, prefix: str = _STAGE) -> None:
    """Remove what interrupted writes and removals left below `parent`. Raises: OSError."""
    for stage in parent.iterdir():
        with contextlib.suppress(OSError):  # somebody else removes it
            if not stage.name.startswith(prefix) or in_use(stage):
                continue
            if stage.is_dir():
                shutil.rmtree(stage, ignore_errors=True)
            elif time.time() - stage.stat().st_mtime > _STALE_S:  # nobody marks a file as in use
                stage.unlink()


@contextlib.contextmanager
def staged(parent: Path, prefix: str = _STAGE) -> Iterator[Path]:
    """An empty folder below `parent` to write aside in, marked as in use; gone afterwards unless
    it was renamed. What interrupted writes left under this prefix goes first. Raises: OSError.
    """
    sweep(parent, prefix)
    stage = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    descriptor = hold(stage)
    try:
        stage.chmod(0o755)
        yield stage
    finally:
        os.close(descriptor)
        shutil.rmtree(stage, ignore_errors=True)


def is_stage(folder: Path) -> bool:
    """Whether this is what an interrupted write left over."""
    return folder.name.startswith(_STAGE)


def discard(folder: Path) -> None:
    """Remove a folder that nobody needs; a removal that is cut short is ended by the next write."""
    with contextlib.suppress(OSError):
        if not is_stage(folder):
            unique = f"{_STAGE}{folder.name}-{os.urandom(4).hex()}"
            folder = folder.rename(folder.with_name(unique))
        shutil.rmtree(folder)


class FileFacts(BaseModel):
    """Size and sha256 (hex) of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class HashedFile(contextlib.AbstractContextManager["HashedFile"]):
    """Opened for writing, as a context manager; an error removes nothing. Raises: OSError."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: Any) -> int:
        """Append bytes, or anything with a contiguous buffer; how many bytes."""
        # Through a Python file, because FAISS' own writer does not notice a full disk on closing.
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        self._file.write(view)
        self._hash.update(view)
        self._bytes += len(view)
        return len(view)

    @property
    def facts(self) -> FileFacts:
        """Of what was written so far."""
        return FileFacts(bytes=self._bytes, sha256=self._hash.hexdigest())

    def __exit__(self, *_: object) -> None:
        self._file.close()
