"""Publish snapshots of a gallery at an address of fsspec, for any number of followers.

ADDRESS/
  snapshot.json        Snapshot; replaced last, so a snapshot is published atomically
  objects/<sha256>     files that snapshots share: parts of the catalogue, segments, row numbers
  pictures/<ab>/<sha256>   the images of items, if requested

The catalogue is published as *deltas*: the items that were added or changed after one write of the
gallery and up to another. The first delta starts at the first write. A follower applies the deltas
that end after its last write; they may repeat changes that it already has. Small deltas are merged
over time, so their number is logarithmic in the number of items.
"""

import contextlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from kinlens.embedder.bundle import sha256_of
from kinlens.embedder.durable import FileFacts, crash_point, exclusive, holder, lock_folder
from kinlens.embedder.errors import (
    GalleryBusyError,
    GalleryConflictError,
    GalleryCorruptError,
    GalleryError,
    GalleryNotFoundError,
    KinlensError,
)
from kinlens.indexer.catalog.database import catalog_view
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.replay import NameRows, live_bits, name_rows, write_part
from kinlens.indexer.catalog.schema import read_state
from kinlens.indexer.catalog.vectors import NUMBERS, VectorFile
from kinlens.indexer.exchange.objects import ObjectFolder
from kinlens.indexer.folder.layout import PUBLISH, UPLOADS, GalleryFolder, disk_errors_explained
from kinlens.indexer.folder.manifest import (
    CALIBRATION,
    PRECISIONS,
    REPORT,
    GalleryManifest,
    read_manifest,
)
from kinlens.indexer.images import source_bytes
from kinlens.indexer.index.segment import MANIFEST as SEGMENT_MANIFEST
from kinlens.indexer.index.segment import brief
from kinlens.indexer.index.segment import read_manifest as read_segment_manifest
from kinlens.indexer.live.compaction import CATALOG, SEGMENTS
from kinlens.indexer.types import Ids, Item, Progress

SNAPSHOT = "snapshot.json"
OBJECTS = "objects"

RETIRED_S = 3600.0
"""Grace period before an object that no snapshot names is deleted, for slow followers."""

_ORPHAN_AGE_S = 86_400.0  # age after which an object without a snapshot counts as a failed upload
_PART_BYTES = 128 * 2**20
_ROW_BYTES = 600  # estimate for an item without its vector
_BATCH = 4096  # items whose images are checked per view of the catalogue
_ATTEMPTS = 8  # in case a compaction replaces the segment before it is locked
FILES = (REPORT, CALIBRATION, PRECISIONS)
"""Other files of a generation that are published: not manifest, catalogue, vectors or segments."""


# Names become paths on every following host, so they are restricted.
_SEGMENT = r"^[0-9]{12}-[0-9a-f]{8}$"
_VECTORS = r"^[0-9a-f]{8}$"
_FILE = r"^[a-z]+\.[a-z]+$"


class Delta(BaseModel, frozen=True, extra="forbid"):
    """The changes after the write `since`, up to the write `until`.

    Attributes:
        parts: objects in the format of `kinlens.indexer.catalog.replay`.
        live: an object with one bit per item id, set for live items, compressed with zlib. None if
            the tombstones in the first part contain every removal since then.
    """

    since: int = Field(ge=0)
    until: int = Field(ge=0)
    items: int = Field(ge=0)
    parts: tuple[FileFacts, ...]
    live: FileFacts | None = None


class Snapshot(BaseModel, frozen=True, extra="forbid"):
    """One state of a gallery, and its objects.

    Attributes:
        publisher: id of the folder that owns the address.
        seq, size, segment, segment_seq, numbers: the state of the catalogue.
        last_given: the highest item id that was ever assigned.
        names: the rows of the attribute names.
        vectors: the name of the vector file. The vectors themselves are in the deltas.
        row_numbers: an object with the item id of each row of the vector file.
        files: other files of the generation.
        retired: objects of earlier snapshots, with the time when they were last in use (seconds
            since 1970).
    """

    schema_version: Literal[1] = 1
    published_at: str
    publisher: str
    gallery: GalleryManifest
    seq: int = Field(ge=0)
    size: int = Field(ge=0)
    segment: str | None = Field(pattern=_SEGMENT)
    segment_seq: int = Field(ge=0)
    numbers: int
    last_given: int = Field(ge=0)
    names: NameRows
    deltas: tuple[Delta, ...]
    vectors: str = Field(pattern=_VECTORS)
    row_numbers: FileFacts
    segment_files: dict[Annotated[str, Field(pattern=_FILE)], FileFacts]
    files: dict[str, FileFacts]
    pictures: bool = False
    retired: dict[str, float] = {}

    @property
    def base(self) -> tuple[str | None, int, str]:
        """The segment, the last write that it contains, and the vector file."""
        return self.segment, self.segment_seq, self.vectors

    def objects(self) -> set[str]:
        """The sha256 of each object of the snapshot."""
        own = {part.sha256 for delta in self.deltas for part in delta.parts}
        own |= {delta.live.sha256 for delta in self.deltas if delta.live is not None}
        own |= {facts.sha256 for facts in (*self.segment_files.values(), *self.files.values())}
        return own | {self.row_numbers.sha256}


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


