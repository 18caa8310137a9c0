"""Backups of a whole service: its galleries with their images, bundles, keys, feedback and jobs.

    BACKUP/                     mode 0700
      backup.json               Backup: what is and what is not contained
      SHA256SUMS                of every other file; `sha256sum -c SHA256SUMS` checks them
      galleries/<name>/         as `kinlens-index backup` writes it, and pictures/<ab>/<sha256>
      bundles/<bundle_id>/
      state/                    keys.json, feedback.sqlite, service.sqlite, feedback/, jobs/ ...

Each gallery and each database is a consistent snapshot, taken while it is in use. A backup is
written to a temporary folder and renamed at the end.
"""

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from kinlens.embedder.bundle import MANIFEST, Bundle, sha256_of
from kinlens.embedder.durable import make_folder, rename, staged, sync_tree
from kinlens.embedder.errors import (
    BundleError,
    GalleryError,
    KinlensError,
    StateError,
    disk_errors_as,
)
from kinlens.indexer.galleries import (
    check_backup,
    current_generation,
    current_manifest,
    restore_backup,
    write_backup,
)
from kinlens.indexer.types import Progress
from kinlens.indexer.uploads import UploadFolder
from kinlens.quality.golden import GoldenSet
from kinlens.reports import Report
from kinlens.service.access.keys import KEYS_FILE, KeyStore
from kinlens.service.galleries.locations import Locations, list_bundles
from kinlens.service.jobs.store import JOBS_FILE, JobStore
from kinlens.service.settings import REPLICAS, Settings

LAST = ".last-backup.json"
"""In the state folder: `LastBackup`, for the metrics of the service."""

REPORT = "backup.json"
SUMS = "SHA256SUMS"

_STEP = "service backup"
_PART = ".kinlens-backup-"
_FOLDERS = ("feedback", "jobs")  # in the state folder, copied whole
_COPIED_SEPARATELY = ("galleries", "bundles")
_SQLITE_SUFFIXES = ("-wal", "-shm", "-journal")
_LOCK = "lock"  # of a job, valid only while its process runs
_CURE = "Use another backup."
_INTERRUPTED = "The job was running when the restored backup was made. Start it again."


class SavedGallery(BaseModel, frozen=True):
    """One gallery of a backup, copied from `path`: `seq` is its state within `generation`."""

    name: str
    path: str
    managed: bool
    generation: str
    seq: int
    items: int
    bytes: int
    pictures: int


class SavedBundle(BaseModel, frozen=True):
    """One bundle of a backup; `primary` if the settings named it. `bundle_id` is that of its
    manifest, which covers attached files.
    """

    bundle_id: str
    primary: bool


class Backup(Report, BaseModel, frozen=True):
    """The contents of a backup. `not_contained` lists other data and how to save it; `damaged`
    lists images that were already damaged.
    """

    schema_version: Literal[1] = 1
    created_at: str
    kinlens: str
    galleries: tuple[SavedGallery, ...]
    bundles: tuple[SavedBundle, ...]
    not_contained: tuple[str, ...]
    damaged: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """What is contained, and what is not."""
        yield f"of {self.created_at}, {len(self.bundles)} bundles"
        for gallery in self.galleries:
            counts = f"{gallery.items:,} items, {gallery.pictures:,} uploaded images"
            yield f"  gallery {gallery.name}: {counts}"
        yield from (f"  damaged before the backup: {text}" for text in self.damaged)
        yield from (f"  not included: {text}" for text in self.not_contained)


class LastBackup(BaseModel, frozen=True):
    """The end of the last backup that was complete, in seconds since 1970 (0 for none), and whether
    a later one has failed.
    """

    succeeded_at: float = 0.0
    has_failed: bool = False


def last_backup(state: Path) -> LastBackup:
    """Raises: OSError; ValueError if the record is damaged."""
    try:
        return LastBackup.model_validate_json((state / LAST).read_bytes())
    except FileNotFoundError:
        return LastBackup()


