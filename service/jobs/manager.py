"""The queue of jobs: started in processes of their own, which live on when this one stops.

start, resume, cancel ──► the table ──► a thread that watches it ──► python -m kinlens.service.jobs
"""

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
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog

from kinlens.embedder.durable import discard, is_stage
from kinlens.embedder.errors import (
    JobConflictError,
    JobNotFoundError,
    KinlensError,
    StateMissingError,
)
from kinlens.indexer.gallery import current_manifest
from kinlens.models import JobLog, JobOptions
from kinlens.service.galleries.locations import Locations, id_of
from kinlens.service.jobs.params import Params, SwapParams, options_of, params_of, plan_of
from kinlens.service.jobs.store import HEAVY, Job, JobFolders, JobStore, reason_of
from kinlens.service.settings import Settings

LOG_PAGE = 64 * 1024
"""Bytes of a log in one answer."""

KEPT_JOBS = 200
"""The newest jobs, which are kept however old they are."""

KEPT = timedelta(days=30)
"""Jobs that ended since then are kept, and bundles that were used since then."""

_RESULTS_KEPT = timedelta(days=7)
_PROCESSES = Path("/proc")
_MARK = "KINLENS_JOB_ID"  # the variable by which all processes of a job are known
_SETTINGS = "KINLENS_"
_LOOK_S = 0.5  # other processes start and cancel jobs, too
_LONGEST_WAIT_S = 60.0  # between two looks, where they fail
_TIDY_S = 500.0
_CLOSE_S = 3.0


