"""The attributes of items: valid names, types and values."""

import math
import re
from collections.abc import Mapping
from datetime import date, datetime
from typing import Any

from kinlens.embedder.sources.names import composed
from kinlens.values import (
    AttributeType,
    AttributeValue,
    Scalar,
    date_text,
    is_missing,
    plain_attributes,
)

Schema = Mapping[str, AttributeType]
"""The attributes of a gallery: name -> type."""

MAX_NAME = 128
MAX_TEXT = 4096
MAX_LIST = 1000
DATE = "date"
"""Type name of a date. It is stored as text in a format that sorts by time."""

_WHOLE = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_DIGITS = 100  # including leading zeros
BOOLEANS = {"true": True, "false": False}
_TYPES: Mapping[type, AttributeType] = {
    bool: "boolean",
    str: "text",
    int: "number",
    float: "number",
}
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def as_stored(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Plain attributes whose texts are in the composed Unicode form."""
    plain = plain_attributes(attributes)
    if all(isinstance(value, str) and value.isascii() for value in plain.values()):
        return plain
    return {name: _composed(value) for name, value in plain.items()}


def _composed(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_composed, value))
    return composed(value) if isinstance(value, str) else value


def type_of(value: object) -> AttributeType:
    """The attribute type of one value. Raises: ValueError for None, a list and other objects."""
    found = _TYPES.get(type(value))
    if found is not None:
        return found
    for known, type_ in _TYPES.items():
        if isinstance(value, known):
            return type_
    if is_missing(value):
        raise ValueError(f"{value!r:.80} is a missing value. Omit the attribute")
    raise ValueError(f"{value!r:.80} must be a string, a number or true/false")


def checked_type(value: AttributeValue) -> AttributeType:
    """The attribute type of a value or a tuple of values, after checking that it can be stored.

    Raises: ValueError for no value, NaN, infinity, integers beyond 64 bits, invalid Unicode, values
        of different types, too many values, or too long texts.
    """
    if isinstance(value, tuple):
        return _type_of_all(value)
    type_ = type_of(value)
    if isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            raise ValueError(f"{value!r:.80} is not valid Unicode")
        if len(value) > MAX_TEXT:
            raise ValueError(
                f"a text has {len(value):,} characters, the limit is {MAX_TEXT:,}. Shorten it"
            )
    elif isinstance(value, float):
        if not math.isfinite(value):
            cure = ". Omit the attribute" if math.isnan(value) else ""
            raise ValueError(f"{value} is not a finite number{cure}")
    elif not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"a whole number of {value.bit_length()} bits does not fit in 64 bits")
    return type_


def _type_of_all(values: tuple[Scalar, ...]) -> AttributeType:
    if len(values) > MAX_LIST:
        raise ValueError(f"a list of {len(values):,} values; give at most {MAX_LIST:,}")
    if any(isinstance(value, list | tuple) for value in values):
        raise ValueError("a list in a list. Give texts, numbers or true/false in a list")
    types = [checked_type(value) for value in values]
    for type_, value in zip(types, values, strict=True):
        if type_ != types[0]:
            raise ValueError(
                f"a list with {values[0]!r:.80}, a {types[0]}, and {value!r:.80}, a {type_}. Give "
                "values of one type"
            )
    return types[0]


def is_printable(text: str) -> bool:
    """Whether a text has no control characters, line breaks or invalid Unicode."""
    return text.isprintable() or _UNPRINTABLE.search(text) is None


def check_name(name: object) -> None:
    """Check an attribute name: 1 to 128 printable characters. Raises: ValueError."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not is_printable(name):
        raise ValueError(
            f"an attribute name must have 1 to {MAX_NAME} printable characters, not {name!r:.160}"
        )


def parse_value(text: str, kind: str) -> Scalar:
    """Convert `text` to a value of type `kind`. Raises: ValueError with the expected format."""
    word = text.strip()
    if kind == "text":
        return text
    if kind == DATE:
        try:
            short = len(word) <= len("2026-11-25")
            return date_text((date if short else datetime).fromisoformat(word))
        except ValueError as error:
            raise ValueError("expected a date such as 2026-11-25 or 2026-11-25T10:30Z") from error
    if kind == "boolean":
        if word.lower() not in BOOLEANS:
            raise ValueError("expected true or false")
        return BOOLEANS[word.lower()]
    if _WHOLE.fullmatch(word):
        if len(word) > _DIGITS or not -(2**63) <= int(word) < 2**63:
            raise ValueError("expected a 64-bit integer, or a number with a point such as 1.5e20")
        return int(word)
    if not _DECIMAL.fullmatch(word) or not math.isfinite(float(word)):
        raise ValueError("expected a finite number such as 12 or 12.5, with a decimal point")
    return float(word)
