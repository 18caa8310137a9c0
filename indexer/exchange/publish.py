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
has erased items, the parts of deltas that may contain them are written again, and the old ones are
deleted. A follower that has applied these deltas does not read them.
"""

import contextlib
import functools
import hashlib
import math
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from kinlens.embedder.bundle import sha256_of
from kinlens.embedder.durable import FileFacts, crash_point, exclusive, holder
from kinlens.embedder.errors import (
    GalleryBusyError,
    GalleryConflictError,
    GalleryCorruptError,
    GalleryError,
    ItemNotFoundError,
    KinlensError,
    UnreachableError,
)
from kinlens.indexer.addresses import ImageRoot, image_root_of
from kinlens.indexer.catalog.database import catalog_view
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.replay import name_rows, packed_ids, part_of, tombstones, unpacked_ids
from kinlens.indexer.catalog.vectors import NUMBERS, VectorFile
from kinlens.indexer.entries import Item
from kinlens.indexer.exchange.objects import Content, ObjectFolder, store_errors_explained
from kinlens.indexer.exchange.published import (
    FILES,
    LAYOUT,
    OBJECTS,
    SNAPSHOT,
    Owner,
    PublishedDelta,
    PublishedPart,
    PublishedSnapshot,
    read_as,
)
from kinlens.indexer.folder.layout import PUBLISH, UPLOADS, GalleryFolder, disk_errors_explained
from kinlens.indexer.folder.manifest import read_manifest
from kinlens.indexer.images import source_bytes
from kinlens.indexer.index.segment import SEGMENT_MANIFEST, read_segment_manifest
from kinlens.indexer.live.compaction import CATALOG, with_state
from kinlens.indexer.types import Ids, Progress
from kinlens.reports import Report

_PART_BYTES = 2**20  # an erased item costs the upload of such a part
_MAX_PARTS = 256  # of a delta; larger ones have larger parts
_ROW_BYTES = 600  # estimate for an item without its vector
_BATCH = 4096  # items whose images are checked per view of the catalogue
_WAITING_BYTES = 64 * 2**20  # in memory, uploaded together
_SHA256 = re.compile("[0-9a-f]{64}")


class PublishReport(Report, BaseModel, frozen=True):
    """Result of a publication; `uploaded_bytes` is 0 if the snapshot was up to date."""

    address: str
    seq: int
    items: int
    changed_items: int
    uploaded_bytes: int
    pictures: int
    missing_pictures: int
    elapsed_s: float

    def lines(self) -> Iterator[str]:
        """What was uploaded."""
        text = (
            f"{self.address}: {self.items:,} items, {self.changed_items:,} changed, "
            f"{self.uploaded_bytes / 1e6:,.1f} MB uploaded in {self.elapsed_s:.1f} s"
        )
        if self.pictures or self.missing_pictures:
            text += f", {self.pictures:,} images"
        if self.missing_pictures:
            text += f"; {self.missing_pictures:,} items have no readable image"
        yield f"{text}."


def publish(
    gallery: Path | str,
    address: str,
    *,
    with_images: bool = False,
    image_root: ImageRoot | str | None = None,
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
        with store_errors_explained(
            f"The snapshot at {address} was not written",
            f"{outcome} Check the address, its permissions and free space, then publish again.",
        ):
            before = _before(store, folder.publisher(), take_over)
            work = _Publication(
                folder, store, before, with_images, image_root, on_progress or (lambda _: None)
            )
            return work.run(started)


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


class _Publication:
    """Writes one snapshot."""

    def __init__(
        self,
        folder: GalleryFolder,
        store: ObjectFolder,
        before: Owner | None,
        with_images: bool,
        image_root: ImageRoot | str | None,
        on_progress: Progress,
    ) -> None:
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
        self._is_erasing = False
        self._is_compacted = False  # since the last snapshot
        self._is_requested = with_images
        self._stored_images: set[str] = set()  # sha256 of images
        self._uploaded_images = self._missing = 0
        self._with_images = with_images or (before is not None and before.pictures)
        self._image_root = image_root_of(image_root or self._manifest.source_root)
        self._waiting: dict[str, Content] = {}  # files to upload together, by name
        self._waiting_bytes = self._uploaded = 0

    def run(self, started: float) -> PublishReport:
        """Upload the missing objects, then the snapshot."""
        last_id = self._last_with_image() if self._with_images else 0
        report = with_state(
            self._generation, lambda view, segment: self._publish(view, segment, last_id, started)
        )
        if self._with_images and self._is_compacted:
            self._sweep_images()
        return report

    def _publish(
        self, view: CatalogView, folder: Path | None, last_id: int, started: float
    ) -> PublishReport:
        row, last, generation = view.state(), self._last, self._generation
        segment = None if folder is None else read_segment_manifest(folder)
        if view.file is None or (segment is not None and segment.vectors is None):
            raise GalleryError(
                f"{self._folder.path} was written by an earlier version. Update it before you "
                "publish it: kinlens-index compact GALLERY."
            )
        self._is_compacted = last is None or last.segment_seq != row.segment_seq
        changed, deltas = self._deltas(view, view.file, row.seq, row.segment_seq)
        while (next_id := self._upload_images(view, last_id)) != last_id:
            last_id = next_id  # images of items that were added meanwhile
        segment_files: dict[str, FileFacts] = {}
        if last is not None and last.segment == row.segment:
            segment_files = last.segment_files
        elif folder is not None and segment is not None:
            names = (*segment.files, SEGMENT_MANIFEST)
            segment_files = {name: self._upload(folder / name) for name in names}
        if last is not None and last.vectors == view.file.name:
            row_numbers = last.row_numbers
        else:
            row_numbers = self._upload(packed_ids(np.load(view.file.folder / NUMBERS)))
        snapshot = PublishedSnapshot(
            publisher=self._folder.publisher(),
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
            live=self._live(view, row.segment_seq),
            vectors=view.file.name,
            row_numbers=row_numbers,
            segment_files=segment_files,
            files={
                name: self._upload((generation / name).read_bytes())
                for name in FILES
                if (generation / name).is_file()
            },
            pictures=self._with_images,
        )
        self._upload_waiting()
        if last is None or last.expired or not snapshot.equals(last):
            self._replace(snapshot)
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
        kept, erased = [], np.empty(0, np.int64)
        if self._last is not None and self._last.seq > seq:
            raise GalleryError(
                f"{self._store.address} has the write {self._last.seq:,} of this gallery, but the "
                f"folder is at {seq:,}: it was reset to an older state. Create a new generation "
                "with kinlens-index backup, then restore --replace."
            )
        if self._last is not None:
            with contextlib.suppress(FileNotFoundError):  # else all is published again
                erased = self._erased(file, self._last)
                kept = [*self._last.deltas]
            self._is_erasing = len(erased) > 0 or not kept
        since, new = kept[-1].until if kept else 0, []
        changed = merged = len(_changed(view, since))
        if since < seq or not kept:
            # Keep each delta larger than twice the sum of all later ones.
            while kept and kept[-1].items <= 2 * merged:
                absorbed = kept.pop()
                since, merged = absorbed.since, merged + absorbed.items
            ids, removed = _changed(view, since), tombstones(view, max(since, segment_seq))
            new = [
                PublishedDelta(
                    since=since,
                    until=seq,
                    items=len(ids),
                    parts=tuple(self._parts(view, file, ids, since)),
                    removed=self._upload(packed_ids(removed.ravel())) if removed.size else None,
                )
            ]
        return changed, (*(self._without(erased, each, view, file) for each in kept), *new)

    def _erased(self, file: VectorFile, last: PublishedSnapshot) -> Ids:
        """The published items that a compaction has erased, ascending.

        Raises: FileNotFoundError if the store has lost what this takes.
        """
        if last.vectors == file.name:
            return np.empty(0, np.int64)
        numbers = unpacked_ids(self._store.read(f"{OBJECTS}/{last.row_numbers.sha256}"))
        later = np.arange(numbers[-2] + 1, last.last_given + 1)
        published = np.concatenate([numbers[:-2], later])
        return published[file.row_ids.rows_of(published) < 0]

    def _without(
        self, erased: Ids, delta: PublishedDelta, view: CatalogView, file: VectorFile
    ) -> PublishedDelta:
        """A published delta without these items: the parts that may contain one are replaced."""
        parts: list[PublishedPart] = []
        for part in delta.parts:
            start, end = np.searchsorted(erased, [part.first, part.last + 1])
            if start == end:
                parts.append(part)
                continue
            ids = _changed(view, delta.since)
            some = ids[(part.first <= ids) & (ids <= part.last)]
            parts += self._parts(view, file, some, delta.since)
        return delta.model_copy(update={"parts": tuple(parts)})

    def _live(self, view: CatalogView, segment_seq: int) -> FileFacts:
        """The list of live items; renewed after each compaction, which forgets removals."""
        if self._last is not None and self._last.segment_seq == segment_seq:
            return self._last.live
        _, later = tombstones(view, segment_seq)
        live = np.union1d(view.live_ids(), later)
        return self._upload(packed_ids(np.append(live, view.last_given())))

    def _parts(
        self, view: CatalogView, file: VectorFile, ids: Ids, since: int
    ) -> Iterator[PublishedPart]:
        """Upload the items of a delta."""
        most = max(1, _PART_BYTES // (file.bytes_of(1) + _ROW_BYTES))
        step = max(most, math.ceil(len(ids) / _MAX_PARTS))
        for start in range(0, len(ids), step):
            some = ids[start : start + step]
            facts = self._upload(part_of(view, some, since, self._on_progress))
            yield PublishedPart(**facts.model_dump(), first=int(some[0]), last=int(some[-1]))

    def _last_with_image(self) -> int:
        """Upload the missing images; returns the id of the last item for which this was done.

        It uses many short views of the catalogue, because the write-ahead log cannot be truncated
        while a view is open.
        """
        last_id, next_id = -1, 0
        if not self._is_requested and self._last is not None and self._last.pictures:
            next_id = self._last.last_given  # the images of earlier items are there
        else:  # list the store once: a request for each of millions would take days
            self._stored_images = self._store.names(UPLOADS)
        while next_id != last_id:
            last_id = next_id
            with catalog_view(self._generation / CATALOG) as view:
                next_id = self._upload_images(view, last_id)
        return last_id

    def _upload_images(self, view: CatalogView, after: int) -> int:
        """Upload the missing images of the next items; returns the id of the last one, or `after`
        if there are no more.
        """
        ids = view.ids_from(0, _BATCH, after).tolist() if self._with_images else []
        for item in view.get(ids).values():
            if item.sha256 in self._stored_images:
                continue
            try:
                data = self._image_of(item)
            except UnreachableError:
                raise  # it is the store that is away, and not the image
            except (KinlensError, OSError):
                self._missing += 1  # an item that was stored as a vector only, or a lost file
                continue
            self._stored_images.add(item.sha256)
            self._uploaded_images += 1
            self._wait(f"{UPLOADS}/{item.sha256[:2]}/{item.sha256}", data, len(data))
        return max(ids, default=after)

    def _image_of(self, item: Item) -> bytes:
        """The image of an item.

        Raises: ItemNotFoundError if it has none, OSError, SourceError, ImageTooManyBytesError.
        """
        if not item.has_image:  # a file that is not deleted yet may have its sha256
            raise ItemNotFoundError(f"Item {item.key!r:.200} has no image.")
        uploaded = self._folder.path / UPLOADS / item.sha256[:2] / item.sha256
        if not item.path or uploaded.is_file():
            return uploaded.read_bytes()
        return source_bytes(self._image_root, item)

    def _sweep_images(self) -> None:
        """Delete the images of which no item is left, nor one that can be restored; after each
        compaction, since it lists the store.

        An error of a deletion is ignored: the publication after the next compaction tries again.
        """
        names = sorted(filter(_SHA256.fullmatch, self._store.names(UPLOADS)))
        for start in range(0, len(names), _BATCH):
            some = names[start : start + _BATCH]
            with catalog_view(self._generation / CATALOG) as view:
                unused = {*some} - view.kept_contents(some)
            for name in unused:
                with contextlib.suppress(Exception):
                    self._store.remove(f"{UPLOADS}/{name[:2]}/{name}")

    def _upload(self, content: Content) -> FileFacts:
        """Upload an object before the snapshot, unless the store already has it."""
        if isinstance(content, bytes):
            facts = FileFacts(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        else:
            facts = FileFacts(bytes=content.stat().st_size, sha256=sha256_of(content))
        if facts.sha256 not in self._known and facts.sha256 not in self._stored:
            self._known.add(facts.sha256)
            self._wait(f"{OBJECTS}/{facts.sha256}", content, facts.bytes)
        return facts

    @functools.cached_property
    def _stored(self) -> set[str]:
        """The objects that the store had before this publication."""
        return self._store.names(OBJECTS)

    def _wait(self, name: str, content: Content, size: int) -> None:
        """Upload a file, together with others."""
        self._waiting[name] = content
        self._waiting_bytes += size
        if self._waiting_bytes > _WAITING_BYTES:
            self._upload_waiting()

    def _upload_waiting(self) -> None:
        if self._waiting:
            crash_point("publish: before upload")
            self._store.write_all(self._waiting)
            self._uploaded += self._waiting_bytes
            self._waiting, self._waiting_bytes = {}, 0

    def _replace(self, snapshot: PublishedSnapshot) -> None:
        """Write the snapshot, and delete the objects that followers do not need any more: of those
        that it does not name, those whose grace period is over, and all if items were erased.

        An error of a deletion is ignored: the next publication tries again.
        """
        now, named = time.time(), snapshot.objects()
        known = {} if self._before is None else self._before.retired
        retired = {
            name: 0.0 if self._is_erasing else known.get(name, now)
            for name in self._stored
            if name not in named
        }
        snapshot = snapshot.model_copy(update={"retired": retired})
        crash_point("publish: before snapshot")
        self._store.write(SNAPSHOT, snapshot.model_dump_json(indent=1).encode())
        crash_point("publish: after snapshot")
        for name in snapshot.expired:
            with contextlib.suppress(Exception):
                self._store.remove(f"{OBJECTS}/{name}")


def _changed(view: CatalogView, since: int) -> Ids:
    """The ids of items added or changed after a write, ascending."""
    return view.changed_since(since) if since else view.live_ids()
