"""Backups of a whole service: its galleries with their pictures, bundles, keys, feedback and jobs.

    BACKUP/                     mode 0700
      backup.json               Backup: what it holds, and what it does not
      SHA256SUMS                of every other file; `sha256sum -c SHA256SUMS` checks them
      galleries/<name>/         as `kinlens-index backup` writes it, and pictures/<ab>/<sha256>
      bundles/<bundle_id>/
      state/                    keys.json, feedback.sqlite, service.sqlite, feedback/, jobs/ ...

Each gallery and each database is one state of its own, taken while it is in use. A backup is
written aside and appears by one rename.
"""

import contextlib
import hashlib
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.durable import (
    discard,
    exclusive,
    holder,
    make_folder,
    reach,
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

REPORT = "backup.json"
SUMS = "SHA256SUMS"

_STEP = "service backup"
_PART = ".kinlens-backup-"
_JOBS = "service.sqlite"
_KEYS = "keys.json"
_FOLDERS = ("feedback", "jobs")  # of the state folder, copied whole
_APART = ("galleries", "bundles")  # copied in their own way
_OF_SQLITE = ("-wal", "-shm", "-journal")
_OF_A_PROCESS = ("lock", "group.txt")  # of a job
_RESERVE_BYTES = 16 << 20
_CURE = "Use another backup."
_UNDER_WAY = "The job was under way when the backup was made that was restored. Start it again."


class SavedGallery(BaseModel, frozen=True):
    """One gallery: `seq` is the state of its generation `generation` at `path` that was copied."""

    name: str
    path: str
    managed: bool
    generation: str
    seq: int
    items: int
    bytes: int
    pictures: int


class SavedBundle(BaseModel, frozen=True):
    """One bundle; the `primary` one is that of the settings."""

    bundle_id: str
    primary: bool


class Backup(BaseModel, frozen=True):
    """What a backup holds. `not_contained` says how to save the rest; `damaged` names pictures that
    were damaged already.
    """

    schema_version: Literal[1] = 1
    created_at: str
    kinlens: str
    galleries: tuple[SavedGallery, ...]
    bundles: tuple[SavedBundle, ...]
    not_contained: tuple[str, ...]
    damaged: tuple[str, ...] = ()


def expected_bytes(settings: Settings) -> int:
    """About how many bytes a backup takes. Raises: KinlensError, OSError."""
    size = 0
    for place in _in_folders(settings):
        if place.path is not None:
            size += copy_bytes(place.path)
            size += _size(UploadFolder(place.path).files())
    for folder, _ in _bundles(settings).values():
        size += _size(_files(folder))
    return size + (_size(_state_files(settings.state)) if settings.state is not None else 0)


def back_up(settings: Settings, out: Path, on_progress: Progress) -> Backup:
    """Copy all that the service keeps in folders to the new folder `out`, while it is in use.

    Everything that was acknowledged before the call is in it. Until it is complete there is no
    `out`.

    Raises: StateError if `out` is there already or the disk is full; KinlensError; OSError.
    """
    if out.exists():
        raise StateError(f"out = {out} is there already. Choose a new folder for the backup.")
    make_folder(out.absolute().parent, _STEP)
    _refuse_full(out.absolute().parent, expected_bytes(settings), "the backup")
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

    Raises: StateError naming what is missing, damaged or not of the backup; KinlensError.
    """
    sums = _sums(backup)
    found = {path for path in _listed(backup) if not path.endswith(_OF_SQLITE)}
    for path in sorted({*sums, *found} - {SUMS}):
        file = backup / path
        if path not in sums:
            raise StateError(f"{file} is not in {SUMS}, so that it is not of this backup. {_CURE}")
        if path not in found:
            raise StateError(f"{file} is missing. {_CURE}")
        if _digest(file) != sums[path]:
            raise StateError(f"{file} is damaged: its sha256 is not the one in {SUMS}. {_CURE}")
        on_progress(file.stat().st_size)
    try:
        report = Backup.model_validate_json((backup / REPORT).read_bytes())
    except (OSError, ValidationError) as error:
        raise StateError(
            f"{backup / REPORT} cannot be read, or is of a newer Kinlens. Restore with the version "
            "that made the backup, or use another backup."
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
    """Put a backup back: managed galleries and all else into `state`, the others into `galleries`.

    Nothing is changed unless the whole backup can be read. Each part is then replaced by one step:
    after a kill it is the old or the new one, and the same call with `replace` ends the work.

    Raises: StateError if there is something already and not `replace`, if a service runs on
        `state`, or the disk is full; KinlensError; OSError.
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
    found = [place for place in Locations(settings).list_galleries() if place.follows is None]
    for place in found:
        if place.path is not None and not place.exists:
            raise GalleryError(
                f"No gallery at {place.path}, which the settings name {place.name!r}. Correct "
                "--gallery, or take it out."
            )
    return [place for place in found if place.path is not None]


def _save_galleries(
    settings: Settings, stage: Path, on_progress: Progress
) -> Iterator[SavedGallery]:
    for place in _in_folders(settings):
        assert place.path is not None
        target, pictures = _gallery_in(stage, place.name), UploadFolder(place.path)
        with contextlib.ExitStack() as held:
            with contextlib.suppress(GalleryWriteError):  # read-only, so nothing is removed there
                held.enter_context(pictures.removal_paused())
            try:
                saved = backup_gallery(place.path, target, on_progress)
            except KinlensError:
                if place.managed and current_generation(place.path) is None:
                    continue  # deleted meanwhile
                raise
            # After the catalogue: what an item shows was written before the item was.
            count = 0
            for file in pictures.files():
                _copy(file, target / file.relative_to(place.path), on_progress)
                count += 1
        yield SavedGallery(
            name=place.name,
            path=str(place.path),
            managed=place.managed,
            generation=saved.source_generation,
            seq=saved.seq,
            items=saved.items,
            bytes=saved.bytes,
            pictures=count,
        )


def _save_state(state: Path, target: Path, on_progress: Progress) -> None:
    target.mkdir()
    # Databases first: a picture of feedback is written before its row.
    files = sorted(_state_files(state), key=lambda file: file.parent != state)
    for file in files:
        copy = target / file.relative_to(state)
        if file.suffix == ".sqlite":
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy_database(file, copy)
            on_progress(copy.stat().st_size)
        else:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                _copy(file, copy, on_progress)
    if (target / _JOBS).is_file():
        JobStore(target / _JOBS).fail_active(_UNDER_WAY)
        with _database(target / _JOBS) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")


def _state_files(state: Path) -> Iterator[Path]:
    """What is copied of the state folder, besides galleries and bundles."""
    for entry in sorted(state.iterdir()) if state.is_dir() else []:
        if entry.name.startswith(".") or entry.name.endswith(_OF_SQLITE):
            continue
        if entry.is_file():
            yield entry
        elif entry.name in _FOLDERS:
            yield from (file for file in _files(entry) if file.name not in _OF_A_PROCESS)


def _not_contained(settings: Settings) -> Iterator[str]:
    for place in Locations(settings).list_galleries():
        if place.follows is not None:
            yield f"gallery {place.name}, a copy of {place.follows}: back up what publishes it"
        elif place.path is None:
            yield (
                f"gallery {place.name} at {place.address}: kinlens-index export {place.address} "
                f"--out {place.name}.parquet, or the backup tools of Milvus"
            )
        elif root := current_manifest(place.path).source_root:
            yield f"the images of gallery {place.name} in {root}: copy that folder"
    for text in settings.pictures:
        yield f"shared pictures {text}: use the tools of that store"
    if settings.state is not None and settings.state.is_dir():
        for entry in sorted(settings.state.iterdir()):
            is_left = entry.is_dir() and entry.name not in (*_FOLDERS, *_APART, REPLICAS)
            if is_left and not entry.name.startswith(".") and any(entry.iterdir()):
                yield f"{entry}: work of jobs, which can be made again"


def _bundles(settings: Settings) -> dict[str, tuple[Path, bool]]:
    """Folder of each bundle by its id, and whether it is that of the settings."""
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
                f"Gallery {name!r} was in {gallery.path}, outside the state folder. Say where to "
                f"put it: --gallery {name}={gallery.path}."
            )
        found[name] = galleries.get(name, managed_folder(state) / name)
    return found


