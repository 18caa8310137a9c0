"""Make a gallery equal to a source: add, update, rename and remove items, each where it differs.

Only items whose image is a file below the folder of the source are removed. Uploaded items and
vectors without an image stay, unless they are to be removed as well.
"""

import contextlib
import hashlib
import json
import math
import os
import sqlite3
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Self

import numpy as np
from pydantic import BaseModel

from kinlens.embedder.errors import (
    GalleryError,
    GalleryWriteError,
    ImageError,
    InvalidParameterError,
    SourceError,
    UnreachableError,
    disk_errors_as,
)
from kinlens.embedder.preprocess import read_header
from kinlens.embedder.session import Embedder
from kinlens.embedder.sources.walk import is_omitted
from kinlens.indexer.addresses import FileState, ImageAddress, ImageRoot, image_root_of
from kinlens.indexer.entries import Item, is_printable, merged
from kinlens.indexer.folder.layout import FILES
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.images import ANY_SIZE
from kinlens.indexer.ingest.add import (
    KEPT,
    Ingest,
    check_image_root,
    check_root,
    fitting,
    is_stored,
)
from kinlens.indexer.ingest.embed import (
    EmbedSettings,
    Failure,
    failure_lines,
    failure_of,
    faults_of,
    reason_of,
    refuse_unreadable,
)
from kinlens.indexer.ingest.sources import (
    LIST,
    Record,
    Source,
    check_attributes,
    check_names,
    csv_source,
    folder_below,
    relocated,
    source_at,
)
from kinlens.indexer.store import VectorStore
from kinlens.indexer.types import Ids, Progress
from kinlens.reports import Report

_PART = 256  # records that are compared at a time
_REMOVAL_PART = 10_000
_READERS = 8  # threads that read files: a network share answers many requests at a time
_EXAMPLES = 5


