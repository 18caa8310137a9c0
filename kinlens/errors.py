"""The exceptions of the client, one class per cause.

ClientError
├── ArgumentError             an argument is invalid; no request was sent
│   └── ImageReadError        an image file cannot be read; the cause is an OSError
├── GalleryReplacedError      the gallery was rebuilt while its items were read
├── ConnectionFailedError     the service cannot be reached, or did not respond in time
├── AnswerError               this client cannot parse the response
├── JobError                  `wait` ended before the job succeeded
│   ├── JobFailedError        the job failed or was cancelled
│   └── JobTimeoutError       it was still running after `timeout_s`
└── ProblemError              the service reported a problem (RFC 9457)
    ├── BadRequestError       400, 408: malformed, empty, too slow, or for another host
    ├── KeyNeededError        401: no API key, or an unknown one
    ├── NotAllowedError       403: the key lacks the required scope
    ├── NotFoundError         404: no gallery, item or job with that name
    ├── ConflictError         409: the current state does not allow this
    ├── TooLargeError         413: more bytes or pixels than the limit
    ├── UnsupportedError      415: not an image in a supported format
    ├── InvalidError          422: an invalid parameter, or a damaged image
    ├── RateLimitedError      429: more requests than the rate allows
    └── ServiceError          5xx: something failed inside the service
        └── UnavailableError  503: the service is busy, or cannot respond now
"""

from collections.abc import Sequence

from kinlens.models import Fault, JobModel, Problem


class ClientError(Exception): ...


class ArgumentError(ClientError): ...


class ImageReadError(ArgumentError): ...


class GalleryReplacedError(ClientError): ...


class ConnectionFailedError(ClientError): ...


class AnswerError(ClientError): ...


class JobError(ClientError): ...


class JobFailedError(JobError):
    """The job failed or was cancelled; `job` is its final state."""

    def __init__(self, job: JobModel) -> None:
        super().__init__(f"Job {job.id} ({job.kind}) {job.state}: {job.error or job.step}")
        self.job = job


class JobTimeoutError(JobError): ...


class ProblemError(ClientError):
    """A problem that the service reported.

    Attributes:
        status: the HTTP status.
        type: a URN that names the cause.
        detail: what was wrong, the limit, and what to do.
        faults: the invalid parameters.
        request_id: the id of the request in the service log.
        retry_after_s: how long to wait, if the service sent it.
    """

    def __init__(self, problem: Problem, retry_after_s: float | None = None) -> None:
        super().__init__(f"{problem.status} {problem.title}: {problem.detail}")
        self.problem = problem
        self.retry_after_s = retry_after_s
        self.status = problem.status
        self.type = problem.type
        self.title = problem.title
        self.detail = problem.detail
        self.request_id = problem.request_id
        self.faults: Sequence[Fault] = problem.errors or ()


class BadRequestError(ProblemError): ...


class KeyNeededError(ProblemError): ...


class NotAllowedError(ProblemError): ...


class NotFoundError(ProblemError): ...


class ConflictError(ProblemError): ...


class TooLargeError(ProblemError): ...


class UnsupportedError(ProblemError): ...


class InvalidError(ProblemError): ...


class RateLimitedError(ProblemError): ...


class ServiceError(ProblemError): ...


class UnavailableError(ServiceError): ...


_BY_STATUS: dict[int, type[ProblemError]] = {
    400: BadRequestError,
    401: KeyNeededError,
    403: NotAllowedError,
    404: NotFoundError,
    408: BadRequestError,
    409: ConflictError,
    413: TooLargeError,
    415: UnsupportedError,
    422: InvalidError,
    429: RateLimitedError,
    503: UnavailableError,
}


def problem_error(problem: Problem, retry_after_s: float | None = None) -> ProblemError:
    """The exception for a problem, chosen by its status."""
    inside = ServiceError if problem.status >= 500 else ProblemError
    return _BY_STATUS.get(problem.status, inside)(problem, retry_after_s)