def _refuse_existing(backup: Path, state: Path, targets: Mapping[str, Path]) -> None:
    there = [str(path) for path in targets.values() if current_generation(path) is not None]
    files = (backup / "state").glob("*")
    there += [str(state / file.name) for file in files if (state / file.name).is_file()]
    if there:
        raise StateError(
            f"{there[0]} is there already. Choose an empty folder with --state, or give up what is "
            "there with --replace; so you do as well to end a restore that was interrupted."
        )


def _refuse_foreign(bundle: Path | None) -> None:
    if bundle is None or not bundle.exists() or id_of(bundle) is not None:
        return
    if not bundle.is_dir() or any(bundle.iterdir()):
        raise StateError(
            f"bundle = {bundle} is there and is no model bundle. Choose a new folder with --bundle."
        )


@contextlib.contextmanager
def _stopped(state: Path) -> Iterator[None]:
    """No service begins to tidy in `state` until the block ends. Raises: StateError."""
    lock = state / ".sweep.lock"
    with contextlib.ExitStack() as held:
        if not held.enter_context(exclusive(lock, wait=False)):
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
    pictures = UploadFolder(target)
    # Before the catalogue that shows them, and no sweep takes them until it is there.
    with pictures.removal_paused():
        for file in UploadFolder(source).files():
            pictures.write(file.name, file.read_bytes())
            on_progress(file.stat().st_size)
        restore_gallery(source, target, replace=replace, on_progress=on_progress)


def _put_state(source: Path, state: Path, on_progress: Progress) -> None:
    """Pictures and logs, then the databases that name them; keys last, for they open the rest."""
    files = [file for file in _files(source) if not file.name.endswith(_OF_SQLITE)]
    for file in sorted(files, key=lambda file: (file.parent == source, file.name == _KEYS)):
        target = state / file.relative_to(source)
        make_folder(target.absolute().parent, _STEP)
        reach(f"{_STEP}: before {file.name}")
        if file.suffix == ".sqlite":
            target.touch(mode=0o600)
            _copy_database(file, target)
        else:
            write_whole(target, file.read_bytes(), _STEP)
        on_progress(file.stat().st_size)


def _copy_database(source: Path, target: Path) -> None:
    """In one transaction of `target`, so that its users see the old or the new content."""
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
            "is damaged, move it away and take it from a backup."
        ) from error


def _refuse_full(folder: Path, needed: int, what: str) -> None:
    needed += _RESERVE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StateError(
            f"{what.capitalize()} need {needed / 1e6:,.0f} MB, and the disk of {folder} has "
            f"{free / 1e6:,.0f} MB free. Make room there, or choose a folder on another disk."
        )


def _sums(backup: Path) -> dict[str, str]:
    """The sha256 of each file by its path. Raises: StateError."""
    file = backup / SUMS
    try:
        *lines, end = file.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(
            f"No backup at {backup}: {SUMS} cannot be read ({type(error).__name__}). Give the "
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
