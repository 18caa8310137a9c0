"""Crash-safe files: synced writes and renames, locks between processes, hashing while writing.

Mostly for galleries and the service, but bundles are written with it too, and this is the package
that both may import.
"""

import contextlib
import errno
import hashlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

Hook = Callable[[str], None]
"""Called with the name of a crash point; it may raise or end the process."""

_hooks: list[Hook] = []
_STAGE = ".stage-"
_SETTLED_S = 2.0  # some file systems have times of a second


if sys.platform == "win32":
    # Windows opens no folder, and neither renames nor removes a file that a process has open. So a
    # folder or stage is locked by an empty file next to it, and files in use are never lost.

    _MARK = f"{_STAGE}lock-"
    _READERS = 512
    _LOCKED_AT = 2**30  # bytes that are locked cannot be read, so these are beyond the content
    _TO_SYNC = os.O_RDWR
    _SYNCS_FOLDERS = False  # their entries are in the journal of the file system
    _PAUSES_S: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)  # while others read what is replaced

    def lock(descriptor: int, *, alone: bool, wait: bool) -> bool:
        """Lock an open file, exclusively if `alone`; whether it succeeded.

        Windows has exclusive locks of bytes: a reader locks any of 512 bytes, a writer all of them.
        """
        while True:
            for _ in range(1 if alone else 8):  # another reader may have the byte
                place = _LOCKED_AT + (0 if alone else random.randrange(_READERS))
                os.lseek(descriptor, place, os.SEEK_SET)
                with contextlib.suppress(PermissionError):
                    msvcrt.locking(descriptor, msvcrt.LK_NBLCK, _READERS if alone else 1)
                    return True
            if not wait:
                return False
            time.sleep(0.01)

    def _mark(path: Path) -> Path:
        return path if path.name.startswith(_MARK) else path.with_name(_MARK + path.name)

    def _open_to_lock(path: Path) -> int:
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        try:
            return os.open(_mark(path), os.O_RDWR | os.O_CREAT)
        except PermissionError:  # nothing is removed from a folder that cannot be written
            return os.open(os.devnull, os.O_RDWR)

    def _release(path: Path, descriptor: int) -> None:
        os.close(descriptor)
        with contextlib.suppress(OSError):  # another process has it open
            _mark(path).unlink()

else:
    _TO_SYNC = os.O_RDONLY
    _SYNCS_FOLDERS = True
    _PAUSES_S: tuple[float, ...] = ()

    def lock(descriptor: int, *, alone: bool, wait: bool) -> bool:
        """Lock an open file or folder, exclusively if `alone`; whether it succeeded."""
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        try:
            fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _open_to_lock(path: Path) -> int:
        return os.open(path, os.O_RDONLY)

    def _release(_path: Path, descriptor: int) -> None:
        os.close(descriptor)


def set_fault_hook(hook: Hook | None) -> None:
    """Call `hook` at every crash point from now on; None removes it. For tests."""
    _hooks[:] = [] if hook is None else [hook]


def crash_point(point: str) -> None:
    """A point at which a test may simulate a crash or an I/O error."""
    for hook in _hooks:
        hook(point)