class JobManager:
    """The jobs of the state folder of the settings; `store` is their table.

    Thread safe; every call may block. Jobs are begun and ended by a thread that `open` starts; with
    the setting jobs = "elsewhere" it ends those that died, and another process begins them.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises: StateMissingError without a state folder; StateError if it cannot be used."""
        if settings.state is None:
            raise StateMissingError(
                "There is no folder to keep jobs in. Name it with --state or KINLENS_STATE."
            )
        self._state = settings.state.absolute()
        self._settings = settings
        self.store = JobStore(self._state / "service.sqlite")
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="jobs", daemon=True)
        self._tidying = threading.Thread()

    def open(self) -> None:
        """Watch the jobs, and tidy up, until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching, in a bounded time; jobs that run go on in their own processes."""
        self._stopped.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def work(self, once: bool = False) -> None:
        """Watch the jobs in this thread; with `once`, until none is left."""
        self._watch(lambda: once and not self.store.active())

    def options(self) -> JobOptions:
        """What jobs can be given by name."""
        return options_of(self._settings)

    def start(self, gallery: str, params: Params, by: str) -> Job:
        """A new job on a gallery; it waits until its turn comes.

        Raises: InvalidParameterError, GalleryNotFoundError, GalleryConflictError; JobConflictError
            if another job is in its way, or nothing can be trained here.
        """
        plan_of(params, gallery, self._settings)
        stored = params.model_dump(mode="json", by_alias=True, exclude_none=True)
        job = self.store.create(params.kind, gallery, stored, by)
        self._wake.set()
        return job

    def swap(self, job_id: str, by: str) -> Job:
        """Put the candidate of a job in place, whatever its gate said.

        Raises: JobNotFoundError; JobConflictError if there is no candidate to put in place.
        """
        job = self.store.get(job_id)
        if job.state != "succeeded" or not JobFolders(self._state, job.id).candidate.is_dir():
            raise JobConflictError(
                f"Job {job.id} ({job.kind}, {job.state}) has no gallery that waits to be put in "
                "place. Start another rebuild."
            )
        return self.start(job.gallery, SwapParams(job=job.id), by)

    def resume(self, job_id: str) -> Job:
        """Let a rebuild or training that failed or was cancelled go on with what it has.

        Raises: JobNotFoundError; JobConflictError for other kinds, or in another state; as `start`.
        """
        job = self.store.get(job_id)
        plan_of(params_of(job.kind, job.params), job.gallery, self._settings)
        job = self.store.renew(job.id)
        self._wake.set()
        return job

    def cancel(self, job_id: str) -> Job:
        """End a job and all its processes; the gallery stays as it was.

        Raises: JobNotFoundError; JobConflictError if it has ended, or is changing the gallery now.
        """
        self.store.get(job_id)  # unknown to a caller whose key is bound to other galleries
        is_cancelled = self.store.cancel(job_id)
        self._wake.set()
        job = self.store.get(job_id)
        if not is_cancelled:
            state = "is putting its result in place" if job.is_active else f"has {job.state}"
            raise JobConflictError(
                f"Job {job.id} {state}; only one that waits or runs can be cancelled."
            )
        return job

    def log(self, job_id: str, offset: int = 0) -> JobLog:
        """At most `LOG_PAGE` bytes of what a job has written. Raises: JobNotFoundError."""
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
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data, final=len(data) < LOG_PAGE and not job.is_active)
        taken = len(data) - len(decoder.getstate()[0])
        return JobLog(offset=offset, next_offset=offset + taken, text=text)

    def _watch(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Look at the jobs again and again; less often while that fails."""
        wait_s = _LOOK_S
        tidy_at = -math.inf
        while not self._stopped.is_set() and not is_over():
            try:
                self._look()
                if time.monotonic() >= tidy_at:
                    tidy_at = time.monotonic() + _TIDY_S
                    self._tidy()
                wait_s = _LOOK_S
            except Exception as error:
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                structlog.get_logger().error(
                    "jobs cannot be looked after", again_in_s=wait_s, exc_info=error
                )
            self._wake.wait(wait_s)
            self._wake.clear()

    def _tidy(self) -> None:
        """In a thread of its own: to remove a large gallery takes long, and jobs go on."""

        def work() -> None:
            try:
                tidy(self._settings, self.store)
            except Exception as error:
                structlog.get_logger().error("jobs cannot be tidied up", exc_info=error)

        if not self._tidying.is_alive():
            self._tidying = threading.Thread(target=work, name="tidy jobs", daemon=True)
            self._tidying.start()

    def _look(self) -> None:
        """End what is to end or has died, and begin what waits."""
        for job in self.store.active():
            if job.state == "queued" and self._settings.jobs == "elsewhere":
                continue
            folders = JobFolders(self._state, job.id)
            with folders.locked() as lock:  # nobody else begins or ends it meanwhile
                if lock is None:
                    if job.cancel_requested:  # so it will not commit any more
                        _kill(folders)
                elif job.state == "queued":
                    self._begin(job, folders, lock)
                else:
                    _kill(folders)  # what its process has left
                    self.store.fail(job.id, _reason_of_death(self.store.get(job.id)))
                    folders.drop_images()

    def _begin(self, job: Job, folders: JobFolders, lock: int) -> None:
        """Start the process of a job if it is its turn; if that fails, so has the job."""
        if not self.store.begin(job.id):
            return
        try:
            plan = plan_of(params_of(job.kind, job.params), job.gallery, self._settings)
            folders.plan.write_text(plan.model_dump_json(indent=2), encoding="utf-8")
            self._spawn(job.id, folders, lock)
        except Exception as error:
            structlog.get_logger().error("a job was not started", job=job.id, exc_info=error)
            self.store.fail(job.id, reason_of(error))

    def _spawn(self, job_id: str, folders: JobFolders, lock: int) -> None:
        # What it needs of our settings is in the plan, and our secrets are not.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_SETTINGS)}
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
        folders.group.write_text(str(process.pid))

        def wait() -> None:
            process.wait()
            self._wake.set()  # the next one's turn may have come

        threading.Thread(target=wait, name="job", daemon=True).start()


def _kill(folders: JobFolders) -> None:
    """End every process of a job at once."""
    mark = f"{_MARK}={folders.path.name}".encode()
    if not _PROCESSES.joinpath("self/environ").exists():  # macOS: of the group that it began with
        with contextlib.suppress(OSError, ValueError):
            os.killpg(int(folders.group.read_text()), signal.SIGKILL)
    for folder in _PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or gone
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.killpg(os.getpgid(int(folder.name)), signal.SIGKILL)


def _reason_of_death(job: Job) -> str:
    found = "The gallery is as it was."
    if job.committed:
        found = f"GET /galleries/{job.gallery} tells by the bundle_id whether it changed."
    cure = "Start the job again."
    if job.kind in HEAVY:
        cure = f"POST /jobs/{job.id}/resume goes on; epochs and pictures that are done are kept."
    return (
        "Its process ended without a result: it was killed, the machine went down, or the memory "
        f"was used up. {found} {cure}"
    )


def tidy(settings: Settings, store: JobStore, now: datetime | None = None) -> None:
    """Remove what nobody will ask for by `now` from the state folder of the settings.

    Runs of trainings stay for seven days, and so does, of each gallery, the newest candidate that
    waits, and the newest of those that were stopped. Jobs stay for 30 days, and the newest 200
    longer. Bundles stay for 30 days after somebody has used them. While a gallery has a job that
    waits or runs, all of its own stay.

    Raises: StateError, KinlensError, OSError.
    """
    assert settings.state is not None
    now = now or datetime.now(UTC)
    jobs = store.newest(limit=sys.maxsize)
    busy = {job.gallery for job in jobs if job.is_active}
    newer: set[tuple[str, bool]] = set()
    for number, job in enumerate(jobs):
        if job.gallery in busy:
            continue
        folders = JobFolders(settings.state, job.id)
        age = now - datetime.fromisoformat(job.ended_at or job.created_at)
        if age > _RESULTS_KEPT:
            shutil.rmtree(folders.run, ignore_errors=True)
        if folders.candidate.is_dir():
            sort = (job.gallery, job.state == "succeeded")
            if age > _RESULTS_KEPT or sort in newer:
                shutil.rmtree(folders.candidate, ignore_errors=True)
            newer.add(sort)
        if age > KEPT and number >= KEPT_JOBS:
            shutil.rmtree(folders.path, ignore_errors=True)
            store.forget(job.id)
    if not busy:
        _drop_bundles(settings.state, settings, now)


def _drop_bundles(state: Path, settings: Settings, now: datetime) -> None:
    """When one was last seen in use is when its folder was last changed, which no copy takes over
    from elsewhere. While a gallery cannot be read, or lies on Milvus, all stay.
    """
    places = Locations(settings).list_galleries()
    paths = [place.path for place in places if place.path is not None]
    if len(paths) < len(places):
        return
    try:
        used = {current_manifest(path).bundle_id for path in [*paths, *state.glob("candidates/*")]}
    except KinlensError:
        return
    if settings.bundle is not None and (served := id_of(settings.bundle)) is not None:
        used.add(served)
    for folder in state.glob("bundles/*"):
        bundle_id = id_of(folder)
        is_old = now.timestamp() - folder.stat().st_ctime > KEPT.total_seconds()
        if bundle_id in used:
            os.utime(folder)
        elif bundle_id is not None and is_old and not is_stage(folder):
            discard(folder)
