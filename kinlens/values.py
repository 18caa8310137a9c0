"""Attribute values, as stored with items and as sent in requests."""

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Literal

Scalar = str | int | float | bool
"""One value of an attribute."""

AttributeValue = Scalar | tuple[Scalar, ...]
"""The stored value of an attribute: one scalar, or several scalars of one kind."""

AttributeInput = AttributeValue | date | Sequence[Scalar | date]
"""An attribute value in a request. A list is stored as a tuple, an empty list is not stored, and a
date or time is stored as the text that `date_text` returns."""

AttributeType = Literal["text", "number", "boolean"]
"""The type of the values of an attribute; integers and decimals are one kind."""


def date_text(value: date) -> str:
    """A date as 2026-11-25; a time as 2026-11-25T10:30:00Z, in whole seconds and in UTC.

    A time without a zone is taken as UTC. The texts sort in the order of time.
    """
    if not isinstance(value, datetime):
        return value.isoformat()
    moment = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
    return f"{moment.isoformat(timespec='seconds')}Z"


def values_in(value: AttributeValue | None) -> tuple[Scalar, ...]:
    """The values of one attribute of an item; empty if the item does not have it."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def single(value: AttributeValue | None) -> Scalar | None:
    """The single value of one attribute of an item; None if there is none, or several."""
    return None if isinstance(value, tuple) else value
