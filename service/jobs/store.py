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
from kinlens.service.access.keys import CALLER

ACTIVE: tuple[JobState, ...] = ("queued", "running")
ENDED: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")
HEAVY: tuple[JobKind, ...] = ("rebuild", "train")
"""Kinds that need a whole machine: only one runs at a time."""

RESUMABLE: tuple[JobKind, ...] = (*HEAVY, "sync")
"""Kinds of which an interrupted one can resume."""

TOTAL = 1000
"""The value of `done` at the end of every job: progress is counted in per mille."""

JOBS_FILE = "service.sqlite"
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
    """A job, with two fields that clients do not see: `cancel_requested`, and `committed`, after
    which it cannot be cancelled.
    """

    cancel_requested: bool
    committed: bool

    @property
    def is_active(self) -> bool:
        """Whether it is queued or running."""
        return self.state in ACTIVE

    @property
    def galleries(self) -> frozenset[str]:
        """The galleries that it uses; it writes only to `gallery`."""
        return frozenset({self.gallery, self.params.get("with", self.gallery)})


class JobFolders:
    """The files of one job in the state folder `state`."""

    def __init__(self, state: Path, job_id: str) -> None:
        self.state = state
        self.path = state / "jobs" / job_id
        self.log = self.path / "log.txt"
        self.plan = self.path / "plan.json"
        self.missing = self.path / "missing.json"
        self.run = state / "runs" / job_id
        self.data = self.run / "data"
        self.feedback = self.run / "feedback"
        self.candidate = state / "candidates" / job_id
        self.bundles = state / "bundles"

    @property
    def can_resume(self) -> bool:
        """Whether a training can resume from finished epochs."""
        return (self.run / "checkpoint.pt").is_file()

    def drop_images(self) -> None:
        """Remove the copied images, unless a training can resume with them."""
        if not self.can_resume:
            shutil.rmtree(self.data, ignore_errors=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[int | None]:
        """Lock the job. Yields a descriptor, whose copies in subprocesses extend the lock until all
        are closed; None if the job is already locked. Raises: OSError.
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

    For a caller whose key is bound to galleries, `get` and `newest` return only jobs that use no
    other gallery.

    Every call raises: StateError if the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        make_folder(path.parent, "jobs")
        with self._transaction() as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(_TABLE)

    def create(self, kind: JobKind, gallery: str, params: dict[str, Any], by: str) -> Job:
        """Add a queued job. Raises: JobConflictError naming a job that uses the same gallery."""
        job_id = uuid.uuid4().hex[:_ID_DIGITS]
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO jobs (id, kind, gallery, state, step, total, created_at, by, params)"
                " VALUES (?, ?, ?, 'queued', 'waiting', ?, ?, ?, ?)",
                (job_id, kind, gallery, TOTAL, _now(), by, json.dumps(params)),
            )
            return _without_conflict(connection, job_id)

    def get(self, job_id: str) -> Job:
        """One job. Raises: JobNotFoundError."""
        with self._transaction() as connection:
            for job in _read(connection, "WHERE id = ?", job_id):
                if CALLER.get().permits(*job.galleries):
                    return job
        raise JobNotFoundError(f"There is no job {job_id[:40]!r}. GET /jobs lists all jobs.")

    def newest(self, state: JobState | None = None, limit: int = 100) -> list[Job]:
        """Up to `limit` jobs in this state, by default in any, newest first."""
        where = "WHERE state = coalesce(?, state) ORDER BY number DESC LIMIT ?"
        binding = CALLER.get()
        read = sys.maxsize if binding.is_bound else limit
        with self._transaction() as connection:
            found = _read(connection, where, state, read)
        return [job for job in found if binding.permits(*job.galleries)][:limit]

    def active(self) -> list[Job]:
        """The queued and running jobs, oldest first."""
        with self._transaction() as connection:
            return _active(connection)

    def active_in(self, gallery: str) -> Job | None:
        """The oldest queued or running job that uses `gallery`."""
        return next((job for job in self.active() if gallery in job.galleries), None)

    def counts(self) -> dict[JobState, int]:
        """The number of jobs in each state."""
        with self._transaction() as connection:
            found = connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall()
        return dict.fromkeys((*ACTIVE, *ENDED), 0) | dict(found)

    def forget(self, job_id: str) -> None:
        """Remove a job that has ended."""
        sql = "DELETE FROM jobs WHERE id = ? AND state NOT IN ('queued', 'running')"
        self._change(sql, job_id)

    def begin(self, job_id: str) -> bool:
        """Mark a queued job as running; False if it is not queued, or is of a heavy kind while
        another heavy job runs.
        """
        sql = (
            "UPDATE jobs SET state = 'running', step = 'starting', started_at = ?"
            " WHERE id = ? AND state = 'queued' AND NOT (kind IN ('rebuild', 'train') AND EXISTS"
            " (SELECT 1 FROM jobs WHERE state = 'running' AND kind IN ('rebuild', 'train')))"
        )
        return self._change(sql, _now(), job_id)

    def progress(self, job_id: str, step: str, done: int) -> None:
        """Record the step and progress of a running job; `done` never decreases."""
        sql = (
            "UPDATE jobs SET step = ?, done = max(done, min(?, total))"
            " WHERE id = ? AND state = 'running'"
        )
        self._change(sql, step, done, job_id)

    def report(self, job_id: str, report: dict[str, Any]) -> None:
        """Replace the report of a job, whether it is running or has ended."""
        self._change("UPDATE jobs SET report = ? WHERE id = ?", json.dumps(report), job_id)

    def succeed(self, job_id: str) -> bool:
        """Mark a running job as succeeded; False if it is not running."""
        sql = (
            "UPDATE jobs SET state = 'succeeded', step = 'done', done = total, ended_at = ?"
            " WHERE id = ? AND state = 'running'"
        )
        return self._change(sql, _now(), job_id)

    def fail(self, job_id: str, error: str) -> bool:
        """Mark a running job as failed, or as cancelled if that was requested; False if it is not
        running.
        """
        sql = (
            "UPDATE jobs SET state = iif(cancel_requested, 'cancelled', 'failed'),"
            " error = iif(cancel_requested, NULL, ?), ended_at = ?"
            " WHERE id = ? AND state = 'running'"
        )
        return self._change(sql, error, _now(), job_id)

    def fail_active(self, error: str) -> None:
        """Mark all queued and running jobs as failed with this error."""
        sql = (
            "UPDATE jobs SET state = 'failed', error = ?, ended_at = ?"
            " WHERE state IN ('queued', 'running')"
        )
        self._change(sql, error, _now())

    def cancel(self, job_id: str) -> bool:
        """Cancel a queued job, or request the cancellation of a running one, which then cannot
        commit. False if the job has ended or is committed.
        """
        sql = (
            "UPDATE jobs SET cancel_requested = 1, ended_at = iif(state = 'queued', ?, NULL),"
            " state = iif(state = 'queued', 'cancelled', state)"
            " WHERE id = ? AND committed = 0 AND state IN ('queued', 'running')"
        )
        return self._change(sql, _now(), job_id)

    def commit(self, job_id: str) -> bool:
        """Make a running job impossible to cancel; False if its cancellation was requested."""
        sql = (
            "UPDATE jobs SET committed = 1"
            " WHERE id = ? AND state = 'running' AND cancel_requested = 0"
        )
        return self._change(sql, job_id)

    def renew(self, job_id: str) -> Job:
        """Queue a failed or cancelled job of a kind in `RESUMABLE` again.

        Raises: JobNotFoundError; JobConflictError for another kind or state, or naming a job that
            uses the same gallery.
        """
        job = self.get(job_id)
        with self._transaction() as connection:
            ended = connection.execute(
                "UPDATE jobs SET state = 'queued', step = 'waiting', error = NULL, ended_at = NULL,"
                " cancel_requested = 0, committed = 0"
                " WHERE id = ? AND state IN ('failed', 'cancelled')"
                " AND kind IN (SELECT value FROM json_each(?))",
                (job_id, json.dumps(RESUMABLE)),
            )
            if not ended.rowcount:
                raise JobConflictError(
                    f"Job {job_id} ({job.kind}, {job.state}) cannot be resumed: only a sync, "
                    "rebuild or training that failed or was cancelled can. Start it again instead."
                )
            return _without_conflict(connection, job_id)

    def _change(self, sql: str, *values: object) -> bool:
        with self._transaction() as connection:
            return connection.execute(sql, values).rowcount > 0

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction: committed at the end, or rolled back after an error. Other processes
        cannot write from its first change on.
        """
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
    """The public reason why a job failed, without the text of unexpected errors."""
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
    """The job with this id.

    Raises: JobConflictError if another active job uses its gallery, or it uses the gallery that
        another active job writes to.
    """
    active = {job.id: job for job in _active(connection)}
    job = active.pop(job_id)
    for other in active.values():
        if job.gallery in other.galleries or other.gallery in job.galleries:
            raise JobConflictError(
                f"Job {other.id} ({other.kind}) uses the same gallery. Wait until it has ended, or "
                f"cancel it: POST /jobs/{other.id}/cancel."
            )
    return job


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
