"""Jobs: a table that any number of processes read and write, and the files of each job."""

import contextlib
import fcntl
import json
import shutil
import sqlite3
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kinlens.embedder.durable import make_folder
from kinlens.embedder.errors import JobConflictError, JobNotFoundError, KinlensError, StateError
from kinlens.models import JobKind, JobModel, JobState
from kinlens.service.access.binding import of_caller

ACTIVE: tuple[JobState, ...] = ("queued", "running")
ENDED: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")
HEAVY: tuple[JobKind, ...] = ("rebuild", "train")
"""Kinds that take a whole machine: one of them runs at a time, and one that was stopped goes on."""

TOTAL = 1000
"""What `done` counts to, whatever the job does: per mille of it."""

_BUSY_S = 10.0
_ID_DIGITS = 12
_TABLE = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, gallery TEXT NOT NULL, state TEXT NOT NULL,
    step TEXT NOT NULL DEFAULT '', done INTEGER NOT NULL DEFAULT 0, total INTEGER,
    created_at TEXT NOT NULL, started_at TEXT, ended_at TEXT,
    by TEXT NOT NULL, params TEXT NOT NULL, error TEXT, report TEXT,
    cancel_requested INTEGER NOT NULL DEFAULT 0, committed INTEGER NOT NULL DEFAULT 0
) STRICT
"""


class Job(JobModel):
    """With what clients are not shown: whether it is to end, or may no longer be ended."""

    cancel_requested: bool
    committed: bool

    @property
    def is_active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ACTIVE

    @property
    def galleries(self) -> frozenset[str]:
        """Those that it reads or writes; of them it writes `gallery` alone."""
        return frozenset({self.gallery, self.params.get("with", self.gallery)})


class JobFolders:
    """The files of one job in the state folder `state`."""

    def __init__(self, state: Path, job_id: str) -> None:
        self.state = state
        self.path = state / "jobs" / job_id
        self.log = self.path / "log.txt"
        self.plan = self.path / "plan.json"
        self.group = self.path / "group.txt"
        self.missing = self.path / "missing.json"
        self.run = state / "runs" / job_id
        self.data = self.run / "data"
        self.feedback = self.run / "feedback"
        self.candidate = state / "candidates" / job_id
        self.bundles = state / "bundles"

    @property
    def can_resume(self) -> bool:
        """Whether a training can go on from finished epochs or folds."""
        return (self.run / "checkpoint.pt").is_file() or any(self.run.glob("fold-*"))

    def drop_images(self) -> None:
        """Remove the copied pictures, unless a training can go on with them."""
        if not self.can_resume:
            shutil.rmtree(self.data, ignore_errors=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[int | None]:
        """A descriptor that marks the job as alive until each copy of it is closed; None if a
        process has the job. Raises: OSError.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
            else:
                yield file.fileno()


