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
import hashlib
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.durable import (
    crash_point,
    discard,
    exclusive,
    holder,
    make_folder,
    rename,
    staged,
    sync_tree,
    write_whole,
)
from kinlens.embedder.errors import (
    BundleError,
    GalleryError,
    GalleryWriteError,
    KinlensError,
    StateError,
)
from kinlens.embedder.types import SHORT
from kinlens.indexer.gallery import backup as backup_gallery
from kinlens.indexer.gallery import check_backup, copy_bytes, current_generation, current_manifest
from kinlens.indexer.gallery import restore as restore_gallery
from kinlens.indexer.types import Progress
from kinlens.service.access.keys import KeyStore
from kinlens.service.galleries.locations import (
    Bundles,
    GalleryLocation,
    Locations,
    id_of,
    known_bundles,
    managed_folder,
)
from kinlens.service.galleries.uploads import UploadFolder
from kinlens.service.jobs.store import JobFolders, JobStore
from kinlens.service.settings import REPLICAS, Settings

LAST = ".last-backup.json"
"""In the state folder: `LastBackup`, for the metrics of the service."""

REPORT = "backup.json"
SUMS = "SHA256SUMS"

_STEP = "service backup"
_PART = ".kinlens-backup-"
_JOBS = "service.sqlite"
_KEYS = "keys.json"
_FOLDERS = ("feedback", "jobs")  # in the state folder, copied whole
_COPIED_SEPARATELY = ("galleries", "bundles")
_SQLITE_SUFFIXES = ("-wal", "-shm", "-journal")
_PROCESS_FILES = ("lock", "group.txt")  # of a job, valid only while its process runs
_RESERVE_BYTES = 16 << 20
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
    """One bundle of a backup; `primary` if the settings named it."""

    bundle_id: str
    primary: bool


class Backup(BaseModel, frozen=True):
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


