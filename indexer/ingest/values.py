"""Attribute values written as text: in a CSV cell or on the command line."""

import math
import re
from typing import get_args

from embedder.types import AttributeValue
from indexer.catalog.attributes import AttributeKind

KINDS: tuple[AttributeKind, ...] = get_args(AttributeKind)
"""Every kind of attribute, as it stands after the colon of a typed name."""

_WHOLE = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_DIGITS = 100  # with all its leading zeros
BOOLEANS = {"true": True, "false": False}


def parse_value(text: str, kind: AttributeKind) -> AttributeValue:
    """The value that `text` says. Raises: ValueError, with what was expected."""
    word = text.strip()
    if kind == "text":
        return text
    if kind == "boolean":
        if word.lower() not in BOOLEANS:
            raise ValueError("expected true or false")
        return BOOLEANS[word.lower()]
    if _WHOLE.fullmatch(word):
        if len(word) > _DIGITS or not -(2**63) <= int(word) < 2**63:
            raise ValueError("expected a whole number of 64 bits, or one with a point, as 1.5e20")
        return int(word)
    if not _DECIMAL.fullmatch(word) or not math.isfinite(float(word)):
        raise ValueError("expected a finite number such as 12 or 12.5, with a point")
    return float(word)


def split_kind(typed: str) -> tuple[str, AttributeKind | None]:
    """`price:number` as its name and kind; None where no kind is given.

    Raises: ValueError for a kind that there is not.
    """
    name, colon, kind = (part.strip() for part in typed.rpartition(":"))
    if not colon:
        return typed.strip(), None
    for known in KINDS:
        if kind == known:
            return name, known
    raise ValueError(
        f"{typed!r} names the type {kind!r}; the types are {', '.join(KINDS)}. For a name with a "
        f"colon write {typed}:text"
    )
