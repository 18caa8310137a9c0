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
    INTERNAL,
    KINDS,
    MEDIA_TYPE,
    UNKNOWN_HOST,
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
        "detail": _TEXTS[kind.status],
        "request_id": "6f0c2d8e5b7a4c31a1d0c9e8f7b6a594",
    }
