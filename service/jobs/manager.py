"""The queue of jobs: each runs in its own process, which continues when the service stops.

start, resume, cancel ──► the table ──► a thread that watches it ──► python -m kinlens.service.jobs
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import wait
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog

from kinlens.embedder.durable import discard
from kinlens.embedder.errors import (
    JobConflictError,
    JobNotFoundError,
    KinlensError,
)
from kinlens.environment import child_environment
from kinlens.indexer.galleries import current_manifest
from kinlens.models import JobLog, JobOptions
from kinlens.service.concurrency import begin_in_thread, too_late
from kinlens.service.galleries.locations import (
    Locations,
    known_bundles,
    list_bundles,
    vectors_id,
)
from kinlens.service.jobs.params import Params, Plan, SwapParams, options_of, params_of, plan_of
from kinlens.service.jobs.store import JOBS_FILE, RESUMABLE, Job, JobFolders, JobStore, reason_of
from kinlens.service.settings import Settings

LOG_PAGE = 64 * 1024
"""Maximum bytes of a log in one answer."""

KEPT_JOBS = 200
"""Number of newest jobs that are kept regardless of their age."""

KEPT = timedelta(days=30)
"""How long jobs are kept after their end, and bundles after their last use."""

_RESULTS_KEPT = timedelta(days=7)
_PROCESSES = Path("/proc")
_MARK = "KINLENS_JOB_ID"  # the environment variable that identifies all processes of a job
_SETTINGS = "KINLENS_"
_POLL_S = 0.5  # other processes start and cancel jobs, too
_LONGEST_WAIT_S = 60.0  # between two polls, if they fail
_CLOSE_S = 3.0


class JobManager:
    """The jobs of the state folder of the settings; `store` is their table.

    Thread safe; every call may block. `open` starts a thread that starts and ends jobs. With the
    setting jobs = "elsewhere" another process starts jobs, and the thread only ends dead ones.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises: StateMissingError without a state folder; StateError if it cannot be used."""
        self._state = settings.require_state("The table of jobs").absolute()
        self._settings = settings
        self.store = JobStore(self._state / JOBS_FILE)
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jobs", daemon=True)

    def open(self) -> None:
        """Watch the jobs in the background, until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching, in a bounded time. Running jobs continue in their own processes."""
        self._stopped.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def work(self, once: bool = False) -> None:
        """Watch the jobs in this thread; with `once`, until no job is queued or running."""
        self._watch(lambda: once and not self.store.active())

    def tidy(self) -> None:
        """Remove old files of jobs. Raises: what the function `tidy` raises."""
        tidy(self._settings, self.store)

    def options(self) -> JobOptions:
        """The names that the parameters of jobs can have here."""
        return options_of(self._settings)

    def start(self, gallery: str, params: Params, by: str) -> Job:
        """Queue a new job on a gallery.

        Raises: InvalidParameterError, GalleryNotFoundError, GalleryConflictError; JobConflictError
            if another job uses the same gallery, or nothing can be trained here.
        """
        plan_of(params, gallery, self._settings)
        stored = params.model_dump(mode="json", by_alias=True, exclude_none=True)
        job = self.store.create(params.kind, gallery, stored, by)
        self._wake.set()
        return job

    def swap(self, job_id: str, by: str) -> Job:
        """Queue a swap to the candidate of a job, whether or not it passed the gate.

        Raises: JobNotFoundError; JobConflictError if the job has no candidate.
        """
        job = self.store.get(job_id)
        if job.state != "succeeded" or not JobFolders(self._state, job.id).candidate.is_dir():
            raise JobConflictError(
                f"Job {job.id} ({job.kind}, {job.state}) has no new gallery to swap in. Start "
                "another rebuild."
            )
        return self.start(job.gallery, SwapParams(job=job.id), by)

    def resume(self, job_id: str) -> Job:
        """Resume a failed or cancelled sync, rebuild or training from its partial results.

        Raises: JobNotFoundError; JobConflictError for another kind or state; what `start` raises.
        """
        job = self.store.get(job_id)
        plan_of(params_of(job.kind, job.params), job.gallery, self._settings)
        job = self.store.renew(job.id)
        self._wake.set()
        return job

    def cancel(self, job_id: str) -> Job:
        """End a job and all its processes. The gallery is not changed, but for a sync, which keeps
        the changes made so far.

        Raises: JobNotFoundError; JobConflictError if it has ended, or is changing the gallery now.
        """
        self.store.get(job_id)  # raises if the key of the caller is bound to other galleries
        is_cancelled = self.store.cancel(job_id)
        self._wake.set()
        job = self.store.get(job_id)
        if not is_cancelled:
            state = "is publishing its result" if job.is_active else f"has {job.state}"
            raise JobConflictError(
                f"Job {job.id} {state}; only queued and running jobs can be cancelled."
            )
        return job

    def log(self, job_id: str, offset: int = 0) -> JobLog:
        """Up to `LOG_PAGE` bytes of the log of a job, from `offset`. Raises: JobNotFoundError."""
        job = self.store.get(job_id)
        try:
            with JobFolders(self._state, job.id).log.open("rb") as file:
                offset = min(offset, file.seek(0, os.SEEK_END))
                file.seek(offset)
                data = file.read(LOG_PAGE)
        except FileNotFoundError:
            return JobLog(offset=0, next_offset=0, text="")
        except OSError as error:
            raise JobNotFoundError(f"The log of job {job.id} cannot be read: {error}.") from error
        if job.is_active or len(data) == LOG_PAGE:  # it may end within a character
            data = data[: data.rfind(b"\n") + 1] or data
        return JobLog(
            offset=offset, next_offset=offset + len(data), text=data.decode(errors="replace")
        )

    def _watch(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Poll the jobs until `is_over`; less often while polls fail."""
        wait_s = _POLL_S
        while not self._stopped.is_set() and not is_over():
            try:
                self._poll()
                wait_s = _POLL_S
            except Exception as error:
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                structlog.get_logger().error(
                    "jobs cannot be watched", again_in_s=wait_s, exc_info=error
                )
            self._wake.wait(wait_s)
            self._wake.clear()

    def _poll(self) -> None:
        """End cancelled and dead jobs, and start queued ones."""
        for job in self.store.active():
            if job.state == "queued" and self._settings.jobs == "elsewhere":
                continue
            folders = JobFolders(self._state, job.id)
            with folders.locked() as lock:  # no other process may start or end it now
                if lock is None:  # its process is running
                    if job.cancel_requested:  # it cannot commit after that
                        _kill(folders)
                elif job.state == "queued":
                    self._begin(job, folders, lock)
                else:
                    _kill(folders)  # remaining subprocesses of its dead process
                    self.store.fail(job.id, _reason_of_death(self.store.get(job.id)))
                    folders.drop_images()

    def _begin(self, job: Job, folders: JobFolders, lock: int) -> None:
        """Start the process of a job if it may run now; if that fails, the job fails."""
        if not self.store.begin(job.id):
            return
        try:
            plan = self._plan(job)
            folders.plan.write_text(plan.model_dump_json(indent=2), encoding="utf-8")
            self._spawn(job.id, folders, lock)
        except Exception as error:
            structlog.get_logger().error("a job was not started", job=job.id, exc_info=error)
            self.store.fail(job.id, reason_of(error))

    def _plan(self, job: Job) -> Plan:
        """The plan of a job. It reads the gallery, whose disk may hang, and this thread must not.

        Raises: DeadlineExceededError, what `plan_of` raises.
        """
        limit_s = self._settings.request_timeout_ms / 1e3
        params = params_of(job.kind, job.params)
        planning = begin_in_thread(lambda: plan_of(params, job.gallery, self._settings))
        done, _ = wait([planning], limit_s)
        if not done:
            cure = "Check its disk, then start the job again."
            raise too_late(limit_s, f"Reading gallery {job.gallery!r}", cure)
        return planning.result()

    def _spawn(self, job_id: str, folders: JobFolders, lock: int) -> None:
        # The plan contains all settings that the job needs. Our secrets must not reach it.
        inherited = child_environment()
        environment = {k: v for k, v in inherited.items() if not k.startswith(_SETTINGS)}
        environment |= {_MARK: job_id, "PYTHONUNBUFFERED": "1"}
        with folders.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "kinlens.service.jobs", str(self._state), job_id],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
                env=environment,
            )

        # After its end the next job may be able to start.
        begin_in_thread(process.wait).add_done_callback(lambda _: self._wake.set())


