"""The process of one job: do the work, say how it ended, end at once when that is asked."""

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from embedder.errors import KinlensError
from service.jobs.context import Context
from service.jobs.folders import JobFolders
from service.jobs.params import checked
from service.jobs.plan import Plan
from service.jobs.record import Kind
from service.jobs.replace import rebuild_gallery
from service.jobs.simple import compact_gallery, remove_items, swap_gallery
from service.jobs.steps import JobCancelledError, Steps
from service.jobs.store import JobStore
from service.jobs.train import train_gallery

WORK: Mapping[Kind, Callable[[Context], None]] = {
    "compact": compact_gallery,
    "swap": swap_gallery,
    "rebuild": rebuild_gallery,
    "train": train_gallery,
    "delete_where": remove_items,
}

_LOOK_S = 0.2
_NICE = 10  # searches come first


def run_job(state: Path, job_id: str) -> int:
    """Do the work of a job that was just started; the exit status of its process.

    Raises: StateError, JobNotFoundError.
    """
    os.nice(_NICE)
    store = JobStore(state / "service.sqlite")
    folders = JobFolders(state, job_id)
    job = store.get(job_id)
    plan = Plan.model_validate_json(folders.plan.read_bytes())
    with _ends_when_cancelled(store, folders):
        error = _attempt(
            Context(job, checked(job.kind, job.params), plan, folders, store, Steps(store, job_id))
        )
    if error is None:
        store.finish(job_id, "succeeded")
        return 0
    folders.drop_candidate()
    print(error, flush=True)  # noqa: T201 (into the log of the job)
    is_cancelled = store.get(job_id).cancel_requested
    store.finish(job_id, "cancelled" if is_cancelled else "failed", None if is_cancelled else error)
    return 1


def _attempt(context: Context) -> str | None:
    """Do the work; why it failed, or None."""
    try:
        WORK[context.job.kind](context)
    except JobCancelledError as error:
        return str(error)
    except (KinlensError, OSError) as error:
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return f"The job failed with {type(error).__name__}. Its log has the cause."
    return None


@contextlib.contextmanager
def _ends_when_cancelled(store: JobStore, folders: JobFolders) -> Iterator[None]:
    """While the block runs, look whether the job is to end, and then end all its processes."""
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.wait(_LOOK_S):
            with contextlib.suppress(KinlensError):
                job = store.get(folders.job_id)
                if job.cancel_requested and not job.committed:
                    _end(store, folders)

    thread = threading.Thread(target=watch, name="cancel", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _end(store: JobStore, folders: JobFolders) -> None:
    if not store.finish(folders.job_id, "cancelled"):
        return
    folders.drop_candidate()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
