"""python -m kinlens.service.jobs STATE ID: the process of one job. `JobManager` starts it."""

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from kinlens.models import JobKind
from kinlens.service.jobs.params import Plan, params_of
from kinlens.service.jobs.rebuild import (
    Context,
    compact_gallery,
    rebuild_gallery,
    swap_gallery,
    sync_gallery,
)
from kinlens.service.jobs.store import JOBS_FILE, JobFolders, JobStore, reason_of
from kinlens.service.jobs.train import train_gallery

WORK: Mapping[JobKind, Callable[[Context], None]] = {
    "compact": compact_gallery,
    "swap": swap_gallery,
    "sync": sync_gallery,
    "rebuild": rebuild_gallery,
    "train": train_gallery,
}

_NICE = 10  # searches have priority


def run_job(state: Path, job_id: str) -> int:
    """Do the work of a job that was just started, and record its result. Returns the exit status.

    Raises: StateError, JobNotFoundError.
    """
    os.nice(_NICE)
    store = JobStore(state / JOBS_FILE)
    folders = JobFolders(state, job_id)
    job = store.get(job_id)
    plan = Plan.model_validate_json(folders.plan.read_bytes())
    try:
        WORK[job.kind](Context(job, params_of(job.kind, job.params), plan, folders, store))
    except Exception as error:
        traceback.print_exc()
        store.fail(job_id, reason_of(error))
        return 1
    store.succeed(job_id)
    return 0


if __name__ == "__main__":
    sys.exit(run_job(Path(sys.argv[1]), sys.argv[2]))