class JobStore:
    """The table of jobs in the SQLite file `path`; each call is a transaction of its own.

    For a caller whose key is bound to galleries, `get` and `newest` know the jobs alone that read
    and write no other one.

    Raises, from every call: StateError if the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        make_folder(path.parent, "jobs")
        with self._transaction() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(_TABLE)

    def create(self, kind: JobKind, gallery: str, params: dict[str, Any], by: str) -> Job:
        """A new job that waits. Raises: JobConflictError naming the one that it must not meet."""
        job_id = uuid.uuid4().hex[:_ID_DIGITS]
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO jobs (id, kind, gallery, state, step, total, created_at, by, params)"
                " VALUES (?, ?, ?, 'queued', 'waits', ?, ?, ?, ?)",
                (job_id, kind, gallery, TOTAL, _now(), by, json.dumps(params)),
            )
            return _without_conflict(connection, job_id)

    def get(self, job_id: str) -> Job:
        """One job. Raises: JobNotFoundError."""
        with self._transaction() as connection:
            for job in _read(connection, "WHERE id = ?", job_id):
                if of_caller().permits(*job.galleries):
                    return job
        raise JobNotFoundError(f"There is no job {job_id[:40]!r}. GET /jobs lists them.")

    def newest(self, state: JobState | None = None, limit: int = 100) -> list[Job]:
        """The newest jobs, newest first."""
        where = "WHERE state = coalesce(?, state) ORDER BY number DESC LIMIT ?"
        binding = of_caller()
        read = sys.maxsize if binding.is_bound else limit
        with self._transaction() as connection:
            found = _read(connection, where, state, read)
        return [job for job in found if binding.permits(*job.galleries)][:limit]

    def active(self) -> list[Job]:
        """The jobs that wait or run, oldest first."""
        with self._transaction() as connection:
            return _active(connection)

    def active_in(self, gallery: str) -> Job | None:
        """The oldest job that waits or runs and uses `gallery`."""
        return next((job for job in self.active() if gallery in job.galleries), None)

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        with self._transaction() as connection:
            found = connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall()
        return dict.fromkeys((*ACTIVE, *ENDED), 0) | dict(found)

    def forget(self, job_id: str) -> None:
        """Remove a job that has ended."""
        sql = "DELETE FROM jobs WHERE id = ? AND state NOT IN ('queued', 'running')"
        self._change(sql, job_id)

    def begin(self, job_id: str) -> bool:
        """A job that waits runs from now on; False if it does not wait, or its turn has not come.

        Of the heavy kinds one runs at a time.
        """
        sql = (
            "UPDATE jobs SET state = 'running', step = 'starts', started_at = ?"
            " WHERE id = ? AND state = 'queued' AND NOT (kind IN ('rebuild', 'train') AND EXISTS"
            " (SELECT 1 FROM jobs WHERE state = 'running' AND kind IN ('rebuild', 'train')))"
        )
        return self._change(sql, _now(), job_id)

    def progress(self, job_id: str, step: str, done: int) -> None:
        """How far a running job is; `done` never goes back."""
        sql = (
            "UPDATE jobs SET step = ?, done = max(done, min(?, total))"
            " WHERE id = ? AND state = 'running'"
        )
        self._change(sql, step, done, job_id)

    def report(self, job_id: str, report: dict[str, Any]) -> None:
        """What a job has found so far, also of one that has ended."""
        self._change("UPDATE jobs SET report = ? WHERE id = ?", json.dumps(report), job_id)

    def succeed(self, job_id: str) -> bool:
        """A running job has done its work; False if it does not run, and then nothing changes."""
        sql = (
            "UPDATE jobs SET state = 'succeeded', step = 'done', done = total, ended_at = ?"
            " WHERE id = ? AND state = 'running'"
        )
        return self._change(sql, _now(), job_id)

    def fail(self, job_id: str, error: str) -> bool:
        """A running job has ended for this reason, or as it was cancelled; False as `succeed`."""
        sql = (
            "UPDATE jobs SET state = iif(cancel_requested, 'cancelled', 'failed'),"
            " error = iif(cancel_requested, NULL, ?), ended_at = ?"
            " WHERE id = ? AND state = 'running'"
        )
        return self._change(sql, error, _now(), job_id)

    def fail_active(self, error: str) -> None:
        """All jobs that wait or run have failed for this reason."""
        sql = (
            "UPDATE jobs SET state = 'failed', error = ?, ended_at = ?"
            " WHERE state IN ('queued', 'running')"
        )
        self._change(sql, error, _now())

    def cancel(self, job_id: str) -> bool:
        """End a job that waits; of a running one, that it is to end, and it commits no more.

        False if it has ended, or is committed.
        """
        sql = (
            "UPDATE jobs SET cancel_requested = 1, ended_at = iif(state = 'queued', ?, NULL),"
            " state = iif(state = 'queued', 'cancelled', state)"
            " WHERE id = ? AND committed = 0 AND state IN ('queued', 'running')"
        )
        return self._change(sql, _now(), job_id)

    def commit(self, job_id: str) -> bool:
        """From now on a running job cannot be cancelled; False if that was asked for before."""
        sql = (
            "UPDATE jobs SET committed = 1"
            " WHERE id = ? AND state = 'running' AND cancel_requested = 0"
        )
        return self._change(sql, job_id)

    def renew(self, job_id: str) -> Job:
        """Let a rebuild or training that ended without success wait once more.

        Raises: JobNotFoundError; JobConflictError if it did not end so, is of another kind than
            these, or naming another job that it must not meet.
        """
        job = self.get(job_id)
        with self._transaction() as connection:
            ended = connection.execute(
                "UPDATE jobs SET state = 'queued', step = 'waits', error = NULL, ended_at = NULL,"
                " cancel_requested = 0, committed = 0"
                " WHERE id = ? AND state IN ('failed', 'cancelled')"
                " AND kind IN ('rebuild', 'train')",
                (job_id,),
            )
            if not ended.rowcount:
                raise JobConflictError(
                    f"Job {job_id} ({job.kind}, {job.state}) does not go on: only a rebuild or "
                    "training does that failed or was cancelled. Start it again instead."
                )
            return _without_conflict(connection, job_id)

    def _change(self, sql: str, *values: object) -> bool:
        with self._transaction() as connection:
            return connection.execute(sql, values).rowcount > 0

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Committed in the end, or rolled back; no other process writes after its first change."""
        try:
            connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level="IMMEDIATE")
            connection.row_factory = sqlite3.Row
            with contextlib.closing(connection), connection:
                yield connection
        except sqlite3.Error as error:
            raise StateError(
                f"{self._path} cannot be used: {error}. Check the disk and the permissions of the "
                "folder that --state names."
            ) from error


def reason_of(error: Exception) -> str:
    """Why a job failed, without the words of an error that nobody foresaw."""
    if isinstance(error, KinlensError | OSError):
        return str(error)
    return f"The job failed with {type(error).__name__}. The log has the cause."


def _read(connection: sqlite3.Connection, where: str, *values: object) -> list[Job]:
    rows = connection.execute(f"SELECT * FROM jobs {where}", values)  # noqa: S608 (constants)
    return [
        Job.model_validate(
            {
                **row,
                "params": json.loads(row["params"]),
                "report": json.loads(row["report"] or "null"),
            }
        )
        for row in rows
    ]


def _active(connection: sqlite3.Connection) -> list[Job]:
    return _read(connection, "WHERE state IN ('queued', 'running') ORDER BY number")


def _without_conflict(connection: sqlite3.Connection, job_id: str) -> Job:
    """The job, unless one of it and another writes a gallery that the other one reads or writes."""
    active = {job.id: job for job in _active(connection)}
    job = active.pop(job_id)
    for other in active.values():
        if job.gallery in other.galleries or other.gallery in job.galleries:
            raise JobConflictError(
                f"Job {other.id} ({other.kind}) works with the same gallery. Wait until it has "
                f"ended, or end it: POST /jobs/{other.id}/cancel."
            )
    return job


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
