"""Jobs of the client: started, followed, ended; the calls of both kinds of client."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

from service.client_call import Call, address, model
from service.client_errors import JobFailedError, JobTimeoutError
from service.client_transport import AsyncSender, Sender
from service.schemas.jobs import JobLog, JobModel, Jobs

Progress = Callable[[JobModel], None]
"""Told each state of a job that differs from the one before."""

State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
_ENDED = ("succeeded", "failed", "cancelled")


class RebuildOptions(TypedDict, total=False):
    """How to rebuild a gallery with another bundle; docs/service-jobs.md explains each."""

    swap: Literal["auto", "never"]
    max_recall_loss: float
    class_attribute: str
    max_missing: float


class TrainOptions(TypedDict, total=False):
    """How to train and what the new gallery must reach; docs/service-jobs.md explains each."""

    data: str | None
    overrides: Mapping[str, bool | int | float | str | Sequence[bool | int | float | str]]
    gate: Mapping[str, float | None]
    swap: Literal["auto", "never"]
    class_attribute: str
    max_missing: float


class JobCalls(Sender):
    """Calls about jobs that wait for their answer."""

    def compact(self, gallery: str) -> JobModel:
        """Start to make the index of a gallery again, without what was removed.

        Example: `client.wait(client.compact("shop"))`
        """
        return self._send(_compact(gallery))

    def swap(self, gallery: str, other: str) -> JobModel:
        """Start to put the state of another gallery in the place of this one.

        Example: `client.wait(client.swap("shop", "summer"))`
        """
        return self._send(_swap(gallery, other))

    def rebuild(self, gallery: str, bundle_id: str, **options: Unpack[RebuildOptions]) -> JobModel:
        """Start to make a gallery again with another bundle, beside the old one.

        Example: `client.wait(client.rebuild("shop", bundle_id, swap="never")).report`
        """
        return self._send(_rebuild(gallery, bundle_id, options))

    def train(self, job: str, gallery: str, **options: Unpack[TrainOptions]) -> JobModel:
        """Start to train a model, and to give it to a gallery if it passes its gate.

        Example: `client.train("shop", "shop", overrides={"optimizer.epochs": 2}).id`
        """
        return self._send(_train(job, gallery, options))

    def jobs(self, *, state: State | None = None, limit: int | None = None) -> Jobs:
        """Jobs, newest first.

        Example: `[job.id for job in client.jobs(state="running").jobs]`
        """
        return self._send(_list(state, limit))

    def job(self, job_id: str) -> JobModel:
        """A job as it is now.

        Example: `client.job("4f2a90c1be77").step`
        """
        return self._send(_describe(job_id))

    def job_log(self, job_id: str, offset: int = 0) -> JobLog:
        """What a job has written from byte `offset` on.

        Example: `client.job_log("4f2a90c1be77").text`
        """
        return self._send(_log(job_id, offset))

    def cancel_job(self, job_id: str) -> JobModel:
        """Ask a job to end.

        Example: `client.cancel_job("4f2a90c1be77").state`
        """
        return self._send(_change(job_id, "cancel"))

    def swap_job(self, job_id: str) -> JobModel:
        """Start to put the gallery that a job has made in place.

        Example: `client.wait(client.swap_job("4f2a90c1be77"))`
        """
        return self._send(_change(job_id, "swap"))

    def resume_job(self, job_id: str) -> JobModel:
        """Start a job that failed or was cancelled anew, from where it stopped.

        Example: `client.resume_job("4f2a90c1be77").id`
        """
        return self._send(_change(job_id, "resume"))

    def wait(
        self,
        job: JobModel | str,
        on_progress: Progress | None = None,
        *,
        timeout_s: float | None = None,
        poll_s: float = 0.5,
    ) -> JobModel:
        """The job when it has succeeded. Raises: JobFailedError, JobTimeoutError.

        Example: `client.wait(job, lambda job: print(job.step, job.done, job.total))`
        """
        following = _Following(job, on_progress, timeout_s)
        while not following.has_ended(self.job(following.id)):
            time.sleep(poll_s)
        return following.result()


class AsyncJobCalls(AsyncSender):
    """The same calls in an event loop."""

    async def compact(self, gallery: str) -> JobModel:
        """Start to make the index of a gallery again, without what was removed.

        Example: `await client.wait(await client.compact("shop"))`
        """
        return await self._send(_compact(gallery))

    async def swap(self, gallery: str, other: str) -> JobModel:
        """Start to put the state of another gallery in the place of this one.

        Example: `await client.swap("shop", "summer")`
        """
        return await self._send(_swap(gallery, other))

    async def rebuild(
        self, gallery: str, bundle_id: str, **options: Unpack[RebuildOptions]
    ) -> JobModel:
        """Start to make a gallery again with another bundle, beside the old one.

        Example: `await client.rebuild("shop", bundle_id)`
        """
        return await self._send(_rebuild(gallery, bundle_id, options))

    async def train(self, job: str, gallery: str, **options: Unpack[TrainOptions]) -> JobModel:
        """Start to train a model, and to give it to a gallery if it passes its gate.

        Example: `await client.train("shop", "shop")`
        """
        return await self._send(_train(job, gallery, options))

    async def jobs(self, *, state: State | None = None, limit: int | None = None) -> Jobs:
        """Jobs, newest first.

        Example: `(await client.jobs(limit=5)).jobs`
        """
        return await self._send(_list(state, limit))

    async def job(self, job_id: str) -> JobModel:
        """A job as it is now.

        Example: `(await client.job("4f2a90c1be77")).state`
        """
        return await self._send(_describe(job_id))

    async def job_log(self, job_id: str, offset: int = 0) -> JobLog:
        """What a job has written from byte `offset` on.

        Example: `(await client.job_log("4f2a90c1be77")).text`
        """
        return await self._send(_log(job_id, offset))

    async def cancel_job(self, job_id: str) -> JobModel:
        """Ask a job to end.

        Example: `await client.cancel_job("4f2a90c1be77")`
        """
        return await self._send(_change(job_id, "cancel"))

    async def swap_job(self, job_id: str) -> JobModel:
        """Start to put the gallery that a job has made in place.

        Example: `await client.swap_job("4f2a90c1be77")`
        """
        return await self._send(_change(job_id, "swap"))

    async def resume_job(self, job_id: str) -> JobModel:
        """Start a job that failed or was cancelled anew, from where it stopped.

        Example: `await client.resume_job("4f2a90c1be77")`
        """
        return await self._send(_change(job_id, "resume"))

    async def wait(
        self,
        job: JobModel | str,
        on_progress: Progress | None = None,
        *,
        timeout_s: float | None = None,
        poll_s: float = 0.5,
    ) -> JobModel:
        """The job when it has succeeded. Raises: JobFailedError, JobTimeoutError.

        Example: `await client.wait(job, lambda job: print(job.step))`
        """
        following = _Following(job, on_progress, timeout_s)
        while not following.has_ended(await self.job(following.id)):
            await asyncio.sleep(poll_s)
        return following.result()


class _Following:
    """A job that is waited for."""

    def __init__(
        self, job: JobModel | str, on_progress: Progress | None, timeout_s: float | None
    ) -> None:
        self.id = job if isinstance(job, str) else job.id
        self._job: JobModel | None = None
        self._on_progress = on_progress
        self._timeout_s = timeout_s
        self._started = time.monotonic()

    def has_ended(self, job: JobModel) -> bool:
        """Take in what the job is now. Raises: JobTimeoutError."""
        if self._on_progress is not None and job != self._job:
            self._on_progress(job)
        self._job = job
        if job.state in _ENDED:
            return True
        waited_s = time.monotonic() - self._started
        if self._timeout_s is not None and waited_s > self._timeout_s:
            raise JobTimeoutError(
                f"Job {job.id} is still {job.state} ({job.step}) after {waited_s:.0f} s. Wait for "
                "it again, or cancel it."
            )
        return False

    def result(self) -> JobModel:
        """The job at its end. Raises: JobFailedError."""
        assert self._job is not None
        if self._job.state != "succeeded":
            raise JobFailedError(self._job)
        return self._job


def _compact(gallery: str) -> Call[JobModel]:
    return _started(address("galleries", gallery, "compact"), None)


def _swap(gallery: str, other: str) -> Call[JobModel]:
    return _started(address("galleries", gallery, "swap"), {"with": other})


def _rebuild(gallery: str, bundle_id: str, options: RebuildOptions) -> Call[JobModel]:
    return _started(address("galleries", gallery, "rebuild"), {"bundle_id": bundle_id, **options})


def _train(job: str, gallery: str, options: TrainOptions) -> Call[JobModel]:
    return _started("/jobs/train", {"job": job, "gallery": gallery, **options})


def _change(job_id: str, change: str) -> Call[JobModel]:
    return _started(address("jobs", job_id, change), None)


def _started(path: str, body: Any) -> Call[JobModel]:
    return Call("POST", path, model(JobModel), json=body, idempotent=False)


def _list(state: State | None, limit: int | None) -> Call[Jobs]:
    return Call("GET", "/jobs", model(Jobs), query={"state": state, "limit": limit})


def _describe(job_id: str) -> Call[JobModel]:
    return Call("GET", address("jobs", job_id), model(JobModel))


def _log(job_id: str, offset: int) -> Call[JobLog]:
    return Call("GET", address("jobs", job_id, "log"), model(JobLog), query={"offset": offset})