def back_up(settings: Settings, out: Path, on_progress: Progress) -> Backup:
    """Copy all data that the service stores in folders to the new folder `out`, while it runs.

    The backup contains every change that was acknowledged before the call. `out` is created only
    when the backup is complete. The outcome is recorded in the state folder for `last_backup`.

    Raises: StateError if `out` exists; KinlensError; OSError.
    """

    def outcome() -> str:
        if out.exists():
            return "It is complete, but a loss of power may remove it."
        return "It was not created, and the service was not changed."

    try:
        if out.exists():
            raise StateError(f"out = {out} already exists. Choose a new folder for the backup.")
        with disk_errors_as(StateError, out.absolute(), outcome, "The backup"):
            report = _write(settings, out, on_progress)
    except BaseException:
        _record(settings.state, has_failed=True)
        raise
    _record(settings.state, succeeded_at=time.time(), has_failed=False)
    return report


def _record(state: Path | None, **changes: Any) -> None:
    # Without the record the service reports an old backup; the backup itself is not at fault.
    with contextlib.suppress(OSError, ValueError):
        if state is not None:
            last = last_backup(state).model_copy(update=changes)
            (state / LAST).write_text(last.model_dump_json(), encoding="utf-8")


def _write(settings: Settings, out: Path, on_progress: Progress) -> Backup:
    make_folder(out.absolute().parent, _STEP)
    with staged(out.absolute().parent, _PART) as stage:
        stage.chmod(0o700)
        galleries = tuple(_save_galleries(settings, stage, on_progress))
        bundles, damaged = _save_bundles(settings, stage, on_progress)
        if settings.state is not None:
            _save_state(settings.state, stage / "state", on_progress)
        sums = {path: sha256_of(stage / path) for path in _listed(stage)}
        report = Backup(
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            kinlens=version("kinlens"),
            galleries=galleries,
            bundles=tuple(bundles),
            not_contained=(*damaged, *_not_contained(settings)),
            damaged=tuple(path for path, digest in sums.items() if _is_damaged(path, digest)),
        )
        (stage / REPORT).write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
        sums[REPORT] = sha256_of(stage / REPORT)
        lines = [f"{digest}  {path}\n" for path, digest in sorted(sums.items())]
        (stage / SUMS).write_text("".join(lines), encoding="utf-8")
        sync_tree(stage, _STEP)
        rename(stage, out, _STEP)
    return report


def check(backup: Path, on_progress: Progress) -> Backup:
    """Read the whole backup: every hash, gallery, bundle, key and database.

    Raises: StateError naming a file that is missing, damaged or unknown; KinlensError.
    """
    report = _without_galleries(backup, on_progress)
    for gallery in report.galleries:
        check_backup(_gallery_in(backup, gallery.name))
        GoldenSet(_gallery_in(backup, gallery.name)).check()
    return report


def _without_galleries(backup: Path, on_progress: Progress) -> Backup:
    """Check every hash, and all parts but the galleries."""
    sums = _sums(backup)
    found = {path for path in _listed(backup) if not path.endswith(_SQLITE_SUFFIXES)}
    for path in sorted({*sums, *found} - {SUMS}):
        file = backup / path
        if path not in sums:
            raise StateError(f"{file} is not in {SUMS}, so it does not belong here. {_CURE}")
        if path not in found:
            raise StateError(f"{file} is missing. {_CURE}")
        if sha256_of(file) != sums[path]:
            raise StateError(f"{file} is damaged: its sha256 differs from {SUMS}. {_CURE}")
        on_progress(file.stat().st_size)
    try:
        report = Backup.model_validate_json((backup / REPORT).read_bytes())
    except (OSError, ValidationError) as error:
        raise StateError(
            f"{backup / REPORT} cannot be read, or was made by a newer Kinlens. Restore it with "
            "the version that made the backup, or use another backup."
        ) from error
    for bundle in report.bundles:
        Bundle.open(backup / "bundles" / bundle.bundle_id)
    if (backup / "state" / KEYS_FILE).is_file():
        KeyStore(backup / "state" / KEYS_FILE).list()
    for file in (backup / "state").glob("*.sqlite"):
        _check_database(file)
    return report


