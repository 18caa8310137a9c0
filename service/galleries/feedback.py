"""Feedback of users on answers: which item was right for a query image or item, and which was not.

    answer ─► sign ─► answer_id ─► POST /feedback ─► question ─► add ─► pairs ─► CSV, training
                                                                    └► words ─► CSV, teach-words
    stored images, words ─► unlabelled ─► a person ─► golden set

STATE/feedback.sqlite stores the rows and the secret for signatures. STATE/feedback/pictures stores
the query images, if the operator chose to keep them; only then the words of queries are stored.
Nothing about the client is stored, and no time finer than a day. Any number of threads and
processes may use both.
"""

import base64
import contextlib
import csv
import hashlib
import hmac
import io
import json
import os
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, get_args

from kinlens.embedder.durable import make_folder, write_whole
from kinlens.embedder.errors import InvalidParameterError, ItemNotFoundError, StateError
from kinlens.embedder.types import SHORT
from kinlens.models import Action
from kinlens.service.access.links import VERSION_DIGITS
from kinlens.service.settings import Settings

ACTIONS: tuple[Action, ...] = get_args(Action)
IMAGE_PX = 640
"""Longest side of a stored query image, which is a JPEG without camera metadata."""

_STEP = "feedback"
_DATABASE = "feedback.sqlite"
_MAC_BYTES = 16  # of HMAC-SHA256
_BUSY_S = 10.0
_CLOSE_S = 1.0
_TABLES = """
CREATE TABLE IF NOT EXISTS signing (one INTEGER PRIMARY KEY CHECK (one = 1), secret BLOB NOT NULL)
STRICT;
CREATE TABLE IF NOT EXISTS feedback (
    number INTEGER PRIMARY KEY,
    gallery TEXT NOT NULL, version TEXT NOT NULL, picture TEXT NOT NULL, query_key TEXT NOT NULL,
    item TEXT NOT NULL, action TEXT NOT NULL, day TEXT NOT NULL,
    UNIQUE (gallery, version, picture, query_key, item, action)
) STRICT;
CREATE INDEX IF NOT EXISTS feedback_by_picture ON feedback (picture);
CREATE TABLE IF NOT EXISTS words (
    number INTEGER PRIMARY KEY,
    gallery TEXT NOT NULL, version TEXT NOT NULL, text TEXT NOT NULL,
    item TEXT NOT NULL, action TEXT NOT NULL, day TEXT NOT NULL,
    UNIQUE (gallery, version, text, item, action)
) STRICT;
CREATE TABLE IF NOT EXISTS handled (
    gallery TEXT NOT NULL, query TEXT NOT NULL, day TEXT NOT NULL, PRIMARY KEY (gallery, query)
) STRICT;
"""


@dataclass(frozen=True, slots=True)
class Question:
    """The query of an answer and the gallery version that it searched. The query is the sha256
    (hex) of an `image`, the key of an `item`, or the words of a `text`.
    """

    gallery: str
    version: str
    image: str = ""
    item: str = ""
    text: str = ""

    @property
    def digest(self) -> str:
        """The sha256 (hex) of its image, or of its words."""
        return self.image or hashlib.sha256(self.text.encode()).hexdigest()


class Pair(NamedTuple):
    """A row of pairs.csv: the path of the query image, or the key of the query item; the key of the
    item in the answer; the action.
    """

    query: str
    query_key: str
    item: str
    action: str


class ClickedWords(NamedTuple):
    """A row of words.csv: the words of a query, and the key of an item that was right for them."""

    text: str
    item: str


