"""Errors as RFC 9457 problem details, with one table from error classes to statuses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import structlog
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from kinlens.embedder import errors
from kinlens.embedder.errors import (
    DeltaFullError,
    KinlensError,
    OverloadedError,
    RateLimitedError,
)
from kinlens.embedder.programs.faults import fault_text, path_of

MEDIA_TYPE = "application/problem+json"
INTERNAL_TEXT = (
    "Something failed inside the service. The service log has the cause under this request_id."
)
_FULL_TEXT = (
    "The disk of the service is full; nothing was changed. Free space there, and send it again."
)
_RETRY_AFTER_S = 1
_MAX_FAULTS = 20
_MAX_MESSAGE = 1_000


@dataclass(frozen=True, slots=True)
class ProblemType:
    """How errors of one class are shown; clients only see the message if it is `public`."""

    status: int
    title: str
    slug: str
    public: bool = True

    @property
    def type(self) -> str:
        """The problem type, a URN."""
        return f"urn:kinlens:problem:{self.slug}"


BAD_REQUEST = ProblemType(400, "Bad Request", "bad-request")
UNKNOWN_HOST = ProblemType(400, "Unknown host", "unknown-host")
HEAD_TOO_LARGE = ProblemType(431, "Request head too large", "head-too-large")
UNSUPPORTED_MEDIA = ProblemType(415, "Unsupported Media Type", "unsupported-media-type")
INTERNAL = ProblemType(500, "Internal error", "internal", public=False)
INVALID = ProblemType(422, "Invalid parameter", "invalid-parameter")
OVERLOADED = ProblemType(503, "Too busy", "overloaded")
UNKNOWN_MODEL = ProblemType(404, "Unknown model", "unknown-model")
BODY_TOO_LARGE = ProblemType(413, "Request body too large", "body-too-large")
BODY_TOO_SLOW = ProblemType(408, "Request body too slow", "body-too-slow")
CLIENT_DISCONNECTED = ProblemType(499, "Client disconnected", "client-gone")
"""The client has disconnected, so only the log and the metrics show this status."""


class RefusedError(HTTPException):
    """The end of a request whose body is refused or whose client has disconnected."""

    def __init__(
        self, kind: ProblemType, text: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(kind.status, text, headers)
        self.kind = kind


PROBLEM_TYPES: dict[
    type[KinlensError], ProblemType
] = {  # a class without an entry uses that of its parent
    errors.KinlensError: INTERNAL,
    errors.ImageError: ProblemType(422, "Unusable image", "unusable-image"),
    errors.EmptyImageError: ProblemType(400, "Empty image", "empty-image"),
    errors.ImageTooManyBytesError: ProblemType(
        413, "Image has too many bytes", "image-too-many-bytes"
    ),
    errors.ImageTooLargeError: ProblemType(413, "Image has too many pixels", "image-too-large"),
    errors.UnsupportedFormatError: ProblemType(
        415, "Unsupported image format", "unsupported-format"
    ),
    errors.CorruptImageError: ProblemType(422, "Corrupt image", "corrupt-image"),
    errors.ImageCostError: ProblemType(422, "Image costs too much", "image-too-costly"),
    errors.BundleError: ProblemType(
        503, "The model cannot answer", "model-unavailable", public=False
    ),
    errors.GalleryError: ProblemType(
        503, "The gallery cannot answer", "gallery-unavailable", public=False
    ),
    errors.GalleryNotFoundError: ProblemType(404, "Unknown gallery", "unknown-gallery"),
    errors.ItemNotFoundError: ProblemType(404, "Unknown item", "unknown-item"),
    errors.GalleryConflictError: ProblemType(409, "Conflict with the gallery", "gallery-conflict"),
    errors.GalleryBusyError: ProblemType(503, "The gallery is being changed", "gallery-busy"),
    errors.DeltaFullError: ProblemType(429, "Too many new items", "delta-full"),
    errors.SearchError: ProblemType(503, "The search cannot be answered", "search-unavailable"),
    errors.InvalidParameterError: INVALID,
    errors.FilterError: ProblemType(422, "Invalid filter", "invalid-filter"),
    errors.OverloadedError: OVERLOADED,
    errors.DeadlineExceededError: ProblemType(503, "Took too long", "deadline-exceeded"),
    errors.AccessError: ProblemType(403, "Not allowed", "not-allowed"),
    errors.KeyMissingError: ProblemType(401, "API key needed", "key-needed"),
    errors.KeyNotFoundError: ProblemType(404, "Unknown key", "unknown-key"),
    errors.ScopeError: ProblemType(403, "Scope needed", "scope-needed"),
    errors.KeysUnreadableError: ProblemType(503, "Keys cannot be read", "keys-unreadable"),
    errors.RateLimitedError: ProblemType(429, "Too many requests", "rate-limited"),
    errors.StateError: ProblemType(
        503, "The state folder cannot be used", "state-unavailable", public=False
    ),
    errors.StateMissingError: ProblemType(409, "No folder for state", "state-missing"),
    errors.JobNotFoundError: ProblemType(404, "Unknown job", "unknown-job"),
    errors.JobConflictError: ProblemType(409, "Conflict with the job", "job-conflict"),
}


def problem(
    kind: ProblemType,
    detail: str,
    *,
    request_id: str,
    instance: str,
    headers: Mapping[str, str] | None = None,
    faults: Sequence[Mapping[str, str]] = (),
) -> JSONResponse:
    """Build a problem response; each 503 has a Retry-After header."""
    content = _document(kind, detail, request_id, instance)
    if faults:
        content["errors"] = faults
    headers = dict(headers or {})
    if kind.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.setdefault("Retry-After", str(_RETRY_AFTER_S))
    return JSONResponse(content, kind.status, headers, MEDIA_TYPE)


def described(error: Exception, *, request_id: str, instance: str) -> dict[str, Any]:
    """An error as problem details inside another answer, as for one query of a batch."""
    kind, detail, faults = _details_of(error)
    return _document(kind, detail, request_id, instance) | {"errors": faults or None}


def request_id_of(scope: Any) -> str:
    """The id that `Edge` assigned to this request."""
    return str(scope.get("state", {}).get("request_id", ""))


async def from_error(request: Request, error: Exception) -> JSONResponse:
    """Convert any error to a problem response.

    A KinlensError uses its entry in `PROBLEM_TYPES`, an HTTPException its status, and invalid
    parameters are listed by name. Any other error is a 500 without internal details.
    """
    kind, detail, faults = _details_of(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, DeltaFullError | OverloadedError | RateLimitedError):
        headers["Retry-After"] = str(error.retry_after_s)
    if kind.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    where = {"request_id": request_id_of(request.scope), "instance": request.url.path}
    return problem(kind, detail, headers=headers, faults=faults, **where)


def _document(kind: ProblemType, detail: str, request_id: str, instance: str) -> dict[str, Any]:
    content = {"type": kind.type, "title": kind.title, "status": kind.status}
    texts = {"detail": _encodable(detail), "instance": _encodable(instance)}
    return content | texts | {"request_id": request_id}


def _encodable(text: str) -> str:
    """`text` with ? in place of lone surrogates, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def _details_of(error: Exception) -> tuple[ProblemType, str, list[dict[str, str]]]:
    """The kind of an error, its detail and its faults; an internal error is only logged."""
    if isinstance(error, RequestValidationError):
        found = error.errors()
        faults = [_fault(entry) for entry in found[:_MAX_FAULTS]]
        detail = " ".join(fault["message"] for fault in faults)
        if len(found) > _MAX_FAULTS:
            detail += f" {len(found) - _MAX_FAULTS:,} more are not shown."
        return INVALID, detail, faults
    if isinstance(error, RefusedError):
        return error.kind, error.detail, []
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase
        slug = phrase.lower().replace(" ", "-")
        return ProblemType(error.status_code, phrase, slug), str(error.detail), []
    kind = next((PROBLEM_TYPES[of] for of in type(error).__mro__ if of in PROBLEM_TYPES), INTERNAL)
    if kind.public:
        return kind, str(error), []
    if errors.is_disk_full(error):
        structlog.get_logger().error("disk full", exc_info=error)
        is_known = kind.status == HTTPStatus.SERVICE_UNAVAILABLE
        return kind if is_known else PROBLEM_TYPES[errors.StateError], _FULL_TEXT, []
    structlog.get_logger().error("internal error", exc_info=error)
    return kind, INTERNAL_TEXT, []


def _fault(entry: Any) -> dict[str, str]:
    location: Sequence[Any] = entry.get("loc", ())
    is_body = location[:1] == ("body",)
    if entry["type"] == "json_invalid":
        location = location[:1]  # the rest is a position, not a name
    name = _encodable(path_of(location[1:] or location) or "request")
    where = " in the JSON body" if is_body else f" in the URL, as ?{name}=..."
    message = fault_text(entry, name, where)
    return {"name": name, "message": _encodable(message[:_MAX_MESSAGE])}
