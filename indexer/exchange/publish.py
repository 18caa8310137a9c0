"""Publish snapshots of a gallery at an address of fsspec, for any number of followers.

ADDRESS/
  snapshot.json        PublishedSnapshot; replaced last, so a snapshot is published atomically
  objects/<sha256>     files that snapshots share: parts of the catalogue, segments, row numbers
  pictures/<ab>/<sha256>   the images of items, if requested

The catalogue is published as *deltas*: the items that were added or changed after one write of the
gallery and up to another, and the ids of those that were removed. The first delta starts at the
first write. A follower applies the deltas that end after its last write; they may repeat changes
that it already has. Small deltas are merged over time, so their number is logarithmic in the number
of items. After a compaction a list of all item ids names the removals that it has forgotten. If it
has erased items, the parts of deltas that may contain them are written again; a follower that has
applied these deltas does not read them.
"""

import contextlib
import math
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from kinlens.embedder.bundle import sha256_of
from kinlens.embedder.durable import FileFacts, crash_point, exclusive, holder, lock_folder
from kinlens.embedder.errors import (
    GalleryBusyError,
    GalleryConflictError,
    GalleryCorruptError,
    GalleryError,
    KinlensError,
)
from kinlens.indexer.catalog.database import catalog_view
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.replay import (
    name_rows,
    packed,
    tombstones,
    unpacked,
    write_part,
)
from kinlens.indexer.catalog.schema import read_state
from kinlens.indexer.catalog.vectors import NUMBERS, VectorFile
from kinlens.indexer.exchange.objects import ObjectFolder
from kinlens.indexer.exchange.published import (
    FILES,
    LAYOUT,
    OBJECTS,
    SNAPSHOT,
    Owner,
    Part,
    PublishedDelta,
    PublishedSnapshot,
    read_as,
)
from kinlens.indexer.folder.layout import PUBLISH, UPLOADS, GalleryFolder, disk_errors_explained
from kinlens.indexer.folder.manifest import (
    read_manifest,
)
from kinlens.indexer.images import source_bytes
from kinlens.indexer.index.segment import MANIFEST as SEGMENT_MANIFEST
from kinlens.indexer.index.segment import SEGMENTS
from kinlens.indexer.index.segment import read_manifest as read_segment_manifest
from kinlens.indexer.live.compaction import CATALOG
from kinlens.indexer.types import Ids, Item, Progress

_ORPHAN_AGE_S = 86_400.0  # age after which an object without a snapshot counts as a failed upload
_PART_BYTES = 2**20  # an erased item costs the upload of such a part
_MAX_PARTS = 256  # of a delta; larger ones have larger parts
_ROW_BYTES = 600  # estimate for an item without its vector
_BATCH = 4096  # items whose images are checked per view of the catalogue
_IMAGE_BYTES = 64 * 2**20  # images in memory, uploaded together
_ATTEMPTS = 8  # in case a compaction replaces the segment before it is locked


class PublishReport(BaseModel, frozen=True):
    """Result of a publication; `uploaded_bytes` is 0 if the snapshot was up to date."""

    address: str
    seq: int
    items: int
    changed_items: int
    uploaded_bytes: int
    pictures: int
    missing_pictures: int
    elapsed_s: float


def _before(store: ObjectFolder, publisher: str, take_over: bool) -> Owner | None:
    """What the address has: a PublishedSnapshot, or an Owner if an earlier version published it.

    Raises: GalleryCorruptError, GalleryConflictError; not if this folder is to `take_over`.
    """
    try:
        owner = read_as(store, Owner)
        if owner is not None and owner.schema_version >= LAYOUT:
            owner = read_as(store, PublishedSnapshot)
    except GalleryCorruptError:
        if not take_over:
            raise
        return None
    if owner is not None and owner.publisher != publisher and not take_over:
        raise GalleryConflictError(
            f"{store.address} belongs to another folder, which published there at "
            f"{owner.published_at}. If this folder replaces it, use --take-over."
        )
    return owner


