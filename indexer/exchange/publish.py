"""Snapshots of a gallery at an address of fsspec, which any number of hosts follow.

ADDRESS/
  snapshot.json        Snapshot; it is replaced last, so a snapshot is there whole or not at all
  objects/<sha256>     files that snapshots share: parts of the catalogue, segments, row numbers
  pictures/<ab>/<sha256>   the images of items, if they were asked for

The catalogue is published as *deltas*: the items that were added or changed after one write of the
gallery and up to another. The first delta begins at the first write. A follower applies those that
end after the write that it has reached, and a delta may repeat what it knows. Later deltas are
merged as they grow, so their number is logarithmic in the number of items.
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
from kinlens.embedder.durable import FileFacts, crash_point, exclusive, hold, holder
from kinlens.embedder.errors import (
    GalleryBusyError,
    GalleryConflictError,
    GalleryCorruptError,
    GalleryError,
    GalleryNotFoundError,
    KinlensError,
)
from kinlens.indexer.calibration import CALIBRATION
from kinlens.indexer.catalog.database import catalog_view
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.replay import NameRows, live_bits, name_rows, write_part
from kinlens.indexer.catalog.schema import read_state
from kinlens.indexer.catalog.vectors import NUMBERS, VectorFile
from kinlens.indexer.exchange.objects import ObjectFolder
from kinlens.indexer.folder.layout import PICTURES, PUBLISH, GalleryFolder, disk_errors_explained
from kinlens.indexer.folder.manifest import PRECISIONS, REPORT, GalleryManifest, read_manifest
from kinlens.indexer.images import source_bytes
from kinlens.indexer.index.segment import MANIFEST as SEGMENT_MANIFEST
from kinlens.indexer.index.segment import brief
from kinlens.indexer.index.segment import read_manifest as read_segment_manifest
from kinlens.indexer.live.compaction import CATALOG, SEGMENTS
from kinlens.indexer.types import Ids, Item, Progress

SNAPSHOT = "snapshot.json"
OBJECTS = "objects"

RETIRED_S = 3600.0
"""How long an object stays that no snapshot names any more: a slow follower may be reading it."""

_ORPHAN_S = 86_400.0  # after which an object without a snapshot is of a publication that failed
_PART_BYTES = 128 * 2**20
_ROW_BYTES = 600  # of an item without its vector, roughly
_AT_ONCE = 4096  # items whose images are looked at
_PATIENCE = 8  # times that a segment which a compaction has replaced is looked up anew
FILES = (REPORT, CALIBRATION, PRECISIONS)
"""What lies in a generation beside its manifest, catalogue, vectors and segments."""


# Names become paths on every host that follows.
_SEGMENT = r"^[0-9]{12}-[0-9a-f]{8}$"
_VECTORS = r"^[0-9a-f]{8}$"
_FILE = r"^[a-z]+\.[a-z]+$"


class Delta(BaseModel, frozen=True, extra="forbid"):
    """What changed after the write `since`, up to the write `until`.

    parts: objects, as of `kinlens.indexer.catalog.replay`. live: an object with a bit for each
    item id that is alive, compressed with zlib; None where the tombstones in the first part name
    every removal since then.
    """

    since: int = Field(ge=0)
    until: int = Field(ge=0)
    items: int = Field(ge=0)
    parts: tuple[FileFacts, ...]
    live: FileFacts | None = None


class Snapshot(BaseModel, frozen=True, extra="forbid"):
    """One state of a gallery, and the objects that it consists of.

    publisher: the folder that owns the address. seq, size, segment, segment_seq, numbers: the
    state of the catalogue; last_given: the highest item id that was ever given. names: the rows of
    the attribute names. vectors: the name of the file of vectors, of which `row_numbers` says
    which row is of which item; the rows themselves come with the deltas. files: what else lies in
    the generation. retired: objects of earlier snapshots, and when they were last named (seconds
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
        """The segment, the write that it was made at, and the file of vectors."""
        return self.segment, self.segment_seq, self.vectors

    def objects(self) -> set[str]:
        """The sha256 of each object that it consists of."""
        own = {part.sha256 for delta in self.deltas for part in delta.parts}
        own |= {delta.live.sha256 for delta in self.deltas if delta.live is not None}
        own |= {facts.sha256 for facts in (*self.segment_files.values(), *self.files.values())}
        return own | {self.row_numbers.sha256}


class PublishReport(BaseModel, frozen=True):
    """What a publication did; nothing was uploaded if the snapshot was up to date."""

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

    Raises: GalleryCorruptError for another version or a damaged one.
    """
    try:
        data = store.read(SNAPSHOT)
    except FileNotFoundError:
        return None
    try:
        return Snapshot.model_validate_json(data)
    except ValidationError as error:
        raise GalleryCorruptError(
            f"{store.address}/{SNAPSHOT} is not a snapshot that this version of Kinlens reads: "
            f"{brief(error)}. Publish the gallery again with this version and --take-over."
        ) from error


def publish(
    gallery: Path | str,
    address: str,
    *,
    pictures: bool = False,
    image_root: Path | None = None,
    take_over: bool = False,
    on_progress: Progress | None = None,
) -> PublishReport:
    """Make the gallery in the folder `gallery`, as it is now, the snapshot at `address`.

    Only what changed since the last snapshot is uploaded. Until everything is there, followers see
    the snapshot before. With `pictures` the images of its items are uploaded as well; a gallery
    that was published with them goes on with them. `image_root` is their folder, if it was moved.

    An address belongs to the folder that published there first, until another one is told to
    `take_over`: two writers would mix their items in every copy.

    Raises: GalleryNotFoundError, GalleryCorruptError; GalleryConflictError for a copy, or if the
        address belongs to another folder; GalleryBusyError if another process publishes
        it, or compactions keep replacing what is read; GalleryError if another gallery is at
        `address`, or it cannot be written; EngineUnavailableError.
    """
    started = time.perf_counter()
    folder, store = GalleryFolder(gallery), ObjectFolder(address)
    folder.current()
    folder.refuse_copy()
    with disk_errors_explained(folder.path), contextlib.ExitStack() as held:
        if not held.enter_context(exclusive(folder.path / PUBLISH, wait=False)):
            raise GalleryBusyError(
                f"Another process ({holder(folder.path / PUBLISH)}) publishes {folder.path}. Wait "
                "until it has ended."
            )
        with _store_errors_explained(address):
            before = _readable(store) if take_over else read_snapshot(store)
            publisher = folder.publisher()
            if before is not None and before.publisher != publisher and not take_over:
                raise GalleryConflictError(
                    f"{store.address} belongs to another folder, which published there at "
                    f"{before.published_at}. If that one is retired: --take-over."
                )
            work = _Publication(
                publisher,
                folder,
                store,
                before,
                pictures,
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
    except Exception as error:  # each client of a store has errors of its own
        raise GalleryError(
            f"The snapshot at {address} was not written: {type(error).__name__}: {error}. "
            "Followers keep the snapshot before. Check the address, the permissions and the free "
            "space there, then publish again."
        ) from error


class _Publication:
    """The writing of one snapshot."""

    def __init__(
        self,
        publisher: str,
        folder: GalleryFolder,
        store: ObjectFolder,
        before: Snapshot | None,
        pictures: bool,
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
                f"{store.address} has the gallery {before.gallery.name!r}, and {folder.path} is "
                f"{self._manifest.name!r}. Publish it to another address, or delete that folder."
            )
        is_same = before is not None and before.gallery.uid == self._manifest.uid
        self._last = before if is_same else None  # of this very generation
        self._before = before
        self._known = set() if before is None else before.objects()
        self._is_asked = pictures
        self._there: set[str] = set()  # sha256 of images
        self._images = self._missing = 0
        self._pictures = pictures or (before is not None and before.pictures)
        self._image_root = image_root or Path(self._manifest.source_root)
        self._uploaded = 0

    def run(self, started: float) -> PublishReport:
        """Upload what is missing, then the snapshot."""
        shown = self._upload_pictures() if self._pictures else 0
        for _ in range(_PATIENCE):
            with catalog_view(self._generation / CATALOG) as view, contextlib.ExitStack() as held:
                state = view.state()
                if state.segment is not None:
                    try:
                        descriptor = hold(self._generation / SEGMENTS / state.segment)
                    except FileNotFoundError:
                        continue  # a compaction has replaced it meanwhile
                    held.callback(os.close, descriptor)
                return self._publish(view, shown, started)
        raise GalleryBusyError(
            f"Compactions of {self._folder.path} keep replacing what is to be published. Try again "
            "when they have ended."
        )

    def _publish(self, view: CatalogView, shown: int, started: float) -> PublishReport:
        row = read_state(view.connection)
        if view.file is None or row is None:
            raise GalleryError(
                f"{self._folder.path} was made by an earlier version. Bring it up to date before "
                "it is published: kinlens-index compact GALLERY."
            )
        last, now = self._last, time.time()
        changed, deltas = self._deltas(view, view.file, row.seq, row.segment_seq)
        if self._pictures:
            for item in view.get(view.changed_since(shown)).values():
                self._upload_picture(item)  # of items that came meanwhile
        segment_files: dict[str, FileFacts] = {}
        if row.segment is not None:
            folder = self._generation / SEGMENTS / row.segment
            if last is not None and last.segment == row.segment:
                segment_files = last.segment_files
            else:
                for name in (*read_segment_manifest(folder).files, SEGMENT_MANIFEST):
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
            pictures=self._pictures,
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
            pictures=self._images,
            missing_pictures=self._missing,
            elapsed_s=time.perf_counter() - started,
        )

    def _deltas(
        self, view: CatalogView, file: VectorFile, seq: int, segment_seq: int
    ) -> tuple[int, tuple[Delta, ...]]:
        """How many items changed since the last snapshot, and the deltas up to now."""
        kept = [] if self._last is None else [*self._last.deltas]
        since = 0 if self._last is None else self._last.seq
        if self._last is not None and since > seq:
            raise GalleryError(
                f"{self._store.address} has the write {since:,} of this gallery, which is at "
                f"{seq:,}: the folder was set back. Make a new generation of it: "
                "kinlens-index backup, then restore --replace."
            )
        if self._last is not None and since == seq and self._last.vectors == file.name:
            return 0, self._last.deltas
        if self._last is not None and self._last.vectors != file.name:
            # The compaction has erased what was removed, so no delta may have it any more.
            kept, since = [], 0
        changed = view.count_changed(since) if since else view.state().size
        merged = changed
        # Each delta is at least twice as large as all that follow it.
        while kept and kept[-1].items <= 2 * merged:
            gone = kept.pop()
            since, merged = gone.since, merged + gone.items
        ids = view.changed_since(since) if since else view.live_ids()
        live = None
        if segment_seq > since:  # the catalogue has forgotten removals before that
            live = self._upload_data(live_bits(view))
        parts = tuple(self._parts(view, file, ids, since))
        kept.append(Delta(since=since, until=seq, items=len(ids), parts=parts, live=live))
        return changed, tuple(kept)

    def _parts(
        self, view: CatalogView, file: VectorFile, ids: Ids, since: int
    ) -> Iterator[FileFacts]:
        """Upload the items of a delta, at most 128 MB in a part."""
        step = max(1, _PART_BYTES // (file.bytes_of(1) + _ROW_BYTES))
        for start in range(0, max(1, len(ids)), step):
            with tempfile.TemporaryDirectory(prefix="kinlens-publish-") as folder:
                path, some = Path(folder, "part"), ids[start : start + step]
                write_part(path, view, some, since, not start, self._on_progress)
                yield self._upload(path)

    def _upload_pictures(self) -> int:
        """Upload the images that are not there yet; the write up to which that was done.

        Not in one view of the catalogue: as long as one lasts, the log of the writer only grows.
        """
        last = self._last
        is_first = self._is_asked or last is None or not last.pictures
        since = 0 if is_first or last is None else last.seq
        with catalog_view(self._generation / CATALOG) as view:
            seq = view.state().seq
            ids = view.changed_since(since) if since else view.live_ids()
        if is_first:  # to ask for each of millions would take days
            for shard in range(256):
                name = f"{shard:02x}"
                self._there |= self._store.names(f"{PICTURES}/{name}")
        for start in range(0, len(ids), _AT_ONCE):
            with catalog_view(self._generation / CATALOG) as view:
                items = view.get(ids[start : start + _AT_ONCE])
            for item in items.values():
                self._upload_picture(item)
        return seq

    def _upload_picture(self, item: Item) -> None:
        name = f"{PICTURES}/{item.sha256[:2]}/{item.sha256}"
        if item.sha256 in self._there or self._store.exists(name):
            return
        try:
            data = self._picture(item)
        except (KinlensError, OSError):
            self._missing += 1  # an item that was stored as a vector alone, or a lost file
            return
        self._store.write(name, data)
        self._there.add(item.sha256)
        self._uploaded += len(data)
        self._images += 1

    def _picture(self, item: Item) -> bytes:
        """The image of an item. Raises: OSError, SourceError, ImageTooManyBytesError."""
        uploaded = self._folder.path / PICTURES / item.sha256[:2] / item.sha256
        if not item.path or uploaded.is_file():
            return uploaded.read_bytes()
        return source_bytes(self._image_root, item)

    def _upload(self, path: Path) -> FileFacts:
        """A file as an object; one that is there already is not sent again."""
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
        """The snapshot with the objects that only earlier ones name; those that were retired long
        ago are deleted.
        """
        now, named = time.time(), snapshot.objects()
        before = self._before
        retired = {} if before is None else {**before.retired}
        for sha256 in set() if before is None else before.objects():
            retired.setdefault(sha256, now)
        retired = {sha256: at for sha256, at in retired.items() if sha256 not in named}
        over = {sha256 for sha256, at in retired.items() if now - at > RETIRED_S}
        if before is None or len(snapshot.deltas) == 1:  # rare, since it lists all objects
            over |= self._orphans(named | retired.keys(), now)
        for sha256 in over:
            # Each client has errors of its own; the next publication tries again.
            with contextlib.suppress(Exception):
                with contextlib.suppress(FileNotFoundError):
                    self._store.remove(f"{OBJECTS}/{sha256}")
                retired.pop(sha256, None)
        return snapshot.model_copy(update={"retired": retired})

    def _orphans(self, known: set[str], now: float) -> set[str]:
        """Objects of publications that were interrupted more than a day ago."""
        found = set()
        for name in self._store.names(OBJECTS) - known:
            with contextlib.suppress(FileNotFoundError):
                modified_s = self._store.modified_s(f"{OBJECTS}/{name}")
                if modified_s is not None and now - modified_s > _ORPHAN_S:
                    found.add(name)
        return found


def _readable(store: ObjectFolder) -> Snapshot | None:
    """The current snapshot; None also for one that this version does not read."""
    with contextlib.suppress(GalleryCorruptError):
        return read_snapshot(store)
    return None


def snapshot_at(address: str) -> Snapshot:
    """The current snapshot at an address. Raises: GalleryError, EngineUnavailableError."""
    try:
        return latest(ObjectFolder(address))
    except KinlensError:
        raise
    except Exception as error:  # each client of a store has errors of its own
        raise GalleryError(
            f"The snapshot at {address} cannot be read: {type(error).__name__}: {error}. Check the "
            "address, the permissions there and the network."
        ) from error


def latest(store: ObjectFolder) -> Snapshot:
    """The current snapshot at an address. Raises: GalleryNotFoundError, GalleryCorruptError."""
    found = read_snapshot(store)
    if found is None:
        raise GalleryNotFoundError(
            f"No snapshot at {store.address}: {SNAPSHOT} is missing. Publish the gallery there: "
            "kinlens-index publish GALLERY ADDRESS."
        )
    return found


def _content(snapshot: Snapshot) -> Snapshot:
    """A snapshot without its times."""
    return snapshot.model_copy(update={"published_at": "", "retired": {}})