def expected_bytes(settings: Settings) -> int:
    """The approximate size of a backup in bytes. Raises: KinlensError, OSError."""
    size = 0
    for location in _in_folders(settings):
        if location.path is not None:
            size += copy_bytes(location.path)
            size += _size(UploadFolder(location.path).files())
    for folder, _ in _bundles(settings).values():
        size += _size(_files(folder))
    return size + (_size(_state_files(settings.state)) if settings.state is not None else 0)


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

    The outcome is recorded in the state folder for `last_backup`.

    Raises: as `_back_up`.
    """
    record = partial(_record, settings.state)
    try:
        report = _back_up(settings, out, on_progress)
    except BaseException:
        record(has_failed=True)
        raise
    record(succeeded_at=time.time(), has_failed=False)
    return report


def _record(state: Path | None, **changes: Any) -> None:
    # Without the record the service reports an old backup; the backup itself is not at fault.
    with contextlib.suppress(OSError, ValueError):
        if state is not None:
            last = last_backup(state).model_copy(update=changes)
            (state / LAST).write_text(last.model_dump_json(), encoding="utf-8")


def _back_up(settings: Settings, out: Path, on_progress: Progress) -> Backup:
    """Copy all data that the service stores in folders to the new folder `out`, while it runs.

    The backup contains every change that was acknowledged before the call. `out` is created only
    when the backup is complete.

    Raises: StateError if `out` exists or the disk is full; KinlensError; OSError.
    """
    if out.exists():
        raise StateError(f"out = {out} already exists. Choose a new folder for the backup.")
    make_folder(out.absolute().parent, _STEP)
    _refuse_full(out.absolute().parent, expected_bytes(settings), "the files of the backup")
    with staged(out.absolute().parent, _PART) as stage:
        stage.chmod(0o700)
        galleries = tuple(_save_galleries(settings, stage, on_progress))
        bundles = []
        for bundle_id, (folder, primary) in _bundles(settings).items():
            _copy_tree(folder, stage / "bundles" / bundle_id, on_progress)
            bundles.append(SavedBundle(bundle_id=bundle_id, primary=primary))
        if settings.state is not None:
            _save_state(settings.state, stage / "state", on_progress)
        sums = {path: _digest(stage / path) for path in _listed(stage)}
        report = Backup(
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            kinlens=version("kinlens"),
            galleries=galleries,
            bundles=tuple(bundles),
            not_contained=tuple(_not_contained(settings)),
            damaged=tuple(path for path, digest in sums.items() if _is_damaged(path, digest)),
        )
        (stage / REPORT).write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
        sums[REPORT] = _digest(stage / REPORT)
        lines = [f"{digest}  {path}\n" for path, digest in sorted(sums.items())]
        (stage / SUMS).write_text("".join(lines), encoding="utf-8")
        sync_tree(stage, _STEP)
        rename(stage, out, _STEP)
    return report


def check(backup: Path, on_progress: Progress) -> Backup:
    """Read the whole backup: every hash, gallery, bundle, key and database.

    Raises: StateError naming a file that is missing, damaged or unknown; KinlensError.
    """
    sums = _sums(backup)
    found = {path for path in _listed(backup) if not path.endswith(_SQLITE_SUFFIXES)}
    for path in sorted({*sums, *found} - {SUMS}):
        file = backup / path
        if path not in sums:
            raise StateError(f"{file} is not in {SUMS}, so it does not belong here. {_CURE}")
        if path not in found:
            raise StateError(f"{file} is missing. {_CURE}")
        if _digest(file) != sums[path]:
            raise StateError(f"{file} is damaged: its sha256 differs from {SUMS}. {_CURE}")
        on_progress(file.stat().st_size)
    try:
        report = Backup.model_validate_json((backup / REPORT).read_bytes())
    except (OSError, ValidationError) as error:
        raise StateError(
            f"{backup / REPORT} cannot be read, or was made by a newer Kinlens. Restore it with "
            "the version that made the backup, or use another backup."
        ) from error
    for gallery in report.galleries:
        check_backup(_gallery_in(backup, gallery.name))
    for bundle in report.bundles:
        Bundle.open(_bundle_in(backup, bundle.bundle_id))
    if (backup / "state" / _KEYS).is_file():
        KeyStore(backup / "state" / _KEYS).list()
    for file in (backup / "state").glob("*.sqlite"):
        _check_database(file)
    return report


def restore(
    backup: Path,
    state: Path,
    galleries: Mapping[str, Path],
    bundle: Path | None,
    *,
    replace: bool,
    on_progress: Progress,
) -> Backup:
    """Restore a backup: galleries outside the state folder to the paths in `galleries`, all else to
    `state`.

    Nothing is changed unless the whole backup can be read. Then each part is replaced atomically.
    If the process is killed, repeat the call with `replace` to finish the restore.

    Raises: StateError if a target exists and `replace` is false, if a service runs on `state`, or
        if the disk is full; KinlensError; OSError.
    """
    report = check(backup, on_progress)
    targets = _targets(report, state, galleries)
    make_folder(state.absolute(), _STEP)
    with _stopped(state):
        if not replace:
            _refuse_existing(backup, state, targets)
        for saved in report.bundles:
            _refuse_foreign(bundle if saved.primary else None)
        size = sum((backup / path).stat().st_size for path in _listed(backup))
        _refuse_full(state, size, "the restored files")
        for saved in report.bundles:
            _put_bundle(backup, saved, state, bundle, on_progress)
        for name, target in targets.items():
            _put_gallery(_gallery_in(backup, name), target, replace, on_progress)
        _put_state(backup / "state", state, on_progress)
    return report


def _in_folders(settings: Settings) -> list[GalleryLocation]:
    """The galleries in folders, without copies of followed galleries. Raises: GalleryError."""
    found = [one for one in Locations(settings).list_galleries() if one.follows is None]
    for location in found:
        if location.path is not None and not location.exists:
            raise GalleryError(
                f"No gallery at {location.path}, which the settings name {location.name!r}. "
                "Correct or remove this --gallery."
            )
    return [location for location in found if location.path is not None]


def _save_galleries(
    settings: Settings, stage: Path, on_progress: Progress
) -> Iterator[SavedGallery]:
    for location in _in_folders(settings):
        assert location.path is not None
        target, uploads = _gallery_in(stage, location.name), UploadFolder(location.path)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(GalleryWriteError):  # read-only, so nothing is removed there
                stack.enter_context(uploads.removal_paused())
            try:
                saved = backup_gallery(location.path, target, on_progress)
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


def _save_state(state: Path, target: Path, on_progress: Progress) -> None:
    target.mkdir()
    # Databases first: the image of a feedback is written before its row.
    files = sorted(_state_files(state), key=lambda file: file.parent != state)
    for file in files:
        copy = target / file.relative_to(state)
        if file.suffix == ".sqlite":
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy_database(file, copy)
            on_progress(copy.stat().st_size)
        else:
            with contextlib.suppress(FileNotFoundError):  # it has just been removed
                _copy(file, copy, on_progress)
    if (target / _JOBS).is_file():
        JobStore(target / _JOBS).fail_active(_INTERRUPTED)
        with _database(target / _JOBS) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")


def _state_files(state: Path) -> Iterator[Path]:
    """The files of the state folder to copy, without galleries and bundles."""
    for entry in sorted(state.iterdir()) if state.is_dir() else []:
        if entry.name.startswith(".") or entry.name.endswith(_SQLITE_SUFFIXES):
            continue
        if entry.is_file():
            yield entry
        elif entry.name in _FOLDERS:
            yield from (file for file in _files(entry) if file.name not in _PROCESS_FILES)


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


def _bundles(settings: Settings) -> dict[str, tuple[Path, bool]]:
    """The folder of each bundle by its id, and whether the settings name it."""
    primary = None if settings.bundle is None else Bundles(settings).primary()
    known = known_bundles(settings.state, settings.bundle)
    return {bundle_id: (folder, bundle_id == primary) for bundle_id, (folder, _) in known.items()}


def _targets(report: Backup, state: Path, galleries: Mapping[str, Path]) -> dict[str, Path]:
    known = {gallery.name: gallery for gallery in report.galleries}
    for name in galleries:
        if name not in known:
            raise StateError(
                f"The backup has no gallery {name!r}. It has: {', '.join(known) or 'none'}."
            )
    found = {}
    for name, gallery in known.items():
        if name not in galleries and not gallery.managed:
            raise StateError(
                f"Gallery {name!r} was in {gallery.path}, outside the state folder. Choose where "
                f"to restore it: --gallery {name}={gallery.path}."
            )
        found[name] = galleries.get(name, managed_folder(state) / name)
    return found


def _refuse_existing(backup: Path, state: Path, targets: Mapping[str, Path]) -> None:
    existing = [str(path) for path in targets.values() if current_generation(path) is not None]
    files = (backup / "state").glob("*")
    existing += [str(state / file.name) for file in files if (state / file.name).is_file()]
    if existing:
        raise StateError(
            f"{existing[0]} already exists. Choose an empty folder with --state, or overwrite the "
            "existing files with --replace, also to finish an interrupted restore."
        )


def _refuse_foreign(bundle: Path | None) -> None:
    if bundle is None or not bundle.exists() or id_of(bundle) is not None:
        return
    if not bundle.is_dir() or any(bundle.iterdir()):
        raise StateError(
            f"bundle = {bundle} exists and is not a model bundle. Choose a new folder with "
            "--bundle."
        )


@contextlib.contextmanager
def _stopped(state: Path) -> Iterator[None]:
    """Hold the sweep lock of `state`, so no service sweeps there during the block.

    Raises: StateError if a service or a job runs on `state`.
    """
    lock = state / ".sweep.lock"
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(exclusive(lock, wait=False)):
            raise StateError(
                f"A service (process {holder(lock)}) runs on {state}. Stop it, restore, and start "
                "it again."
            )
        for job in (state / "jobs").glob("*"):
            with JobFolders(state, job.name).locked() as is_free:
                if is_free is None:
                    raise StateError(
                        f"Job {job.name} runs in {state}. Stop `kinlens-serve work`, restore, and "
                        "start it again."
                    )
        yield


def _put_bundle(
    backup: Path, saved: SavedBundle, state: Path, bundle: Path | None, on_progress: Progress
) -> None:
    known = known_bundles(state, None)
    target = state / "bundles" / saved.bundle_id[:SHORT]
    if saved.bundle_id in known:
        target = known[saved.bundle_id][0]
    if saved.primary and bundle is not None:
        target = bundle
    with contextlib.suppress(BundleError):
        if Bundle.open(target).bundle_id == saved.bundle_id:
            return
    make_folder(target.absolute().parent, _STEP)
    with staged(target.absolute().parent) as stage:
        _copy_tree(_bundle_in(backup, saved.bundle_id), stage, on_progress)
        sync_tree(stage, _STEP)
        if target.exists():
            discard(target)
        rename(stage, target, _STEP)


def _put_gallery(source: Path, target: Path, replace: bool, on_progress: Progress) -> None:
    make_folder(target.absolute(), _STEP)
    uploads = UploadFolder(target)
    # Images before the catalogue that refers to them. No sweep may remove them in between.
    with uploads.removal_paused():
        for file in UploadFolder(source).files():
            uploads.write(file.name, file.read_bytes())
            on_progress(file.stat().st_size)
        restore_gallery(source, target, replace=replace, on_progress=on_progress)


def _put_state(source: Path, state: Path, on_progress: Progress) -> None:
    """Restore images and logs, then the databases that refer to them; keys last, since they give
    access to the rest.
    """
    files = [file for file in _files(source) if not file.name.endswith(_SQLITE_SUFFIXES)]
    for file in sorted(files, key=lambda file: (file.parent == source, file.name == _KEYS)):
        target = (state / file.relative_to(source)).resolve()  # replicas may share keys by a link
        make_folder(target.parent, _STEP)
        crash_point(f"{_STEP}: before {file.name}")
        if file.suffix == ".sqlite":
            target.touch(mode=0o600)
            _copy_database(file, target)
        else:
            write_whole(target, file.read_bytes(), _STEP)
        on_progress(file.stat().st_size)


def _copy_database(source: Path, target: Path) -> None:
    """Copy a database in one transaction of `target`: readers see the old or the new content."""
    with _database(source) as read, _database(target, "rwc") as write:
        read.backup(write)


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


def _refuse_full(folder: Path, needed: int, what: str) -> None:
    needed += _RESERVE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StateError(
            f"{what.capitalize()} need {needed / 1e6:,.0f} MB, but the disk of {folder} has "
            f"{free / 1e6:,.0f} MB free. Free some space, or choose a folder on another disk."
        )


def _sums(backup: Path) -> dict[str, str]:
    """The sha256 of each file in SHA256SUMS, by its path. Raises: StateError."""
    file = backup / SUMS
    try:
        *lines, end = file.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(
            f"No backup at {backup}: {SUMS} cannot be read ({type(error).__name__}). Pass the "
            "folder that `kinlens-serve backup --out` wrote."
        ) from error
    found = {}
    for line in [*lines, end] if end else lines:
        digest, gap, path = line[:64], line[64:66], line[66:]
        if gap != "  " or not path or line == end:
            raise StateError(f"{file} is damaged at the line {line[:80]!r}. {_CURE}")
        found[path] = digest
    return found


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _is_damaged(path: str, digest: str) -> bool:
    parts = Path(path).parts
    return parts[0] == "galleries" and "pictures" in parts and parts[-1] != digest


def _listed(folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in _files(folder)]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _size(files: "Iterator[Path] | list[Path]") -> int:
    size = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


def _copy_tree(source: Path, target: Path, on_progress: Progress) -> None:
    for file in _files(source):
        _copy(file, target / file.relative_to(source), on_progress)


def _copy(source: Path, target: Path, on_progress: Progress) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    on_progress(target.stat().st_size)


def _gallery_in(backup: Path, name: str) -> Path:
    return backup / "galleries" / name


def _bundle_in(backup: Path, bundle_id: str) -> Path:
    return backup / "bundles" / bundle_id
