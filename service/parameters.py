"""Form fields of a search, checked with messages that name value and range."""

import math
from collections.abc import Callable
from typing import Any

from pydantic_core import PydanticCustomError

_SHOWN_CHARACTERS = 40


def whole_number(name: str, low: int, high: int) -> Callable[[Any], int]:
    """A validator for whole numbers from `low` to `high`."""

    def check(value: Any) -> int:
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = low - 1
        if not low <= number <= high:
            raise _out_of_range(name, value, f"a whole number from {low:,} to {high:,}")
        return number

    return check


def finite_number(name: str, low: float, high: float) -> Callable[[Any], float | None]:
    """A validator for numbers from `low` to `high`; NaN is none."""

    def check(value: Any) -> float | None:
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not low <= number <= high:
            raise _out_of_range(name, value, f"a number from {low:g} to {high:g}")
        return number

    return check


def _out_of_range(name: str, value: Any, expected: str) -> PydanticCustomError:
    shown = value[:_SHOWN_CHARACTERS] if isinstance(value, str) else "a file"
    return PydanticCustomError(
        "out_of_range",
        "{name} = {shown} is outside its range; send {expected}.",
        {"name": name, "shown": shown, "expected": expected},
    )
