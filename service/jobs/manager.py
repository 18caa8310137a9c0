"""Jobs as the service sees them: start, look, end; their processes live on when it stops."""

import codecs
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedder.errors import JobConflictError, JobNotFoundError
from service.jobs.attempts import Attempts
from service.jobs.folders import JobFolders
from service.jobs.launch import Launcher
from service.jobs.params import SwapParams, checked
from service.jobs.plan import check_start
from service.jobs.record import Job, Kind, State
from service.jobs.store import JobStore
from service.jobs.tidy import tidy, tidy_bundles
from service.settings import Settings

LOG_PAGE = 64 * 1024
"""Bytes of a log in one answer."""

_LOOK_S = 0.5
_TIDY_LOOKS = 1000


@dataclass(frozen=True, slots=True)
class LogPage:
    """Part of a log; offsets are bytes, and the next page begins at `next_offset`."""

    offset: int
    next_offset: int
    text: str


class JobManager:
    """The jobs of the state folder `state`. Thread safe; every call may block.

    With the setting jobs = "elsewhere", `kinlens-serve work` starts them, not this process.
    """

    def __init__(self, state: Path, settings: Settings) -> None:
        """Raises: StateError."""
        self._state = state.absolute()
        self._settings = settings
        self._store = JobStore(self._state / "service.sqlite")
        self._launcher = Launcher(self._state, settings, self._store)
        self._attempts = Attempts()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Watch the jobs in a thread of its own until `close`."""
        self._stopped.clear()
        self._thread = threading.Thread(target=self._watch, name="jobs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; jobs that run go on."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def start(self, kind: Kind, gallery: str, params: dict[str, Any], by: str) -> Job:
        """A new job on a gallery; it runs at once, or when its turn comes.

        Raises: InvalidParameterError, GalleryNotFoundError, GalleryConflictError; JobConflictError
            if another job changes the gallery, or nothing can be trained here; JobNotFoundError for
            a job without a candidate.
        """
        model = checked(kind, params)
        stored = model.model_dump(mode="json", by_alias=True, exclude_none=True)
        draft = Job("", kind, gallery, "queued", "", 0, None, "", None, None, by, stored)
        check_start(draft, self._settings)
        touches: tuple[str, ...] = ()
        if isinstance(model, SwapParams) and model.other is not None:
            touches = (model.other,)
        job = self._store.create(kind, gallery, stored, by, touches)
        self._look()
        return self._store.get(job.id)

    def swap(self, job_id: str, by: str) -> Job:
        """Put the candidate of a job in place, whatever its gate said.

        Raises: JobNotFoundError; JobConflictError if there is no candidate to put in place.
        """
        job = self.get(job_id)
        if job.state != "succeeded" or not JobFolders(self._state, job.id).candidate.is_dir():
            raise JobConflictError(
                f"Job {job.id} ({job.kind}, {job.state}) has no gallery that waits to be put in "
                "place. Start another rebuild."
            )
        return self.start("swap", job.gallery, {"job": job.id}, by)

    def resume(self, job_id: str) -> Job:
        """Let a training that failed or was cancelled go on from its last epoch.

        Raises: JobNotFoundError; JobConflictError for other kinds, or in another state.
        """
        job = self.get(job_id)
        if job.kind != "train":
            raise JobConflictError(
                f"Job {job.id} is a {job.kind}; only a training goes on. Start it again instead."
            )
        check_start(job, self._settings)
        self._store.renew(job.id)
        self._look()
        return self._store.get(job.id)

    def cancel(self, job_id: str) -> Job:
        """End a job and all its processes; the gallery stays as it was.

        Raises: JobNotFoundError; JobConflictError if it has ended, or is changing the gallery now.
        """
        job = self.get(job_id)
        if not self._store.cancel(job.id):
            job = self._store.get(job.id)
            state = "is putting its result in place" if job.is_active else f"has {job.state}"
            raise JobConflictError(
                f"Job {job.id} {state}; only one that waits or runs can be cancelled."
            )
        return self._store.get(job.id)

    def get(self, job_id: str) -> Job:
        """A job as it is now. Raises: JobNotFoundError."""
        job = self._store.get(job_id)
        if job.state == "running":
            self._launcher.settle(job)
            job = self._store.get(job_id)
        return job

    def list(self, state: State | None = None, limit: int = 100) -> list[Job]:
        """The newest jobs, newest first."""
        for job in self._store.active():
            if job.state == "running":
                self._launcher.settle(job)
        return self._store.newest(state, limit)

    def counts(self) -> dict[State, int]:
        """How many jobs are in each state. Raises: StateError."""
        return self._store.counts()

    def log(self, job_id: str, offset: int = 0) -> LogPage:
        """At most `LOG_PAGE` bytes of what a job has written. Raises: JobNotFoundError."""
        job = self._store.get(job_id)
        path = JobFolders(self._state, job.id).log
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                offset = min(offset, size)
                file.seek(offset)
                data = file.read(LOG_PAGE)
        except FileNotFoundError:
            return LogPage(0, 0, "")
        except OSError as error:
            raise JobNotFoundError(f"The log of job {job.id} cannot be read: {error}.") from error
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data, final=len(data) < LOG_PAGE and not job.is_active)
        taken = len(data) - len(decoder.getstate()[0])
        return LogPage(offset, offset + taken, text)

    def _watch(self) -> None:
        looks = 0
        while not self._stopped.wait(_LOOK_S):
            self._attempts.attempt("look", self._look)
            if looks % _TIDY_LOOKS == 0:
                self._attempts.attempt("tidy", self._tidy)
                self._attempts.attempt("tidy bundles", self._tidy_bundles)
            looks += 1

    def _look(self) -> None:
        if self._settings.jobs == "here":
            self._launcher.tick()
        else:
            self.list()

    def _tidy(self) -> None:
        tidy(self._state, self._store)

    def _tidy_bundles(self) -> None:
        tidy_bundles(self._state, self._settings, self._store, time.time())


def open_jobs(settings: Settings) -> JobManager | None:
    """The jobs of the state folder; None without one. Raises: StateError."""
    return None if settings.state is None else JobManager(settings.state, settings)
