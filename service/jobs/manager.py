"""The queue of jobs: started in processes of their own, which live on when this one stops."""

import codecs
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from embedder.errors import JobConflictError, JobNotFoundError, StateMissingError
from service.galleries.locations import Locations
from service.galleries.migration import bring_over
from service.jobs.params import checked, plan_of
from service.jobs.store import HEAVY, Job, JobFolders, JobStore, Kind, State, reason_of
from service.jobs.tidy import tidy
from service.settings import Settings

LOG_PAGE = 64 * 1024
"""Bytes of a log in one answer."""

MARK = "KINLENS_JOB_ID"
"""The environment variable by which the processes of a job are known."""

_SECRETS = "KINLENS_"
_LOOK_S = 0.5
_LONGEST_WAIT_S = 60.0  # between two looks, where they fail
_TIDY_S = 500.0
_CLOSE_S = 3.0


@dataclass(frozen=True, slots=True)
class LogPage:
    """Part of a log; offsets are bytes, and the next page begins at `next_offset`."""

    offset: int
    next_offset: int
    text: str


class JobManager:
    """The jobs of the state folder of the settings. Thread safe; every call may block.

    With the setting jobs = "elsewhere", `kinlens-serve work` starts them, not this process.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises: StateMissingError without a state folder; StateError if it cannot be used."""
        if settings.state is None:
            raise StateMissingError(
                "There is no folder to keep jobs in. Name it with --state or KINLENS_STATE."
            )
        self._state = settings.state.absolute()
        self._settings = settings
        self._is_here = settings.jobs == "here"
        self._store = JobStore(self._state / "service.sqlite")
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._running: list[str] = []
        self._tidy_at = math.inf
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Watch the jobs, and tidy up, in a thread of its own until `close`."""
        self._tidy_at = 0.0
        self._thread = threading.Thread(target=self._watch, name="jobs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, in a bounded time; jobs that run go on in their own processes."""
        self._stopped.set()
        self._wake.set()
        if self._thread is None:
            return
        self._thread.join(_CLOSE_S)
        if self._running:
            structlog.get_logger().info("jobs go on by themselves", jobs=self._running)
        if self._thread.is_alive():
            structlog.get_logger().warning("a look at the jobs does not end", limit_s=_CLOSE_S)

    def work(self, once: bool = False) -> None:
        """Start jobs as they come, here, whatever the settings; with `once`, until none is left."""
        self._is_here = True
        locations = Locations(self._settings).list_galleries()
        bring_over(self._state, [place.path for place in locations if place.path is not None])
        self._watch(lambda: once and not self._store.active())

    def start(self, kind: Kind, gallery: str, params: dict[str, Any], by: str) -> Job:
        """A new job on a gallery; it runs at once, or when its turn comes.

        Raises: InvalidParameterError, GalleryNotFoundError, GalleryConflictError; JobConflictError
            if another job is in its way, or nothing can be trained here; JobNotFoundError for a job
            without a candidate.
        """
        model = checked(kind, params)
        plan_of(model, gallery, self._settings, is_done_here=self._is_here)
        stored = model.model_dump(mode="json", by_alias=True, exclude_none=True)
        return self._begun(self._store.create(kind, gallery, stored, by))

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
        """Let a rebuild or training that failed or was cancelled go on with what it has.

        Raises: JobNotFoundError; JobConflictError for other kinds, or in another state; as `start`.
        """
        job = self.get(job_id)
        if job.kind not in HEAVY:
            raise JobConflictError(
                f"Job {job.id} is a {job.kind}; only a rebuild or a training goes on. Start it "
                "again instead."
            )
        params = checked(job.kind, job.params)
        plan_of(params, job.gallery, self._settings, is_done_here=self._is_here)
        return self._begun(self._store.renew(job.id))

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
        return self.get(job.id)

    def get(self, job_id: str) -> Job:
        """A job as it is now. Raises: JobNotFoundError."""
        job = self._store.get(job_id)
        if job.state == "running":
            self._settle(job)
            job = self._store.get(job_id)
        return job

    def list(self, state: State | None = None, limit: int = 100) -> list[Job]:
        """The newest jobs, newest first."""
        for job in self._store.newest("running"):
            self._settle(job)
        return self._store.newest(state, limit)

    def counts(self) -> dict[State, int]:
        """How many jobs are in each state. Raises: StateError."""
        return self._store.counts()

    def log(self, job_id: str, offset: int = 0) -> LogPage:
        """At most `LOG_PAGE` bytes of what a job has written. Raises: JobNotFoundError."""
        job = self._store.get(job_id)
        try:
            with JobFolders(self._state, job.id).log.open("rb") as file:
                offset = min(offset, file.seek(0, os.SEEK_END))
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

    def _watch(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Look at the jobs again and again; less often while that fails."""
        wait_s = _LOOK_S
        while not self._stopped.is_set() and not is_over():
            try:
                self._look()
                wait_s = _LOOK_S
            except Exception as error:
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                structlog.get_logger().error(
                    "jobs cannot be looked after", again_in_s=wait_s, exc_info=error
                )
            self._wake.wait(wait_s)
            self._wake.clear()

    def _look(self) -> None:
        """Settle what runs, start what waits, and tidy up now and then."""
        active = self._store.active()
        self._running = [job.id for job in active if job.state == "running"]
        for job in active:
            if job.state == "running":
                self._settle(job)
            elif self._is_here:
                self._launch(job)
        if time.monotonic() >= self._tidy_at:
            self._tidy_at = time.monotonic() + _TIDY_S
            tidy(self._settings, self._store)

    def _begun(self, job: Job) -> Job:
        """A job that waits, as it is once it was started if it is its turn."""
        if self._is_here:
            self._launch(job)
        return self._store.get(job.id)

    def _settle(self, job: Job) -> None:
        """End a running job that is to end; one whose process is gone has failed."""
        folders = JobFolders(self._state, job.id)
        lock = folders.take_lock()
        if lock is None:
            if job.cancel_requested:  # so it will not commit any more
                _kill(job.id)
            return
        try:  # nobody can start it anew meanwhile
            _kill(job.id)  # what its process has left
            if self._store.fail(job.id, _epitaph(self._store.get(job.id))):
                shutil.rmtree(folders.data, ignore_errors=True)
        finally:
            os.close(lock)

    def _launch(self, job: Job) -> None:
        """Start a job that waits in a process of its own, if it is its turn.

        Whatever keeps it from starting, it has failed then.
        """
        folders = JobFolders(self._state, job.id)
        lock = folders.take_lock()
        if lock is None:
            return
        try:
            if self._store.begin(job.id):
                plan = plan_of(checked(job.kind, job.params), job.gallery, self._settings)
                folders.plan.write_text(plan.model_dump_json(indent=2), encoding="utf-8")
                self._spawn(folders, job.id, lock)
        except Exception as error:
            structlog.get_logger().error("a job was not started", job=job.id, exc_info=error)
            self._store.fail(job.id, reason_of(error))
        finally:
            os.close(lock)

    def _spawn(self, folders: JobFolders, job_id: str, lock: int) -> None:
        # Its parameters stand in the plan, so that it needs none of our settings, or secrets.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_SECRETS)}
        environment |= {MARK: job_id, "PYTHONUNBUFFERED": "1"}
        with folders.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "service.jobs", str(self._state), job_id],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
                env=environment,
            )

        def wait() -> None:
            process.wait()
            self._wake.set()  # the next one's turn may have come

        threading.Thread(target=wait, name="job", daemon=True).start()


def _kill(job_id: str) -> None:
    """End every process of a job at once."""
    mark = f"{MARK}={job_id}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or gone
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.killpg(os.getpgid(int(folder.name)), signal.SIGKILL)


def _epitaph(job: Job) -> str:
    said = (
        "Its process ended without a result: it was killed, the machine went down, or the memory "
        "was used up."
    )
    state = "The gallery is as it was."
    if job.committed:
        state = (
            f"It was about to put the new gallery in place; GET /galleries/{job.gallery} tells by "
            "the bundle_id whether it did."
        )
    cure = "Start the job again."
    if job.kind in HEAVY:
        cure = f"POST /jobs/{job.id}/resume goes on; epochs and pictures that are done are kept."
    return f"{said} {state} {cure}"