class MaxRemoved(NamedTuple):
    """The most items that may be removed: a part of the managed items, or a number."""

    value: float
    is_part: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `10%` or `25`. Raises: InvalidParameterError."""
        word = text.strip()
        is_part = word.endswith("%")
        try:
            value = float(word.removesuffix("%")) / 100 if is_part else int(word)
        except ValueError:
            value = math.nan
        if not 0 <= value <= (1 if is_part else math.inf):
            raise InvalidParameterError(
                f"max_removed = {text!r:.40} must be a percentage from 0% to 100%, or a number of "
                "items such as 25."
            )
        return cls(value, is_part)

    def permits(self, removed: int, items: int) -> bool:
        """Whether `removed` of `items` may be removed. A percentage permits one: in a small shop
        each product is more than a tenth.
        """
        part = max(1, self.value * items) if self.value else 0
        return removed <= (part if self.is_part else self.value)

    def __str__(self) -> str:
        return f"{100 * self.value:g} %" if self.is_part else f"{self.value:,} items"


MAX_REMOVED = MaxRemoved(0.1, is_part=True)


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """Settings of a sync.

    Attributes:
        max_removed: with more items to remove, nothing is changed.
        uploads: also remove items without a file below the folder, such as uploaded ones.
        checksum: read every file, also if its size and time of change are as before.
        dry_run: change nothing.
    """

    max_removed: MaxRemoved = MAX_REMOVED
    uploads: bool = False
    checksum: bool = False
    dry_run: bool = False
    embed: EmbedSettings = field(default_factory=EmbedSettings)


class SyncReport(Report, BaseModel, frozen=True):
    """Result of a sync, or what it would do: found = added + replaced + updated + renamed +
    unchanged + failures.

    Attributes:
        removed: items whose image is gone; renamed ones are not counted.
        failures: images that cannot be read. Their items are unchanged.
        refused: why nothing was changed; empty if the gallery is in step.
        examples: the first keys of each kind of change.
    """

    found: int
    added: int
    replaced: int
    updated: int
    renamed: int
    removed: int
    unchanged: int
    embedded: int
    failures: tuple[Failure, ...]
    examples: dict[str, tuple[str, ...]]
    dry_run: bool
    refused: str
    elapsed_s: float

    def lines(self) -> Iterator[str]:
        """What was or would be done, examples of the latter, and the first failures."""
        would = "would be " if self.dry_run or self.refused else ""
        yield (
            f"{self.added:,} {would}added, {self.replaced:,} {would}replaced, "
            f"{self.updated:,} {would}changed, {self.renamed:,} {would}renamed, "
            f"{self.removed:,} {would}removed, {self.unchanged:,} unchanged "
            f"({self.embedded:,} embedded) in {self.elapsed_s:.1f} s."
        )
        if would:
            for kind, keys in self.examples.items():
                more = ", ..." if getattr(self, kind) > len(keys) else ""
                yield f"  {kind}: {', '.join(keys)}{more}"
        yield from failure_lines(self.failures, self.found)


def sync_source(
    store: VectorStore,
    source: Source,
    open_embedder: Callable[[], Embedder],
    settings: SyncSettings | None = None,
    on_compared: Progress = lambda _: None,
    on_progress: Progress = lambda _: None,
) -> SyncReport:
    """Make the items of a gallery equal to those of a source, while it is in use.

    A file whose size and time of change are as at the last sync is not read. An image under a new
    key keeps the vector and the attributes of its item. To complete an interrupted sync, make the
    same call. `open_embedder` is called if items are to be added or changed.

    Raises: SourceError for another root, or if no image can be read; BundleMismatchError;
        InvalidParameterError for an attribute of another type than in the gallery; BundleError;
        GalleryWriteError; GalleryBusyError.
    """
    settings = settings or SyncSettings()
    start = time.perf_counter()
    check_root(store, source)
    check_attributes(source, store)
    with FileHashes.of(store, source.root, settings.dry_run) as hashes:
        sync = _Sync(store, source, settings, hashes)
        sync.compare(on_compared)
        refuse_unreadable(source.description, sync.found, sync.failures)
        refused = sync.refusal()
        if not settings.dry_run and not refused:
            sync.apply(open_embedder, on_progress)
        return sync.report(refused, time.perf_counter() - start)


class Facts(NamedTuple):
    """A file, as it was read: its size and version as in `FileState`, sha256 (hex) and format."""

    size: int
    version: int
    sha256: str
    format: str

    def are_of(self, state: FileState) -> bool:
        """Whether a file still has this size and version."""
        return self[:2] == state[:2]


class FileHashes:
    """The sha256 of files by path, size and time of change, as of the last sync.

    Also the ids of items whose renaming has begun. All of it can be lost: it only saves time.
    `dry_run` reads the file, and writes nothing.
    """

    def __init__(self, file: Path | None, generation: str, root: ImageRoot, dry_run: bool) -> None:
        self._connection = _connect(file, dry_run)
        self._file, self._dry_run = file, dry_run
        old = self._connection.execute("SELECT name, root FROM generation").fetchone()
        if old == (generation, str(root)):
            return
        if dry_run:
            self._connection.close()
            self._connection = _connect(None, dry_run)
            return
        with self._writing() as connection:
            connection.execute("DELETE FROM moved")  # ids of other items
            connection.execute("DELETE FROM generation")
            connection.execute("INSERT INTO generation VALUES (?, ?)", (generation, str(root)))
            if old is not None and old[1] != str(root):
                connection.execute("DELETE FROM files")

    @classmethod
    def of(cls, store: VectorStore, root: ImageRoot, dry_run: bool = False) -> Self:
        """The hashes of files below `root`, next to a gallery in a folder; on Milvus, they are lost
        at the end.
        """
        file = store.path / FILES if isinstance(store, Gallery) else None
        return cls(file, store.generation, root, dry_run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def known(self, paths: Sequence[str]) -> dict[str, Facts]:
        """The facts of files, by path."""
        text = json.dumps([path for path in paths if is_printable(path)])
        rows = self._connection.execute(_KNOWN, (text,))
        return {path: Facts(*facts) for path, *facts in rows}

    def store(self, facts: Mapping[str, Facts]) -> None:
        """Store the facts of files by path. Raises: GalleryWriteError."""
        if self._dry_run:
            return
        rows = [(path, *known) for path, known in facts.items()]
        with self._writing() as connection:
            connection.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", rows)

    def forget(self, paths: Iterable[str]) -> None:
        """Remove the facts of files. Raises: GalleryWriteError."""
        with self._writing() as connection:
            connection.executemany("DELETE FROM files WHERE path = ?", ((path,) for path in paths))

    def moved(self) -> set[int]:
        """The ids of items whose renaming has begun."""
        return {number for (number,) in self._connection.execute("SELECT id FROM moved")}

    def set_moved(self, ids: Iterable[int]) -> None:
        """Replace the ids of items whose renaming has begun. Raises: GalleryWriteError."""
        with self._writing() as connection:
            connection.execute("DELETE FROM moved")
            connection.executemany("INSERT INTO moved VALUES (?)", ((number,) for number in ids))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction whose errors name the file."""
        file, outcome = self._file or Path(), "Finished work is kept."
        with disk_errors_as(GalleryWriteError, file, outcome), self._connection:
            yield self._connection


