"""Backups: a gallery as it is at one moment, taken while it is searched and changed; and back.

A backup is a folder in the layout of a gallery, so it opens as it is, with one file more:

    backup.json            BackupReport: bytes and sha256 of every file
    CURRENT
    versions/<generation>/ manifest.json, report.json, catalog.sqlite, segments/<name>/

A backup and what is restored from it are generations of their own: their items change separately
from then on, so nothing that somebody remembers of one may be taken for another.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from embedder.bundle import sha256_of
from embedder.durable import hold, in_use, make_folder, rename, sync_tree
from embedder.errors import (
    GalleryBusyError,
    GalleryCorruptError,
    GalleryError,
    GalleryNotFoundError,
)
from embedder.types import SHORT
from indexer.catalog.database import Catalog
from indexer.catalog.read import State
from indexer.folder.layout import GalleryFolder, disk_errors_explained
from indexer.folder.manifest import MANIFEST, GalleryManifest, read_manifest, write_manifest
from indexer.folder.manifest import REPORT as BUILD_REPORT
from indexer.index.segment import MANIFEST as SEGMENT_MANIFEST
from indexer.index.segment import check_file
from indexer.index.segment import read_manifest as read_segment_manifest
from indexer.live.compaction import SEGMENTS
from indexer.live.snapshot import open_segment
from indexer.types import Progress

REPORT = "backup.json"
CATALOG = "catalog.sqlite"

_CHUNK = 1 << 20
_CURE = "Restore another backup."

_PAGES = 1024  # of a catalogue, copied between two calls of the progress: 16 MiB
_PATIENCE = 8  # a segment that is replaced while it is copied is looked up anew that often


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


def backup(
    gallery: Path | str, out: Path | str, on_progress: Progress | None = None
) -> BackupReport:
    """Copy the gallery in folder `gallery`, while it is in use, to the new folder `out`.

    The copy holds every change that was acknowledged before the call, and is one state of the
    gallery. Until it is complete there is no `out`.

    Raises: GalleryNotFoundError, GalleryCorruptError; GalleryBusyError if compactions keep
        replacing what is copied; GalleryError if `out` is there already; GalleryWriteError.
    """
    source, out = GalleryFolder(gallery).current(), Path(out)
    if out.exists():
        raise GalleryError(f"{out} is there already. Choose a new folder for the backup.")
    with contextlib.ExitStack() as held:
        held.callback(os.close, hold(source))
        with disk_errors_explained(out), _stage(out) as stage:
            report = _write(source, stage, on_progress or _ignore)
            sync_tree(stage, "backup")
            rename(stage, out, "backup")
    return report


def restore(
    backup: Path | str,
    out: Path | str,
    *,
    replace: bool = False,
    on_progress: Progress | None = None,
) -> GalleryManifest:
    """Make the gallery of a backup the current one in folder `out`, as a new generation.

    Every file of the backup is checked before anything is written; a kill at any moment leaves
    `out` as it was. A gallery that is there has to be given up with `replace`.

    Raises: GalleryNotFoundError if there is no backup; GalleryCorruptError if it is damaged;
        GalleryError if `out` holds a gallery and not `replace`; GalleryBusyError;
        GalleryWriteError.
    """
    folder = GalleryFolder(out)
    _refuse_old(folder, replace)
    report = read_backup(backup)
    source = GalleryFolder(backup).current()
    manifest = _renewed(read_manifest(source))
    with disk_errors_explained(folder.path), folder.locked(), folder.stage() as stage:
        _refuse_old(folder, replace)
        (stage / SEGMENTS).mkdir()
        for name, file in report.files.items():
            if name != MANIFEST:
                copy_checked(source / name, stage / name, file, on_progress or _ignore)
        write_manifest(stage, manifest)
        folder.publish(stage, manifest.generation)
    return manifest


def backup_bytes(gallery: Path | str) -> int:
    """How many bytes `backup` copies, unless the gallery changes meanwhile.

    Raises: GalleryNotFoundError, GalleryCorruptError.
    """
    source = GalleryFolder(gallery).current()
    with contextlib.closing(Catalog.open(source / CATALOG)) as catalog, catalog.reading() as view:
        segment = view.state().segment
    with contextlib.closing(_reader(source / CATALOG)) as read:
        # Not the size of the file: what came last may stand in its log alone.
        pages, page_size = (
            read.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")
        )
    files = [] if segment is None else (source / SEGMENTS / segment).glob("*")
    with contextlib.suppress(FileNotFoundError):  # a compaction has replaced it meanwhile
        return int(pages * page_size) + sum(file.stat().st_size for file in files)
    return int(pages * page_size)


def _write(source: Path, stage: Path, on_progress: Progress) -> BackupReport:
    old = read_manifest(source)
    manifest = _renewed(old)
    folder = stage / "versions" / manifest.generation
    (folder / SEGMENTS).mkdir(parents=True)
    state = _copy_state(source, folder, on_progress)
    check_catalog(folder / CATALOG)
    if state.segment is not None:
        open_segment(folder / SEGMENTS / state.segment, "cpu", verify_hashes=True)
    shutil.copyfile(source / BUILD_REPORT, folder / BUILD_REPORT)
    write_manifest(folder, manifest)
    (stage / "CURRENT").write_text(f"{manifest.generation}\n", encoding="ascii")
    report = BackupReport(
        name=manifest.name,
        generation=manifest.generation,
        source_generation=old.generation,
        seq=state.seq,
        items=state.size,
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        files=files_below(folder),
    )
    (stage / REPORT).write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return report


def _copy_state(source: Path, folder: Path, on_progress: Progress) -> State:
    """The catalogue, then the segment that this copy of it names."""
    for _ in range(_PATIENCE):
        _copy_catalog(source / CATALOG, folder / CATALOG, on_progress)
        state = _state(folder / CATALOG)
        if state.segment is None or _is_copied(
            source / SEGMENTS / state.segment, folder / SEGMENTS / state.segment, on_progress
        ):
            return state
    raise GalleryBusyError(
        f"Compactions of {source.parent.parent} keep replacing what is to be copied, "
        f"{_PATIENCE} times by now. Try again when they have ended."
    )


def _copy_catalog(source: Path, target: Path, on_progress: Progress) -> None:
    done = page_size = 0

    def report(_: int, remaining: int, total: int) -> None:
        nonlocal done
        on_progress(page_size * (total - remaining - done))
        done = total - remaining

    target.unlink(missing_ok=True)
    with contextlib.closing(_reader(source)) as read, contextlib.closing(_new(target)) as write:
        # Within a transaction all steps copy one state; otherwise each change starts them anew.
        read.execute("BEGIN")
        page_size = read.execute("PRAGMA page_size").fetchone()[0]
        read.execute("SELECT 1 FROM sqlite_master").fetchone()
        read.backup(write, pages=_PAGES, progress=report)


def _reader(path: Path) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?mode=ro"
    try:
        connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
        raise GalleryCorruptError(
            f"{path} cannot be read: {error}. Restore an older backup: kinlens-index restore."
        ) from error
    return connection


def _new(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")  # the whole tree is synced before it is renamed
    return connection


def _state(catalog: Path) -> State:
    opened = Catalog.open(catalog)
    try:
        with opened.reading() as view:
            return view.state()
    finally:
        opened.close()
        for suffix in ("-wal", "-shm"):  # of reading only: they are empty
            catalog.with_name(f"{catalog.name}{suffix}").unlink(missing_ok=True)


def _is_copied(source: Path, target: Path, on_progress: Progress) -> bool:
    """False if a compaction removed the segment meanwhile."""
    try:
        descriptor = hold(source)
    except FileNotFoundError:
        return False
    try:
        target.mkdir()
        files = read_segment_manifest(source).files
        for name, facts in files.items():
            check_file(source / name, facts, verify_hash=False)
        for name in (*files, SEGMENT_MANIFEST):
            shutil.copyfile(source / name, target / name)
            on_progress((target / name).stat().st_size)
    except (FileNotFoundError, GalleryCorruptError):
        if source.is_dir():
            raise
        shutil.rmtree(target)
        return False
    finally:
        os.close(descriptor)
    return True


@contextlib.contextmanager
def _stage(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, gone afterwards unless it was renamed; left-overs go first."""
    prefix = f".{out.name}.part-"
    make_folder(out.parent, "backup")
    for folder in out.parent.iterdir():
        if folder.name.startswith(prefix) and not in_use(folder):
            shutil.rmtree(folder, ignore_errors=True)
    stage = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    with contextlib.ExitStack() as held:
        held.callback(shutil.rmtree, stage, ignore_errors=True)
        held.callback(os.close, hold(stage))
        stage.chmod(0o755)
        yield stage


def _renewed(manifest: GalleryManifest) -> GalleryManifest:
    return manifest.model_copy(update={"uid": uuid.uuid4().hex})


def _refuse_old(folder: GalleryFolder, replace: bool) -> None:
    if folder.current_name() is not None and not replace:
        raise GalleryError(
            f"{folder.path} holds a gallery already. Choose another folder with --out, or give it "
            "up with --replace."
        )


def _ignore(_: int) -> None:
    """Nobody watches."""
