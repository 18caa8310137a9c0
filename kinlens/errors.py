"""What the client raises, one class per cause.

ClientError
├── ArgumentError             an argument that cannot be sent; nothing was
│   └── ImageReadError        the file of an image cannot be read; the cause is an OSError
├── GalleryReplacedError      the gallery was built again while its items were read
├── ConnectionFailedError     the service was not reached, or did not answer in time
├── AnswerError               an answer that this client does not understand
├── JobError                  a job that was waited for
│   ├── JobFailedError        it failed or was cancelled
│   └── JobTimeoutError       it still runs after the time that was given
└── ProblemError              a problem that the service told (RFC 9457)
    ├── BadRequestError       400, 408: malformed, empty, too slow, or for another host
    ├── KeyNeededError        401: no API key, or one that is not known
    ├── NotAllowedError       403: a key without the scope that this needs
    ├── NotFoundError         404: no gallery, item or job of that name
    ├── ConflictError         409: what is there now does not allow this
    ├── TooLargeError         413: more bytes or pixels than the limit
    ├── UnsupportedError      415: not an image in a format that is read
    ├── InvalidError          422: a parameter outside its range, or a damaged image
    ├── RateLimitedError      429: more requests than the rate allows
    └── ServiceError          5xx: something failed inside the service
        └── UnavailableError  503: it is too busy, or not able to answer now
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
    """The job failed or was cancelled; `job` as it is at its end."""

    def __init__(self, job: JobModel) -> None:
        super().__init__(f"Job {job.id} ({job.kind}) {job.state}: {job.error or job.step}")
        self.job = job


class JobTimeoutError(JobError): ...


class ProblemError(ClientError):
    """A problem that the service told.

    `detail` says what was wrong, the limit and the cure, `type` is a URN that names the cause,
    `faults` are the parameters that do not fit, `request_id` is that of the service's log, and
    `retry_after_s` is there if the service said when to ask again.
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
    """The error for a problem, by its status."""
    inside = ServiceError if problem.status >= 500 else ProblemError
    return _BY_STATUS.get(problem.status, inside)(problem, retry_after_s)
