"""Items as they are sent, a form or JSON, made into what is to be stored."""

from typing import Annotated, Any

from fastapi import HTTPException, Request
from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from embedder.errors import InvalidParameterError
from embedder.types import AttributeValue
from service.api.bounded import plain_values
from service.api.gallery_models import NewItemModel, PutItems
from service.api.parameters import base64_content
from service.galleries.items import NewItem
from service.http.bodies import (
    JSON,
    Part,
    checked,
    media_type_of,
    parse_form,
    parse_json,
    parse_object,
)
from service.runtime import Runtime

_ATTRIBUTES: TypeAdapter[dict[str, AttributeValue]] = TypeAdapter(
    Annotated[dict[str, AttributeValue], BeforeValidator(plain_values)]
)
_FORM = "multipart/form-data"
_FIELDS = ("image", "key", "attributes")
_SHOWN = 80


def _json_schema() -> dict[str, Any]:
    schema = PutItems.model_json_schema()
    schema["properties"]["items"]["items"] = schema.pop("$defs")[NewItemModel.__name__]
    return schema


PUT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["image", "key"],
                    "properties": {
                        "image": {
                            "type": "array",
                            "items": {"type": "string", "format": "binary"},
                            "description": "The image files, one for each item.",
                        },
                        "key": {
                            "type": "array",
                            "items": {"type": "string"},
                            "description": "The key of each image, in the same order.",
                        },
                        "attributes": {
                            "type": "array",
                            "items": {"type": "string"},
                            "description": "For each image a JSON object; or none at all.",
                        },
                    },
                },
                "encoding": {"attributes": {"contentType": "application/json"}},
            },
            "application/json": {"schema": _json_schema()},
        },
    }
}
"""The OpenAPI of a put, whose body is read here and not by FastAPI."""


async def new_items(request: Request, runtime: Runtime) -> list[NewItem]:
    """The items in a request.

    Raises: HTTPException (400, 415), InvalidParameterError, RequestValidationError.
    """
    content_type, media_type = request.headers.get("content-type", ""), media_type_of(request)
    if media_type not in (_FORM, JSON):
        raise HTTPException(
            415,
            f"Content-Type = {media_type[:_SHOWN]!r} is not read here; send {_FORM} or {JSON}.",
        )
    body, limit = await request.body(), runtime.settings.max_items_per_request
    if media_type == _FORM:
        return await runtime.pools["write"].run(lambda: _from_form(body, content_type, limit))
    return await runtime.pools["write"].run(lambda: _from_json(body, limit))


def _from_form(body: bytes, content_type: str, limit: int) -> list[NewItem]:
    named: dict[str, list[Part]] = {name: [] for name in _FIELDS}
    for part in parse_form(body, content_type):
        if part.name not in named:
            raise InvalidParameterError(
                f"The form has a field {part.name[:_SHOWN]!r}; send image, key and attributes."
            )
        if part.name != "image" and part.is_file:
            raise InvalidParameterError(f"{part.name} was sent as a file; send it as a text.")
        named[part.name].append(part)
    images, keys, texts = (named[name] for name in _FIELDS)
    _check_count(len(images), limit)
    if len(keys) != len(images) or len(texts) not in (0, len(images)):
        raise InvalidParameterError(
            f"The form has {len(images)} images, {len(keys)} keys and {len(texts)} attributes; "
            "send one key for each image, and attributes for each or for none."
        )
    attributes = [part.text for part in texts] or ["{}"] * len(images)
    return [
        _with_attributes(key.text, image.data, text)
        for image, key, text in zip(images, keys, attributes, strict=True)
    ]


def _with_attributes(key: str, data: bytes, text: str) -> NewItem:
    try:
        return NewItem(key, data, _ATTRIBUTES.validate_python(parse_json(text.encode() or b"{}")))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)[0]
        reason = found["msg"]
    except (ValueError, InvalidParameterError) as error:
        reason = str(error)
    fault = InvalidParameterError(
        f"attributes of item {key!r:.200}: {reason}; send a JSON object of texts, numbers and "
        "true/false."
    )
    return NewItem(key, data, error=fault)


def _from_json(body: bytes, limit: int) -> list[NewItem]:
    payload = parse_object(body)
    if isinstance(payload.get("items"), list):
        _check_count(len(payload["items"]), limit)
    items = checked(PutItems, payload, None).items
    return [_decoded(item) for item in items]


def _decoded(item: NewItemModel) -> NewItem:
    try:
        return NewItem(item.key, base64_content(item.data), item.attributes)
    except PydanticCustomError as error:
        return NewItem(item.key, b"", item.attributes, InvalidParameterError(error.message()))


def _check_count(count: int, limit: int) -> None:
    if not 1 <= count <= limit:
        raise InvalidParameterError(
            f"The request has {count:,} items; send from 1 to {limit:,} at once."
        )
