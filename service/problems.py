"""Errors as RFC 9457 problem details: one table from the error tree to statuses."""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import structlog
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from embedder import errors
from embedder.errors import KinlensError, OverloadedError, RateLimitedError

MEDIA_TYPE = "application/problem+json"
INTERNAL_TEXT = "Something failed inside the service. Its log has the cause under this request_id."
_RETRY_AFTER_S = 1
_MAX_FAULTS = 20
_SHOWN = 80
_MAX_MESSAGE = 1_000


@dataclass(frozen=True, slots=True)
class Kind:
    """How one class of error is shown; only a `public` message is meant for the client."""

    status: int
    title: str
    slug: str
    public: bool = True

    @property
    def type(self) -> str:
        """The problem type, a URN."""
        return f"urn:kinlens:problem:{self.slug}"


BAD_REQUEST = Kind(400, "Bad Request", "bad-request")
UNKNOWN_HOST = Kind(400, "Unknown host", "unknown-host")
_MODEL = Kind(503, "The model cannot answer", "model-unavailable", public=False)
_GALLERY = Kind(503, "The gallery cannot answer", "gallery-unavailable", public=False)
UNSUPPORTED_MEDIA = Kind(415, "Unsupported Media Type", "unsupported-media-type")
_STATE = Kind(503, "The state folder cannot be used", "state-unavailable", public=False)
INTERNAL = Kind(500, "Internal error", "internal", public=False)
INVALID = Kind(422, "Invalid parameter", "invalid-parameter")
OVERLOADED = Kind(503, "Too busy", "overloaded")
BODY_TOO_LARGE = Kind(413, "Request body too large", "body-too-large")
BODY_TOO_SLOW = Kind(408, "Request body too slow", "body-too-slow")

KINDS: dict[type[KinlensError], Kind] = {
    errors.KinlensError: INTERNAL,
    errors.ImageError: Kind(422, "Unusable image", "unusable-image"),
    errors.EmptyImageError: Kind(400, "Empty image", "empty-image"),
    errors.ImageTooManyBytesError: Kind(413, "Image has too many bytes", "image-too-many-bytes"),
    errors.ImageTooLargeError: Kind(413, "Image has too many pixels", "image-too-large"),
    errors.UnsupportedFormatError: Kind(415, "Unsupported image format", "unsupported-format"),
    errors.CorruptImageError: Kind(422, "Corrupt image", "corrupt-image"),
    errors.ImageCostError: Kind(422, "Image costs too much", "image-too-costly"),
    errors.BundleError: _MODEL,
    errors.BundleNotFoundError: _MODEL,
    errors.BundleCorruptError: _MODEL,
    errors.GoldenMismatchError: _MODEL,
    errors.ProviderError: _MODEL,
    errors.GalleryError: _GALLERY,
    errors.GalleryNotFoundError: Kind(404, "Unknown gallery", "unknown-gallery"),
    errors.GalleryCorruptError: _GALLERY,
    errors.BundleMismatchError: _GALLERY,
    errors.ItemNotFoundError: Kind(404, "Unknown item", "unknown-item"),
    errors.GalleryConflictError: Kind(409, "Conflict with the gallery", "gallery-conflict"),
    errors.SourceError: _GALLERY,
    errors.GalleryBusyError: Kind(503, "The gallery is being changed", "gallery-busy"),
    errors.GalleryWriteError: _GALLERY,
    errors.PlanError: _GALLERY,
    errors.RecallError: _GALLERY,
    errors.EngineUnavailableError: _GALLERY,
    errors.SearchError: Kind(503, "The search cannot be answered", "search-unavailable"),
    errors.InvalidParameterError: INVALID,
    errors.FilterError: Kind(422, "Invalid filter", "invalid-filter"),
    errors.OverloadedError: OVERLOADED,
    errors.DeadlineExceededError: Kind(503, "Took too long", "deadline-exceeded"),
    errors.AccessError: Kind(403, "Not allowed", "not-allowed"),
    errors.KeyMissingError: Kind(401, "API key needed", "key-needed"),
    errors.ScopeError: Kind(403, "Scope needed", "scope-needed"),
    errors.KeysUnreadableError: Kind(503, "Keys cannot be read", "keys-unreadable"),
    errors.RateLimitedError: Kind(429, "Too many requests", "rate-limited"),
    errors.StateError: _STATE,
    errors.StateMissingError: Kind(409, "No folder for state", "state-missing"),
    errors.JobNotFoundError: Kind(404, "Unknown job", "unknown-job"),
    errors.JobConflictError: Kind(409, "Conflict with the job", "job-conflict"),
    errors.TrainingError: INTERNAL,
    errors.JobError: INTERNAL,
    errors.DatasetError: INTERNAL,
    errors.CheckpointError: INTERNAL,
    errors.EvaluationError: INTERNAL,
    errors.ExportError: INTERNAL,
}


