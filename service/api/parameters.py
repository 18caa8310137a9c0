"""Parameters of requests, checked with messages that name value and range."""

import base64
import binascii
import math
import re
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationInfo
from pydantic_core import PydanticCustomError

from embedder.errors import InvalidParameterError
from embedder.preprocess import Box, check_box
from service.search.query import SearchLimits

_SHOWN_CHARACTERS = 40
_LARGEST_SHOWN = 10**18
_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")
_ADDRESS = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:/")
_DATA_URL = re.compile(r"\s*data:[^,]{0,200};base64,", re.IGNORECASE)
_HEAD = 256
_CORNERS = 4


def whole_number(name: str, low: int, high: int) -> Callable[[Any], int]:
    """A validator for whole numbers from `low` to `high`."""
    return lambda value: _whole(name, value, low, high)


def whole_number_within(name: str, low: int, bound: str) -> Callable[[Any, ValidationInfo], Any]:
    """As `whole_number`, up to the field `bound` of the `SearchLimits` in the context; or None."""

    def check(value: Any, info: ValidationInfo) -> int | None:
        limits = info.context if isinstance(info.context, SearchLimits) else SearchLimits()
        return None if value is None else _whole(name, value, low, getattr(limits, bound))

    return check


def finite_number(name: str, low: float, high: float) -> Callable[[Any], float | None]:
    """A validator for numbers from `low` to `high`, or None; NaN is none."""

    def check(value: Any) -> float | None:
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not low <= number <= high:
            raise _out_of_range(name, value, f"a number from {low:g} to {high:g}")
        return number

    return check


def crop_box(value: Any) -> Box:
    """A validator for a part of an image: four numbers, or a text with commas between them."""
    parts = value.split(",", _CORNERS) if isinstance(value, str) else value
    try:
        if not isinstance(parts, Sequence) or any(isinstance(part, bool) for part in parts):
            raise TypeError
        if len(parts) > _CORNERS:
            raise ValueError
        return check_box([float(part) for part in parts])
    except InvalidParameterError as error:
        raise custom_error(str(error)) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise _out_of_range(
            "crop",
            value,
            "left,top,width,height as fractions of the image, such as 0.1,0.2,0.5,0.5",
        ) from error


def filter_form(value: Any) -> Any:
    """A validator for what may be a filter: a text, an object, or None."""
    if value is None or isinstance(value, str | dict):
        return value
    raise custom_error(
        f"filter = {shown(value)} is neither a text nor an object; send "
        'colour = "red" or {"colour": "red"}.'
    )


def base64_content(value: Any) -> bytes:
    """A validator for base64, also in a data: URL. Nothing is ever loaded from an address."""
    if not isinstance(value, str):
        raise custom_error("data is no text; send the content of an image file as base64.")
    head = _DATA_URL.match(value[:_HEAD])
    if head is None and _ADDRESS.match(value[:_HEAD]):
        raise custom_error(
            f"data = {value.strip()[:_SHOWN_CHARACTERS]!r} is an address, and this service loads "
            "nothing from addresses; send the content of the image file as base64."
        )
    if head is None and value[:_HEAD].lstrip().lower().startswith("data:"):
        raise custom_error("data is a data: URL that is not base64; send data:image/...;base64,...")
    try:
        return base64.b64decode(value if head is None else value[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise custom_error(
            f"data is not base64 ({error}); encode the content of an image file with the standard "
            "alphabet and padding, without line breaks."
        ) from error


def custom_error(message: str) -> PydanticCustomError:
    """A fault that is shown with this message as it is."""
    return PydanticCustomError("out_of_range", "{message}", {"message": message})


def _whole(name: str, value: Any, low: int, high: int) -> int:
    number = low - 1
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        number = int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    if not low <= number <= high:
        raise _out_of_range(name, value, f"a whole number from {low:,} to {high:,}")
    return number


def _out_of_range(name: str, value: Any, expected: str) -> PydanticCustomError:
    return custom_error(f"{name} = {shown(value)} is outside its range; send {expected}.")


def shown(value: Any) -> str:
    """A value of a request in a message: short, whatever it is."""
    if isinstance(value, str):
        return value[:_SHOWN_CHARACTERS]
    if isinstance(value, int) and abs(value) > _LARGEST_SHOWN:
        return "a number of more than 18 digits"
    if isinstance(value, int | float | None):
        return str(value)
    return reprlib.repr(value)[:_SHOWN_CHARACTERS] if isinstance(value, list) else "something else"
