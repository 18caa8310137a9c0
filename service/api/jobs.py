"""Jobs over HTTP: start, describe, read the log, cancel.

These routes read and write files, so they are plain functions that FastAPI runs in threads.
"""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import ConfigDict, Field

from kinlens.embedder import errors
from kinlens.models import JobLog, JobModel, JobOptions, Jobs, JobState
from kinlens.service.access.audit import note
from kinlens.service.access.prefix import public_path
from kinlens.service.http.openapi import problems
from kinlens.service.jobs.manager import JobManager
from kinlens.service.jobs.params import (
    NAME,
    CompactParams,
    Params,
    RebuildParams,
    SwapParams,
    SyncParams,
    TrainParams,
)
from kinlens.service.jobs.store import Job
from kinlens.service.problems import BAD_REQUEST, BODY_TOO_LARGE, BODY_TOO_SLOW, PROBLEM_TYPES

_STATE = (
    PROBLEM_TYPES[errors.StateMissingError],
    PROBLEM_TYPES[errors.StateError],
    PROBLEM_TYPES[errors.InvalidParameterError],
)
_UNKNOWN = PROBLEM_TYPES[errors.JobNotFoundError]
_CHANGES = (
    *_STATE,
    PROBLEM_TYPES[errors.GalleryNotFoundError],
    PROBLEM_TYPES[errors.GalleryConflictError],
    PROBLEM_TYPES[errors.GalleryError],
    PROBLEM_TYPES[errors.JobConflictError],
    BAD_REQUEST,
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
)
_LOOK: dict[str, Any] = {"responses": problems(*_STATE, _UNKNOWN)}
_START: dict[str, Any] = {"response_model": JobModel, "status_code": 202}
_CHANGE = _START | {"responses": problems(*_CHANGES, _UNKNOWN)}
_START |= {"responses": problems(*_CHANGES)}

JobId = Annotated[str, Path(max_length=64, description="The id of a job.")]
GalleryName = Annotated[str, Path(max_length=200, description="The name of a gallery.")]


async def _manager_of(request: Request) -> JobManager:
    manager: JobManager | None = request.app.state.runtime.jobs
    if manager is None:
        raise errors.StateMissingError(
            "The service has no state folder for jobs. Start it with --state DIR."
        )
    return manager


async def _accept_of(request: Request, response: Response) -> Callable[[Job], Job]:
    def accept(job: Job) -> Job:
        note(request.scope["state"], gallery=job.gallery, target=job.id)
        response.headers["Location"] = public_path(f"/jobs/{job.id}")
        return job

    return accept


async def _principal_of(request: Request) -> str:
    return str(getattr(request.state, "principal", "anonymous"))


Manager = Annotated[JobManager, Depends(_manager_of)]
Principal = Annotated[str, Depends(_principal_of)]
Accept = Annotated[Callable[[Job], Job], Depends(_accept_of)]
"""Adds the job to the audit log and sets the Location header."""

router = APIRouter(tags=["jobs"])


class SwapRequest(Params):
    """The gallery whose state becomes the next generation of this one."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"with": "shop-new"}]})

    other: Annotated[str, Field(alias="with", pattern=NAME)]


class TrainRequest(TrainParams):
    """A training job and the gallery that is rebuilt with its model."""

    gallery: Annotated[str, Field(pattern=NAME)]


@router.post("/jobs/train", **_START, summary="Train a model")
def train(manager: Manager, body: TrainRequest, by: Principal, accept: Accept) -> Job:
    """Train, export, rebuild the gallery next to the old one, compare, and swap if it passes."""
    params = TrainParams.model_validate(body.model_dump(exclude={"gallery"}))
    return accept(manager.start(body.gallery, params, by))


@router.post("/galleries/{name}/rebuild", **_START, summary="Change the model")
def rebuild(
    manager: Manager, name: GalleryName, body: RebuildParams, by: Principal, accept: Accept
) -> Job:
    """Rebuild the gallery with another bundle, compare, and swap if it passes."""
    return accept(manager.start(name, body, by))


@router.post("/galleries/{name}/swap", **_START, summary="Swap in a gallery")
def swap(
    manager: Manager, name: GalleryName, body: SwapRequest, by: Principal, accept: Accept
) -> Job:
    """The state of another gallery becomes the next generation of this one."""
    return accept(manager.start(name, SwapParams(other=body.other), by))


@router.post("/galleries/{name}/sync", **_START, summary="Sync with a folder")
def sync(
    manager: Manager,
    name: GalleryName,
    by: Principal,
    accept: Accept,
    body: SyncParams = SyncParams(),  # noqa: B008 (never changed)
) -> Job:
    """Make the gallery equal to its image root, or to a folder or list of the settings.

    Items are added, updated, renamed and removed. If cancelled, the changes made so far stay.
    """
    return accept(manager.start(name, body, by))


@router.post("/galleries/{name}/compact", **_START, summary="Compact the index")
def compact(manager: Manager, name: GalleryName, by: Principal, accept: Accept) -> Job:
    """Rebuild the index without removed items."""
    return accept(manager.start(name, CompactParams(), by))


@router.get("/jobs", responses=problems(*_STATE), summary="List jobs")
def jobs(
    manager: Manager,
    state: JobState | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Jobs:
    """The newest jobs, newest first."""
    return Jobs(jobs=[*manager.store.newest(state, limit)])


@router.get("/jobs/options", responses=problems(*_STATE), summary="Options for jobs")
def options(manager: Manager) -> JobOptions:
    """The names of the training jobs, data sets, weights and bundles of this service."""
    return manager.options()


@router.get("/jobs/{job_id}", **_LOOK, response_model=JobModel, summary="Describe a job")
def job(manager: Manager, job_id: JobId) -> Job:
    """The progress of a job and its report."""
    return manager.store.get(job_id)


@router.get("/jobs/{job_id}/log", **_LOOK, summary="Read the log of a job")
def log(
    manager: Manager, job_id: JobId, offset: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0
) -> JobLog:
    """Up to 64 KiB of the log of a job, from byte `offset` on."""
    return manager.log(job_id, offset)


@router.post("/jobs/{job_id}/cancel", **_CHANGE, summary="Cancel a job")
def cancel(manager: Manager, job_id: JobId, accept: Accept) -> Job:
    """Cancel a job and stop all its processes. The gallery does not change, but for a sync."""
    return accept(manager.cancel(job_id))


@router.post("/jobs/{job_id}/swap", name="swap", **_CHANGE, summary="Swap in a candidate")
def swap_candidate(manager: Manager, job_id: JobId, by: Principal, accept: Accept) -> Job:
    """Swap in the gallery that a job has built, even if it did not pass its gate."""
    return accept(manager.swap(job_id, by))


@router.post("/jobs/{job_id}/resume", **_CHANGE, summary="Resume a job")
def resume(manager: Manager, job_id: JobId, accept: Accept) -> Job:
    """Continue a sync, rebuild or training job that failed or was cancelled, from its last step."""
    return accept(manager.resume(job_id))