def sync(path: Path, step: str) -> None:
    """Flush a file, or the entries of a folder, to the disk. Raises: OSError."""
    crash_point(f"{step}: before sync of {path.name}")
    if _SYNCS_FOLDERS or not path.is_dir():
        descriptor = os.open(path, _TO_SYNC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    crash_point(f"{step}: after sync of {path.name}")


def sync_tree(folder: Path, step: str) -> None:
    """Flush all files and folders below `folder` to the disk. Raises: OSError."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            sync_tree(entry, step)
        else:
            sync(entry, step)
    sync(folder, step)


def make_folder(folder: Path, step: str) -> None:
    """Create a folder and its missing parents, durably. Raises: OSError."""
    if not folder.is_dir():
        if not folder.parent.exists():
            make_folder(folder.parent, step)
        folder.mkdir(exist_ok=True)
        sync(folder.parent, step)


def rename(source: Path, target: Path, step: str) -> None:
    """Rename `source` to `target` durably, replacing it. Raises: OSError."""
    crash_point(f"{step}: before rename")
    for pause_s in _PAUSES_S:
        with contextlib.suppress(PermissionError):
            source.replace(target)
            break
        time.sleep(pause_s)
    else:
        source.replace(target)
    crash_point(f"{step}: after rename")
    sync(target.parent, step)


def write_whole(path: Path, data: bytes, step: str) -> None:
    """Replace the content of `path` atomically and durably. Only this user can read the file.

    Raises: OSError.
    """
    stage, descriptor = _new_stage(path.parent, _STAGE, _new_file)
    try:
        stage.write_bytes(data)
        sync(stage, step)
        rename(stage, path, step)
    finally:
        _release(stage, descriptor)
        stage.unlink(missing_ok=True)


def stamp(path: str) -> tuple[int, ...] | None:
    """The device, inode, size and times of a file; None if it cannot be looked at. Differs after a
    change, except perhaps after several within the resolution of the times (`is_settled`).
    """
    try:
        found = os.stat(path)  # noqa: PTH116 (for many files each second: a Path costs as much again)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_settled(stamp: tuple[int, ...] | None) -> bool:
    """Whether a file was changed long enough ago that its next change shows in its stamp."""
    return stamp is not None and time.time() - stamp[3] / 1e9 > _SETTLED_S


@contextlib.contextmanager
def exclusive(path: Path, *, wait: bool) -> Iterator[bool]:
    """Lock the file `path` exclusively; yields False if it is locked and `wait` is false."""
    with path.open("a+", encoding="ascii") as file:
        if not lock(file.fileno(), alone=True, wait=wait):
            yield False
            return
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield True


@contextlib.contextmanager
def shared(path: Path) -> Iterator[bool]:
    """Lock the file `path` in shared mode; yields False if a process has it exclusively."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # a fifth of the time of `open`
    try:
        yield lock(descriptor, alone=False, wait=False)
    finally:
        os.close(descriptor)


def holder(path: Path) -> str:
    """The id of the process that last locked `path` exclusively, or "unknown"."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip() or "unknown"
    return "unknown"


def lock_folder(folder: Path) -> int:
    """Mark a folder or file as in use until the returned descriptor is closed. Raises: OSError."""
    descriptor = _open_to_lock(folder)
    with contextlib.suppress(OSError):  # file system without locks: pruning then does not wait
        lock(descriptor, alone=False, wait=True)  # waits while `sweep` removes it
    return descriptor


@contextlib.contextmanager
def _unused(folder: Path) -> Iterator[bool]:
    """Whether no process uses this folder or file. Then none begins to, until the block ends."""
    descriptor = _open_to_lock(folder)
    try:
        yield _has_locked(descriptor)
    finally:
        _release(folder, descriptor)


def _has_locked(descriptor: int) -> bool:
    try:
        return lock(descriptor, alone=True, wait=False)
    except OSError:
        return False


def in_use(folder: Path) -> bool:
    """Whether a process reads this folder."""
    with _unused(folder) as is_unused:
        return not is_unused


def sweep(parent: Path, prefix: str = _STAGE) -> None:
    """Remove the remains of interrupted writes and removals below `parent`. Raises: OSError."""
    for stage in parent.iterdir():
        if not stage.name.startswith(prefix):
            continue
        # Another process may remove it at the same time.
        with contextlib.suppress(OSError), _unused(stage) as is_unused:
            if not is_unused:
                continue
            if stage.is_dir():
                shutil.rmtree(stage, ignore_errors=True)
            else:
                stage.unlink()


@contextlib.contextmanager
def staged(parent: Path, prefix: str = _STAGE) -> Iterator[Path]:
    """A temporary folder below `parent`, marked as in use. It is removed afterwards unless it was
    renamed. Remains of interrupted writes with this prefix are removed first. Raises: OSError.
    """
    sweep(parent, prefix)
    stage, descriptor = _new_stage(parent, prefix, tempfile.mkdtemp)
    try:
        stage.chmod(0o755)
        yield stage
    finally:
        _release(stage, descriptor)
        shutil.rmtree(stage, ignore_errors=True)


def _new_stage(
    parent: Path, prefix: str, make: Callable[[str, str, Path], str]
) -> tuple[Path, int]:
    """A new folder or file, with a name from `make`, and the descriptor of its lock."""
    while True:
        stage = Path(make("", prefix, parent))
        with contextlib.suppress(FileNotFoundError):  # `sweep` may remove it before it is locked
            descriptor = lock_folder(stage)
            if stage.exists():
                return stage, descriptor
            _release(stage, descriptor)


def _new_file(suffix: str, prefix: str, parent: Path) -> str:
    descriptor, name = tempfile.mkstemp(suffix, prefix, parent)
    os.close(descriptor)
    return name


def is_stage(folder: Path) -> bool:
    """Whether the name of `folder` is that of a temporary folder."""
    return folder.name.startswith(_STAGE)


def discard(folder: Path) -> None:
    """Remove an unused folder. The next write completes a removal that was interrupted."""
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
    """A new file that is hashed while it is written. A context manager, which closes the file and
    does not remove it after an error. Raises: OSError.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: Any) -> int:
        """Append bytes, or any contiguous buffer; returns the number of bytes."""
        # FAISS writes through this class, because its own writer misses a full disk on closing.
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
        """Size and hash of the bytes written so far."""
        return FileFacts(bytes=self._bytes, sha256=self._hash.hexdigest())

    def __exit__(self, *_: object) -> None:
        self._file.close()
