"""The OpenAPI document with its problems and scopes, served at /openapi.json; and Swagger UI, whose
files come from the package fastapi-offline, at /docs.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from kinlens.embedder import errors
from kinlens.embedder.errors import KinlensError
from kinlens.models import Fault, Problem, Scope
from kinlens.service.access import keys
from kinlens.service.access.links import public_path
from kinlens.service.concurrency import Recent, in_thread
from kinlens.service.http.bodies import FORM, IMAGE, JSON, RAW
from kinlens.service.http.pages import Assets, Page
from kinlens.service.http.rules import Extent, Route, rule
from kinlens.service.problems import (
    BAD_REQUEST,
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
    INTERNAL,
    MEDIA_TYPE,
    PROBLEM_TYPES,
    UNKNOWN_HOST,
    UNSUPPORTED_MEDIA,
    ProblemType,
)
from kinlens.service.settings import Settings

_VIEWER = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}
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
        "description": "The API key in a separate header.",
    },
}
_REFUSED: dict[Extent, str] = {
    "galleries": " Refused to keys with a filter.",
    "service": " Refused to keys that are bound to galleries.",
}
_OF_ALL = (UNKNOWN_HOST, BAD_REQUEST, INTERNAL)
_REFUSALS = (  # of operations that need a scope
    *(errors.AccessError, errors.KeyMissingError, errors.ScopeError, errors.RateLimitedError),
)
_OF_BODIES = (BODY_TOO_SLOW, BODY_TOO_LARGE, UNSUPPORTED_MEDIA)
_PROBLEM = {"$ref": "#/components/schemas/Problem"}
_RETRY_AFTER = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}

_PNG = (  # red and blue, 8 x 8 px
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAGklEQVR42mM8ISfHAANhDKvgbCYGHGBw"
    "SgAAioUCFJLJ2DgAAAAASUVORK5CYII="
)
IMAGES = [{"data": _PNG}]
"""The images of an example."""

_VECTOR = [0.5, 0.5, 0.5, 0.5]  # of a model with four numbers
_REQUESTS = {
    "image": {"value": {"images": IMAGES, "k": 5}},
    "crops": {"value": {"images": [{"data": _PNG, "crops": [[0, 0, 0.5, 1], [0.5, 0, 0.5, 1]]}]}},
    "filter and groups": {
        "value": {
            "images": IMAGES,
            "min_score": 0.5,
            "filter": {"colour": "red", "price": {"<": 20}},
            "group_by": "product",
            "group_size": 3,
        }
    },
    "image and vector": {
        "value": {"images": IMAGES, "vectors": [{"vector": _VECTOR, "weight": 0.5}], "k": 5}
    },
    "words": {"value": {"texts": ["green mug"], "k": 5}},
    "image and words": {
        "value": {"images": IMAGES, "texts": [{"text": "green", "weight": 0.5}], "k": 5}
    },
    "facets": {"value": {"images": IMAGES, "min_score": 0.5, "facets": ["colour", "price"]}},
    "like and unlike": {
        "value": {"positives": ["shoes/0017.jpg"], "negatives": ["boots/0004.jpg"]}
    },
}
_BATCHES = {
    "two": {"value": {"queries": [{"images": IMAGES, "k": 5}, {"positives": ["shoes/0017.jpg"]}]}}
}
FILE = {"type": "string", "format": "binary"}
_NAMES_TEXT = {"type": "string", "examples": ["colour,price"]}
_VECTORS = {"type": "string", "examples": ['[{"vector": [0.6, 0.8], "weight": 0.5}]']}
_TEXTS = {"type": "string", "examples": ['["green"]', '[{"text": "green", "weight": 0.5}]']}
_CROP_TEXT = (
    "left,top,width,height as fractions of the upright image; or auto for the whole image and "
    "parts of it. Applies to each image."
)
_CROP = {"type": "string", "examples": ["0.1,0.2,0.5,0.5"]}


def problems(*kinds: ProblemType | type[KinlensError]) -> dict[int | str, dict[str, Any]]:
    """The `responses=` of a route: these problems or errors, and those of every route."""
    found = {kind if isinstance(kind, ProblemType) else PROBLEM_TYPES[kind] for kind in kinds}
    examples: dict[int | str, dict[str, Any]] = {}
    for kind in sorted({*found, *_OF_ALL}, key=lambda kind: (kind.status, kind.slug)):
        examples.setdefault(kind.status, {})[kind.slug] = {"value": _example(kind)}
    return {status: _response(status, shown) for status, shown in examples.items()}


def _response(status: int | str, examples: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": ". ".join(example["value"]["title"] for example in examples.values()) + ".",
        "content": {MEDIA_TYPE: {"schema": _PROBLEM, "examples": examples}},
        **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
    }


def body_docs(content: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    """The OpenAPI of an operation with a body of these media types."""
    return {"requestBody": {"required": required, "content": content}}


def model_docs(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """The OpenAPI of an operation with a model as its JSON body."""
    return body_docs({JSON: {"schema": inlined(model)}}, required=required)


def inlined(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a model, with nested models inlined instead of referenced."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(part) for part in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return resolved(definitions[value["$ref"].rpartition("/")[2]])
        return {name: resolved(part) for name, part in value.items()}

    whole: dict[str, Any] = resolved(schema)
    return whole


def _text_fields(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of each field in a form or a query string, where values are never null."""
    texts = {}
    for name, schema in inlined(model)["properties"].items():
        choice = schema.pop("anyOf", [{}])[0]  # the first type is text if allowed; null is last
        default = schema.pop("default", None)
        known = {} if default is None else {"default": default}
        texts[name.removesuffix("s")] = {**choice, **schema, **known}  # positives -> positive
    for name in ("facets", "fields"):
        texts[name] = {
            **_NAMES_TEXT,
            "description": texts.pop(name.removesuffix("s"))["description"],
        }
    for name, example in (("vectors", _VECTORS), ("texts", _TEXTS)):
        if schema := texts.pop(name.removesuffix("s"), None):
            texts[name] = {**example, "description": f"{schema['description']} As JSON."}
    if texts.pop("image", None):
        crops = {"type": "array", "items": _CROP, "maxItems": Settings.max_crops}
        texts["crop"] = {**crops, "description": _CROP_TEXT}
    return texts