def read_snapshot(store: ObjectFolder) -> Snapshot | None:
    """The current snapshot at an address; None if there is none.

    Raises: GalleryCorruptError if it is damaged or from another version.
    """
    try:
        data = store.read(SNAPSHOT)
    except FileNotFoundError:
        return None
    try:
        return Snapshot.model_validate_json(data)
    except ValidationError as error:
        raise GalleryCorruptError(
            f"{store.address}/{SNAPSHOT} is not a snapshot that this version can read: "
            f"{brief(error)}. Publish the gallery again with this version and --take-over."
        ) from error


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
            before = _readable(store) if take_over else read_snapshot(store)
            publisher = folder.publisher()
            if before is not None and before.publisher != publisher and not take_over:
                raise GalleryConflictError(
                    f"{store.address} belongs to another folder, which published there at "
                    f"{before.published_at}. If this folder replaces it, use --take-over."
                )
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
        before: Snapshot | None,
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
        is_same = before is not None and before.gallery.uid == self._manifest.uid
        self._last = before if is_same else None  # the last snapshot of this generation
        self._before = before
        self._known = set() if before is None else before.objects()
        self._is_requested = with_images
        self._stored_images: set[str] = set()  # sha256 of images
        self._uploaded_images = self._missing = 0
        self._with_images = with_images or (before is not None and before.pictures)
        self._image_root = image_root or Path(self._manifest.source_root)
        self._uploaded = 0

    def run(self, started: float) -> PublishReport:
        """Upload the missing objects, then the snapshot."""
        shown = self._upload_images() if self._with_images else 0
        for _ in range(_ATTEMPTS):
            with catalog_view(self._generation / CATALOG) as view, contextlib.ExitStack() as stack:
                state = view.state()
                if state.segment is not None:
                    try:
                        descriptor = lock_folder(self._generation / SEGMENTS / state.segment)
                    except FileNotFoundError:
                        continue  # a compaction has replaced it
                    stack.callback(os.close, descriptor)
                return self._publish(view, shown, started)
        raise GalleryBusyError(
            f"Compactions of {self._folder.path} keep replacing the segment to publish. Try again "
            "when they have finished."
        )

    def _outdated(self) -> GalleryError:
        return GalleryError(
            f"{self._folder.path} was written by an earlier version. Update it before you "
            "publish it: kinlens-index compact GALLERY."
        )

    def _publish(self, view: CatalogView, shown: int, started: float) -> PublishReport:
        row = read_state(view.connection)
        if view.file is None or row is None:
            raise self._outdated()
        last, now = self._last, time.time()
        changed, deltas = self._deltas(view, view.file, row.seq, row.segment_seq)
        if self._with_images:
            for item in view.get(view.changed_since(shown)).values():
                self._upload_image(item)  # items that were added during the upload
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
            else self._upload(view.file.folder / NUMBERS)
        )
        files = {
            name: self._upload(self._generation / name)
            for name in FILES
            if (self._generation / name).is_file()
        }
        snapshot = Snapshot(
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
            vectors=view.file.name,
            row_numbers=row_numbers,
            segment_files=segment_files,
            files=files,
            pictures=self._with_images,
        )
        is_new = last is None or _content(last) != _content(snapshot)
        is_new |= last is not None and min(last.retired.values(), default=now) < now - RETIRED_S
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
    ) -> tuple[int, tuple[Delta, ...]]:
        """The number of items that changed since the last snapshot, and all deltas up to now."""
        kept = [] if self._last is None else [*self._last.deltas]
        since = 0 if self._last is None else self._last.seq
        if self._last is not None and since > seq:
            raise GalleryError(
                f"{self._store.address} has the write {since:,} of this gallery, but the folder is "
                f"at {seq:,}: it was reset to an older state. Create a new generation with "
                "kinlens-index backup, then restore --replace."
            )
        if self._last is not None and since == seq and self._last.vectors == file.name:
            return 0, self._last.deltas
        if self._last is not None and self._last.vectors != file.name:
            # A compaction has erased removed items, so no delta must contain them any more.
            kept, since = [], 0
        changed = view.count_changed(since) if since else view.state().size
        merged = changed
        # Keep each delta larger than twice the sum of all later ones.
        while kept and kept[-1].items <= 2 * merged:
            absorbed = kept.pop()
            since, merged = absorbed.since, merged + absorbed.items
        ids = view.changed_since(since) if since else view.live_ids()
        live = None
        if segment_seq > since:  # the catalogue has no record of removals before the segment
            live = self._upload_data(live_bits(view))
        parts = tuple(self._parts(view, file, ids, since))
        kept.append(Delta(since=since, until=seq, items=len(ids), parts=parts, live=live))
        return changed, tuple(kept)

    def _parts(
        self, view: CatalogView, file: VectorFile, ids: Ids, since: int
    ) -> Iterator[FileFacts]:
        """Upload the items of a delta, in parts of up to about 128 MB."""
        step = max(1, _PART_BYTES // (file.bytes_of(1) + _ROW_BYTES))
        for start in range(0, max(1, len(ids)), step):
            with tempfile.TemporaryDirectory(prefix="kinlens-publish-") as folder:
                path, chunk = Path(folder, "part"), ids[start : start + step]
                write_part(path, view, chunk, since, not start, self._on_progress)
                yield self._upload(path)

    def _upload_images(self) -> int:
        """Upload the missing images; returns the write up to which this was done.

        It uses many short views of the catalogue, because the write-ahead log cannot be truncated
        while a view is open.
        """
        last = self._last
        is_first = self._is_requested or last is None or not last.pictures
        since = 0 if is_first or last is None else last.seq
        with catalog_view(self._generation / CATALOG) as view:
            seq = view.state().seq
            ids = view.changed_since(since) if since else view.live_ids()
        if is_first:  # list the store once: requests for each of millions would take days
            for shard in range(256):
                name = f"{shard:02x}"
                self._stored_images |= self._store.names(f"{UPLOADS}/{name}")
        for start in range(0, len(ids), _BATCH):
            with catalog_view(self._generation / CATALOG) as view:
                items = view.get(ids[start : start + _BATCH])
            for item in items.values():
                self._upload_image(item)
        return seq

    def _upload_image(self, item: Item) -> None:
        name = f"{UPLOADS}/{item.sha256[:2]}/{item.sha256}"
        if item.sha256 in self._stored_images or self._store.exists(name):
            return
        try:
            data = self._image_of(item)
        except (KinlensError, OSError):
            self._missing += 1  # an item that was stored as a vector only, or a lost file
            return
        self._store.write(name, data)
        self._stored_images.add(item.sha256)
        self._uploaded += len(data)
        self._uploaded_images += 1

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

    def _upload_data(self, data: bytes) -> FileFacts:
        with tempfile.TemporaryDirectory(prefix="kinlens-publish-") as folder:
            path = Path(folder, "data")
            path.write_bytes(data)
            return self._upload(path)

    def _retire(self, snapshot: Snapshot) -> Snapshot:
        """Update `retired` with the objects that only earlier snapshots name, and delete those
        whose grace period is over.
        """
        now, named = time.time(), snapshot.objects()
        before = self._before
        retired = {} if before is None else {**before.retired}
        for sha256 in set() if before is None else before.objects():
            retired.setdefault(sha256, now)
        retired = {sha256: at for sha256, at in retired.items() if sha256 not in named}
        expired = {sha256 for sha256, at in retired.items() if now - at > RETIRED_S}
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


def _readable(store: ObjectFolder) -> Snapshot | None:
    """The current snapshot; None also for one that this version cannot read."""
    with contextlib.suppress(GalleryCorruptError):
        return read_snapshot(store)
    return None


def snapshot_at(address: str) -> Snapshot:
    """The current snapshot at an address. Raises: GalleryError, EngineUnavailableError."""
    try:
        return latest(ObjectFolder(address))
    except KinlensError:
        raise
    except Exception as error:  # each store client has its own exception classes
        raise GalleryError(
            f"The snapshot at {address} cannot be read: {type(error).__name__}: {error}. Check the "
            "address, its permissions and the network."
        ) from error


def latest(store: ObjectFolder) -> Snapshot:
    """The current snapshot at an address. Raises: GalleryNotFoundError, GalleryCorruptError."""
    found = read_snapshot(store)
    if found is None:
        raise GalleryNotFoundError(
            f"No snapshot at {store.address}: {SNAPSHOT} is missing. Publish the gallery with "
            "kinlens-index publish GALLERY ADDRESS."
        )
    return found


def _content(snapshot: Snapshot) -> Snapshot:
    """A snapshot without its times."""
    return snapshot.model_copy(update={"published_at": "", "retired": {}})
