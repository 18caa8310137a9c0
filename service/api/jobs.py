"""Jobs over HTTP: start, describe, read the log, cancel."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import ConfigDict, Field

from kinlens.embedder import errors
from kinlens.models import JobLog, JobModel, JobOptions, Jobs, JobState
from kinlens.service.access.audit import note
from kinlens.service.access.links import public_path
from kinlens.service.api.galleries import STATE_FAILURES, Service
from kinlens.service.http.openapi import problems
from kinlens.service.http.rules import Route, rule
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

T = TypeVar("T")
_UNKNOWN = errors.JobNotFoundError
_CHANGES = (
    *STATE_FAILURES,
    errors.GalleryNotFoundError,
    errors.GalleryConflictError,
    errors.GalleryError,
    errors.JobConflictError,
)
_LOOK: dict[str, Any] = {"responses": problems(*STATE_FAILURES, _UNKNOWN)}
_START: dict[str, Any] = {"response_model": JobModel, "status_code": 202}
_CHANGE = _START | {"responses": problems(*_CHANGES, _UNKNOWN)}
_START |= {"responses": problems(*_CHANGES)}

JobId = Annotated[str, Path(max_length=64, description="The id of a job.")]
GalleryName = Annotated[str, Path(max_length=200, description="The name of a gallery.")]


class _Caller:
    """Calls the job manager for one request, in a thread of the state folder."""

    def __init__(self, request: Request, response: Response, runtime: Service) -> None:
        self.by = str(getattr(request.state, "principal", "anonymous"))
        self._request, self._response, self._runtime = request, response, runtime

    async def read(self, work: Callable[[JobManager], T], subject: str = "The table of jobs") -> T:
        """Raises: StateMissingError, DeadlineExceededError, OverloadedError; what `work` raises."""
        return await self._runtime.in_state(subject, self._runtime.jobs, work)

    async def change(
        self, work: Callable[[JobManager], Job], subject: str = "The table of jobs"
    ) -> Job:
        """Like `read`, and add the job to the audit log and its address to the answer."""
        job = await self.read(work, subject)
        note(self._request.scope["state"], gallery=job.gallery, target=job.id)
        self._response.headers["Location"] = public_path(f"/jobs/{job.id}")
        return job


async def _caller_of(request: Request, response: Response, runtime: Service) -> _Caller:
    return _Caller(request, response, runtime)


Caller = Annotated[_Caller, Depends(_caller_of)]

router = APIRouter(route_class=Route, tags=["jobs"])


class SwapRequest(Params):
    """The gallery whose state becomes the next generation of this one."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"with": "shop-new"}]})

    other: Annotated[str, Field(alias="with", pattern=NAME)]


class TrainRequest(TrainParams):
    """A training job and the gallery that is rebuilt with its model."""

    gallery: Annotated[str, Field(pattern=NAME)]


@router.post("/jobs/train", **_START, summary="Train a model")
@rule("admin", "service")
async def train(caller: Caller, body: TrainRequest) -> Job:
    """Train, export, rebuild the gallery next to the old one, compare, and swap if it passes."""
    params = TrainParams.model_validate(body.model_dump(exclude={"gallery"}))
    return await _start(caller, body.gallery, params)


@router.post("/galleries/{name}/rebuild", **_START, summary="Change the model")
@rule("admin", "service")
async def rebuild(caller: Caller, name: GalleryName, body: RebuildParams) -> Job:
    """Rebuild the gallery with another bundle, compare, and swap if it passes."""
    return await _start(caller, name, body)


@router.post("/galleries/{name}/swap", **_START, summary="Swap in a gallery")
@rule("admin", "galleries")
async def swap(caller: Caller, name: GalleryName, body: SwapRequest) -> Job:
    """The state of another gallery becomes the next generation of this one."""
    return await _start(caller, name, SwapParams(other=body.other))


@router.post("/galleries/{name}/sync", **_START, summary="Sync with a folder")
@rule("admin", "galleries")
async def sync(
    caller: Caller,
    name: GalleryName,
    body: SyncParams = SyncParams(),  # noqa: B008 (never changed)
) -> Job:
    """Make the gallery equal to its image root, or to a folder or list of the settings.

    Items are added, updated, renamed and removed. If cancelled, the changes made so far stay.
    """
    return await _start(caller, name, body)


@router.post("/galleries/{name}/compact", **_START, summary="Compact the index")
@rule("admin", "galleries")
async def compact(caller: Caller, name: GalleryName) -> Job:
    """Rebuild the index without removed items."""
    return await _start(caller, name, CompactParams())


@router.get("/jobs", responses=problems(*STATE_FAILURES), summary="List jobs")
@rule("admin", "galleries")
async def jobs(
    caller: Caller, state: JobState | None = None, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> Jobs:
    """The newest jobs, newest first."""
    return Jobs(jobs=[*await caller.read(lambda manager: manager.store.newest(state, limit))])


@router.get("/jobs/options", responses=problems(*STATE_FAILURES), summary="Options for jobs")
@rule("admin", "galleries")
async def options(caller: Caller) -> JobOptions:
    """The names of the training jobs, data sets, weights and bundles of this service."""
    return await caller.read(JobManager.options, "The folder of bundles")


@router.get("/jobs/{job_id}", **_LOOK, response_model=JobModel, summary="Describe a job")
@rule("admin", "galleries")
async def job(caller: Caller, job_id: JobId) -> Job:
    """The progress of a job and its report."""
    return await caller.read(lambda manager: manager.store.get(job_id))


@router.get("/jobs/{job_id}/log", **_LOOK, summary="Read the log of a job")
@rule("admin", "galleries")
async def log(
    caller: Caller, job_id: JobId, offset: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0
) -> JobLog:
    """Up to 64 KiB of the log of a job, from byte `offset` on."""
    return await caller.read(
        lambda manager: manager.log(job_id, offset), f"The log of job {job_id}"
    )


@router.post("/jobs/{job_id}/cancel", **_CHANGE, summary="Cancel a job")
@rule("admin", "galleries")
async def cancel(caller: Caller, job_id: JobId) -> Job:
    """Cancel a job and stop all its processes. The gallery does not change, but for a sync."""
    return await caller.change(lambda manager: manager.cancel(job_id))


@router.post("/jobs/{job_id}/swap", name="swap", **_CHANGE, summary="Swap in a candidate")
@rule("admin", "service")
async def swap_candidate(caller: Caller, job_id: JobId) -> Job:
    """Swap in the gallery that a job has built, even if it did not pass its gate."""
    return await caller.change(
        lambda manager: manager.swap(job_id, caller.by), f"The gallery of job {job_id}"
    )


@router.post("/jobs/{job_id}/resume", **_CHANGE, summary="Resume a job")
@rule("admin", "service")
async def resume(caller: Caller, job_id: JobId) -> Job:
    """Continue a sync, rebuild or training job that failed or was cancelled, from its last step."""
    return await caller.change(
        lambda manager: manager.resume(job_id), f"The gallery of job {job_id}"
    )


async def _start(caller: _Caller, gallery: str, params: Params) -> Job:
    work = partial(JobManager.start, gallery=gallery, params=params, by=caller.by)
    return await caller.change(work, f"Gallery {gallery}")
