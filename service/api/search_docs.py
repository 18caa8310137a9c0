"""What the OpenAPI document says of searches: bodies that the routes read themselves, examples."""

from typing import Any

from pydantic import BaseModel, JsonValue

from service.api.query_models import PNG, BatchRequest, LookingFor, SearchFields, SearchRequest
from service.api.search_bodies import FORM, RAW
from service.api.search_models import ANSWER, BATCH, GROUPED, NO_MATCH
from service.http.bodies import JSON
from service.search.query import SearchLimits

_CROP_TEXT = "left,top,width,height as fractions of the upright image; for each image."
_CROP = {"type": "string", "examples": ["0.1,0.2,0.5,0.5"], "description": _CROP_TEXT}
_KEY = {"type": "string"}
_FILE = {"type": "string", "format": "binary"}
_REQUESTS: dict[str, JsonValue] = {
    "image": {"images": [{"data": PNG}], "k": 5},
    "crops": {"images": [{"data": PNG, "crops": [[0, 0, 0.5, 1], [0.5, 0, 0.5, 1]]}], "k": 5},
    "filter and groups": {
        "images": [{"data": PNG}],
        "k": 5,
        "min_score": 0.5,
        "filter": {"colour": "red", "price": {"<": 20}},
        "group_by": "product",
        "group_size": 3,
    },
    "like and unlike": {"positives": ["shoes/0017.jpg"], "negatives": ["boots/0004.jpg"]},
}
_BATCHES: dict[str, JsonValue] = {
    "two": {"queries": [{"images": [{"data": PNG}], "k": 5}, {"images": [{"data": PNG}], "k": 9}]}
}


def search_docs(limits: SearchLimits) -> dict[str, Any]:
    """The parameters and the body of POST /search."""
    return {
        "parameters": _parameters(LookingFor, limits, crops=True),
        "requestBody": {
            "required": True,
            "content": {
                FORM: {"schema": _form(limits, limits.max_images)},
                JSON: {"schema": _inlined(SearchRequest, limits), "examples": _named(_REQUESTS)},
                RAW: {"schema": _FILE},
                "image/*": {"schema": _FILE},
            },
        },
    }


def batch_docs(limits: SearchLimits) -> dict[str, Any]:
    """The body of POST /search/batch."""
    schema = _inlined(BatchRequest, limits)
    schema["properties"]["queries"]["maxItems"] = limits.max_queries
    return {
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": schema, "examples": _named(_BATCHES)},
                FORM: {"schema": _form(limits, limits.max_queries) | {"required": ["image"]}},
            },
        }
    }


def similar_docs(limits: SearchLimits) -> dict[str, Any]:
    """The query string of a search like an item; its gallery is in the path."""
    version = {
        "name": "version",
        "in": "query",
        "required": False,
        "description": "The gallery generation that the number is from, as in links of pictures.",
        "schema": {"type": "string"},
    }
    return {"parameters": [version, *_parameters(SearchFields, limits, crops=False)]}


ANSWER_DOCS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "What was found; with combine=separate an answer for each image and crop.",
        "content": {
            JSON: {
                "examples": {
                    "hits": {"value": ANSWER},
                    "no match": {"value": NO_MATCH},
                    "groups": {"value": GROUPED},
                    "separate": {"value": BATCH},
                }
            }
        },
    }
}
SIMILAR_DOCS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "What is similar, without the item itself.",
        "content": {JSON: {"examples": {"hits": {"value": ANSWER}}}},
    }
}
BATCH_DOCS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An outcome for each query, in their order.",
        "content": {JSON: {"examples": {"one of two": {"value": BATCH}}}},
    }
}


def _named(values: dict[str, JsonValue]) -> dict[str, Any]:
    return {name: {"value": value} for name, value in values.items()}


def _inlined(model: type[BaseModel], limits: SearchLimits) -> dict[str, Any]:
    """The schema of a request without references, with the limits of this service."""
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
    _limit(whole, limits)
    return whole


def _limit(schema: Any, limits: SearchLimits) -> None:
    """Write the limits of the settings into a schema and all that is in it."""
    if isinstance(schema, list):
        for part in schema:
            _limit(part, limits)
    if not isinstance(schema, dict):
        return
    properties = schema.get("properties", {})
    for name in properties.keys() & {"k", "offset", "group_size"}:
        _bounded(properties[name], limits.max_k)
    if isinstance(properties.get("k"), dict):
        properties["k"]["default"] = limits.default_k
    for name, most in (("images", limits.max_images), ("crops", limits.max_crops)):
        if name in properties:
            properties[name]["maxItems"] = most
    for part in schema.values():
        _limit(part, limits)


def _bounded(schema: dict[str, Any], most: int) -> None:
    for choice in schema.get("anyOf", [schema]):
        if choice.get("type") == "integer":
            choice["maximum"] = most


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a value as text, which cannot be null."""
    choices = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    texts = [each for each in choices if each.get("type") == "string"]
    if not choices:
        return schema
    kept = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    if "examples" in kept:
        kept["examples"] = [each for each in kept["examples"] if isinstance(each, str)]
    default = {} if schema.get("default") is None else {"default": schema["default"]}
    plain: dict[str, Any] = (texts or choices)[0]
    return plain | kept | default


def _text_fields(model: type[BaseModel], limits: SearchLimits) -> dict[str, Any]:
    """The schema of each field as it is written in a form or a query string."""
    fields = {n: _plain(s) for n, s in _inlined(model, limits)["properties"].items()}
    for several, name in (("positives", "positive"), ("negatives", "negative")):
        if several in fields:
            fields[name] = {"type": "array", "items": _KEY, **_described(fields.pop(several))}
    return fields


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": schema["description"]}


def _form(limits: SearchLimits, max_images: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "image": {
                "type": "array",
                "items": _FILE,
                "maxItems": max_images,
                "description": "JPEG, PNG, WebP, BMP, TIFF or GIF; each a part of its own.",
            },
            "crop": {"type": "array", "items": _CROP, "maxItems": limits.max_crops},
            **_text_fields(LookingFor, limits),
        },
        "additionalProperties": False,
    }


def _parameters(
    model: type[BaseModel], limits: SearchLimits, *, crops: bool
) -> list[dict[str, Any]]:
    """The same fields as a query string."""
    fields = _text_fields(model, limits)
    if crops:
        fields["crop"] = {"type": "array", "items": _CROP, "maxItems": limits.max_crops}
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": schema.pop("description", _CROP_TEXT),
            "schema": {key: value for key, value in schema.items() if key != "title"},
        }
        for name, schema in ((name, dict(schema)) for name, schema in fields.items())
    ]
