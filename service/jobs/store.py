"""The jobs of a state folder, in SQLite: read and written by any number of processes."""

import contextlib
import json
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from embedder.durable import make_folder
from embedder.errors import JobConflictError, JobNotFoundError, StateError
from service.jobs.record import ACTIVE, ENDED, HEAVY, TOTAL, Job, Kind, State

_BUSY_S = 10.0
_ID_DIGITS = 12
_TABLE = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    gallery TEXT NOT NULL,
    state TEXT NOT NULL,
    step TEXT NOT NULL DEFAULT '',
    done INTEGER NOT NULL DEFAULT 0,
    total INTEGER,
    created_at TEXT NOT NULL,
    started_at TEXT,
    ended_at TEXT,
    by TEXT NOT NULL,
    params TEXT NOT NULL,
    error TEXT,
    report TEXT,
    cancel_requested INTEGER NOT NULL DEFAULT 0,
    committed INTEGER NOT NULL DEFAULT 0,
    pid INTEGER
) STRICT
"""
_COLUMNS = (
    "id, kind, gallery, state, step, done, total, created_at, started_at, ended_at, by, params, "
    "error, report, cancel_requested, committed, pid"
)
_OTHERS = "SELECT id, kind FROM jobs WHERE gallery IN ({}) AND state IN ({}) LIMIT 1"
_OLD = (
    "WHERE state IN ({}) AND ended_at < ?"
    " AND number NOT IN (SELECT number FROM jobs ORDER BY number DESC LIMIT ?)"
)
_HEAVY_RUNS = "SELECT 1 FROM jobs WHERE state = 'running' AND kind IN ({}) AND id <> ?"


class JobStore:
    """The table of jobs in the SQLite file `path`; each call is a transaction of its own.

    Raises, from every call: StateError if the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        make_folder(path.parent, "jobs")
        with self._connection() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(_TABLE)

    def create(
        self,
        kind: Kind,
        gallery: str,
        params: dict[str, Any],
        by: str,
        touches: Sequence[str] = (),
    ) -> Job:
        """A new job that waits; no other may change `gallery` or the galleries that it `touches`.

        Raises: JobConflictError naming the job that does.
        """
        job_id = uuid.uuid4().hex[:_ID_DIGITS]
        names = (gallery, *touches)
        with self._writing() as connection:
            sql = _OTHERS.format(_marks(names), _marks(ACTIVE))
            for other, what in connection.execute(sql, (*names, *ACTIVE)):
                raise JobConflictError(
                    f"Job {other} ({what}) is changing the gallery. Wait until it has ended, or "
                    f"end it: POST /jobs/{other}/cancel."
                )
            connection.execute(
                "INSERT INTO jobs (id, kind, gallery, state, step, total, created_at, by, params)"
                " VALUES (?, ?, ?, 'queued', 'waits', ?, ?, ?, ?)",
                (job_id, kind, gallery, TOTAL, _now(), by, json.dumps(params)),
            )
        return self.get(job_id)

    def get(self, job_id: str) -> Job:
        """One job. Raises: JobNotFoundError."""
        found = self._jobs("WHERE id = ?", job_id)
        if not found:
            raise JobNotFoundError(f"There is no job {job_id[:40]!r}. GET /jobs lists them.")
        return found[0]

    def newest(self, state: State | None = None, limit: int = 100) -> list[Job]:
        """The newest jobs, newest first."""
        if state is None:
            return self._jobs("ORDER BY number DESC LIMIT ?", limit)
        return self._jobs("WHERE state = ? ORDER BY number DESC LIMIT ?", state, limit)

    def ended_before(self, when: str, newest: int) -> list[Job]:
        """The jobs that ended before `when` (ISO 8601, UTC), without the `newest` of all."""
        return self._jobs(
            _OLD.format(_marks(ENDED)),
            *(*ENDED, when, newest),
        )

    def forget(self, job_id: str) -> None:
        """Remove a job that has ended."""
        self._change(
            f"DELETE FROM jobs WHERE id = ? AND state IN ({_marks(ENDED)})",  # noqa: S608 (constants)
            *(job_id, *ENDED),
        )

    def counts(self) -> dict[State, int]:
        """How many jobs are in each state."""
        with self._connection() as connection:
            found = connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall()
        return dict.fromkeys((*ACTIVE, *ENDED), 0) | dict(found)

    def active(self) -> list[Job]:
        """The jobs that wait or run, oldest first."""
        return self._jobs(f"WHERE state IN ({_marks(ACTIVE)}) ORDER BY number", *ACTIVE)

    def begin(self, job_id: str, pid: int) -> bool:
        """A job that waits runs from now on; False if it does not wait, or its turn has not come.

        Of the heavy kinds one runs at a time.
        """
        with self._writing() as connection:
            rows = connection.execute(
                "SELECT kind FROM jobs WHERE id = ? AND state = 'queued'", (job_id,)
            ).fetchall()
            if not rows:
                return False
            if rows[0][0] in HEAVY:
                sql = _HEAVY_RUNS.format(_marks(HEAVY))
                if connection.execute(sql, (*HEAVY, job_id)).fetchone():
                    return False
            connection.execute(
                "UPDATE jobs SET state = 'running', step = 'starts', started_at = ?, pid = ?"
                " WHERE id = ?",
                (_now(), pid, job_id),
            )
        return True

    def started(self, job_id: str, pid: int) -> None:
        """The process of a running job."""
        self._change("UPDATE jobs SET pid = ? WHERE id = ?", pid, job_id)

    def progress(self, job_id: str, step: str, done: int) -> None:
        """How far a running job is; `done` never goes back."""
        self._change(
            "UPDATE jobs SET step = ?, done = max(done, min(?, total))"
            " WHERE id = ? AND state = 'running'",
            *(step, done, job_id),
        )

    def report(self, job_id: str, report: dict[str, Any]) -> None:
        """What a job has found so far, also of one that has ended."""
        self._change("UPDATE jobs SET report = ? WHERE id = ?", json.dumps(report), job_id)

    def finish(self, job_id: str, state: State, error: str | None = None) -> bool:
        """A job has ended; False if it had ended before, and then nothing changes."""
        done = ", done = total, step = 'done'" if state == "succeeded" else ""
        return self._change(
            f"UPDATE jobs SET state = ?, error = ?, ended_at = ?{done}"  # noqa: S608 (a constant)
            f" WHERE id = ? AND state IN ({_marks(ACTIVE)})",
            *(state, error, _now(), job_id, *ACTIVE),
        )

    def cancel(self, job_id: str) -> bool:
        """Ask a running job to end, and end one that waits; False if it has ended, or is past
        the point at which it changes the gallery."""
        return self._change(
            "UPDATE jobs SET cancel_requested = 1,"
            " ended_at = CASE state WHEN 'queued' THEN ? END,"
            " state = CASE state WHEN 'queued' THEN 'cancelled' ELSE state END"
            " WHERE id = ? AND committed = 0 AND state IN ('queued', 'running')",
            *(_now(), job_id),
        )

    def commit(self, job_id: str) -> bool:
        """From now on a running job cannot be cancelled; False if that was asked for before."""
        return self._change(
            "UPDATE jobs SET committed = 1"
            " WHERE id = ? AND state = 'running' AND cancel_requested = 0",
            job_id,
        )

    def renew(self, job_id: str) -> Job:
        """Let a job that ended without success wait once more.

        Raises: JobNotFoundError; JobConflictError if it did not end so, or another one runs.
        """
        job = self.get(job_id)
        with self._writing() as connection:
            sql = _OTHERS.format(_marks((job.gallery,)), _marks(ACTIVE))
            for other, what in connection.execute(sql, (job.gallery, *ACTIVE)):
                raise JobConflictError(
                    f"Job {other} ({what}) is changing the gallery. Wait until it has ended."
                )
            ended = connection.execute(
                "UPDATE jobs SET state = 'queued', step = 'waits', error = NULL, ended_at = NULL,"
                " cancel_requested = 0, committed = 0, pid = NULL"
                " WHERE id = ? AND state IN ('failed', 'cancelled')",
                (job_id,),
            )
            if not ended.rowcount:
                raise JobConflictError(
                    f"Job {job_id} is {job.state}; only one that failed or was cancelled goes on."
                )
        return self.get(job_id)

    def _jobs(self, where: str, *values: object) -> list[Job]:
        with self._connection() as connection:
            sql = f"SELECT {_COLUMNS} FROM jobs {where}"  # noqa: S608 (constants)
            return [_job(row) for row in connection.execute(sql, values)]

    def _change(self, sql: str, *values: object) -> bool:
        with self._writing() as connection:
            return connection.execute(sql, values).rowcount > 0

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
            with contextlib.closing(connection):
                yield connection
        except sqlite3.Error as error:
            raise StateError(
                f"{self._path} cannot be used: {error}. Check the disk and the permissions of the "
                "folder that --state names."
            ) from error


def _job(row: tuple[Any, ...]) -> Job:
    values = dict(zip(_COLUMNS.split(", "), row, strict=True))
    values["params"] = json.loads(values["params"])
    values["report"] = None if values["report"] is None else json.loads(values["report"])
    values["cancel_requested"] = bool(values["cancel_requested"])
    return Job(**values | {"committed": bool(values["committed"])})


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
