"""The OpenAPI document: the problems, the scopes, and the two addresses that serve it."""

import asyncio
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic_core import to_json

from kinlens.embedder import errors
from kinlens.models import Fault, Problem
from kinlens.service.access import keys
from kinlens.service.concurrency import Recent
from kinlens.service.http.bodies import JSON
from kinlens.service.http.docs_page import render_docs
from kinlens.service.http.gate import Reach, rule_of
from kinlens.service.problems import (
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
_REFUSED: dict[Reach, str] = {
    "galleries": " Refused to keys with a filter.",
    "service": " Refused to keys that are bound to galleries.",
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
    403: "The API key lacks the scope that this needs, or is bound to less than this is about.",
    404: "The gallery, item, job or key is unknown, or the link is of another gallery version.",
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


@dataclass(frozen=True, slots=True)
class _Page:
    """An answer that stays the same while the process runs."""

    body: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        """304 without the body for a client that has it already."""
        headers = {"ETag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def _page(body: bytes, media_type: str) -> _Page:
    return _Page(body, media_type, f'"{hashlib.sha256(body).hexdigest()}"')


def install_openapi(app: FastAPI) -> None:
    """Make `app.openapi` know the problem schema, and serve the document and its page.

    Both need no key, so they are made once, at the first request, in a thread: that takes as long
    as many searches.
    """

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

    def make() -> tuple[_Page, _Page]:
        document = app.openapi()
        page = render_docs(document).encode()
        return _page(to_json(document), JSON), _page(page, "text/html")

    kept = Recent(partial(asyncio.to_thread, make), math.inf)
    app.openapi = build  # type: ignore[method-assign]

    @app.api_route("/openapi.json", methods=["GET", "HEAD"], include_in_schema=False)
    async def openapi(request: Request) -> Response:
        return (await kept.get())[0].answer(request)

    @app.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
    async def docs(request: Request) -> Response:
        return (await kept.get())[1].answer(request)


def _add_security(document: dict[str, Any], anonymous: Iterable[keys.Scope]) -> None:
    """Name the scope of every operation, and add the answers of the gate to it.

    The scope is the role that each scheme needs; an operation that anonymous callers may use
    has the empty requirement as well.
    """
    document["components"]["securitySchemes"] = _SCHEMES
    free, refusals = keys.allowed(anonymous), problems(*_REFUSALS)
    for path, item in document["paths"].items():
        for method in _METHODS & item.keys():
            operation, rule = item[method], rule_of(method.upper(), path)
            scope = rule.scope
            operation["security"] = []
            if scope is None:
                continue
            operation["security"] += [{name: [scope]} for name in _SCHEMES]
            operation["security"] += [{}] if scope in free else []
            text = operation.get("description", "")
            needs = f"Needs the scope `{scope}`.{_REFUSED.get(rule.reach, '')}"
            operation["description"] = f"{text}\n\n{needs}".strip()
            for status, response in refusals.items():
                operation["responses"].setdefault(str(status), response)


def _example(kind: Kind) -> dict[str, Any]:
    return {
        "type": kind.type,
        "title": kind.title,
        "status": kind.status,
        "detail": _TEXTS[kind.status],
        "request_id": "6f0c2d8e5b7a4c31a1d0c9e8f7b6a594",
    }
