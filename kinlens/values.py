"""Attribute values, as stored with items, as sent in requests and as written in addresses."""

import re
from collections.abc import Mapping, Set
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any, Literal
from urllib.parse import quote

Scalar = str | int | float | bool
"""One value of an attribute."""

AttributeValue = Scalar | tuple[Scalar, ...]
"""The stored value of an attribute: one scalar, or several scalars of one kind."""

AttributeInput = Any
"""An attribute value before it is stored: a scalar, a date, Decimal, Enum, a scalar of NumPy or
pandas, or a list, tuple, set or array of these. `plain` describes how each is stored."""

AUTO: Literal["auto"] = "auto"
"""As the crop of an image: the whole image and parts of it, which Kinlens chooses."""

AttributeType = Literal["text", "number", "boolean"]
"""The type of the values of an attribute; integers and decimals are one kind."""

NAME = re.compile(r"\{([^{}]+)\}")
"""The name of an attribute in the template of an address, such as https://shop.example/p/{id}."""


def date_text(value: date) -> str:
    """A date as 2026-11-25; a time as 2026-11-25T10:30:00Z, in whole seconds and in UTC.

    A time without a zone is taken as UTC. The texts sort in the order of time.
    """
    if not isinstance(value, datetime):
        return value.isoformat()
    moment = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
    return f"{moment.isoformat(timespec='seconds')}Z"


def plain(value: Any) -> Any:
    """An attribute value as it is stored: str, int, float or bool, or a tuple of these.

    Dates and times become the text of `date_text`; decimals and fractions become numbers; an Enum
    becomes its value; scalars of NumPy become those of Python, and float32 the shortest decimal
    of its value. Lists, tuples, sets and arrays become tuples, a set in sorted order. Other
    objects, among them the missing values NaN, NaT and NA, are returned unchanged for the checks
    that refuse them.
    """
    kind = type(value)
    if kind in (str, int, float, bool) or is_missing(value):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    if isinstance(value, Set):
        return tuple(sorted(map(plain, value), key=lambda one: (str(type(one)), one)))
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, date):
        return date_text(value)
    if isinstance(value, Decimal | Fraction):
        is_whole = float(value).is_integer() and value == int(value)
        return int(value) if is_whole else float(value)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # of NumPy or pandas, not imported
        return _plain_of_array(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else value


def _plain_of_array(value: Any) -> Any:
    kind, is_numpy = value.dtype.kind, type(value).__module__.startswith("numpy")
    if kind == "m":
        return value  # a duration would become a number without a unit
    if kind == "M" and is_numpy and value.dtype.name.endswith("s]"):  # seconds to attoseconds
        value = value.astype("datetime64[us]")  # in nanoseconds `tolist` returns integers
    elif kind == "f" and value.dtype.itemsize < 8:
        value = value.astype(str).astype(float)
    python = value.tolist()
    return value if type(python) is type(value) else plain(python)


def plain_attributes(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Attributes as they are stored: each value `plain`, without empty lists."""
    if all(type(value) in (str, int, float, bool) for value in attributes.values()):
        return attributes
    stored = {name: plain(value) for name, value in attributes.items()}
    return {name: value for name, value in stored.items() if type(value) is not tuple or value}


def is_missing(value: Any) -> bool:
    """Whether a value is one of those that stand for none: NaN, NaT of NumPy and pandas, or NA."""
    if type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    is_scalar = isinstance(value, float) or getattr(value, "shape", None) == ()
    return is_scalar and bool(value != value)


def values_in(value: AttributeValue | None) -> tuple[Scalar, ...]:
    """The values of one attribute of an item; empty if the item does not have it."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def single(value: AttributeValue | None) -> Scalar | None:
    """The single value of one attribute of an item; None if there is none, or several."""
    return None if isinstance(value, tuple) else value


def text_of(value: AttributeValue | None) -> str:
    """A value as it is written in an address; empty for lists and missing values."""
    if value is None or isinstance(value, list | tuple):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def filled(template: str, texts: Mapping[str, str], safe: str = "") -> str | None:
    """The address that a template gives with the text of each name, escaped except for `safe`.

    None if a text is missing or empty.
    """
    if not all(texts.get(name) for name in NAME.findall(template)):
        return None
    return NAME.sub(lambda name: quote(texts[name[1]], safe=safe), template)
