"""The OpenAPI document, and a page that shows it without a script or another host."""

from collections.abc import Iterable
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from embedder import errors
from service.access import keys
from service.api.models import Fault, Problem
from service.http.gate import rule_of
from service.problems import (
    BAD_REQUEST,
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
    INTERNAL,
    INTERNAL_TEXT,
    INVALID,
    KINDS,
    MEDIA_TYPE,
    OVERLOADED,
    UNKNOWN_HOST,
    UNSUPPORTED_MEDIA,
    Kind,
)

_METHODS = frozenset({"get", "head", "post", "put", "patch", "delete"})
_SCHEMES = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key as `Authorization: Bearer KEY`, made with "
        "`kinlens-serve keys create`.",
    },
    "key": {
        "type": "apiKey",
        "in": "header",
        "name": "X-API-Key",
        "description": "The same key in a header of its own.",
    },
}
_REFUSALS = (
    KINDS[errors.AccessError],
    KINDS[errors.KeyMissingError],
    KINDS[errors.ScopeError],
    KINDS[errors.RateLimitedError],
)  # what the gate may answer instead of an operation that needs a scope
_PROBLEM = {"$ref": "#/components/schemas/Problem"}
_RETRY_AFTER = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}
_TEXTS = {
    400: "The image is empty, the form is malformed, or the host is not one of this service.",
    401: "The address needs an API key, or the one that was sent is not known.",
    403: "The API key lacks the scope that this needs.",
    404: "The gallery, item or job is unknown, or the link comes from another gallery version.",
    408: "The body did not arrive in time.",
    409: "What is there now does not allow this.",
    413: "The body, or the image, is larger than the limit.",
    415: "The content is not an image in a format that is read, or its type is not one of these.",
    422: "A parameter is missing or outside its range, or the image is damaged.",
    429: "More requests than the rate allows; Retry-After says when to ask again.",
    500: "Something failed inside the service.",
    503: "The service is too busy or not able to answer now; Retry-After says when to ask again.",
}
_DETAILS = {
    UNSUPPORTED_MEDIA: "Content-Type = 'text/plain' is not read here; send multipart/form-data, an "
    "image as image/* or application/octet-stream, or application/json.",
    UNKNOWN_HOST: "The host 'shop.example' is not served here; known are 127.0.0.1, [::1], "
    "localhost. Name it in KINLENS_ALLOWED_HOSTS to allow it.",
    BAD_REQUEST: "Missing boundary in multipart.",
    KINDS[errors.EmptyImageError]: "The image is empty (0 bytes). Send the content of an "
    "image file.",
    KINDS[errors.GalleryNotFoundError]: "gallery = 'shoes' is unknown. Known are: shop.",
    KINDS[errors.ItemNotFoundError]: "This link is from version 9b2e00000000 of gallery shop, "
    "which was built again and is at version 51c7a90be2f4 now. Search again.",
    BODY_TOO_SLOW: "The request body was not complete after 30 s, which is the limit. Send a "
    "smaller image or use a faster connection.",
    BODY_TOO_LARGE: "The request body has 62,914,877 bytes; the limit is 21,037,056. Resize or "
    "compress the image.",
    KINDS[errors.ImageTooManyBytesError]: "The image has 21,000,000 bytes; the limit is "
    "20,971,520. Resize or compress it.",
    KINDS[errors.ImageTooLargeError]: "The image is 14000 x 9000 px (126.0 MP); the limits "
    "are 64 MP and 16384 px a side. Resize it.",
    KINDS[errors.UnsupportedFormatError]: "The content is no image in a known format. Send JPEG, "
    "PNG, WebP, BMP, TIFF, GIF, AVIF or HEIC.",
    KINDS[errors.CorruptImageError]: "The JPEG image is truncated or damaged (broken data "
    "stream). Export it again from its source.",
    KINDS[errors.ImageCostError]: "Decoding the image took longer than 5 s, which is the limit. "
    "Resize it or save it as a plain JPEG.",
    KINDS[errors.KeyMissingError]: "This needs an API key with the scope write. Send it as "
    "Authorization: Bearer KEY.",
    KINDS[
        errors.ScopeError
    ]: "The key till has the scopes search; this needs write. Create another "
    "with kinlens-serve keys create.",
    KINDS[errors.RateLimitedError]: "More than 600 requests a minute came from this key. Try again "
    "in 12 s.",
    KINDS[errors.StateMissingError]: "The service has no folder to keep this in. Start it with "
    "--state DIR.",
    KINDS[errors.JobNotFoundError]: "There is no job 4f2a. GET /jobs lists them.",
    KINDS[errors.JobConflictError]: "Job 4f2a has succeeded; only a queued or running job can be "
    "cancelled.",
    KINDS[errors.GalleryConflictError]: "There is a gallery shop already. Choose another name, or "
    "delete it first.",
    INVALID: "k = 0 is outside its range; send a whole number from 1 to 10,000.",
    OVERLOADED: "64 images wait for the model, which is the limit. Try again in a second, or "
    "raise KINLENS_QUEUE_SIZE.",
    KINDS[errors.DeadlineExceededError]: "The search took longer than 10 s, which is the limit. "
    "Try again in a second.",
    KINDS[errors.SearchError]: "The worker that runs the model has stopped; it is started again by "
    "itself. Try again in a second.",
}


