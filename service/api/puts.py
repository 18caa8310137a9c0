"""The items that a put sends, as a form or JSON."""

import hashlib
from functools import partial
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field, SkipValidation, WithJsonSchema

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.programs.faults import shown
from kinlens.service.api.fields import (
    VECTOR_FORMS,
    VECTOR_TEXT,
    Strict,
    base64_content,
    read_form,
)
from kinlens.service.encoding.vectors import vector_content
from kinlens.service.galleries.items import NewItem
from kinlens.service.http.bodies import (
    FORM,
    JSON,
    checked,
    off_loop,
    parse_json,
    parse_object,
    read_body,
)
from kinlens.service.http.openapi import body_docs, inlined
from kinlens.service.settings import Settings
from kinlens.values import AttributeValue

_SHOWN = 80
_OF_PRODUCT = (
    "The product that all these images show. It is stored as the attribute `product` and is the "
    "prefix of generated keys. Search with group_by=product."
)


_KEEP = (
    "false: store the vector of each image and not the image, as if it was never sent. Answers "
    "then have `has_image` = false for the item."
)


# The gallery checks the values, and names the item and the attribute.
Attributes = dict[str, Annotated[AttributeValue, SkipValidation]]


class NewItemModel(Strict):
    """An item to add or replace: its key, its image or its vector, and all of its attributes. If
    `attributes` is omitted or null, the stored attributes are kept.
    """

    key: str | None = None
    data: Annotated[str | None, Field(description="The image file, base64.")] = None
    vector: Annotated[
        Any,
        WithJsonSchema({"anyOf": [*VECTOR_FORMS, {"type": "null"}]}),
        Field(description=f"In place of data, for an item without image. {VECTOR_TEXT}"),
    ] = None
    attributes: Attributes | None = None


class PutItems(Strict):
    """Items to add; an item with the key of a stored item replaces it."""

    keep: Annotated[bool, Field(description=_KEEP)] = True
    product: Annotated[str | None, Field(description=_OF_PRODUCT, min_length=1)] = None
    items: Annotated[list[NewItemModel], Field(fail_fast=True, min_length=1)]


def _parts(of: dict[str, str], description: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string", **of}, "description": description}


_PUT_FORM = {
    "type": "object",
    "required": ["image"],
    "properties": {
        "image": _parts({"format": "binary"}, "The image files, one for each item."),
        "key": _parts({}, "The key of each image, in order; may be omitted with product."),
        "product": {"type": "string", "description": _OF_PRODUCT},
        "keep": {"type": "string", "enum": ["true", "false"], "description": _KEEP},
        "attributes": _parts(
            {},
            "A JSON object for each image, or null to keep the stored attributes; may be omitted.",
        ),
    },
}


def put_docs() -> dict[str, Any]:
    """The OpenAPI of the operation."""
    form = {"schema": _PUT_FORM, "encoding": {"attributes": {"contentType": JSON}}}
    return body_docs({FORM: form, JSON: {"schema": inlined(PutItems)}})


async def read_items(request: Request) -> list[NewItem]:
    """The items in a request.

    Raises: HTTPException (400, 415), InvalidParameterError, RequestValidationError.
    """
    body, kind = await read_body(request, FORM, JSON)
    read = _from_json if kind == JSON else _from_form
    return await off_loop(request, partial(read, request, body))


def _from_form(request: Request, body: bytes) -> list[NewItem]:
    images, fields = read_form(request, body)
    _check_count(len(images))
    named: dict[str, list[str]] = {"key": [], "attributes": [], "product": [], "keep": []}
    for name, value in fields:
        if name not in named:
            raise InvalidParameterError(
                f"The form has a field {name[:_SHOWN]!r}; send image, key, attributes, product and "
                "keep."
            )
        named[name].append(value)
    keys, attributes, products, keep = named.values()
    if keep not in ([], ["true"], ["false"]):
        raise InvalidParameterError(
            f"keep = {', '.join(keep)[:_SHOWN]!r} must be true or false, once for all images."
        )
    if len(products) > 1 or "" in products:
        raise InvalidParameterError(
            f"The form has {len(products)} products, or an empty one; send one for all images."
        )
    product = products[0] if products else None
    needed = (len(images),) if product is None else (0, len(images))
    if len(keys) not in needed or len(attributes) not in (0, len(images)):
        raise InvalidParameterError(
            f"The form has {len(images)} images, {len(keys)} keys and {len(attributes)} "
            "attributes; send one key for each image, or a product, and attributes for each or for "
            "none."
        )
    new = []
    for number, image in enumerate(images):
        content: Any = image  # as it is, and not as base64
        item = NewItemModel.model_construct(key=keys[number] if keys else None, data=content)
        text = attributes[number] if attributes else None
        new.append(_new_item(item, product, keep != ["false"], text))
    return new


def _attributes_in(text: str, key: str | None) -> Attributes | None:
    """The attributes in a field of a form. Raises: InvalidParameterError."""
    try:
        given = parse_json(text.encode() or b"null")
        if given is None or isinstance(given, dict):
            return given
        reason = f"{shown(given)} is not an object"
    except (ValueError, InvalidParameterError) as error:
        reason = str(error)
    raise InvalidParameterError(
        f"attributes{f' of item {key!r:.200}' if key else ''}: {reason.rstrip('.')}; send a JSON "
        "object of texts, numbers and true/false."
    )


def _from_json(_: Request, body: bytes) -> list[NewItem]:
    payload = parse_object(body)
    if isinstance(payload.get("items"), list):
        _check_count(len(payload["items"]))
    sent = checked(PutItems, payload)
    return [_new_item(item, sent.product, sent.keep) for item in sent.items]


def _new_item(
    item: NewItemModel,
    product: str | None,
    keeps_image: bool,
    attributes_text: str | None = None,
) -> NewItem:
    """The item to store, of the product, if any; a form has its attributes as a text. A generated
    key is determined by the product and the image or vector.
    """
    key, data, vector, fault = item.key, b"", b"", None
    try:
        if (item.data is None) == (item.vector is None):
            raise InvalidParameterError("The item needs either data or vector; send one of them.")
        if item.data is not None:
            data = base64_content(item.data)
        else:
            vector = vector_content(item.vector)
        if attributes_text is not None:
            item.attributes = _attributes_in(attributes_text, key)
        if key is None and product is None:
            raise InvalidParameterError("The item has no key; send a key, or a product for all.")
    except InvalidParameterError as error:
        fault = error
    if key is None:
        content = hashlib.sha256(data or vector).hexdigest()[:16]
        key = f"{product}/{content}" if product is not None and (data or vector) else ""
    attributes = dict(item.attributes or {})
    if product is not None and attributes.setdefault("product", product) != product:
        fault = fault or InvalidParameterError(
            f"Item {key!r:.200} has the attribute product = {attributes['product']!r:.80}, but the "
            f"request has product = {product!r:.80}. Send one of them."
        )
    return NewItem(
        key,
        data,
        attributes,
        fault,
        keeps=item.attributes is None,
        vector=vector,
        keeps_image=keeps_image,
    )


def _check_count(count: int) -> None:
    limit = Settings.max_items_per_request
    if not 1 <= count <= limit:
        raise InvalidParameterError(
            f"The request has {count:,} items; send from 1 to {limit:,} per request."
        )