def kind_of(error: BaseException) -> Kind:
    """The row of the table for an error: its own class or the nearest parent."""
    for cls in type(error).__mro__:
        if cls in KINDS:
            return KINDS[cls]
    return INTERNAL


def problem(
    kind: Kind,
    detail: str,
    *,
    request_id: str,
    instance: str | None = None,
    headers: dict[str, str] | None = None,
    **extra: Any,
) -> JSONResponse:
    """A problem response; `extra` are extension members. Each 503 says when to ask again."""
    if kind.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers = {"Retry-After": str(_RETRY_AFTER_S)} | (headers or {})
    content = {"type": kind.type, "title": kind.title, "status": kind.status}
    content |= {"detail": encodable(detail)}
    content |= {} if instance is None else {"instance": encodable(instance)}
    content |= {"request_id": request_id, **extra}
    return JSONResponse(content, kind.status, headers=headers, media_type=MEDIA_TYPE)


def encodable(text: str) -> str:
    """`text` with ? in place of halves of surrogate pairs, which UTF-8 has no bytes for."""
    return text.encode(errors="replace").decode()


def request_id_of(scope: Any) -> str:
    """The id that the gate gave to this request."""
    return str(scope.get("state", {}).get("request_id", ""))


def described(error: Exception, *, request_id: str, instance: str) -> dict[str, Any]:
    """An error as problem details inside another answer: that of one query of several."""
    faults: list[dict[str, str]] | None = None
    if isinstance(error, RequestValidationError):
        faults, text = _faults(error)
        kind, detail = INVALID, text
    else:
        kind = kind_of(error)
        detail = str(error) if kind.public else INTERNAL_TEXT
    if not kind.public:
        structlog.get_logger().error("internal error", exc_info=error)
    return {
        "type": kind.type,
        "title": kind.title,
        "status": kind.status,
        "detail": encodable(detail),
        "instance": encodable(instance),
        "request_id": request_id,
        "errors": faults,
    }


async def from_kinlens(request: Request, error: Exception) -> JSONResponse:
    """A KinlensError as a problem; the text of an internal one goes to the log only."""
    kind = kind_of(error)
    if not kind.public:
        structlog.get_logger().error("internal error", exc_info=error)
    headers = {}
    if isinstance(error, OverloadedError | RateLimitedError):
        headers["Retry-After"] = str(error.retry_after_s)
    if kind.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return _answer(request, kind, str(error) if kind.public else INTERNAL_TEXT, headers)


async def from_validation(request: Request, error: Exception) -> JSONResponse:
    """Parameters that do not fit, each named with its range."""
    assert isinstance(error, RequestValidationError)
    faults, detail = _faults(error)
    return _answer(request, INVALID, detail, errors=faults)


async def from_http(request: Request, error: Exception) -> JSONResponse:
    """Unknown addresses, wrong methods and malformed forms."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    detail = str(error.detail)
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND and detail == phrase:
        detail = f"Nothing is at {request.url.path}. /openapi.json lists the addresses."
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.method} is not allowed here; use {headers.get('Allow', 'GET')}."
    kind = Kind(error.status_code, phrase, phrase.lower().replace(" ", "-"))
    return _answer(request, kind, detail, headers)


async def from_unexpected(request: Request, error: Exception) -> JSONResponse:
    """Anything else: 500, with nothing of its inside."""
    structlog.get_logger().error("unexpected error", exc_info=error)
    return _answer(request, INTERNAL, INTERNAL_TEXT)


def _answer(
    request: Request,
    kind: Kind,
    detail: str,
    headers: dict[str, str] | None = None,
    **extra: Any,
) -> JSONResponse:
    return problem(
        kind,
        detail,
        request_id=request_id_of(request.scope),
        instance=request.url.path,
        headers=headers,
        **extra,
    )


def _faults(error: RequestValidationError) -> tuple[list[dict[str, str]], str]:
    """The first faults, and all of their messages."""
    found = error.errors()
    faults = [_fault(entry) for entry in found[:_MAX_FAULTS]]
    detail = " ".join(fault["message"] for fault in faults)
    if len(found) > _MAX_FAULTS:
        detail += f" {len(found) - _MAX_FAULTS:,} more are not shown."
    return faults, detail


def _fault(entry: Any) -> dict[str, str]:
    location: Sequence[Any] = entry.get("loc", ())
    name = encodable(str(location[-1])[:_SHOWN]) if location else "request"
    if entry.get("type") == "missing":
        message = f"{name} is missing; send it as a part of a multipart/form-data body."
    elif entry.get("type") == "out_of_range":
        message = str(entry["msg"])
    else:
        message = f"{name}: {entry.get('msg')}."
    return {"name": name, "message": encodable(message[:_MAX_MESSAGE])}