def restore(backup: Path, state: Path, on_progress: Progress) -> Backup:
    """Restore a whole backup to the new or empty folder `state`, with all galleries and bundles.

    The parts are moved into it when all are complete, keys last, since they give access to the
    rest. After a kill in that moment, empty the folder and repeat the call.

    Raises: StateError if `state` is no empty folder, or a file of the backup is missing or damaged;
        KinlensError; OSError.
    """
    if state.exists() and not (state.is_dir() and all(map(_is_left_over, state.iterdir()))):
        raise StateError(
            f"state = {state} is not an empty folder. A restore overwrites nothing: choose a new "
            "folder with --state, or stop the service and move the content of this one away."
        )
    target, nothing = state.absolute(), f"Nothing was restored to {state}."
    partly = f"{state} may have parts of the backup: empty it before the next try."
    with contextlib.ExitStack() as stack:
        with disk_errors_as(StateError, target, nothing, "The folder"):
            report = _without_galleries(backup, on_progress)
            make_folder(target, _STEP)
            stage = stack.enter_context(staged(state, _PART))
            _copy_parts(report, backup, stage, on_progress)
            sync_tree(stage, _STEP)
        with disk_errors_as(StateError, target, partly, "The folder"):
            for part in sorted(stage.iterdir(), key=lambda part: part.name == KEYS_FILE):
                rename(part, state / part.name, _STEP)
    return report


def _copy_parts(report: Backup, backup: Path, stage: Path, on_progress: Progress) -> None:
    for saved in report.galleries:
        source, target = (_gallery_in(folder, saved.name) for folder in (backup, stage))
        GoldenSet(source).check()
        restore_backup(source, target, on_progress=on_progress)  # which checks the gallery
        for file in UploadFolder(source).files():
            _copy(file, target / file.relative_to(source), on_progress)
    for rank, bundle in enumerate(report.bundles):
        copy = stage / "bundles" / bundle.bundle_id
        _copy_tree(backup / "bundles" / bundle.bundle_id, copy, on_progress)
        time_s = time.time() - rank  # so that the same one of several with one id is served
        os.utime(copy / MANIFEST, (time_s, time_s))
    for file in _files(backup / "state"):
        if not file.name.endswith(_SQLITE_SUFFIXES):
            copy = stage / file.relative_to(backup / "state")
            _copy(file, copy, on_progress)
            copy.chmod(0o600)


def _is_left_over(entry: Path) -> bool:
    """Whether it is of a restore that was killed, which the next one removes, or of the file system
    of a mounted volume.
    """
    return entry.name.startswith(_PART) or entry.name == "lost+found"


def _save_galleries(
    settings: Settings, stage: Path, on_progress: Progress
) -> Iterator[SavedGallery]:
    for location in Locations(settings).list_galleries():
        if location.path is None or location.follows is not None:
            continue
        if not location.exists:
            raise GalleryError(
                f"No gallery at {location.path}, which the settings name {location.name!r}. "
                "Correct or remove this --gallery."
            )
        target, uploads = _gallery_in(stage, location.name), UploadFolder(location.path)
        with uploads.removal_paused():
            try:
                GoldenSet(location.path).check()
                saved = write_backup(location.path, target, on_progress)
            except KinlensError:
                if location.managed and current_generation(location.path) is None:
                    continue  # it has just been deleted
                raise
            # After the catalogue: the image of each item was written before the item.
            count = 0
            for file in uploads.files():
                _copy(file, target / file.relative_to(location.path), on_progress)
                count += 1
        yield SavedGallery(
            name=location.name,
            path=str(location.path),
            managed=location.managed,
            generation=saved.source_generation,
            seq=saved.seq,
            items=saved.items,
            bytes=saved.bytes,
            pictures=count,
        )


def _save_bundles(
    settings: Settings, stage: Path, on_progress: Progress
) -> tuple[list[SavedBundle], list[str]]:
    """The saved bundles in the order of `list_bundles`, and those that cannot be opened. Raises:
    BundleError for the one of the settings.
    """
    saved: dict[str, SavedBundle] = {}
    damaged = []
    for folder, _ in list_bundles(settings.state, settings.bundle):
        try:
            bundle_id = Bundle.open(folder).manifest.bundle_id
        except BundleError as error:
            if folder == settings.bundle:
                raise
            # With it the whole backup could not be restored.
            damaged.append(f"bundle {folder}: {error}")
            continue
        if bundle_id not in saved:
            _copy_tree(folder, stage / "bundles" / bundle_id, on_progress)
            primary = folder == settings.bundle
            saved[bundle_id] = SavedBundle(bundle_id=bundle_id, primary=primary)
    return list(saved.values()), damaged


