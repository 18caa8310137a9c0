"""What users made of answers: which item was right for a picture, or for another item, and which
was wrong.

    answer ─► sign ─► answer_id ─► POST /feedback ─► question ─► add ─► pairs ─► CSV, training

STATE/feedback.sqlite has the rows and the secret of the signatures; STATE/feedback/pictures has the
pictures that were searched with, where the operator keeps them. Neither knows anything of the
client, nor a time finer than a day. Any number of threads and processes may use both.
"""

import base64
import contextlib
import csv
import hmac
import io
import json
import os
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, get_args

from kinlens.embedder.durable import make_folder, write_whole
from kinlens.embedder.errors import InvalidParameterError, StateError, StateMissingError
from kinlens.models import Action
from kinlens.service.settings import Settings

ACTIONS: tuple[Action, ...] = get_args(Action)
PICTURE_PX = 640
"""Longest side of a picture that is kept: a JPEG without what the camera wrote into the file."""

_STEP = "feedback"
_MAC_BYTES = 16  # of HMAC-SHA256
_VERSION_DIGITS = 12
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
"""


@dataclass(frozen=True, slots=True)
class Question:
    """What a gallery was asked, of which version: the sha256 (hex) of the picture that was searched
    with, or else the key of the item.
    """

    gallery: str
    version: str
    picture: str = ""
    item: str = ""


class Pair(NamedTuple):
    """A row of pairs.csv: the path of the query picture, or else the key of the item searched with;
    the key of the item that was answered; the action.
    """

    query: str
    query_key: str
    item: str
    action: str


class FeedbackStore:
    """The feedback in the folder `state`. Of more than `max_rows` the oldest go; `tidy` removes
    what is older than `days`.

    Raises, from every call: StateError if the disk does not allow it.
    """

    def __init__(self, state: Path, *, max_rows: int = 100_000, days: int = 180) -> None:
        self._path = state / "feedback.sqlite"
        self._pictures = state / "feedback" / "pictures"
        self._max_rows = max_rows
        self._days = days
        self._lock = threading.Lock()  # of the one connection: to open and close one costs 40 ms
        try:
            make_folder(self._pictures, _STEP)
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
                f"Feedback cannot be kept in {state} ({reason}). Let this user write there, or "
                "name another folder."
            ) from error
        try:
            self._prepare()
        except StateError:
            self._connection.close()
            raise

    def sign(self, question: Question) -> str:
        """The text under which feedback on an answer to this question is taken, by any process."""
        version = question.version[:_VERSION_DIGITS]
        parts = [question.gallery, version, question.picture, question.item]
        said = json.dumps(parts, ensure_ascii=False).encode()
        return base64.urlsafe_b64encode(self._mac(said) + said).decode().rstrip("=")

    def question(self, answer_id: str) -> Question:
        """What was signed. Raises: InvalidParameterError for a text that is not of this service."""
        try:
            raw = base64.urlsafe_b64decode(answer_id + "=" * (-len(answer_id) % 4))
        except ValueError:
            raw = b""
        mac, said = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(said)):
            raise InvalidParameterError(
                f"answer_id = {answer_id[:20]!r} is not one that this service gave. Send the "
                "answer_id of an answer as it is, to the service that answered."
            )
        return Question(*json.loads(said))

    def has_picture(self, question: Question) -> bool:
        """Whether the picture of a question is kept."""
        return self._file(question).is_file()

    def add(self, question: Question, item: str, action: Action, picture: bytes = b"") -> bool:
        """Keep one feedback, and the picture of the question if it is given; False if the very same
        was there already. It survives the end of the process, whatever ends it; a loss of power may
        take the last ones.
        """
        today = _today()
        row = (question.gallery, question.version, question.picture, question.item, item, action)
        with self._transaction() as connection:
            sql = (
                "INSERT OR IGNORE INTO feedback"
                " (gallery, version, picture, query_key, item, action, day)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)"
            )
            is_new = connection.execute(sql, (*row, today.isoformat())).rowcount > 0
            sql = "DELETE FROM feedback WHERE number <= (SELECT max(number) FROM feedback) - ?"
            connection.execute(sql, (self._max_rows,))
            if picture and not self.has_picture(question):  # nobody tidies before this is over
                write_whole(self._file(question), picture, _STEP)
                midnight = datetime(today.year, today.month, today.day, tzinfo=UTC).timestamp()
                os.utime(self._file(question), (midnight, midnight))
        return is_new

    def pairs(self, gallery: str, names: Mapping[str, str] | None = None) -> list[Pair]:
        """What can be learnt from, oldest first: feedback on an answer to an item, or to a picture
        that is kept.

        Args:
            names: other names for the keys of items; what is about an item without one is left out.
        """
        sql = "SELECT picture, query_key, item, action FROM feedback WHERE gallery = ?"
        with self._transaction() as connection:
            rows = connection.execute(f"{sql} ORDER BY number", (gallery,)).fetchall()
            kept = {file.stem for file in self._pictures.glob("*.jpg")}
        found = []
        for picture, key, item, action in rows:
            query = f"pictures/{picture}.jpg" if picture in kept else ""
            if names is not None:
                key, item = names.get(key, ""), names.get(item, "")
            if (query or key) and item:
                found.append(Pair(query, key, item, action))
        return found

    def galleries(self) -> list[str]:
        """The galleries that there is feedback on."""
        with self._transaction() as connection:
            rows = connection.execute("SELECT DISTINCT gallery FROM feedback ORDER BY gallery")
            return [gallery for (gallery,) in rows]

    def counts(self, gallery: str) -> dict[Action, int]:
        """How often each action was sent."""
        sql = "SELECT action, count(*) FROM feedback WHERE gallery = ? GROUP BY action"
        with self._transaction() as connection:
            found = connection.execute(sql, (gallery,)).fetchall()
        return dict.fromkeys(ACTIONS, 0) | dict(found)

    def export(
        self, gallery: str, folder: Path, names: Mapping[str, str] | None = None
    ) -> list[Pair]:
        """Write `pairs` to FOLDER/pairs.csv, and the pictures that they name below it."""
        pairs = self.pairs(gallery, names)
        gone = set()
        try:
            make_folder(folder / "pictures", _STEP)
            for name in {pair.query for pair in pairs if pair.query}:
                try:
                    shutil.copyfile(self._pictures.parent / name, folder / name)
                except FileNotFoundError:  # its time has just come
                    gone.add(name)
            pairs = [pair for pair in pairs if pair.query not in gone]
            write_whole(folder / "pairs.csv", as_csv(pairs).encode(), _STEP)
        except OSError as error:
            raise StateError(
                f"{folder} cannot be written: {error}. Name another folder."
            ) from error
        return pairs

    def clear(self, gallery: str | None = None) -> int:
        """Forget the feedback on a gallery, or all; how much it was."""
        with self._transaction() as connection:
            sql = "DELETE FROM feedback WHERE gallery = coalesce(?, gallery)"
            removed = connection.execute(sql, (gallery,)).rowcount
            self._drop_images(connection)
        return removed

    def tidy(self) -> None:
        """Forget what is too old, and pictures that no row names."""
        oldest = _today() - timedelta(days=self._days)
        with self._transaction() as connection:
            connection.execute("DELETE FROM feedback WHERE day < ?", (oldest.isoformat(),))
            self._drop_images(connection)

    def close(self) -> None:
        """Let go of the file; a call that hangs keeps it."""
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
        """Committed in the end, or rolled back; no other process writes after its first change."""
        try:
            with self._lock, self._connection:
                yield self._connection
        except (sqlite3.Error, OSError) as error:
            raise StateError(
                f"{self._path} cannot be used: {error}. Check the disk and the permissions of the "
                "folder that --state names."
            ) from error

    def _drop_images(self, connection: sqlite3.Connection) -> None:
        named = {name for (name,) in connection.execute("SELECT DISTINCT picture FROM feedback")}
        for file in self._pictures.iterdir():
            if file.stem not in named:  # also what an interrupted write left
                file.unlink(missing_ok=True)

    def _file(self, question: Question) -> Path:
        return self._pictures / f"{question.picture}.jpg"

    def _mac(self, said: bytes) -> bytes:
        return hmac.digest(self._secret, said, "sha256")[:_MAC_BYTES]


def open_feedback(settings: Settings) -> FeedbackStore:
    """The feedback that the settings speak of. Raises: StateMissingError, StateError."""
    if settings.state is None:
        raise StateMissingError(
            "Feedback needs a folder. Name it with --state DIR or KINLENS_STATE."
        )
    most, days = settings.feedback_max_rows, settings.feedback_days
    return FeedbackStore(settings.state, max_rows=most, days=days)


def as_csv(pairs: Sequence[Pair]) -> str:
    """The text of pairs.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([Pair._fields, *pairs])
    return text.getvalue()


def _today() -> date:
    return datetime.now(UTC).date()
