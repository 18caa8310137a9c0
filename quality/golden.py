"""A golden set: labelled queries that are stored with a gallery, to measure its results.

    GALLERY/golden.sqlite     queries with image and label, the reports of runs, and the options of
                              guarantees

It belongs to the gallery and not to a generation, so builds, swaps and compactions keep it. The
models of the HTTP API are in `kinlens.golden`, the measurement is in `kinlens.quality.judging`.
"""

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kinlens.embedder.errors import (
    GalleryCorruptError,
    GalleryWriteError,
    InvalidParameterError,
    ItemNotFoundError,
)
from kinlens.embedder.types import SHORT
from kinlens.golden import Crop, GoldenQuery, GoldenRun, Label, Words
from kinlens.indexer.entries import is_printable
from kinlens.indexer.filters.tree import Equals
from kinlens.indexer.folder.layout import GOLDEN
from kinlens.indexer.store import VectorStore
from kinlens.quality.guarantee import Choices

MAX_QUERIES = 1_000
"""Maximum number of queries of a golden set."""

MAX_RIGHT = 10_000
"""Maximum number of right items per query."""

KEPT_RUNS = 500
"""Number of reports to keep; older ones are deleted."""

_TABLES = {
    "queries": "sha256 TEXT PRIMARY KEY, query TEXT NOT NULL, image BLOB NOT NULL",
    "runs": "number INTEGER PRIMARY KEY, report TEXT NOT NULL",
}
_WAIT_S = 10.0
_NAME = 200


def right_items(label: Label, store: VectorStore) -> int:
    """The number of right items. Raises: FilterError if there is no such attribute."""
    if label.attribute is not None and label.value is not None:
        return store.page(0, 1, Equals(label.attribute, label.value)).total
    return len(store.stored(label.keys))


