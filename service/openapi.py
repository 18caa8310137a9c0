"""The OpenAPI document, and a page that shows it without a script or another host."""

from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.problems import MEDIA_TYPE
from service.schemas import Fault, Problem

_PROBLEM = {"$ref": "#/components/schemas/Problem"}
_TEXTS = {
    400: "The image is empty or the form is malformed.",
    404: "The gallery or the item is unknown.",
    408: "The body did not arrive in time.",
    413: "The body, or the image, is larger than the limit.",
    415: "The content is not an image in a format that is read.",
    422: "A parameter is missing or outside its range, or the image is damaged.",
    500: "Something failed inside the service.",
    503: "The service is too busy or not able to answer now; Retry-After says when to ask again.",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses=` of a route: each status as a problem."""
    return {
        status: {
            "description": _TEXTS[status],
            "content": {
                MEDIA_TYPE: {
                    "schema": _PROBLEM,
                    "example": {
                        "type": "urn:kinlens:problem:example",
                        "title": "What kind of error",
                        "status": status,
                        "detail": _TEXTS[status],
                        "request_id": "6f0c2d8e5b7a4c31a1d0c9e8f7b6a594",
                    },
                }
            },
        }
        for status in statuses
    }


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
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = build  # type: ignore[method-assign]


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
