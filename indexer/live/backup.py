"""Backup and restore of a gallery while it is searched and changed.

A backup is a consistent copy in the folder layout of a gallery, so it can be opened as one. It has
one more file:

    backup.json            BackupReport; builds refuse a folder that contains it
    CURRENT
    golden.sqlite          the golden set, if there is one
    versions/<generation>/ manifest.json, report.json, calibration.json, precisions.json,
                           catalog.sqlite, vectors/<name>/, segments/<name>/, columns/

A backup and a restored gallery get generation ids of their own: their items change independently,
so cached answers of one are invalid for the other. Before a copy gets its name, it is verified: the
hashes of the segment, every row of the catalogue and its pages.
"""

import contextlib
import os
import shutil
import sqlite3
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from kinlens.embedder.durable import lock_folder, make_folder, rename, staged, sync_tree
from kinlens.embedder.errors import GalleryCorruptError, GalleryError, GalleryNotFoundError
from kinlens.indexer.catalog.database import Catalog, catalog_view
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.schema import State
from kinlens.indexer.catalog.vectors import VECTORS
from kinlens.indexer.columns.checkpoint import copy_columns
from kinlens.indexer.folder.layout import GOLDEN, GalleryFolder, disk_errors_explained
from kinlens.indexer.folder.manifest import (
    CALIBRATION,
    PRECISIONS,
    REPORT,
    GalleryManifest,
    read_manifest,
    read_report,
    write_manifest,
)
from kinlens.indexer.index.segment import (
    SEGMENT_MANIFEST,
    SEGMENTS,
    check_file,
    read_segment_manifest,
)
from kinlens.indexer.live.compaction import CATALOG, with_state
from kinlens.indexer.live.keeper import open_segment
from kinlens.indexer.types import Progress

BACKUP_REPORT = "backup.json"

_PAGES = 1024  # pages of a catalogue (4 MiB) copied between two progress calls


class BackupReport(BaseModel, frozen=True):
    """Contents of a backup: `items` items of state `seq` of the generation `source_generation`."""

    schema_version: Literal[2] = 2
    name: str
    generation: str
    source_generation: str
    seq: int
    items: int
    bytes: int
    created_at: str


def write_backup(
    gallery: Path | str, out: Path | str, on_progress: Progress | None = None
) -> BackupReport:
    """Copy the gallery in folder `gallery`, which may be in use, to the new folder `out`.

    The copy is one consistent state with every change acknowledged before the call. `out` appears
    only when the copy is complete.

    Raises: GalleryNotFoundError, GalleryCorruptError; GalleryBusyError if compactions keep
        replacing the segment during the copy; GalleryError if `out` exists; GalleryWriteError.
    """
    source, out = GalleryFolder(gallery).current(), Path(out)
    if out.exists():
        raise GalleryError(f"{out} already exists. Choose a new folder for the backup.")

    def outcome() -> str:
        return f"{out} is complete." if out.exists() else f"{out} was not created."

    with disk_errors_explained(out, outcome):
        make_folder(out.parent, "backup")
        with staged(out.parent, f".{out.name}.part-") as stage:
            report = _write(source, stage, on_progress)
            _copy_database(Path(gallery) / GOLDEN, stage / GOLDEN)
            sync_tree(stage, "backup")
            rename(stage, out, "backup")
    return report


def restore_backup(
    backup: Path | str,
    out: Path | str,
    *,
    replace: bool = False,
    on_progress: Progress | None = None,
) -> GalleryManifest:
    """Restore a backup to folder `out` as a new generation.

    If the backup is damaged or the process is killed, the gallery in `out` is unchanged. `replace`
    is required to overwrite a gallery; its golden set is replaced if the backup has one.

    Raises: GalleryNotFoundError if there is no backup; GalleryCorruptError if it is damaged;
        GalleryError if `out` contains a gallery, without `replace`; GalleryBusyError;
        GalleryWriteError.
    """
    if not (Path(backup) / BACKUP_REPORT).is_file():
        raise GalleryNotFoundError(
            f"No backup at {backup}: {BACKUP_REPORT} is missing. Give the folder that "
            "`kinlens-index backup ... --out` wrote."
        )
    source, folder = GalleryFolder(backup).current(), GalleryFolder(out)
    _refuse_overwrite(folder, replace)
    with disk_errors_explained(folder.path), folder.locked(), folder.stage() as stage:
        _refuse_overwrite(folder, replace)
        manifest = _with_new_uid(source)
        _copy(source, stage, manifest, on_progress)
        folder.publish(stage, manifest.generation)
        _copy_database(Path(backup) / GOLDEN, folder.path / GOLDEN)
    return manifest