@dataclass(frozen=True, slots=True)
class NewQuery:
    """A query with its label; `name` is shown in reports, such as the file name.

    crop: the part of the image to search with.
    texts: words that are added to the image, or the whole query if `data` is empty.
    """

    data: bytes = field(repr=False)
    label: Label
    name: str = ""
    crop: Crop | None = None
    texts: tuple[Words, ...] = ()

    @property
    def image(self) -> str | None:
        """The sha256 (hex) of its image, None for words alone."""
        return hashlib.sha256(self.data).hexdigest() if self.data or not self.texts else None

    @property
    def sha256(self) -> str:
        """The sha256 (hex) of its image; with a crop or words, that of all its parts."""
        if self.image and not (self.crop or self.texts):
            return self.image
        parts = self.image, self.crop, [(words.text, words.weight) for words in self.texts]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class GoldenSet:
    """The golden set of the gallery in folder `gallery`, which may be empty.

    Any number of processes may use it. Every method raises: GalleryCorruptError, GalleryWriteError.
    """

    def __init__(self, gallery: Path | str) -> None:
        self.file = Path(gallery) / GOLDEN

    def queries(self) -> list[GoldenQuery]:
        """All queries, in the order in which they were added."""
        rows = self._read("SELECT query FROM queries ORDER BY rowid")
        return [GoldenQuery.model_validate_json(text) for (text,) in rows]

    def is_empty(self) -> bool:
        """Whether no query is labelled."""
        return not self._read("SELECT 1 FROM queries LIMIT 1")

    def image(self, sha256: str) -> bytes:
        """The image of a query, empty for words alone. Raises: ItemNotFoundError."""
        for text, data in self._read("SELECT query, image FROM queries WHERE sha256 = ?", sha256):
            image = GoldenQuery.model_validate_json(text).image
            if image is not None and hashlib.sha256(data).hexdigest() != image:
                raise self._damaged(f"the image of query {sha256[:SHORT]} has another hash")
            return bytes(data)
        raise ItemNotFoundError(
            f"The golden set has no query {sha256[:SHORT]}; it may have been removed. Use a "
            "sha256 from the list of its queries."
        )

    def add(self, new: Sequence[NewQuery], store: VectorStore) -> list[GoldenQuery]:
        """Add all queries or none. A query that is already there gets the new label. `store` is the
        gallery, which must have the right items.

        Raises: InvalidParameterError, FilterError for a label that does not fit the gallery, a
            query without image and words, or too many queries.
        """
        _check_queries(new)
        _check_labels(new, store)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        made = [
            GoldenQuery(
                **one.label.model_dump(),
                sha256=one.sha256,
                crop=one.crop,
                texts=one.texts,
                image_sha256=one.image if one.crop or one.texts else None,
                name=one.name[:_NAME] if is_printable(one.name) else "",
                added_at=now,
            )
            for one in new
        ]
        rows = {
            query.sha256: (query.sha256, query.model_dump_json(), one.data)
            for query, one in zip(made, new, strict=True)
        }
        if len(rows) < len(new):
            raise InvalidParameterError(
                f"{len(new):,} queries have only {len(rows):,} different images, crops and texts. "
                "Label each query once, with all its right items."
            )
        with self._changing() as connection:
            connection.executemany(
                "INSERT INTO queries VALUES (?, ?, ?) "
                "ON CONFLICT (sha256) DO UPDATE SET query = excluded.query",
                rows.values(),
            )
            count = connection.execute("SELECT count(*) FROM queries").fetchone()[0]
            if count > MAX_QUERIES:
                raise InvalidParameterError(
                    f"The golden set would have {count:,} queries; the limit is {MAX_QUERIES:,}. "
                    "Remove some, or add fewer."
                )
        return made

    def remove(self, sha256s: Iterable[str]) -> int:
        """Remove queries; returns the number of removed ones. The last one takes the options of
        guarantees with it.
        """
        if not self.file.is_file():
            return 0
        with self._changing() as connection:
            before = connection.total_changes
            rows = [(sha256,) for sha256 in sha256s]
            connection.executemany("DELETE FROM queries WHERE sha256 = ?", rows)
            removed = connection.total_changes - before
            if removed and not connection.execute("SELECT 1 FROM queries LIMIT 1").fetchall():
                connection.execute("DROP TABLE IF EXISTS guarantees")
            return removed

    def runs(self, limit: int = KEPT_RUNS) -> list[GoldenRun]:
        """Up to `limit` stored reports, newest first."""
        rows = self._read("SELECT report FROM runs ORDER BY number DESC LIMIT ?", limit)
        return [GoldenRun.model_validate_json(text) for (text,) in rows]

    def keep(self, run: GoldenRun) -> None:
        """Store a report."""
        with self._changing() as connection:
            connection.execute("INSERT INTO runs (report) VALUES (?)", (run.model_dump_json(),))
            connection.execute(
                "DELETE FROM runs WHERE number <= (SELECT max(number) FROM runs) - ?", (KEPT_RUNS,)
            )

    def choices(self) -> Choices | None:
        """The options of the last guarantee; None if there was none."""
        for _ in self._read("SELECT 1 FROM sqlite_master WHERE name = 'guarantees'"):
            for (text,) in self._read("SELECT choices FROM guarantees"):
                return Choices.model_validate_json(text)
        return None

    def choose(self, choices: Choices) -> None:
        """Store the options of a guarantee, for later runs, also in another generation."""
        if choices != self.choices():
            with self._changing() as connection:
                connection.execute("DROP TABLE IF EXISTS guarantees")
                connection.execute("CREATE TABLE guarantees (choices TEXT NOT NULL)")
                connection.execute(
                    "INSERT INTO guarantees VALUES (?)", (choices.model_dump_json(),)
                )

    def check(self) -> None:
        """Verify the database and all images. Raises: GalleryCorruptError."""
        for (found,) in self._read("PRAGMA integrity_check(1)"):
            if found != "ok":
                raise self._damaged(str(found))
        for query in self.queries():
            self.image(query.sha256)

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        if not self.file.is_file() or not self.file.stat().st_size:  # nothing was ever added
            return []
        with self._connected("rw") as connection:
            return connection.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, which an exception rolls back."""
        with self._connected("rwc") as connection:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                for name, columns in _TABLES.items():
                    connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns})")
                yield connection

    @contextlib.contextmanager
    def _connected(self, mode: str) -> Iterator[sqlite3.Connection]:
        address = f"{self.file.absolute().as_uri()}?mode={mode}"
        try:
            with contextlib.closing(
                sqlite3.connect(address, timeout=_WAIT_S, isolation_level=None, uri=True)
            ) as connection:
                yield connection
        except sqlite3.OperationalError as error:
            raise GalleryWriteError(
                f"The golden set {self.file} cannot be used: {error}. Check the free space and the "
                "permissions of its folder."
            ) from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, reason: str) -> GalleryCorruptError:
        return GalleryCorruptError(
            f"The golden set {self.file} is damaged: {reason}. Restore that file from a backup of "
            "the gallery, or remove it and label the queries again."
        )


def _check_queries(new: Sequence[NewQuery]) -> None:
    for one in new:
        fault = ""
        if one.data == b"" and not any(words.weight > 0 for words in one.texts):
            fault = "has neither an image nor words with a weight above 0"
        elif one.data == b"" and one.crop is not None:
            fault = "has a crop and no image"
        if fault:
            raise InvalidParameterError(f"A query {fault}. Give it an image, words, or both.")


def _check_labels(new: Sequence[NewQuery], store: VectorStore) -> None:
    known = store.stored([*{key for one in new for key in one.label.keys}])
    for one in new:
        label = one.label
        given = (bool(label.keys), label.attribute is not None, label.no_match)
        if sum(given) != 1 or (label.attribute is None) is not (label.value is None):
            raise InvalidParameterError(
                f"The label {label.model_dump(exclude_defaults=True)} of {_shown(one)} must have "
                "exactly one of: keys, an attribute with a value, no_match."
            )
        if missing := [key for key in label.keys if key not in known]:
            raise InvalidParameterError(
                f"The gallery has no item {missing[0]!r:.200}, named in the label of "
                f"{_shown(one)}. Use existing keys, or label the query as no match."
            )
        count = 0 if label.no_match else right_items(label, store)
        if not label.no_match and not 1 <= count <= MAX_RIGHT:
            raise InvalidParameterError(
                f"{count:,} items have {label.wanted}, the label of {_shown(one)}; "
                f"expected 1 to {MAX_RIGHT:,}. Use another value, or label the query as no match."
            )


def _shown(query: NewQuery) -> str:
    return f"query {query.name or query.sha256[:SHORT]!r:.200}"
