"""Long work over HTTP: start it, look at it, read its log, end it."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response

from embedder import errors
from service.api.job_models import JobLog, JobModel, Jobs, SwapRequest, TrainRequest
from service.http.openapi import problems
from service.jobs.manager import JobManager
from service.jobs.params import RebuildParams
from service.jobs.store import Job, Kind, State
from service.problems import BAD_REQUEST, BODY_TOO_LARGE, BODY_TOO_SLOW, KINDS
from service.runtime import Runtime

_MAX_LISTED = 1000
_MAX_OFFSET = 2**63 - 1
_STATE = (KINDS[errors.StateMissingError], KINDS[errors.StateError])
_UNKNOWN = KINDS[errors.JobNotFoundError]
_CONFLICT = KINDS[errors.JobConflictError]
_INVALID = KINDS[errors.InvalidParameterError]
_BODY = (BAD_REQUEST, BODY_TOO_LARGE, BODY_TOO_SLOW)
_GALLERY = (
    KINDS[errors.GalleryNotFoundError],
    KINDS[errors.GalleryConflictError],
    KINDS[errors.GalleryError],
)
_START = problems(*_GALLERY, _CONFLICT, *_STATE, _INVALID, *_BODY)
_CHANGE = problems(_UNKNOWN, *_GALLERY, _CONFLICT, *_STATE, _INVALID, *_BODY)
_LOOK = problems(_UNKNOWN, *_STATE, _INVALID)

JobId = Annotated[str, Path(max_length=64, description="The id of a job.")]
GalleryName = Annotated[str, Path(max_length=200, description="The name of a gallery.")]


def build_router(runtime: Runtime) -> APIRouter:
    """The routes of jobs. Their work is on the disk, so they run in threads."""
    router = APIRouter(tags=["jobs"])
    _add_starts(router, runtime)
    _add_looks(router, runtime)
    _add_changes(router, runtime)
    return router


def _add_starts(router: APIRouter, runtime: Runtime) -> None:
    def start(
        request: Request, response: Response, kind: Kind, name: str, params: dict[str, Any]
    ) -> JobModel:
        job = _manager(runtime).start(kind, name, params, _principal(request))
        return _accepted(job, response)

    @router.post("/jobs/train", status_code=202, responses=_START, summary="Train a model")
    def train(body: TrainRequest, request: Request, response: Response) -> JobModel:
        """Train, export, rebuild the gallery beside the old one, compare, and swap if it passes."""
        params = body.model_dump(mode="json", by_alias=True, exclude={"gallery"})
        return start(request, response, "train", body.gallery, params)

    @router.post(
        "/galleries/{name}/rebuild", status_code=202, responses=_START, summary="Change the model"
    )
    def rebuild(
        name: GalleryName, body: RebuildParams, request: Request, response: Response
    ) -> JobModel:
        """Make the gallery again with another bundle, compare, and swap if it passes."""
        return start(request, response, "rebuild", name, body.model_dump(mode="json"))

    @router.post(
        "/galleries/{name}/swap", status_code=202, responses=_START, summary="Swap in a gallery"
    )
    def swap(
        name: GalleryName, body: SwapRequest, request: Request, response: Response
    ) -> JobModel:
        """The state of another gallery becomes the next generation of this one."""
        return start(request, response, "swap", name, {"with": body.other})

    @router.post(
        "/galleries/{name}/compact", status_code=202, responses=_START, summary="Compact the index"
    )
    def compact(name: GalleryName, request: Request, response: Response) -> JobModel:
        """Make the index anew, without what was removed."""
        return start(request, response, "compact", name, {})


def _add_looks(router: APIRouter, runtime: Runtime) -> None:
    @router.get("/jobs", responses=problems(*_STATE, _INVALID), summary="List jobs")
    def jobs(
        state: State | None = None, limit: Annotated[int, Query(ge=1, le=_MAX_LISTED)] = 100
    ) -> Jobs:
        """The newest jobs, newest first."""
        return Jobs(jobs=[_shown(job) for job in _manager(runtime).list(state, limit)])

    @router.get("/jobs/{job_id}", responses=_LOOK, summary="A job")
    def job(job_id: JobId) -> JobModel:
        """How far a job is, and what it found."""
        return _shown(_manager(runtime).get(job_id))

    @router.get("/jobs/{job_id}/log", responses=_LOOK, summary="The log of a job")
    def log(job_id: JobId, offset: Annotated[int, Query(ge=0, le=_MAX_OFFSET)] = 0) -> JobLog:
        """Up to 64 KiB of what a job has written, from a byte on."""
        page = _manager(runtime).log(job_id, offset)
        return JobLog(offset=page.offset, next_offset=page.next_offset, text=page.text)


def _add_changes(router: APIRouter, runtime: Runtime) -> None:
    @router.post(
        "/jobs/{job_id}/cancel", status_code=202, responses=_CHANGE, summary="Cancel a job"
    )
    def cancel(job_id: JobId, response: Response) -> JobModel:
        """End a job and all its processes; the gallery stays as it was."""
        return _accepted(_manager(runtime).cancel(job_id), response)

    @router.post(
        "/jobs/{job_id}/swap", status_code=202, responses=_CHANGE, summary="Swap in a candidate"
    )
    def swap(job_id: JobId, request: Request, response: Response) -> JobModel:
        """Put the gallery that a job made in place, whatever its gate said."""
        return _accepted(_manager(runtime).swap(job_id, _principal(request)), response)

    @router.post(
        "/jobs/{job_id}/resume", status_code=202, responses=_CHANGE, summary="Resume a job"
    )
    def resume(job_id: JobId, response: Response) -> JobModel:
        """Let a rebuild or training that failed or was cancelled go on with what it has."""
        return _accepted(_manager(runtime).resume(job_id), response)


def _manager(runtime: Runtime) -> JobManager:
    manager = getattr(runtime, "jobs", None)
    if manager is None:
        raise errors.StateMissingError(
            "The service has no folder to keep jobs in. Start it with --state DIR."
        )
    found: JobManager = manager
    return found


def _principal(request: Request) -> str:
    return str(getattr(request.state, "principal", "anonymous"))


def _accepted(job: Job, response: Response) -> JobModel:
    response.headers["Location"] = f"/jobs/{job.id}"
    return _shown(job)


def _shown(job: Job) -> JobModel:
    return JobModel.model_validate({name: getattr(job, name) for name in JobModel.model_fields})
