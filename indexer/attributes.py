"""The attributes of items: names, kinds and what a value may be."""

import math
import re
from collections.abc import Mapping
from datetime import date
from typing import Any

from kinlens.values import AttributeKind, AttributeValue, Scalar, date_text

Schema = Mapping[str, AttributeKind]
"""The attributes of a gallery: name -> kind."""

MAX_NAME = 128
MAX_TEXT = 4096
MAX_LIST = 1000
_KINDS: Mapping[type, AttributeKind] = {
    bool: "boolean",
    str: "text",
    int: "number",
    float: "number",
}
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def as_stored(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Attributes as they are stored: lists as tuples, none that are empty, and dates as texts."""
    if not any(isinstance(value, list | tuple | date) for value in attributes.values()):
        return attributes
    return {
        name: tuple(map(_plain, value)) if isinstance(value, list | tuple) else _plain(value)
        for name, value in attributes.items()
        if value not in ([], ())
    }


def _plain(value: Any) -> Any:
    return date_text(value) if isinstance(value, date) else value


def kind_of(value: object) -> AttributeKind:
    """The kind of one value. Raises: ValueError for None, a list and whatever is no value."""
    kind = _KINDS.get(type(value))
    if kind is not None:
        return kind
    for known, kind in _KINDS.items():
        if isinstance(value, known):
            return kind
    raise ValueError(f"{value!r:.80} is not a text, a number or true/false")


def checked_kind(value: AttributeValue) -> AttributeKind:
    """The kind of a value, or of several, that can be stored and compared.

    Raises: ValueError for no value, NaN, infinity, whole numbers beyond 64 bits, broken Unicode,
        values of different kinds, too many or too long ones.
    """
    if isinstance(value, tuple):
        return _kind_of_all(value)
    kind = kind_of(value)
    if isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            raise ValueError(f"{value!r:.80} is not valid Unicode")
        if len(value) > MAX_TEXT:
            raise ValueError(
                f"a text has {len(value):,} characters, the limit is {MAX_TEXT:,}. Shorten it"
            )
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
    elif not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"a whole number of {value.bit_length()} bits does not fit in 64 bits")
    return kind


def _kind_of_all(values: tuple[Scalar, ...]) -> AttributeKind:
    if len(values) > MAX_LIST:
        raise ValueError(f"a list of {len(values):,} values; give at most {MAX_LIST:,}")
    if any(isinstance(value, list | tuple) for value in values):
        raise ValueError("a list in a list. Give texts, numbers or true/false in a list")
    kinds = [checked_kind(value) for value in values]
    for kind, value in zip(kinds, values, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                f"a list with {values[0]!r:.80}, a {kinds[0]}, and {value!r:.80}, a {kind}. Give "
                "values of one kind"
            )
    return kinds[0]


def is_printable(text: str) -> bool:
    """No control character, no line break, no broken Unicode."""
    return text.isprintable() or _UNPRINTABLE.search(text) is None


def check_name(name: object) -> None:
    """An attribute name has 1 to 128 printable characters. Raises: ValueError."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not is_printable(name):
        raise ValueError(
            f"{name!r:.160} is not an attribute name, which has 1 to {MAX_NAME} printable "
            "characters"
        )