_KNOWN = "SELECT * FROM files WHERE path IN (SELECT value FROM json_each(?))"
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, sha256 TEXT, format TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS moved (id INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS generation (name TEXT, root TEXT);
"""


def _connect(file: Path | None, read_only: bool) -> sqlite3.Connection:
    mode = "ro" if read_only else "rwc"
    for _ in range(0 if file is None else 2):
        assert file is not None
        address = f"{file.absolute().as_uri()}?mode={mode}"
        try:
            connection = sqlite3.connect(address, timeout=60, uri=True)
            connection.executescript(_TABLES)
            return connection
        except sqlite3.OperationalError:  # no file, or a folder that is read-only
            break
        except sqlite3.DatabaseError:  # a damaged file only costs time
            connection.close()
            if not read_only:
                file.unlink()
    connection = sqlite3.connect(":memory:")
    connection.executescript(_TABLES)
    return connection


class _Sync:
    """The differences between a gallery and a source."""

    def __init__(
        self, store: VectorStore, source: Source, settings: SyncSettings, hashes: FileHashes
    ) -> None:
        self.store, self.source, self.settings, self.hashes = store, source, settings, hashes
        self.found = 0
        self.embedded = 0
        self.counts = dict.fromkeys(("added", "replaced", "updated", "renamed", "removed"), 0)
        self.examples: dict[str, list[str]] = {name: [] for name in self.counts}
        self.failures: list[Failure] = []
        # Read before the walk, so that what others add meanwhile is not removed.
        self.managed = array("q", (i.id for i in store.items() if self._is_managed(i)))
        self.names: dict[str, str] = {}  # new key -> old key of a renamed item
        self.gone: Ids = np.empty(0, np.int64)
        self.vanished: list[str] = []  # the paths of items that are gone

    def compare(self, on_progress: Progress) -> None:
        """Find all differences. Raises: SourceError, GalleryWriteError."""
        listed, new = array("q"), list[tuple[str, str]]()
        for records in self._described():
            stored = self.store.stored([record.key for record in records])
            self.found += len(records)
            listed.extend(item.id for item in stored.values())
            for record in records:
                item = stored.get(record.key)
                if record.failure:
                    kept = f"{record.failure} {KEPT}" if item else record.failure
                    self.failures.append(failure_of(replace(record, failure=kept)))
                elif item is None:
                    new.append((record.key, record.sha256))
                elif item.sha256 != record.sha256:
                    self._count("replaced", item.key)
                elif not is_stored(record, item, self.source.names):
                    self._count("updated", item.key)
            on_progress(len(records))
        self.gone = np.setdiff1d(
            np.frombuffer(self.managed, np.int64), np.frombuffer(listed, np.int64)
        )
        self._match(new)

    def _match(self, new: Sequence[tuple[str, str]]) -> None:
        """Tell renamed images from added and removed ones, by their content."""
        begun, missing = self.hashes.moved(), defaultdict[str, deque[str]](deque)
        omitted = self.source.omitted
        faults = {*(fault.path for fault in omitted.faults), *omitted.dangling}
        moved: list[int] = []
        ids = {*self.gone.tolist()}
        wanted = {sha256 for _, sha256 in new}
        for item in self.store.items() if ids else ():
            if item.id in ids and (_is_below(item.path, faults) or self._is_hidden(item.path)):
                ids.remove(item.id)  # such as a link to a share that is away
            if item.id not in ids:
                continue
            self.vanished.append(item.path)
            if item.id in begun and item.sha256 not in wanted:
                moved.append(item.id)  # an interrupted sync has already added its new key
            else:
                missing[item.sha256].append(item.key)
        for key, sha256 in new:
            if missing.get(sha256):
                self.names[key] = missing[sha256].popleft()
                self._count("renamed", f"{self.names[key]} -> {key}")
            else:
                self._count("added", key)
        for keys in missing.values():
            for key in keys:
                self._count("removed", key)
        self.moved = moved
        self.gone = np.array(sorted(ids), np.int64)

    def _is_hidden(self, path: str) -> bool:
        """Whether a walk omits an image that is there: earlier versions did not."""
        root = self.source.root
        return isinstance(root, Path) and is_omitted(path) and os.path.lexists(root / path)

    def refusal(self) -> str:
        """Why the changes are refused; empty if they are permitted."""
        removed, managed = self.counts["removed"], len(self.managed)
        if self.settings.max_removed.permits(removed, managed):
            return ""
        return (
            f"{removed:,} of {managed:,} items ({removed / managed:.1%}) would be removed, since "
            f"the {self.source.description} has no image for them; the limit is "
            f"{self.settings.max_removed}. Nothing was changed. Check that the folder is mounted "
            f"and the list is complete, or permit it: --max-removed {removed}."
        )

    def apply(self, open_embedder: Callable[[], Embedder], on_progress: Progress) -> None:
        """Make the changes. Raises: the errors of `sync_source`."""
        counts = self.counts
        if counts["added"] or counts["replaced"] or counts["updated"] or self.names:
            old = self.store.stored([*self.names.values()])
            self.hashes.set_moved([*self.moved, *(item.id for item in old.values())])
            embedder = fitting(self.store, open_embedder())
            source = replace(self.source, records=self._records)
            work = Ingest(self.store, source, embedder, source.names)
            work.run(self.settings.embed, on_progress)
            written = work.written
            self.found, self.embedded, self.failures = work.found, work.embedded, work.failures
            # Of an interrupted rename, the new key may be stored already.
            renamed = min(len(self.names), written.added)
            self.counts |= {
                "added": written.added - renamed,
                "replaced": written.replaced,
                "updated": written.updated,
                "renamed": renamed,
            }
        self.hashes.forget(self.vanished)
        for start in range(0, len(self.gone), _REMOVAL_PART):
            self.store.remove_items(self.gone[start : start + _REMOVAL_PART].tolist())
        self.hashes.set_moved(())

    def report(self, refused: str, elapsed_s: float) -> SyncReport:
        """The report of all differences."""
        faults = faults_of(self.source)
        changed = sum(self.counts.values()) - self.counts["removed"]
        return SyncReport(
            found=self.found + len(faults),
            **self.counts,
            unchanged=self.found - changed - len(self.failures),
            embedded=self.embedded,
            failures=(*faults, *self.failures),
            examples={name: tuple(keys) for name, keys in self.examples.items() if keys},
            dry_run=self.settings.dry_run,
            refused=refused,
            elapsed_s=round(elapsed_s, 3),
        )

    def _count(self, kind: str, example: str) -> None:
        self.counts[kind] += 1
        if len(self.examples[kind]) < _EXAMPLES:
            self.examples[kind].append(example)

    def _is_managed(self, item: Item) -> bool:
        """Whether an item is removed if the source does not list it."""
        if not item.path:
            return self.settings.uploads
        return not self.source.below or item.path.startswith(f"{self.source.below}/")

    def _described(self) -> Iterator[list[Record]]:
        """All records with the hash and format of their images."""
        records = self.source.records()
        with ThreadPoolExecutor(max(_READERS, self.settings.embed.worker_count)) as pool:
            while part := list(islice(records, _PART)):
                known = self.hashes.known([record.path for record in part])
                facts = [known.get(record.path) for record in part]
                found = list(pool.map(self._describe, part, facts))
                self.hashes.store({one.path: read for one, read in found if read is not None})
                yield [record for record, _ in found]

    def _describe(self, record: Record, known: Facts | None) -> tuple[Record, Facts | None]:
        """A record as it was read, and the facts to store if its file was read."""
        try:
            check_names(record)
            state = self.source.state(record)
            if known is not None and known.are_of(state) and not self.settings.checksum:
                return replace(record, sha256=known.sha256, format=known.format), None
            data = self.source.read_image(record, self.settings.embed.max_bytes)
            format_ = read_header(data, ANY_SIZE).format
        except UnreachableError:
            raise  # no image is at fault
        except (ImageError, GalleryError, OSError) as error:
            return replace(record, failure=reason_of(error)), None
        read = Facts(state.size, state.version, hashlib.sha256(data).hexdigest(), format_)
        record = replace(record, sha256=read.sha256, format=format_)
        return record, read if state.is_settled else None

    def _records(self) -> Iterator[Record]:
        """The records of the source with the hashes of unchanged files, which are not read again,
        and with the attributes that renamed items keep.
        """
        records = self.source.records()
        while part := list(islice(records, _PART)):
            known = self.hashes.known([record.path for record in part])
            old = self.store.stored([self.names[r.key] for r in part if r.key in self.names])
            for record in part:
                named, facts = old.get(self.names.get(record.key, "")), known.get(record.path)
                if named is not None:
                    own = merged(record.attributes, named.attributes, self.source.names)
                    record = replace(record, attributes=own)
                with contextlib.suppress(GalleryError, OSError):  # reported when it is read
                    if facts is not None and facts.are_of(self.source.state(record)):
                        record = replace(record, sha256=facts.sha256, format=facts.format)
                yield record


def source_of(store: VectorStore, place: ImageRoot | str, csv: Path | None) -> Source:
    """The images of a folder or address, or of a list whose paths are relative to it. Instead,
    `place` can be a list whose paths are relative to the image root of the gallery.

    Raises: SourceError, UnreachableError.
    """
    check_image_root(store)
    root, given = store.image_root, image_root_of(place)
    root = root.resolve() if isinstance(root, Path) else root
    if csv is None and isinstance(given, Path) and given.is_file():
        csv = given
        given = root
    if csv is None:
        if isinstance(store, Gallery) and store.manifest.source.startswith(f"{LIST} "):
            raise SourceError(
                f"The gallery {store.path} was built from the {store.manifest.source}, which has "
                "keys and attributes that a folder has not. Pass the current list with --csv, or "
                "build the gallery again from the folder."
            )
        return replace(source_at(given, root), below=_below(root, given))
    return relocated(csv_source(csv, given, store.schema()), root, _below(root, given))


def _below(root: ImageRoot, place: ImageRoot) -> str:
    """The path of a place below the root, "" for the root itself. Raises: SourceError."""
    if isinstance(root, ImageAddress):
        return root.below(str(place))
    return folder_below(root, str(place))


def _is_below(path: str, folders: Set[str]) -> bool:
    return path in folders or any(str(parent) in folders for parent in PurePosixPath(path).parents)