def check_backup(backup: Path | str) -> BackupReport:
    """Verify a complete backup, with the checks of `restore`.

    Raises: GalleryNotFoundError if there is none; GalleryCorruptError if it is damaged.
    """
    folder = GalleryFolder(backup).current()
    try:
        report = BackupReport.model_validate_json((Path(backup) / BACKUP_REPORT).read_bytes())
    except (OSError, ValueError) as error:
        raise GalleryCorruptError(
            f"{Path(backup) / BACKUP_REPORT} cannot be read: {error}"
        ) from error
    read_manifest(folder)
    with catalog_view(folder / CATALOG) as view:
        state = view.state()
    _check(folder, state)
    return report


def _write(source: Path, stage: Path, on_progress: Progress | None) -> BackupReport:
    manifest = _with_new_uid(source)
    folder = stage / "versions" / manifest.generation
    folder.mkdir(parents=True)
    state = _copy(source, folder, manifest, on_progress)
    (stage / "CURRENT").write_text(f"{manifest.generation}\n", encoding="ascii")
    report = BackupReport(
        name=manifest.name,
        generation=manifest.generation,
        source_generation=source.name,
        seq=state.seq,
        items=state.size,
        bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )
    (stage / BACKUP_REPORT).write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return report


def _with_new_uid(generation: Path) -> GalleryManifest:
    return read_manifest(generation).model_copy(update={"uid": uuid.uuid4().hex})


def _copy(
    source: Path, target: Path, manifest: GalleryManifest, on_progress: Progress | None
) -> State:
    """Copy one state of the generation `source` into the folder `target`, under this manifest."""
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(os.close, lock_folder(source))
        write_manifest(target, manifest)
        read_report(source)
        shutil.copyfile(source / REPORT, target / REPORT)
        for name in (CALIBRATION, PRECISIONS):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(source / name, target / name)
        (target / SEGMENTS).mkdir()
        state = _copy_state(source, target, on_progress or (lambda _: None))
    try:
        _check(target, state)
    except GalleryCorruptError as error:  # the temporary folder means nothing to the user
        raise GalleryCorruptError(str(error).replace(str(target), str(source))) from error
    return state


def _check(generation: Path, state: State) -> None:
    # Opened for writing, so that closing it deletes the log files of SQLite.
    catalog = Catalog.open(generation / CATALOG, writable=True)
    with contextlib.closing(catalog), catalog.reading() as view:
        view.check()
    if state.segment is not None:
        open_segment(generation / SEGMENTS / state.segment, "cpu", verify_hashes=True)


def _copy_state(source: Path, target: Path, on_progress: Progress) -> State:
    """Copy one state of the catalogue with its segment and vectors."""

    def copy(view: CatalogView, segment: Path | None) -> State:
        _copy_catalog(view, target, on_progress)
        copy_columns(source, target, view)
        if segment is not None:
            files = read_segment_manifest(segment).files
            for name, facts in files.items():
                check_file(segment / name, facts, verify_hash=False)
            shutil.rmtree(target / SEGMENTS, ignore_errors=True)
            (target / SEGMENTS / segment.name).mkdir(parents=True)
            for name in (*files, SEGMENT_MANIFEST):
                shutil.copyfile(segment / name, target / SEGMENTS / segment.name / name)
                on_progress((segment / name).stat().st_size)
        return view.state()

    return with_state(source, copy)


def _copy_catalog(view: CatalogView, target: Path, on_progress: Progress) -> None:
    done = page_size = 0

    def report(_: int, remaining: int, total: int) -> None:
        nonlocal done
        on_progress(page_size * (total - remaining - done))
        done = total - remaining

    (target / CATALOG).unlink(missing_ok=True)
    shutil.rmtree(target / VECTORS, ignore_errors=True)
    # The view's transaction stays open, so that all steps copy one state.
    with contextlib.closing(sqlite3.connect(target / CATALOG, isolation_level=None)) as write:
        write.execute("PRAGMA synchronous = OFF")  # the whole tree is synced before it is renamed
        page_size = view.connection.execute("PRAGMA page_size").fetchone()[0]
        with disk_errors_explained(target):
            view.connection.backup(write, pages=_PAGES, progress=report)
            if view.file is not None:
                view.file.copy_to(target / VECTORS / view.file.name, view.last_given(), on_progress)


def _copy_database(source: Path, target: Path) -> None:
    """Copy one state of an SQLite file that may be in use; an absent one is skipped."""
    if source.is_file():
        with (
            contextlib.closing(sqlite3.connect(source)) as read,
            contextlib.closing(sqlite3.connect(target)) as write,
        ):
            read.backup(write)


def _refuse_overwrite(folder: GalleryFolder, replace: bool) -> None:
    if folder.current_name() is not None and not replace:
        raise GalleryError(
            f"{folder.path} already contains a gallery. Choose another folder with --out, or "
            "replace it with --replace."
        )