def publish(
    gallery: Path | str,
    address: str,
    *,
    with_images: bool = False,
    image_root: Path | None = None,
    take_over: bool = False,
    on_progress: Progress | None = None,
) -> PublishReport:
    """Publish the present state of the gallery in folder `gallery` as the snapshot at `address`.

    Only changes since the last snapshot are uploaded. Followers see the previous snapshot until the
    upload is complete. An address belongs to the folder that published there first, because two
    writers would mix their items in every copy.

    Args:
        with_images: also upload the images of the items. Later publications continue to do so.
        image_root: folder of the images, if they were moved.
        take_over: replace another folder as the owner of the address.

    Raises: GalleryNotFoundError, GalleryCorruptError; GalleryConflictError for a copy, or if the
        address belongs to another folder; GalleryBusyError if another process publishes the
        gallery, or compactions keep replacing its segment; GalleryError if another gallery is at
        `address`, or it cannot be written; EngineUnavailableError.
    """
    started = time.perf_counter()
    folder, store = GalleryFolder(gallery), ObjectFolder(address)
    folder.current()
    folder.refuse_copy()
    outcome = "Followers keep the previous snapshot."
    with disk_errors_explained(folder.path, outcome), contextlib.ExitStack() as stack:
        if not stack.enter_context(exclusive(folder.path / PUBLISH, wait=False)):
            raise GalleryBusyError(
                f"Another process ({holder(folder.path / PUBLISH)}) publishes {folder.path}. Wait "
                "until it has finished."
            )
        with _store_errors_explained(address):
            publisher = folder.publisher()
            before = _before(store, publisher, take_over)
            work = _Publication(
                publisher,
                folder,
                store,
                before,
                with_images,
                image_root,
                on_progress or (lambda _: None),
            )
            return work.run(started)


@contextlib.contextmanager
def _store_errors_explained(address: str) -> Iterator[None]:
    try:
        yield
    except (KinlensError, sqlite3.Error):
        raise
    except Exception as error:  # each store client has its own exception classes
        raise GalleryError(
            f"The snapshot at {address} was not written: {type(error).__name__}: {error}. "
            "Followers keep the previous snapshot. Check the address, its permissions and free "
            "space, then publish again."
        ) from error