class FeedbackStore:
    """The feedback in the folder `state`. Above `max_rows` the oldest rows are removed; `tidy`
    removes rows older than `days`. `keeps_words` is whether answers to words alone get feedback.

    Every call raises: StateError if the disk cannot be read or written.
    """

    def __init__(
        self,
        state: Path,
        *,
        max_rows: int = 100_000,
        days: int = 180,
        keeps_words: bool = False,
    ) -> None:
        self.keeps_words = keeps_words
        self._path = state / _DATABASE
        self._images = state / "feedback" / "pictures"
        self._max_rows = max_rows
        self._days = days
        self._lock = threading.Lock()  # for the single connection: a new one costs 40 ms
        try:
            make_folder(self._images, _STEP)
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._connection = sqlite3.connect(
                self._path,
                timeout=_BUSY_S,
                isolation_level="IMMEDIATE",
                check_same_thread=False,
            )
        except (sqlite3.Error, OSError) as error:
            reason = getattr(error, "strerror", error)
            raise StateError(
                f"Feedback cannot be stored in {state} ({reason}). Give this user write access, "
                "or choose another folder."
            ) from error
        self._prepare()

    def sign(self, question: Question) -> str:
        """The answer_id of an answer to this question; every process accepts feedback on it."""
        version = question.version[:VERSION_DIGITS]
        parts = [question.gallery, version, question.image, question.item]
        parts += [question.text] if question.text else []
        payload = json.dumps(parts, ensure_ascii=False).encode()
        return base64.urlsafe_b64encode(self._mac(payload) + payload).decode().rstrip("=")

    def question(self, answer_id: str) -> Question:
        """The signed question of an answer_id.

        Raises: InvalidParameterError for an answer_id that this service did not sign.
        """
        try:
            raw = base64.urlsafe_b64decode(answer_id + "=" * (-len(answer_id) % 4))
        except ValueError:
            raw = b""
        mac, payload = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(payload)):
            raise InvalidParameterError(
                f"answer_id = {answer_id[:20]!r} was not issued by this service. Send the "
                "answer_id of an answer unchanged, to the service that answered."
            )
        return Question(*json.loads(payload))

    def add(self, question: Question, item: str, action: Action, image: bytes = b"") -> bool:
        """Store one feedback, and the query image if given; False if the same feedback is already
        stored. It survives a crash of the process; a power failure may lose the last rows.
        """
        today = _today()
        row = {"gallery": question.gallery, "version": question.version, "item": item}
        row |= {"action": action, "day": today.isoformat()}
        with self._transaction() as connection:
            if question.text:
                is_new = self._insert(connection, "words", row | {"text": question.text})
                sql = "DELETE FROM words WHERE number <= (SELECT max(number) FROM words) - ?"
                connection.execute(sql, (self._max_rows,))
                return is_new
            row |= {"picture": question.image, "query_key": question.item}
            is_new = self._insert(connection, "feedback", row)
            sql = (
                "DELETE FROM feedback WHERE number <= (SELECT max(number) FROM feedback) - ?"
                " RETURNING picture"
            )
            cut = {name for (name,) in connection.execute(sql, (self._max_rows,)) if name}
            for name in cut:
                sql = "SELECT 1 FROM feedback WHERE picture = ? LIMIT 1"
                if connection.execute(sql, (name,)).fetchone() is None:
                    (self._images / f"{name}.jpg").unlink(missing_ok=True)
            file = self._images / f"{question.image}.jpg"
            if image and not file.is_file():  # `tidy` waits for this transaction
                write_whole(file, image, _STEP)
                midnight = datetime(today.year, today.month, today.day, tzinfo=UTC).timestamp()
                os.utime(file, (midnight, midnight))
        return is_new

    def pairs(self, gallery: str, names: Mapping[str, str] | None = None) -> list[Pair]:
        """The feedback to train on, oldest first: on answers to an item or to a stored image.

        Args:
            names: replaces the keys of items by these names; feedback on other items is omitted.
        """
        sql = "SELECT picture, query_key, item, action FROM feedback WHERE gallery = ?"
        with self._transaction() as connection:
            rows = connection.execute(f"{sql} ORDER BY number", (gallery,)).fetchall()
        kept = self._kept()
        found = []
        for image, key, item, action in rows:
            query = f"pictures/{image}.jpg" if f"{image}.jpg" in kept else ""
            if names is not None:
                key, item = names.get(key, ""), names.get(item, "")
            if (query or key) and item:
                found.append(Pair(query, key, item, action))
        return found

    def words(self, gallery: str) -> list[ClickedWords]:
        """The words of queries with the items that were clicked or bought after them, oldest first;
        without those that were called wrong as often.
        """
        sql = (
            "SELECT text, item FROM words WHERE gallery = ? GROUP BY text, item"
            " HAVING sum(CASE action WHEN 'wrong' THEN -1 ELSE 1 END) > 0 ORDER BY min(number)"
        )
        with self._transaction() as connection:
            return [ClickedWords(*row) for row in connection.execute(sql, (gallery,))]

    def unlabelled(self, gallery: str) -> list[Question]:
        """The different stored images and words that `handle` was not called for, in any order."""

        def column(connection: sqlite3.Connection, sql: str) -> set[str]:
            return {text for (text,) in connection.execute(f"{sql} WHERE gallery = ?", (gallery,))}

        with self._transaction() as connection:
            images = column(connection, "SELECT DISTINCT picture FROM feedback")
            texts = column(connection, "SELECT DISTINCT text FROM words")
            handled = column(connection, "SELECT query FROM handled")
        kept = self._kept() if images else set()
        queries = [Question(gallery, "", image=name) for name in images if f"{name}.jpg" in kept]
        queries += [Question(gallery, "", text=text) for text in texts]
        return [query for query in queries if query.digest not in handled]

    def handle(self, gallery: str, digest: str) -> None:
        """Omit a query from `unlabelled`: a person labels or skips it. One of several calls does.

        Raises: ItemNotFoundError if it is not among them.
        """
        self._require(gallery, digest)
        row = {"gallery": gallery, "query": digest, "day": _today().isoformat()}
        with self._transaction() as connection:
            if not self._insert(connection, "handled", row):
                raise _unknown(digest)

    def unhandle(self, gallery: str, digest: str) -> None:
        """Take `handle` back, if it was called. Raises: ItemNotFoundError for an unknown query."""
        self._require(gallery, digest)
        with self._transaction() as connection:
            sql = "DELETE FROM handled WHERE gallery = ? AND query = ?"
            connection.execute(sql, (gallery, digest))

    def image(self, gallery: str, digest: str) -> bytes:
        """The stored image of a query, a JPEG. Raises: ItemNotFoundError if it was removed."""
        with self._transaction() as connection:
            sql = "SELECT 1 FROM feedback WHERE gallery = ? AND picture = ? LIMIT 1"
            if connection.execute(sql, (gallery, digest)).fetchone() is not None:
                with contextlib.suppress(FileNotFoundError):
                    return (self._images / f"{digest}.jpg").read_bytes()
        raise _unknown(digest)

    def galleries(self) -> list[str]:
        """The names of galleries with feedback."""
        with self._transaction() as connection:
            rows = connection.execute(
                "SELECT gallery FROM feedback UNION SELECT gallery FROM words ORDER BY gallery"
            )
            return [gallery for (gallery,) in rows]

    def counts(self, gallery: str) -> dict[Action, int]:
        """The number of rows for each action."""
        sql = (
            "SELECT action, count(*) FROM (SELECT gallery, action FROM feedback"
            " UNION ALL SELECT gallery, action FROM words) WHERE gallery = ? GROUP BY action"
        )
        with self._transaction() as connection:
            found = connection.execute(sql, (gallery,)).fetchall()
        return dict.fromkeys(ACTIONS, 0) | dict(found)

    def export(
        self, gallery: str, folder: Path, names: Mapping[str, str] | None = None
    ) -> list[Pair]:
        """Write `pairs` to FOLDER/pairs.csv, and their query images to FOLDER/pictures; without
        `names` also `words` to FOLDER/words.csv, if there are some.
        """
        pairs = self.pairs(gallery, names)
        expired = set()
        try:
            make_folder(folder / "pictures", _STEP)
            for name in {pair.query for pair in pairs if pair.query}:
                try:
                    shutil.copyfile(self._images.parent / name, folder / name)
                except FileNotFoundError:  # it was just removed because of its age
                    expired.add(name)
            pairs = [pair for pair in pairs if pair.query not in expired]
            write_whole(folder / "pairs.csv", as_csv(Pair._fields, pairs).encode(), _STEP)
            if names is None and (words := self.words(gallery)):
                text = as_csv(ClickedWords._fields, words)
                write_whole(folder / "words.csv", text.encode(), _STEP)
        except OSError as error:
            raise StateError(
                f"{folder} cannot be written: {error}. Choose another folder."
            ) from error
        return pairs

    def clear(self, gallery: str | None = None) -> int:
        """Remove the feedback on a gallery, by default on all; the number of removed rows."""
        with self._transaction() as connection:
            removed = 0
            for table in ("feedback", "words", "handled"):
                sql = f"DELETE FROM {table} WHERE gallery = coalesce(?, gallery)"  # noqa: S608
                count = connection.execute(sql, (gallery,)).rowcount
                removed += count if table != "handled" else 0
            self._drop_images(connection)
        return removed

    def tidy(self) -> None:
        """Remove rows that are too old, and images that no row refers to."""
        oldest = _today() - timedelta(days=self._days)
        with self._transaction() as connection:
            for table in ("feedback", "words", "handled"):
                sql = f"DELETE FROM {table} WHERE day < ?"  # noqa: S608 (a name of this list)
                connection.execute(sql, (oldest.isoformat(),))
            self._drop_images(connection)

    def close(self) -> None:
        """Close the database, unless a call that hangs still uses it."""
        if self._lock.acquire(timeout=_CLOSE_S):
            self._connection.close()
            self._lock.release()

    def _prepare(self) -> None:
        with self._transaction() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(_TABLES)
            sql = "INSERT OR IGNORE INTO signing VALUES (1, ?)"
            connection.execute(sql, (secrets.token_bytes(32),))
            [(self._secret,)] = connection.execute("SELECT secret FROM signing")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction: committed at the end, or rolled back after an error. Other processes
        cannot write from its first change on.
        """
        try:
            with self._lock, self._connection:
                yield self._connection
        except (sqlite3.Error, OSError) as error:
            raise StateError(
                f"{self._path} cannot be used: {error}. Check the disk and the permissions of the "
                "folder that --state names."
            ) from error

    def _kept(self) -> set[str]:
        """The files of the stored images. It can take long: not for the time of a transaction."""
        try:
            with os.scandir(self._images) as files:
                return {file.name for file in files}
        except OSError as error:
            raise StateError(f"{self._images} cannot be read: {error}. Check the disk.") from error

    def _require(self, gallery: str, digest: str) -> None:
        """Raises: ItemNotFoundError unless the image or the words are stored."""
        with self._transaction() as connection:
            sql = "SELECT 1 FROM feedback WHERE gallery = ? AND picture = ? LIMIT 1"
            is_image = connection.execute(sql, (gallery, digest)).fetchone() is not None
            sql = "SELECT DISTINCT text FROM words WHERE gallery = ?"
            texts = [] if is_image else connection.execute(sql, (gallery,)).fetchall()
        if is_image:
            is_stored = (self._images / f"{digest}.jpg").is_file()
        else:
            is_stored = any(Question(gallery, "", text=text).digest == digest for [text] in texts)
        if not is_stored:
            raise _unknown(digest)

    def _insert(self, connection: sqlite3.Connection, table: str, row: Mapping[str, str]) -> bool:
        """Store a row; False if the same one is stored already."""
        marks = ", ".join("?" * len(row))
        sql = f"INSERT OR IGNORE INTO {table} ({', '.join(row)}) VALUES ({marks})"  # noqa: S608
        return connection.execute(sql, [*row.values()]).rowcount > 0

    def _drop_images(self, connection: sqlite3.Connection) -> None:
        named = {name for (name,) in connection.execute("SELECT DISTINCT picture FROM feedback")}
        for file in self._images.iterdir():
            if file.stem not in named:  # also files of interrupted writes
                file.unlink(missing_ok=True)

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._secret, payload, "sha256")[:_MAC_BYTES]


def open_feedback(settings: Settings) -> FeedbackStore:
    """Open the feedback in the state folder. Raises: StateMissingError, StateError."""
    return FeedbackStore(
        settings.require_state("Feedback"),
        max_rows=settings.feedback_max_rows,
        days=settings.feedback_days,
        keeps_words=settings.feedback == "pictures",
    )


def forget(settings: Settings, store: FeedbackStore | None, gallery: str) -> int:
    """Remove the feedback on a deleted gallery, since another one may get the name; the number of
    removed rows. Raises: StateError.
    """
    with _stored(settings, store) as found:
        return 0 if found is None else found.clear(gallery)


def tidy_feedback(settings: Settings, store: FeedbackStore | None) -> None:
    """Remove what is too old, also while feedback is off. Raises: StateError."""
    with _stored(settings, store) as found:
        if found is not None:
            found.tidy()


@contextlib.contextmanager
def _stored(settings: Settings, store: FeedbackStore | None) -> Iterator[FeedbackStore | None]:
    """`store`, or while feedback is off what earlier runs have stored, if anything."""
    if store is not None or settings.state is None or not (settings.state / _DATABASE).is_file():
        yield store
        return
    with contextlib.closing(open_feedback(settings)) as opened:
        yield opened


def _unknown(digest: str) -> ItemNotFoundError:
    return ItemNotFoundError(
        f"The feedback has no query {digest[:SHORT]} to label. It was removed, labelled or "
        "skipped; ask for another one."
    )


def as_csv(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A list with a header as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([header, *rows])
    return text.getvalue()


def _today() -> date:
    return datetime.now(UTC).date()