def _kill(folders: JobFolders) -> None:
    """Kill every process of a job."""
    mark = f"{_MARK}={folders.path.name}".encode()
    for folder in _PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process of another user, or one that has ended
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.killpg(os.getpgid(int(folder.name)), signal.SIGKILL)


def _reason_of_death(job: Job) -> str:
    """The error of a job whose process ended without a result."""
    state = "The gallery was not changed."
    if job.committed:
        state = f"The bundle_id in GET /galleries/{job.gallery} shows whether the gallery changed."
    if job.kind == "sync":
        state = "Changes made before that are kept."
    cure = "Start the job again."
    if job.kind in RESUMABLE:
        cure = f"Resume it with POST /jobs/{job.id}/resume; finished epochs and images are kept."
    return (
        "Its process ended without a result: it was killed, the machine went down, or the memory "
        f"was used up. {state} {cure}"
    )


def tidy(settings: Settings, store: JobStore, now: datetime | None = None) -> None:
    """Remove old files of jobs from the state folder of the settings. Kept are:

    - runs of trainings, for seven days after the end of the job,
    - of each gallery, the newest candidate of a finished job and the newest one of an interrupted
      job, for seven days,
    - jobs, for 30 days after their end, and the newest 200 jobs,
    - bundles, for 30 days after their last use,
    - everything of a gallery that has a queued or running job.

    Raises: StateError, KinlensError, OSError.
    """
    state = settings.require_state("The table of jobs")
    now = now or datetime.now(UTC)
    jobs = store.newest(limit=sys.maxsize)
    busy = {job.gallery for job in jobs if job.is_active}
    newer: set[tuple[str, bool]] = set()
    for number, job in enumerate(jobs):
        if job.gallery in busy:
            continue
        folders = JobFolders(state, job.id)
        age = now - datetime.fromisoformat(job.ended_at or job.created_at)
        if age > _RESULTS_KEPT:
            shutil.rmtree(folders.run, ignore_errors=True)
        if folders.candidate.is_dir():
            group = (job.gallery, job.state == "succeeded")
            if age > _RESULTS_KEPT or group in newer:
                shutil.rmtree(folders.candidate, ignore_errors=True)
            newer.add(group)
        if age > KEPT and number >= KEPT_JOBS:
            shutil.rmtree(folders.path, ignore_errors=True)
            store.forget(job.id)
    if not busy:
        _drop_bundles(state, settings, now)


def _drop_bundles(state: Path, settings: Settings, now: datetime) -> None:
    """Remove unused bundles. While a gallery is on Milvus or cannot be read, none is removed.

    The change time (ctime) of a folder records the last use of its bundle: unlike the modification
    time, it cannot be copied from elsewhere.
    """
    locations = Locations(settings).list_galleries()
    paths = [location.path for location in locations if location.path is not None]
    if len(paths) < len(locations):
        return
    try:
        used = {current_manifest(path).bundle_id for path in [*paths, *state.glob("candidates/*")]}
    except KinlensError:
        return
    used |= known_bundles(None, settings.bundle).keys()
    for folder, manifest in list_bundles(state, None):
        bundle_id = vectors_id(manifest)
        if bundle_id in used:
            os.utime(folder)
        elif bundle_id and now.timestamp() - folder.stat().st_ctime > KEPT.total_seconds():
            discard(folder)