class _Publication:
    """Writes one snapshot."""

    def __init__(
        self,
        publisher: str,
        folder: GalleryFolder,
        store: ObjectFolder,
        before: Owner | None,
        with_images: bool,
        image_root: Path | None,
        on_progress: Progress,
    ) -> None:
        self._publisher = publisher
        self._folder = folder
        self._store = store
        self._on_progress = on_progress
        self._generation = folder.current()
        self._manifest = read_manifest(self._generation)
        if before is not None and before.gallery.name != self._manifest.name:
            raise GalleryError(
                f"{store.address} has the gallery {before.gallery.name!r}, but {folder.path} is "
                f"{self._manifest.name!r}. Publish to another address, or delete what is stored at "
                "this one."
            )
        self._before = before if isinstance(before, PublishedSnapshot) else None
        is_same = before is not None and before.gallery.uid == self._manifest.uid
        self._last = self._before if is_same else None  # the last snapshot of this generation
        self._known = set() if self._before is None else self._before.objects()
        self._is_requested = with_images
        self._stored_images: set[str] = set()  # sha256 of images
        self._uploaded_images = self._missing = 0
        self._with_images = with_images or (before is not None and before.pictures)
        self._image_root = image_root or Path(self._manifest.source_root)
        self._uploaded = 0

    def run(self, started: float) -> PublishReport:
        """Upload the missing objects, then the snapshot."""
        last_id = self._upload_images() if self._with_images else 0
        for _ in range(_ATTEMPTS):
            with catalog_view(self._generation / CATALOG) as view, contextlib.ExitStack() as stack:
                state = view.state()
                if state.segment is not None:
                    try:
                        descriptor = lock_folder(self._generation / SEGMENTS / state.segment)
                    except FileNotFoundError:
                        continue  # a compaction has replaced it
                    stack.callback(os.close, descriptor)
                return self._publish(view, last_id, started)
        raise GalleryBusyError(
            f"Compactions of {self._folder.path} keep replacing the segment to publish. Try again "
            "when they have finished."
        )

    def _outdated(self) -> GalleryError:
        return GalleryError(
            f"{self._folder.path} was written by an earlier version. Update it before you "
            "publish it: kinlens-index compact GALLERY."
        )

    def _publish(self, view: CatalogView, last_id: int, started: float) -> PublishReport:
        row = read_state(view.connection)
        if view.file is None or row is None:
            raise self._outdated()
        last, now = self._last, time.time()
        changed, deltas = self._deltas(view, view.file, row.seq, row.segment_seq)
        live = self._live(view, row.segment_seq)
        while self._with_images and len(ids := view.ids_from(0, _BATCH, last_id)):
            last_id = self._upload_images_of(view, ids)  # items that were added meanwhile
        segment_files: dict[str, FileFacts] = {}
        if row.segment is not None:
            folder = self._generation / SEGMENTS / row.segment
            if last is not None and last.segment == row.segment:
                segment_files = last.segment_files
            else:
                segment = read_segment_manifest(folder)
                if segment.vectors is None:
                    raise self._outdated()
                for name in (*segment.files, SEGMENT_MANIFEST):
                    segment_files[name] = self._upload(folder / name)
        row_numbers = (
            last.row_numbers
            if last is not None and last.vectors == view.file.name
            else self._upload_ids(np.load(view.file.folder / NUMBERS))
        )
        files = {
            name: self._upload(self._generation / name)
            for name in FILES
            if (self._generation / name).is_file()
        }
        snapshot = PublishedSnapshot(
            publisher=self._publisher,
            published_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            gallery=self._manifest,
            seq=row.seq,
            size=row.size,
            segment=row.segment,
            segment_seq=row.segment_seq,
            numbers=row.numbers,
            last_given=view.last_given(),
            names=name_rows(view),
            deltas=deltas,
            live=live,
            vectors=view.file.name,
            row_numbers=row_numbers,
            segment_files=segment_files,
            files=files,
            pictures=self._with_images,
        )
        is_new = last is None or _content(last) != _content(snapshot)
        is_new |= last is not None and min(last.retired.values(), default=now) < now - last.grace_s
        if is_new:
            snapshot = self._retire(snapshot)
            crash_point("publish: before snapshot")
            self._store.write(SNAPSHOT, snapshot.model_dump_json(indent=1).encode())
            crash_point("publish: after snapshot")
        return PublishReport(
            address=self._store.address,
            seq=row.seq,
            items=row.size,
            changed_items=changed,
            uploaded_bytes=self._uploaded,
            pictures=self._uploaded_images,
            missing_pictures=self._missing,
            elapsed_s=time.perf_counter() - started,
        )

    def _deltas(
        self, view: CatalogView, file: VectorFile, seq: int, segment_seq: int
    ) -> tuple[int, tuple[PublishedDelta, ...]]:
        """The number of items that changed since the last snapshot, and all deltas up to now."""
        kept = [] if self._last is None else [*self._last.deltas]
        since = 0 if self._last is None else self._last.seq
        if self._last is not None and since > seq:
            raise GalleryError(
                f"{self._store.address} has the write {since:,} of this gallery, but the folder is "
                f"at {seq:,}: it was reset to an older state. Create a new generation with "
                "kinlens-index backup, then restore --replace."
            )
        if self._last is not None and self._last.vectors != file.name:
            kept = self._without_erased(view, file, self._last)
            since = kept[-1].until if kept else 0
        if since == seq and kept:
            return 0, tuple(kept)
        changed = merged = view.count_changed(since) if since else view.state().size
        # Keep each delta larger than twice the sum of all later ones.
        while kept and kept[-1].items <= 2 * merged:
            absorbed = kept.pop()
            since, merged = absorbed.since, merged + absorbed.items
        ids = _changed(view, since)
        removed = tombstones(view, max(since, segment_seq))
        delta = PublishedDelta(
            since=since,
            until=seq,
            items=len(ids),
            parts=tuple(self._parts(view, file, ids, since)),
            removed=self._upload_ids(removed.ravel()) if removed.size else None,
        )
        return changed, (*kept, delta)

    def _without_erased(
        self, view: CatalogView, file: VectorFile, last: PublishedSnapshot
    ) -> list[PublishedDelta]:
        """The deltas of the last snapshot without items that a compaction has erased; none if the
        store has lost what this takes.
        """
        try:
            *own, last_row, _ = unpacked(self._store.read(f"{OBJECTS}/{last.row_numbers.sha256}"))
        except FileNotFoundError:
            return []
        later = np.arange(last_row + 1, last.last_given + 1)
        published = np.concatenate([np.array(own, np.int64), later])
        erased = published[file.row_ids.rows_of(published) < 0]
        deltas = []
        for delta in last.deltas:
            parts: list[Part] = []
            for part in delta.parts:
                start, end = np.searchsorted(erased, [part.first, part.last + 1])
                if start == end:
                    parts.append(part)
                    continue
                ids = _changed(view, delta.since)
                some = ids[(part.first <= ids) & (ids <= part.last)]
                parts += self._parts(view, file, some, delta.since)
            deltas.append(delta.model_copy(update={"parts": tuple(parts)}))
        return deltas

    def _live(self, view: CatalogView, segment_seq: int) -> FileFacts:
        """The list of live items; renewed after each compaction, which forgets removals."""
        if self._last is not None and self._last.segment_seq == segment_seq:
            return self._last.live
        _, later = tombstones(view, segment_seq)
        return self._upload_ids(np.append(np.union1d(view.live_ids(), later), view.last_given()))

    def _parts(self, view: CatalogView, file: VectorFile, ids: Ids, since: int) -> Iterator[Part]:
        """Upload the items of a delta."""
        most = max(1, _PART_BYTES // (file.bytes_of(1) + _ROW_BYTES))
        step = max(most, math.ceil(len(ids) / _MAX_PARTS))
        for start in range(0, len(ids), step):
            some = ids[start : start + step]
            with tempfile.TemporaryDirectory(prefix="kinlens-publish-") as folder:
                path = Path(folder, "part")
                write_part(path, view, some, since, self._on_progress)
                facts = self._upload(path)
            yield Part(**facts.model_dump(), first=int(some[0]), last=int(some[-1]))

    def _upload_images(self) -> int:
        """Upload the missing images; returns the id of the last item for which this was done.

        It uses many short views of the catalogue, because the write-ahead log cannot be truncated
        while a view is open.
        """
        last_id = 0
        if not self._is_requested and self._last is not None and self._last.pictures:
            last_id = self._last.last_given  # the images of earlier items are there
        else:  # list the store once: a request for each of millions would take days
            self._stored_images = self._store.all_names(UPLOADS)
        while True:
            with catalog_view(self._generation / CATALOG) as view:
                ids = view.ids_from(0, _BATCH, last_id)
                if not len(ids):
                    return last_id
                last_id = self._upload_images_of(view, ids)

    def _upload_images_of(self, view: CatalogView, ids: Ids) -> int:
        """Upload the missing images of these items, many at a time; returns the last id."""
        images: dict[str, bytes] = {}
        for item in view.get(ids).values():
            if item.sha256 in self._stored_images:
                continue
            try:
                data = self._image_of(item)
            except (KinlensError, OSError):
                self._missing += 1  # an item that was stored as a vector only, or a lost file
                continue
            self._stored_images.add(item.sha256)
            images[f"{UPLOADS}/{item.sha256[:2]}/{item.sha256}"] = data
            if sum(map(len, images.values())) > _IMAGE_BYTES:
                self._write_images(images)
                images = {}
        self._write_images(images)
        return int(ids[-1])

    def _write_images(self, images: dict[str, bytes]) -> None:
        self._store.write_all(images)
        self._uploaded += sum(map(len, images.values()))
        self._uploaded_images += len(images)

    def _image_of(self, item: Item) -> bytes:
        """The image of an item. Raises: OSError, SourceError, ImageTooManyBytesError."""
        uploaded = self._folder.path / UPLOADS / item.sha256[:2] / item.sha256
        if not item.path or uploaded.is_file():
            return uploaded.read_bytes()
        return source_bytes(self._image_root, item)

    def _upload(self, path: Path) -> FileFacts:
        """Upload a file as an object, unless the store already has it."""
        facts = FileFacts(bytes=path.stat().st_size, sha256=sha256_of(path))
        name = f"{OBJECTS}/{facts.sha256}"
        if facts.sha256 not in self._known and self._store.size(name) != facts.bytes:
            crash_point("publish: before upload")
            self._store.upload(path, name)
            self._uploaded += facts.bytes
        return facts

    def _upload_ids(self, ids: Ids) -> FileFacts:
        with tempfile.TemporaryDirectory(prefix="kinlens-publish-") as folder:
            path = Path(folder, "ids")
            path.write_bytes(packed(ids))
            return self._upload(path)

    def _retire(self, snapshot: PublishedSnapshot) -> PublishedSnapshot:
        """Update `retired` with the objects that only earlier snapshots name, and delete those
        whose grace period is over.
        """
        now, named = time.time(), snapshot.objects()
        before = self._before
        retired = {} if before is None else {**before.retired}
        for sha256 in set() if before is None else before.objects():
            retired.setdefault(sha256, now)
        retired = {sha256: at for sha256, at in retired.items() if sha256 not in named}
        expired = {sha256 for sha256, at in retired.items() if now - at > snapshot.grace_s}
        if before is None or len(snapshot.deltas) == 1:  # rare, since it lists all objects
            expired |= self._orphans(named | retired.keys(), now)
        for sha256 in expired:
            # Any error is ignored here: the next publication tries again.
            with contextlib.suppress(Exception):
                with contextlib.suppress(FileNotFoundError):
                    self._store.remove(f"{OBJECTS}/{sha256}")
                retired.pop(sha256, None)
        return snapshot.model_copy(update={"retired": retired})

    def _orphans(self, known: set[str], now: float) -> set[str]:
        """The objects of publications that were interrupted more than a day ago."""
        found = set()
        for name in self._store.names(OBJECTS) - known:
            with contextlib.suppress(FileNotFoundError):
                modified_s = self._store.modified_s(f"{OBJECTS}/{name}")
                if modified_s is not None and now - modified_s > _ORPHAN_AGE_S:
                    found.add(name)
        return found


def _changed(view: CatalogView, since: int) -> Ids:
    """The ids of items added or changed after a write, ascending."""
    return view.changed_since(since) if since else view.live_ids()


def _content(snapshot: PublishedSnapshot) -> PublishedSnapshot:
    """A snapshot without its times."""
    return snapshot.model_copy(update={"published_at": "", "retired": {}})
