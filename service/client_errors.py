"""What the client raises, one class per cause.

ClientError
├── ArgumentError             an argument that cannot be sent: no Unicode, no number, no address
│   └── ImageReadError        the file of an image cannot be read
├── GalleryReplacedError      the gallery was built again while its items were read
├── ConnectionFailedError     the service was not reached, or did not answer in time
├── AnswerError               an answer that this client does not understand
├── JobError                  a job that was waited for
│   ├── JobFailedError        it failed or was cancelled
│   └── JobTimeoutError       it still runs after the time that was given
└── ProblemError              a problem that the service told (RFC 9457)
    ├── BadRequestError       400, 408
    ├── KeyNeededError        401
    ├── NotAllowedError       403
    ├── NotFoundError         404
    ├── ConflictError         409
    ├── TooLargeError         413
    ├── UnsupportedError      415
    ├── InvalidError          422
    ├── RateLimitedError      429
    └── ServiceError          5xx
        └── UnavailableError  503
"""

from collections.abc import Sequence

from service.api.models import Fault, JobModel, Problem


class ClientError(Exception):
    """Root of the tree."""


class ArgumentError(ClientError):
    """An argument that cannot be sent; nothing was."""


class ImageReadError(ArgumentError):
    """The file of an image cannot be read; the cause is an OSError."""


class GalleryReplacedError(ClientError):
    """The gallery was built again while its items were read; their numbers are others now."""


class ConnectionFailedError(ClientError):
    """The service was not reached, or did not answer in time."""


class AnswerError(ClientError):
    """An answer that this client does not understand; is it the address of a Kinlens service?"""


class JobError(ClientError):
    """A job that was waited for."""


class JobFailedError(JobError):
    """The job failed or was cancelled; `job` as it is at its end."""

    def __init__(self, job: JobModel) -> None:
        super().__init__(f"Job {job.id} ({job.kind}) {job.state}: {job.error or job.step}")
        self.job = job


class JobTimeoutError(JobError):
    """The job still runs after the time that was given."""


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


class BadRequestError(ProblemError):
    """The request is malformed, empty, too slow, or for another host."""


class KeyNeededError(ProblemError):
    """No API key, or one that is not known."""


class NotAllowedError(ProblemError):
    """A key without the scope that this needs."""


class NotFoundError(ProblemError):
    """No gallery, item or job of that name."""


class ConflictError(ProblemError):
    """What is there now does not allow this."""


class TooLargeError(ProblemError):
    """More bytes or pixels than the limit."""


class UnsupportedError(ProblemError):
    """Not an image in a format that is read."""


class InvalidError(ProblemError):
    """A parameter outside its range, or an image that is damaged."""


class RateLimitedError(ProblemError):
    """More requests than the rate allows."""


class ServiceError(ProblemError):
    """Something failed inside the service."""


class UnavailableError(ServiceError):
    """The service is too busy, or not able to answer now."""


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
