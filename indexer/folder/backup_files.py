"""What a backup holds, and whether it still does."""

import contextlib
import errno
import hashlib
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from embedder.bundle import sha256_of
from embedder.errors import GalleryCorruptError, GalleryNotFoundError
from indexer.folder.layout import GalleryFolder
from indexer.folder.manifest import SHORT
from indexer.types import Progress

REPORT = "backup.json"
CATALOG = "catalog.sqlite"

_CHUNK = 1 << 20
_CURE = "Restore another backup."


class BackupFile(BaseModel):
    """A file of a backup."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int
    sha256: str


class BackupReport(BaseModel):
    """What a backup holds: `items` items, state `seq` of the generation `source_generation`.

    `files` has every file of the folder versions/`generation`, by its path inside.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    name: str
    generation: str
    source_generation: str
    seq: int
    items: int
    created_at: str
    files: dict[str, BackupFile]

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(file.bytes for file in self.files.values())


def files_below(folder: Path) -> dict[str, BackupFile]:
    """Every file below `folder`, by its path inside. Raises: OSError."""
    return {
        path.relative_to(folder).as_posix(): BackupFile(
            bytes=path.stat().st_size, sha256=sha256_of(path)
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def read_backup(path: Path | str) -> BackupReport:
    """What a backup holds, after every file was compared with its hash and the catalogue checked.

    Raises: GalleryNotFoundError, GalleryCorruptError naming the file.
    """
    path = Path(path)
    report = _report(path / REPORT)
    folder = GalleryFolder(path).current()
    if folder.name != report.generation:
        raise GalleryCorruptError(
            f"{path / REPORT} is about the generation {report.generation[:SHORT]}, but CURRENT "
            f"names {folder.name}: the backup was changed. {_CURE}"
        )
    for name, file in report.files.items():
        _check(folder / name, file)
    check_catalog(folder / CATALOG)
    return report


def copy_checked(source: Path, target: Path, file: BackupFile, on_progress: Progress) -> None:
    """Copy a file, whose content is compared on the way. Raises: GalleryCorruptError, OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with target.open("xb") as write:
        for chunk in _chunks(source):
            digest.update(chunk)
            write.write(chunk)
            on_progress(len(chunk))
    if digest.hexdigest() != file.sha256:
        raise GalleryCorruptError(f"{source} was changed while it was copied. {_CURE}")


def check_catalog(path: Path) -> None:
    """Let SQLite check every page and index of a catalogue that nobody has open.

    Raises: GalleryCorruptError.
    """
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        verdict = str(error)
    if verdict != "ok":
        raise GalleryCorruptError(f"{path} is damaged: {verdict}. {_CURE}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file. Raises: OSError."""
    if path.name != CATALOG:
        with path.open("rb") as file:
            yield from iter(lambda: file.read(_CHUNK), b"")
        return
    # A backup can be open as a gallery. To close a second descriptor of its catalogue in this
    # process would drop the locks of SQLite, and another process could take its log away.
    command = ["cat", "--", str(path.absolute())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        pipe = process.stdout
        assert pipe is not None
        yield from iter(lambda: pipe.read(_CHUNK), b"")
    if process.returncode:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def _report(path: Path) -> BackupReport:
    try:
        report = BackupReport.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise GalleryNotFoundError(
            f"No backup at {path.parent}: {path.name} is missing. Give the folder that "
            "`kinlens-index backup ... --out` wrote."
        ) from error
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        raise GalleryCorruptError(f"{path} is damaged: {reason}. {_CURE}") from error
    for name in report.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise GalleryCorruptError(f"{path} names the file {name!r} outside of it. {_CURE}")
    if CATALOG not in report.files:
        raise GalleryCorruptError(f"{path} lists no {CATALOG}. {_CURE}")
    return report


def _check(path: Path, file: BackupFile) -> None:
    try:
        size, found = path.stat().st_size, _sha256(path)
    except OSError as error:
        raise GalleryCorruptError(f"{path} cannot be read: {error.strerror}. {_CURE}") from error
    if (size, found) != (file.bytes, file.sha256):
        raise GalleryCorruptError(
            f"{path} has {size:,} bytes and sha256 {found[:SHORT]}, {REPORT} says {file.bytes:,} "
            f"and {file.sha256[:SHORT]}: the file is damaged or was changed. {_CURE}"
        )
