"""What nobody will ask for goes: candidates, runs, jobs and bundles of long ago."""

import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

from embedder.durable import discard, is_stage
from embedder.errors import KinlensError
from indexer.gallery import current_manifest
from service.galleries.locations import Locations, id_of
from service.jobs.store import HEAVY, Job, JobFolders, JobStore
from service.settings import Settings

KEPT_JOBS = 200
"""The newest jobs, which are kept however old they are."""

KEPT = timedelta(days=30)
"""Jobs that ended since then are kept, and bundles that were used since then."""

_RESULTS_KEPT = timedelta(days=7)
_ALL = 10_000


def tidy(settings: Settings, store: JobStore, now: datetime | None = None) -> None:
    """Remove what is old by `now` from the state folder of the settings.

    Runs of trainings stay for seven days, and so does, of each gallery, the newest candidate that
    waits, and that of the newest rebuild or training if it was stopped. Jobs stay for 30 days, and
    the newest 200 longer. Bundles stay for 30 days after somebody has used them.

    Raises: StateError, KinlensError, OSError.
    """
    assert settings.state is not None
    now = now or datetime.now(UTC)
    jobs = store.newest(limit=_ALL)
    _drop_candidates(settings.state, jobs, now)
    for number, job in enumerate(jobs):
        folders = JobFolders(settings.state, job.id)
        if not job.is_active and _age(job, now) > _RESULTS_KEPT:
            shutil.rmtree(folders.run, ignore_errors=True)
        if not job.is_active and _age(job, now) > KEPT and number >= KEPT_JOBS:
            shutil.rmtree(folders.path, ignore_errors=True)
            store.forget(job.id)
    if not any(job.is_active for job in jobs):
        _drop_bundles(settings.state, settings, now)


def _drop_candidates(state: Path, jobs: list[Job], now: datetime) -> None:
    busy = {job.gallery for job in jobs if job.is_active}
    kept = set()
    waiting: set[str] = set()
    begun: set[str] = set()
    for job in jobs:  # newest first
        newer = waiting if job.state == "succeeded" else begun
        is_newest = job.gallery not in newer and _age(job, now) < _RESULTS_KEPT
        if is_newest or job.gallery in busy:
            kept.add(job.id)
        if job.kind in HEAVY:
            begun.add(job.gallery)
        if job.state == "succeeded" and JobFolders(state, job.id).candidate.is_dir():
            waiting.add(job.gallery)
    for folder in state.glob("candidates/*"):
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)


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


def _age(job: Job, now: datetime) -> timedelta:
    return now - datetime.fromisoformat(job.ended_at or job.created_at)
