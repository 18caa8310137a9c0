"""A read-only copy of a published gallery, which follows its snapshots while it is in use.

The copy is an ordinary gallery in a folder, marked as a copy, so changes are refused. A follower
replays the changes of the writer in two transactions of the catalogue:

    1. rows and tombstones up to the write of the snapshot, under the present segment
    2. the new segment and vector file, if the writer made them; the items do not change

Each search sees one snapshot. Searches use the present segment until the new one is open, if their
process has noticed the first transaction before the second. Finished downloads are reused after an
interruption.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kinlens.embedder.bundle import sha256_of
from kinlens.embedder.durable import (
    FileFacts,
    crash_point,
    discard,
    exclusive,
    make_folder,
    rename,
    staged,
    sync_tree,
    write_whole,
)
from kinlens.embedder.errors import GalleryCorruptError, GalleryError
from kinlens.indexer.catalog.database import Catalog
from kinlens.indexer.catalog.replay import Removed, apply_part, finish, unpacked_ids
from kinlens.indexer.catalog.vectors import NUMBERS, ROWS, VECTORS, VectorFile, find_sorted
from kinlens.indexer.catalog.write import CatalogWriter
from kinlens.indexer.exchange.objects import ObjectFolder
from kinlens.indexer.exchange.published import (
    FILES,
    OBJECTS,
    PublishedSnapshot,
    reading,
    snapshot_at,
)
from kinlens.indexer.folder.layout import DOWNLOADS, GalleryFolder, disk_errors_explained
from kinlens.indexer.folder.manifest import write_manifest
from kinlens.indexer.index.copies import Copies
from kinlens.indexer.index.segment import (
    SEGMENT_MANIFEST,
    SEGMENTS,
    read_copies,
    read_segment_manifest,
)
from kinlens.indexer.live.compaction import CATALOG, collect
from kinlens.indexer.types import Ids

_LOCK = "LOCK"
_CHECKED = "CHECKED"  # touched whenever the copy was found or made up to date


class Follower:
    """Keeps the gallery in `folder` at the newest snapshot of an address."""

    def __init__(self, address: str, folder: Path) -> None:
        """Raises: EngineUnavailableError for an address that no file system supports."""
        self.address = address
        self.folder = folder
        self._store = ObjectFolder(address)
        self._gallery = GalleryFolder(folder)
        self._downloads = folder / DOWNLOADS

    @property
    def has_copy(self) -> bool:
        """Whether an earlier snapshot can be searched."""
        return self._gallery.current_name() is not None

    def update(self, *, wait: bool = False) -> bool:
        """Bring the copy to the newest snapshot; returns whether it changed.

        Only one process updates at a time. The others return False, or `wait` for their turn.

        Raises: GalleryNotFoundError if nothing was published; GalleryCorruptError; GalleryError if
            the folder has a gallery that is not a copy, or the address does not respond;
            GalleryWriteError. The copy is unchanged then.
        """
        if self.has_copy and self._gallery.copy_of is None:
            raise GalleryError(
                f"{self.folder} has a gallery that is not a copy; a copy of {self.address} would "
                "replace it. Use another folder for copies."
            )
        with disk_errors_explained(self.folder), contextlib.ExitStack() as stack:
            make_folder(self._downloads, "follow")
            is_locked = stack.enter_context(exclusive(self._downloads / _LOCK, wait=wait))
            if not is_locked:
                return False
            has_changed = self._update()
            (self._downloads / _CHECKED).touch()
            return has_changed

    def _update(self) -> bool:
        snapshot = snapshot_at(self.address)
        while True:
            try:
                return self._take_over(snapshot)
            except _ObjectMissingError:
                tried, snapshot = snapshot, snapshot_at(self.address)
                if snapshot == tried:  # else a newer one has replaced it
                    raise

    def _take_over(self, snapshot: PublishedSnapshot) -> bool:
        self._gallery.mark_as_copy(self.address)
        self._clean(snapshot.objects())  # remains of failed updates
        name, has_changed = snapshot.gallery.generation, True
        if self._gallery.current_name() != name:
            self._begin(snapshot)
        else:
            has_changed = self._advance(snapshot, self._gallery.current())
        self._clean(set())
        return has_changed

    def _clean(self, kept: set[str]) -> None:
        """Remove all downloads except those with these sha256."""
        for file in self._downloads.iterdir():
            if file.name not in {_LOCK, _CHECKED, *kept}:
                file.unlink()

    def _begin(self, snapshot: PublishedSnapshot) -> None:
        """Create the copy of a new generation."""
        with self._gallery.stage() as stage:
            manifest = snapshot.gallery
            write_manifest(stage, manifest)
            (stage / SEGMENTS).mkdir()
            Catalog.create(stage / CATALOG, manifest.dim, manifest.vector_type)
            with contextlib.closing(Catalog.open(stage / CATALOG, writable=True)) as catalog:
                nothing = {"segment": None, "segment_seq": 0}
                self._adopt(catalog, snapshot.model_copy(update=nothing), stage)
            self._advance(snapshot, stage)
            self._gallery.publish(stage, manifest.generation)

    def _advance(self, snapshot: PublishedSnapshot, generation: Path) -> bool:
        """Bring a generation to the state of the snapshot; returns whether it changed."""
        with contextlib.closing(Catalog.open(generation / CATALOG, writable=True)) as catalog:
            with catalog.reading() as view:
                now = view.state()
            if now.seq > snapshot.seq:
                raise GalleryError(
                    f"The snapshot at {self.address} is older than the copy in {self.folder}. "
                    "Publish the gallery again, or delete that folder to use the older snapshot."
                )
            if now.segment != snapshot.segment:
                self._check_segment(snapshot)
            has_new_base = now.base != snapshot.base
            if now.seq < snapshot.seq:
                self._apply(catalog, snapshot, now.seq)
            if has_new_base:
                catalog.shrink()  # before the adoption, so that it is repeated after a kill
                self._adopt(catalog, snapshot, generation)
            has_changed = now.seq < snapshot.seq or has_new_base
            has_changed |= self._copy_files(snapshot, generation)
        if has_changed:
            collect(generation)
        return has_changed

    def _apply(self, catalog: Catalog, snapshot: PublishedSnapshot, seq: int) -> None:
        """Write the rows and tombstones of the snapshot, under the present segment."""
        deltas = [delta for delta in snapshot.deltas if delta.until > seq]
        self._download(*(facts for delta in deltas for facts in delta.objects))
        ids = [self._ids(delta.removed) for delta in deltas if delta.removed is not None]
        live = self._ids(snapshot.live) if seq < snapshot.segment_seq else None
        none = np.empty((2, 0), np.int64)
        removed = Removed(np.concatenate([none, *(each.reshape(2, -1) for each in ids)], 1), live)
        with catalog.writing() as writer:
            writer.connection.execute("PRAGMA secure_delete = ON")  # overwrite freed pages, too
            removed.remove(writer, snapshot.segment_seq)  # first: other items may have their keys
            for part in [part for delta in deltas for part in delta.parts]:
                apply_part(writer, self._downloads / part.sha256, removed)
            finish(
                writer,
                snapshot.seq,
                snapshot.size,
                snapshot.numbers,
                snapshot.last_given,
                snapshot.names,
            )
            crash_point("follow: before commit")
        crash_point("follow: after commit")

    def _check_segment(self, snapshot: PublishedSnapshot) -> None:
        """Raise GalleryCorruptError unless this version can read the segment of the snapshot."""
        if snapshot.segment is None:
            return
        with tempfile.TemporaryDirectory(prefix="kinlens-follow-") as folder:
            [manifest] = self._download(snapshot.segment_files[SEGMENT_MANIFEST])
            shutil.copyfile(manifest, Path(folder, SEGMENT_MANIFEST))
            try:
                read_segment_manifest(Path(folder))
            except GalleryCorruptError as error:
                raise GalleryCorruptError(
                    f"The index of the snapshot at {self.address} is of a version of Kinlens that "
                    "this one cannot read. Update Kinlens on this host; the copy stays as it is."
                ) from error

    def _adopt(self, catalog: Catalog, snapshot: PublishedSnapshot, generation: Path) -> None:
        """Switch to the segment and the vector file of the snapshot."""
        file = None
        with catalog.reading() as view:
            has_vectors = view.state().vectors == snapshot.vectors
        with contextlib.ExitStack() as stack:  # stages are in use until the catalogue names them
            if not has_vectors:
                make_folder(generation / VECTORS, "vectors")
                stage = stack.enter_context(staged(generation / VECTORS))
                self._write_vectors(stage, catalog, snapshot)
                _move(stage, generation / VECTORS / snapshot.vectors)
                file = VectorFile.open(
                    generation / VECTORS / snapshot.vectors, snapshot.gallery.dim
                )
            if snapshot.segment is not None:
                stage = stack.enter_context(staged(generation / SEGMENTS))
                files = self._download(*snapshot.segment_files.values())
                for name, path in zip(snapshot.segment_files, files, strict=True):
                    os.link(path, stage / name)
                _move(stage, generation / SEGMENTS / snapshot.segment)
            with catalog.writing() as writer:
                if snapshot.segment is not None:
                    folder = generation / SEGMENTS / snapshot.segment
                    copies = read_copies(folder, read_segment_manifest(folder))
                    if copies is not None:
                        _complete(writer, file or writer.file, copies)
                writer.adopt_segment(snapshot.segment, snapshot.segment_seq, file)
                crash_point("follow: before adoption")
            crash_point("follow: after adoption")
            catalog.erase()

    def _write_vectors(self, stage: Path, catalog: Catalog, snapshot: PublishedSnapshot) -> None:
        """Write a vector file with the rows of the snapshot. Those of removed items are zero, and
        only read if they have copies.
        """
        np.save(stage / NUMBERS, self._ids(snapshot.row_numbers))
        (stage / ROWS[snapshot.gallery.vector_type]).touch()
        file = VectorFile(stage, snapshot.gallery.dim)
        file.lengthen(file.last)
        with catalog.reading() as view:
            for ids, vectors in view.iter_vectors():
                is_before = ids <= file.last
                file.write(ids[is_before], vectors[is_before])

    def _copy_files(self, snapshot: PublishedSnapshot, generation: Path) -> bool:
        """Copy the other files of a generation; returns whether one changed."""
        has_changed = False
        for name in FILES:
            path, facts = generation / name, snapshot.files.get(name)
            if facts is None:
                has_changed |= path.exists()
                path.unlink(missing_ok=True)
            elif not _has(path, facts):
                [found] = self._download(facts)
                write_whole(path, found.read_bytes(), "follow")
                path.chmod(0o644)  # other users may serve the gallery
                has_changed = True
        return has_changed

    def _ids(self, facts: FileFacts) -> Ids:
        """The numbers of an object."""
        [path] = self._download(facts)
        return unpacked_ids(path.read_bytes())

    def _download(self, *objects: FileFacts) -> list[Path]:
        """Download the objects that are not on this disk; returns the paths of all.

        Raises: _ObjectMissingError, GalleryError.
        """
        paths = [self._downloads / facts.sha256 for facts in objects]
        pairs = zip(objects, paths, strict=True)
        missing = [*dict.fromkeys(one for one, path in pairs if not _has(path, one))]
        for start in range(0, len(missing), self._store.concurrent):
            self._fetch(missing[start : start + self._store.concurrent])
        return paths

    def _fetch(self, objects: Sequence[FileFacts]) -> None:
        """Download objects at the same time."""
        unique = os.urandom(4).hex()  # requests of a failed call may still be writing
        parts = [self._downloads / f"{facts.sha256}.{unique}.part" for facts in objects]
        for _ in objects:
            crash_point("follow: before download")
        with reading(self.address):
            try:
                self._store.download(
                    {
                        f"{OBJECTS}/{facts.sha256}": part
                        for facts, part in zip(objects, parts, strict=True)
                    }
                )
            except FileNotFoundError as error:
                raise _ObjectMissingError(
                    f"The snapshot at {self.address} names a missing file. Try again; if the error "
                    "persists, publish the gallery to another address."
                ) from error
        for facts, part in zip(objects, parts, strict=True):
            if not _has(part, facts):
                part.unlink(missing_ok=True)
                raise GalleryCorruptError(
                    f"{self.address}/{OBJECTS}/{facts.sha256} is damaged: its content does not "
                    "match its name. Publish the gallery to another address."
                )
            part.replace(self._downloads / facts.sha256)


def _complete(writer: CatalogWriter, file: VectorFile, copies: Copies) -> None:
    """Write the vector of each content to its first row, which the index has.

    The item of that row may have been removed, and its vector was not sent.
    """
    ids = file.row_ids.of(copies.rows)
    is_there = find_sorted(ids, writer.live_ids()) >= 0
    # The index in `rows` of the first item of each content that is there.
    positions = np.where(is_there, np.arange(len(ids)), len(ids))
    present = np.minimum.reduceat(positions, copies.starts)
    is_lost = (present > copies.starts) & (present < len(ids))
    file.write(ids[copies.starts[is_lost]], writer.vectors(ids[present[is_lost]]))
    writer.has_written = True


def checked_s(folder: Path) -> float | None:
    """Time when the copy in `folder` was last found up to date, in seconds since 1970; None if it
    was never checked.
    """
    try:
        return (folder / DOWNLOADS / _CHECKED).stat().st_mtime
    except OSError:
        return None


class _ObjectMissingError(GalleryCorruptError):
    """A snapshot names a missing object."""


def _has(path: Path, facts: FileFacts) -> bool:
    """Whether the file exists with this content."""
    try:
        return path.stat().st_size == facts.bytes and sha256_of(path) == facts.sha256
    except FileNotFoundError:
        return False


def _move(stage: Path, folder: Path) -> None:
    sync_tree(stage, folder.parent.name)
    if folder.exists():  # from an update that was interrupted before the catalogue named it
        discard(folder)
    rename(stage, folder, "follow")
