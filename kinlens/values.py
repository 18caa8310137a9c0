"""The values of attributes, as items have them and as requests send them."""

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Literal

Scalar = str | int | float | bool
"""One value of an attribute."""

AttributeValue = Scalar | tuple[Scalar, ...]
"""What an item has under the name of an attribute: a value, or several of one kind."""

AttributeInput = AttributeValue | date | Sequence[Scalar | date]
"""The same as it may be given: a list is stored as a tuple, an empty one not at all, and a date or
time as `date_text` writes it."""

AttributeKind = Literal["text", "number", "boolean"]
"""What the values of an attribute are; whole and decimal numbers are of one kind."""


def date_text(value: date) -> str:
    """A date as 2026-11-25; a time as 2026-11-25T10:30:00Z: in whole seconds and in UTC, which one
    without a zone is taken for. So texts are in the order of time.
    """
    if not isinstance(value, datetime):
        return value.isoformat()
    moment = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
    return f"{moment.isoformat(timespec='seconds')}Z"


def values_in(value: AttributeValue | None) -> tuple[Scalar, ...]:
    """The values of an item under one name; none if it does not have the attribute."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def single(value: AttributeValue | None) -> Scalar | None:
    """The value of an item under one name; None if there is none, or several."""
    return None if isinstance(value, tuple) else value