def _save_state(state: Path, target: Path, on_progress: Progress) -> None:
    target.mkdir()
    # Databases first: the image of a feedback is written before its row.
    files = sorted(_state_files(state), key=lambda file: file.parent != state)
    for file in files:
        copy = target / file.relative_to(state)
        if file.suffix == ".sqlite":
            copy.parent.mkdir(parents=True, exist_ok=True)
            with _database(file) as read, _database(copy, "rwc") as write:
                read.backup(write)  # one state, although it may be in use
            on_progress(copy.stat().st_size)
        else:
            with contextlib.suppress(FileNotFoundError):  # it has just been removed
                _copy(file, copy, on_progress)
    if (target / JOBS_FILE).is_file():
        JobStore(target / JOBS_FILE).fail_active(_INTERRUPTED)
        with _database(target / JOBS_FILE) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")


def _state_files(state: Path) -> Iterator[Path]:
    """The files of the state folder to copy, without galleries and bundles."""
    for entry in sorted(state.iterdir()) if state.is_dir() else []:
        if entry.name.startswith(".") or entry.name.endswith(_SQLITE_SUFFIXES):
            continue
        if entry.is_file():
            yield entry
        elif entry.name in _FOLDERS:
            yield from (file for file in _files(entry) if file.name != _LOCK)


def _not_contained(settings: Settings) -> Iterator[str]:
    for location in Locations(settings).list_galleries():
        name, address = location.name, location.address
        if location.follows is not None:
            yield f"gallery {name}, a copy of {location.follows}: back up the original"
        elif location.path is None:
            yield (
                f"gallery {name} at {address}: kinlens-index export {address} "
                f"--out {name}.parquet, or the backup tools of Milvus"
            )
        elif root := current_manifest(location.path).source_root:
            yield f"the images of gallery {name} in {root}: copy that folder"
    for text in settings.pictures:
        yield f"shared images {text}: use the tools of that store"
    if settings.state is not None and settings.state.is_dir():
        for entry in sorted(settings.state.iterdir()):
            is_copied = entry.name in (*_FOLDERS, *_COPIED_SEPARATELY, REPLICAS)
            is_other = entry.is_dir() and not is_copied
            if is_other and not entry.name.startswith(".") and any(entry.iterdir()):
                yield f"{entry}: files of jobs, which can be recreated"


def _check_database(file: Path) -> None:
    with _database(file) as connection:
        [(found,)] = connection.execute("PRAGMA integrity_check(1)").fetchall()
    if found != "ok":
        raise StateError(f"{file} is damaged: {found}. {_CURE}")


@contextlib.contextmanager
def _database(file: Path, mode: str = "rw") -> Iterator[sqlite3.Connection]:
    try:
        address = f"{file.absolute().as_uri()}?mode={mode}"
        with contextlib.closing(
            sqlite3.connect(address, timeout=10.0, isolation_level=None, uri=True)
        ) as connection:
            yield connection
    except sqlite3.Error as error:
        raise StateError(
            f"{file} cannot be copied: {error}. Check the disk and the permissions; if the file "
            "is damaged, remove it and restore it from a backup."
        ) from error


def _sums(backup: Path) -> dict[str, str]:
    """The sha256 of each file in SHA256SUMS, by its path. Raises: StateError."""
    file = backup / SUMS
    try:
        lines = file.read_text("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(
            f"No backup at {backup}: {SUMS} cannot be read ({type(error).__name__}). Pass the "
            "folder that `kinlens-serve backup --out` wrote."
        ) from error
    sums = {}
    for line in lines:
        digest, _, path = line.partition("  ")
        if not path:
            raise StateError(f"{file} is damaged at the line {line[:80]!r}. {_CURE}")
        sums[path] = digest
    return sums


def _is_damaged(path: str, digest: str) -> bool:
    parts = Path(path).parts
    return parts[0] == "galleries" and "pictures" in parts and parts[-1] != digest


def _listed(folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in _files(folder)]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _copy_tree(source: Path, target: Path, on_progress: Progress) -> None:
    for file in _files(source):
        _copy(file, target / file.relative_to(source), on_progress)


def _copy(source: Path, target: Path, on_progress: Progress) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    on_progress(target.stat().st_size)


def _gallery_in(backup: Path, name: str) -> Path:
    return backup / "galleries" / name