def problems(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """The `responses=` of a route: these problems, and those that any route can answer with."""
    responses: dict[int | str, dict[str, Any]] = {}
    for kind in sorted({*kinds, UNKNOWN_HOST, INTERNAL}, key=lambda k: (k.status, k.slug)):
        response = responses.setdefault(
            kind.status,
            {
                "description": _TEXTS[kind.status],
                "content": {MEDIA_TYPE: {"schema": _PROBLEM, "examples": {}}},
                **({"headers": _RETRY_AFTER} if kind.status in (429, 503) else {}),
            },
        )
        response["content"][MEDIA_TYPE]["examples"][kind.slug] = {"value": _example(kind)}
    return responses


def install_openapi(app: FastAPI) -> None:
    """Make `app.openapi` know the problem schema; the document is built at the first call."""

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for model in (Problem, Fault):
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schema.pop("$defs", None)
                schemas[model.__name__] = schema
            anonymous = app.state.runtime.settings.anonymous_scopes
            _add_security(document, anonymous)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]


def _add_security(document: dict[str, Any], anonymous: Iterable[keys.Scope]) -> None:
    """Name the scope of every operation, and add the answers of the gate to it.

    The scope is the role that each scheme needs; an operation that anonymous callers may use
    has the empty requirement as well.
    """
    document["components"]["securitySchemes"] = _SCHEMES
    free, refusals = keys.allowed(anonymous), problems(*_REFUSALS)
    for path, item in document["paths"].items():
        for method in _METHODS & item.keys():
            operation, scope = item[method], rule_of(method.upper(), path).scope
            operation["security"] = []
            if scope is None:
                continue
            operation["security"] += [{name: [scope]} for name in _SCHEMES]
            operation["security"] += [{}] if scope in free else []
            text = operation.get("description", "")
            operation["description"] = f"{text}\n\nNeeds the scope `{scope}`.".strip()
            for status, response in refusals.items():
                operation["responses"].setdefault(str(status), response)


def render_docs(document: dict[str, Any]) -> str:
    """The document as plain HTML."""
    sections = [
        _operation(path, method, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"</head><body><main><h1>{title}</h1><p>{escape(document['info']['description'])} "
        'The whole document: <a href="/openapi.json">openapi.json</a>.</p>'
        f"{''.join(sections)}</main></body></html>"
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = "".join(
        f"<li><code>{escape(status)}</code> {escape(response.get('description', ''))}</li>"
        for status, response in operation["responses"].items()
    )
    return (
        f"<section><h2><code>{method.upper()} {escape(path)}</code></h2>"
        f"<p>{escape(operation.get('description', operation.get('summary', '')))}</p>"
        f"<ul>{rows}</ul></section>"
    )


def _example(kind: Kind) -> dict[str, Any]:
    return {
        "type": kind.type,
        "title": kind.title,
        "status": kind.status,
        "detail": _DETAILS.get(kind, INTERNAL_TEXT),
        "request_id": "6f0c2d8e5b7a4c31a1d0c9e8f7b6a594",
    }
