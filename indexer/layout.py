"""The folder of a gallery: its versions, which one is current, and how a new one replaces it.

gallery/
  CURRENT              the first 12 hex digits of the published version
  LOCK                 held while a build is running
  work.sqlite          vectors of a build that has not been published yet
  versions/<version>/  the files of one version; they never change
"""

import contextlib
import fcntl
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from embedder.errors import GalleryCorruptError, GalleryError, GalleryNotFoundError

SHORT = 12
"""Hex digits of a version or bundle id that are shown and used as names."""

MANIFEST = "manifest.json"
"""The file that makes a folder a version."""

_CURRENT = "CURRENT"
_LOCK = "LOCK"
_WORK = "work.sqlite"
_VERSIONS = "versions"
_STAGE = ".stage-"
_VERSION_NAME = re.compile(f"[0-9a-f]{{{SHORT}}}")
_STAGE_NAME = re.compile(rf"{re.escape(_STAGE)}[0-9a-z_]+")
_OWN_NAMES = {
    *(_CURRENT, f".{_CURRENT}.tmp", _LOCK, _VERSIONS),
    *(f"{_WORK}{suffix}" for suffix in ("", "-wal", "-shm", "-journal")),
}


class GalleryFolder:
    """The files of a gallery as a whole; what is inside a version is not known here."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.work_path = self.path / _WORK
        self._versions = self.path / _VERSIONS

    def current(self) -> Path:
        """The folder of the published version.

        Raises: GalleryNotFoundError, GalleryCorruptError.
        """
        name = self._current_name()
        if name is None:
            raise GalleryNotFoundError(self._absence())
        if not _VERSION_NAME.fullmatch(name) or not (self._versions / name).is_dir():
            raise GalleryCorruptError(
                f"{self.path / _CURRENT} points to the version {name[:40]!r}, which is not there. "
                "Build the gallery again, or write the name of a folder in "
                f"{self._versions} into that file."
            )
        return self._versions / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder if needed and keep other builds out of it.

        Raises: GalleryError if another build is running or the folder holds something else.
        """
        self._refuse_foreign_folder()
        self._versions.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCK).open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise GalleryError(
                    f"Another build (process {file.read() or 'unknown'}) is writing {self.path}. "
                    "Wait for it to finish, or choose another folder with --out."
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        """An empty folder to write a new version in; gone afterwards unless it was published."""
        for folder in self._versions.iterdir():
            if _STAGE_NAME.fullmatch(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=self._versions))
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def publish(self, stage: Path, version: str) -> Path:
        """Make `stage` the current version: everything reaches the disk before anyone sees it.

        The version before it stays, older ones go as soon as nobody has them open.
        """
        previous = self._current_name()
        target = self._versions / version[:SHORT]
        for file in sorted(stage.iterdir()):
            _sync(file)
        stage.chmod(0o755)
        _sync(stage)
        stage.rename(target)
        _sync(self._versions)
        self._switch(target.name)
        self._prune(keep={target.name, previous})
        return target

    def _switch(self, name: str) -> None:
        temporary = self.path / f".{_CURRENT}.tmp"
        temporary.write_text(f"{name}\n", encoding="ascii")
        _sync(temporary)
        temporary.replace(self.path / _CURRENT)
        _sync(self.path)

    def _prune(self, keep: set[str | None]) -> None:
        for folder in self._versions.iterdir():
            if _is_version(folder) and folder.name not in keep and not in_use(folder):
                with contextlib.suppress(OSError):
                    # Named like a stage: if the removal is cut short, the next build ends it.
                    shutil.rmtree(folder.rename(folder.with_name(f"{_STAGE}{folder.name}")))

    def _current_name(self) -> str | None:
        try:
            return (self.path / _CURRENT).read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _absence(self) -> str:
        if self.work_path.exists():
            return (
                f"The gallery {self.path} is not finished: its build was interrupted. "
                "Run the same `kinlens-index build` again; it continues where it stopped."
            )
        return (
            f"No gallery at {self.path}: {_CURRENT} is missing. Give the folder that "
            "`kinlens-index build ... --out` wrote."
        )

    def _refuse_foreign_folder(self) -> None:
        foreign = sorted(self._foreign_entries())
        if foreign:
            raise GalleryError(
                f"{self.path} is not a gallery, or not only that: {foreign[0]} is something else. "
                "Choose a new or an empty folder with --out, or move that elsewhere."
            )

    def _foreign_entries(self) -> Iterator[Path]:
        if self.path.is_dir():
            yield from (entry for entry in self.path.iterdir() if entry.name not in _OWN_NAMES)
        elif self.path.exists():
            yield self.path
        if self._versions.is_dir():
            for entry in self._versions.iterdir():
                if not (_VERSION_NAME.fullmatch(entry.name) or _STAGE_NAME.fullmatch(entry.name)):
                    yield entry


@contextlib.contextmanager
def disk_errors_explained(path: Path) -> Iterator[None]:
    """Turn a failed write below `path` into a GalleryError that says what to do."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise GalleryError(
            f"Cannot write the gallery {path}: {reason}. Check the free space "
            "and the permissions of that folder, then run the same command again; finished work "
            "is kept."
        ) from error


def hold(version: Path) -> int:
    """Mark a version as being read, until the returned descriptor is closed."""
    descriptor = os.open(version, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks; pruning then does not wait
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def in_use(version: Path) -> bool:
    """Whether a process has this version open."""
    descriptor = os.open(version, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_version(folder: Path) -> bool:
    is_named_so = _VERSION_NAME.fullmatch(folder.name) is not None
    return is_named_so and (folder / MANIFEST).is_file()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
