"""The processes of jobs: started apart from the service, found dead, and ended."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import structlog

from embedder.errors import KinlensError
from service.jobs.attempts import Attempts
from service.jobs.folders import JobFolders
from service.jobs.plan import plan_of
from service.jobs.record import Job
from service.jobs.store import JobStore
from service.settings import Settings

MARK = "KINLENS_JOB_ID"
"""The environment variable by which the processes of a job are known."""

_SECRETS = "KINLENS_"
_GRACE_S = 3.0  # a job that is to end does so by itself within this time, or is killed
_KILLED = (
    "Its process ended without a result: it was killed, the machine went down, or the memory was "
    "used up. {state} {cure}"
)
_AS_BEFORE = "The gallery is as it was."
_MAYBE = (
    "It was about to put the new gallery in place; GET /galleries/{gallery} tells by the "
    "bundle_id whether it did."
)
_UNFORESEEN = (
    "The job could not be started: {}. The log of the process that takes jobs has the cause."
)
_AGAIN = "Start the job again."
_RESUME = "Go on with POST /jobs/{id}/resume; finished epochs are kept."


class Launcher:
    """Starts the jobs of a state folder that wait, and settles those that died."""

    def __init__(self, state: Path, settings: Settings, store: JobStore) -> None:
        self._state = state
        self._settings = settings
        self._store = store
        self._attempts = Attempts()
        self._cancelled_at: dict[str, float] = {}

    def tick(self) -> None:
        """Settle dead jobs, end those that are to end, start what waits.

        What goes wrong with one job is logged and concerns no other. Raises: StateError.
        """
        for job in self._store.active():
            if job.state == "running":
                self.settle(job)
            else:
                self._attempts.attempt(f"job {job.id}", functools.partial(self.start, job))

    def settle(self, job: Job) -> None:
        """A running job whose process is gone has failed; one that does not end is killed.

        Trouble is logged, and the job looked at again next time.
        """
        self._attempts.attempt(f"job {job.id}", functools.partial(self._settle, job))

    def _settle(self, job: Job) -> None:
        if JobFolders(self._state, job.id).is_alive():
            if job.cancel_requested and not job.committed:
                since = self._cancelled_at.setdefault(job.id, time.monotonic())
                late = time.monotonic() - since > _GRACE_S
                if late and not self._store.get(job.id).committed:
                    kill(job)
            return
        self._cancelled_at.pop(job.id, None)
        kill(job)
        job = self._store.get(job.id)
        if job.cancel_requested and not job.committed:
            has_died = self._store.finish(job.id, "cancelled")
        else:
            has_died = self._store.finish(job.id, "failed", _epitaph(job))
        if has_died:  # otherwise it ended well meanwhile, and may have a candidate
            JobFolders(self._state, job.id).drop_candidate()

    def start(self, job: Job) -> bool:
        """Start a job that waits in a process of its own; False if it is not its turn.

        Whatever keeps it from starting, it has failed then. Raises: StateError.
        """
        folders = JobFolders(self._state, job.id)
        lock = folders.take_lock()
        if lock is None:
            return False
        try:
            if not self._store.begin(job.id, os.getpid()):
                return False
            plan = plan_of(job, self._settings)
            folders.plan.write_text(plan.model_dump_json(indent=2), encoding="utf-8")
            self._store.started(job.id, self._spawn(folders, lock))
        except (KinlensError, OSError) as error:
            self._store.finish(job.id, "failed", str(error))
            return False
        except Exception as error:
            structlog.get_logger().error("a job was not started", job=job.id, exc_info=error)
            self._store.finish(job.id, "failed", _UNFORESEEN.format(type(error).__name__))
            return False
        finally:
            os.close(lock)
        return True

    def _spawn(self, folders: JobFolders, lock: int) -> int:
        # Its parameters stand in the plan, so that it needs none of our settings, or secrets.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_SECRETS)}
        environment |= {MARK: folders.job_id, "PYTHONUNBUFFERED": "1"}
        with folders.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "service.jobs", str(self._state), folders.job_id],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
                env=environment,
            )
        threading.Thread(target=process.wait, name="job", daemon=True).start()
        return process.pid


def kill(job: Job) -> None:
    """End every process of a job at once. Numbers that others have by now are left alone."""
    if job.pid is None:
        return
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == job.pid and _is_marked(folder, job.id):
                os.kill(pid, signal.SIGKILL)


def _is_marked(folder: Path, job_id: str) -> bool:
    return f"{MARK}={job_id}".encode() in (folder / "environ").read_bytes().split(b"\0")


def _epitaph(job: Job) -> str:
    state = _MAYBE.format(gallery=job.gallery) if job.committed else _AS_BEFORE
    cure = _RESUME.format(id=job.id) if job.kind == "train" else _AGAIN
    return _KILLED.format(state=state, cure=cure)
