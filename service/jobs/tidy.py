"""What nobody will ask for goes: candidates, runs, jobs and bundles of long ago."""

import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

from embedder.durable import discard, is_stage
from embedder.errors import JobNotFoundError, KinlensError
from indexer.gallery import current_manifest
from service.galleries.locations import Locations, id_of
from service.jobs.folders import JobFolders
from service.jobs.record import ACTIVE, Job
from service.jobs.store import JobStore
from service.settings import Settings

KEPT_JOBS = 200
"""The newest jobs, which are kept however old they are."""

KEPT = timedelta(days=30)
"""Jobs that ended since then are kept, and bundles that were used since then."""

_RESULTS_KEPT = timedelta(days=7)


def tidy(state: Path, store: JobStore) -> None:
    """Remove what is old from the state folder.

    Of candidates the newest of each gallery stays for seven days, and so do the runs of trainings.
    Jobs stay for 30 days, and the newest 200 longer. Raises: StateError, OSError.
    """
    _drop_old_candidates(state, store)
    _drop_old_runs(state, store)
    before = (datetime.now(UTC) - KEPT).isoformat(timespec="milliseconds")
    for job in store.ended_before(before, KEPT_JOBS):
        folders = JobFolders(state, job.id)
        folders.drop_candidate()
        shutil.rmtree(folders.run, ignore_errors=True)
        shutil.rmtree(folders.path, ignore_errors=True)
        store.forget(job.id)


def tidy_bundles(state: Path, settings: Settings, store: JobStore, now: float) -> None:
    """Remove the bundles of the state folder that nothing has used for 30 days before `now` (s).

    When one was last seen in use is when its folder was last changed, which no copy takes over from
    elsewhere. While a job waits or runs, or a gallery
    cannot be read, all stay. Raises: StateError, KinlensError, OSError.
    """
    root = state / "bundles"
    if not root.is_dir() or store.active():
        return
    used = _used_bundles(state, settings)
    if used is None:
        return
    for folder in root.iterdir():
        bundle_id = id_of(folder)
        is_old = now - folder.stat().st_ctime > KEPT.total_seconds()
        if bundle_id in used:
            os.utime(folder)
        elif bundle_id is not None and is_old and not is_stage(folder):
            discard(folder)


def _used_bundles(state: Path, settings: Settings) -> set[str | None] | None:
    """The ids of the bundles that are served or may be; None if that cannot be told."""
    paths = [place.path for place in Locations(settings).list_galleries()]
    candidates = state / "candidates"
    paths += candidates.iterdir() if candidates.is_dir() else ()
    used = set() if settings.bundle is None else {id_of(settings.bundle)}
    try:
        for path in paths:
            used.add(current_manifest(path).bundle_id)
    except KinlensError:
        return None
    return used


def _drop_old_candidates(state: Path, store: JobStore) -> None:
    root = state / "candidates"
    folders = list(root.iterdir()) if root.is_dir() else []
    busy = {job.gallery for job in store.active()}
    seen: set[str] = set()
    jobs = [job for job in store.newest(limit=10_000) if (root / job.id).is_dir()]
    for job in jobs:  # newest first
        keep = job.state in (*ACTIVE, "succeeded") and job.gallery not in seen
        if keep and _is_young(job):
            seen.add(job.gallery)
        elif job.gallery not in busy:
            JobFolders(state, job.id).drop_candidate()
    for folder in folders:
        if folder.name not in {job.id for job in jobs}:
            JobFolders(state, folder.name).drop_candidate()


def _drop_old_runs(state: Path, store: JobStore) -> None:
    root = state / "runs"
    for folder in root.iterdir() if root.is_dir() else ():
        try:
            job = store.get(folder.name)
        except JobNotFoundError:
            continue  # not one of ours
        if not job.is_active and not _is_young(job):
            shutil.rmtree(folder, ignore_errors=True)


def _is_young(job: Job) -> bool:
    ended = job.ended_at or job.created_at
    return datetime.now(UTC) - datetime.fromisoformat(ended) < _RESULTS_KEPT
