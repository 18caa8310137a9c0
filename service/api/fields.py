"""What bodies of searches and of items have in common: fields that cost little to refuse."""

import base64
import binascii
import re
import reprlib
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from embedder import errors
from indexer.filters.json import filter_from_json
from indexer.filters.text import parse_filter
from indexer.filters.tree import Filter
from service.http.bodies import parse_json

_UNKNOWN_KEPT = 5
_SHOWN_CHARACTERS = 40
_LARGEST_SHOWN = 10**18
_HEAD = 256
_DATA_URL = re.compile(r"\s*data:[^,]{0,200};base64,", re.IGNORECASE)


class Strict(BaseModel):
    """Refuses unknown fields, and names the first few of them."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _keeps_few_unknown(cls, value: Any) -> Any:
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields) + _UNKNOWN_KEPT:
            return value
        unknown = [name for name in value if name not in cls.model_fields][:_UNKNOWN_KEPT]
        return {name: value[name] for name in (*cls.model_fields, *unknown) if name in value}


def base64_content(value: Any) -> bytes:
    """A validator for base64, also in a data: URL. Nothing is ever loaded from an address."""
    if isinstance(value, bytes):  # a part of a form; JSON has none
        return value
    if not isinstance(value, str):
        raise custom_error("data is no text; send the content of an image file as base64.")
    start = _DATA_URL.match(value[:_HEAD])
    try:
        return base64.b64decode(value if start is None else value[start.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise custom_error(
            f"data = {shown(value)!r} is not base64 ({error}); encode the content of an image file "
            "with the standard alphabet and padding, without line breaks, alone or after "
            "data:image/...;base64, Nothing is loaded from addresses."
        ) from error


def where_of(value: str | dict[str, Any] | None) -> Filter | None:
    """A filter in its text form, or as JSON, also written as text. Raises: FilterError."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        if not value.lstrip().startswith("{"):
            return parse_filter(value)
        try:
            value = parse_json(value.encode(errors="surrogatepass"))
        except (ValueError, errors.InvalidParameterError) as error:
            raise errors.FilterError(
                f"The filter is not valid JSON: {error}. Write it as "
                '{"colour": "red"}, or as text: colour = "red".'
            ) from error
    return filter_from_json(value)


def custom_error(message: str) -> PydanticCustomError:
    """A fault that is shown with this message as it is."""
    return PydanticCustomError("out_of_range", "{message}", {"message": message})


def shown(value: Any) -> str:
    """A value of a request in a message: short, whatever it is."""
    if isinstance(value, str):
        return value[:_SHOWN_CHARACTERS]
    if isinstance(value, int) and abs(value) > _LARGEST_SHOWN:
        return "a number of more than 18 digits"
    if isinstance(value, int | float | None):
        return str(value)
    return reprlib.repr(value)[:_SHOWN_CHARACTERS] if isinstance(value, list) else "something else"


def inlined(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a model with the models inside it in place of references to them."""
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