def parameters_of(model: type[BaseModel]) -> list[dict[str, Any]]:
    """The OpenAPI parameters for the fields of `model` in a query string."""
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": schema.pop("description"),
            "schema": {key: value for key, value in schema.items() if key != "title"},
        }
        for name, schema in _text_fields(model).items()
    ]


def _form(model: type[BaseModel], max_images: int) -> dict[str, Any]:
    image = {
        "type": "array",
        "items": FILE,
        "maxItems": max_images,
        "description": "JPEG, PNG, WebP, BMP, TIFF, GIF, AVIF or HEIC; one part per image. Of an "
        "animation, the first frame. The content decides the format.",
    }
    return {
        "type": "object",
        "properties": {"image": image, **_text_fields(model)},
        "additionalProperties": False,
    }


def search_docs(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI of an operation with a search: a form, JSON, or an image and a query string."""
    body = image_docs(_form(model, Settings.max_images), model, _REQUESTS)
    return {"parameters": parameters_of(model), **body}


def image_docs(
    form: dict[str, Any], model: type[BaseModel], examples: dict[str, Any]
) -> dict[str, Any]:
    """The body of a request with an image: a form, JSON, or the image itself."""
    content = {
        FORM: {"schema": form},
        JSON: {"schema": inlined(model), "examples": examples},
        RAW: {"schema": FILE},
        IMAGE: {"schema": FILE},
    }
    return body_docs(content)


def batch_docs(batch: type[BaseModel], model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI of an operation with several searches: JSON, or an image for each in a form."""
    content = {
        JSON: {"schema": inlined(batch), "examples": _BATCHES},
        FORM: {"schema": _form(model, Settings.max_batch_queries) | {"required": ["image"]}},
    }
    return body_docs(content)


def openapi_routes(app: FastAPI, assets: Assets) -> APIRouter:
    """Add the problem schema to `app.openapi`, and build the routes of the document and its viewer.

    The document and the files of the viewer are public and as costly as many searches, so they are
    built and compressed once, in a thread, at the first request.
    """

    def make() -> Page:
        return Page.of(to_json(app.openapi()), JSON)

    def load() -> dict[str, Page]:
        folder = files("fastapi_offline") / "static"
        return {name: Page.of((folder / name).read_bytes(), kind) for name, kind in _VIEWER.items()}

    document = Recent(partial(in_thread, make), math.inf)
    viewer = Recent(partial(in_thread, load), math.inf)
    located: dict[str, Page] = {}  # by path prefix, which only trusted proxies set
    app.openapi = partial(_document, app)  # type: ignore[method-assign]
    html = assets.page("docs/index.html")
    router = APIRouter(route_class=Route, include_in_schema=False)

    @router.get("/openapi.json")
    @rule(None, "none")
    async def openapi(request: Request) -> Response:
        page, prefix = await document.get(), public_path("")
        if prefix and prefix not in located:
            server = b'{"servers":' + to_json([{"url": prefix}]) + b","
            located[prefix] = await in_thread(partial(Page.of, server + page.body[1:], JSON))
        return located.get(prefix, page).answer(request.headers)

    @router.get("/docs")
    @rule(None, "none")
    async def docs(request: Request) -> Response:
        return html.answer(request.headers)

    @router.get("/docs/{path:path}")
    @rule(None, "none")
    async def file(request: Request, path: str) -> Response:
        if path not in _VIEWER:
            raise HTTPException(404, f"/docs/{path} does not exist.")
        return (await viewer.get())[path].answer(request.headers)

    return router


def _document(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        for route in app.routes:
            if isinstance(route, Route) and route.rule.docs is not None:
                route.openapi_extra = route.rule.docs()
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in (Problem, Fault):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schema.pop("$defs", None)
            schemas[model.__name__] = schema
        _add_security(document, app, app.state.runtime.settings.anonymous_scopes)
        app.openapi_schema = document
    return app.openapi_schema


def _add_security(document: dict[str, Any], app: FastAPI, anonymous: Iterable[Scope]) -> None:
    """Add the scope of every operation and the problems of a refusal.

    The scope is listed as the role of each security scheme. Operations for anonymous callers also
    have the empty requirement.
    """
    document["components"]["securitySchemes"] = _SCHEMES
    free = keys.allowed(anonymous)
    shown = (one for one in app.routes if isinstance(one, Route) and one.include_in_schema)
    for route in shown:
        for method in route.methods or ():
            operation = document["paths"][route.path_format][method.lower()]
            scope = route.rule.scope
            if "requestBody" in operation:
                _add_problems(operation, _OF_BODIES)
            operation["security"] = []
            if scope is None:
                continue
            operation["security"] += [{name: [scope]} for name in _SCHEMES]
            operation["security"] += [{}] if scope in free else []
            text = operation.get("description", "")
            needs = f"Needs the scope `{scope}`.{_REFUSED.get(route.rule.extent, '')}"
            operation["description"] = f"{text}\n\n{needs}".strip()
            _add_problems(operation, _REFUSALS)


def _add_problems(
    operation: dict[str, Any], kinds: Sequence[ProblemType | type[KinlensError]]
) -> None:
    """Add to the answers of an operation, which may share them with others."""
    for status, response in problems(*kinds).items():
        known = operation["responses"].get(str(status), response)
        examples = known["content"][MEDIA_TYPE]["examples"]
        more = response["content"][MEDIA_TYPE]["examples"]
        operation["responses"][str(status)] = known | _response(status, examples | more)


def _example(kind: ProblemType) -> dict[str, Any]:
    return {
        "type": kind.type,
        "title": kind.title,
        "status": kind.status,
        "detail": "What was wrong, the limit, and what to do.",
        "request_id": "6f0c2d8e5b7a4c31a1d0c9e8f7b6a594",
    }
