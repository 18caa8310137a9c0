"""Errors of validation in our words: the value, the limit and what to do, never those of pydantic.

Every surface uses them: HTTP, settings, job files, and files that we read back.
"""

import re
import reprlib
from collections.abc import Mapping, Sequence, Sized
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core.core_schema import ErrorType

_SHOWN = 80
_SHOWN_CHARACTERS = 40
_LARGEST_SHOWN = 10**18
_OWN = ("value_error", "assertion_error")
_PYDANTIC = frozenset(get_args(ErrorType)).difference(_OWN)
TABLES = ("model_type", "model_attributes_type", "dataclass_type")

_NO_WHOLE_NUMBER = "{given} is not a whole number; use only digits."
_NO_NUMBER = "{given} is not a number; use digits, with a point before decimals."
_NO_BOOLEAN = "{given} is neither true nor false; use one of the two."
_NO_LIST = "{name} must be a list{got}; use a list."
_NO_OBJECT = "{name} must be an object{got}; use names with values, such as {{...}}."
_UNUSABLE = "{given} has the wrong form; use another value."
_TEXTS = {  # by pydantic's error type
    "missing": "{name} is missing; send it{where}.",
    "extra_forbidden": "{name} is not a parameter here; /docs lists the parameters.",
    "url_forbidden": "{name} is not a parameter here; URLs are not fetched, send the image.",
    "json_invalid": "The body is not valid JSON: {error}. Send valid JSON.",
    "union_tag_invalid": "{name}: {discriminator} = {tag!r} is unknown; use {expected_tags}.",
    "union_tag_not_found": "{name} has no {discriminator}; add it.",
    "string_pattern_mismatch": "{given} does not have the right form; use {form}.",
    "greater_than": "{given} is too small; use a number above {gt:,}.",
    "greater_than_equal": "{given} is too small; use {ge:,} or more.",
    "less_than": "{given} is too large; use a number below {lt:,}.",
    "less_than_equal": "{given} is too large; use {le:,} or less.",
    "finite_number": "{given} is not finite; use a finite number.",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), _NO_WHOLE_NUMBER),
    "int_parsing_size": "{given} has too many digits; use a smaller number.",
    **dict.fromkeys(("float_parsing", "float_type"), _NO_NUMBER),
    **dict.fromkeys(("bool_parsing", "bool_type"), _NO_BOOLEAN),
    **dict.fromkeys(("literal_error", "enum"), "{given} is not a valid choice; use {expected}."),
    "string_type": "{name} must be a string{got}; use a string.",
    "string_too_short": "{name} has {count} characters; use {min_length:,} or more.",
    "string_too_long": "{name} has {count} characters; use {max_length:,} or fewer.",
    "too_short": "{name} has {count} entries; use {min_length:,} or more.",
    "too_long": "{name} has {count} entries; use {max_length:,} or fewer.",
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), _NO_LIST),
    **dict.fromkeys(("dict_type", "mapping_type", *TABLES), _NO_OBJECT),
}
_OF_FILES = {  # where nothing is sent
    "missing": "{name} is missing; add it.",
    **dict.fromkeys(
        ("extra_forbidden", "url_forbidden"),
        "{name} is unknown; remove it, or use the version of Kinlens that wrote it.",
    ),
    "json_invalid": "it is not valid JSON: {error}.",
}
_LIMITS = (
    "gt", "ge", "lt", "le", "min_length", "max_length", "expected", "error", "discriminator",
    "tag", "expected_tags",
)  # fmt: skip
_URL = re.compile(r"(^|[._-])ur[il]s?$", re.IGNORECASE)
_HEX = re.compile(r"\^\[0-9a-f\]\{(\d+(?:,\d+)?)\}\$")
_FORMS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$": "1 to 64 letters, digits, dots, hyphens and underscores, "
    "the first a letter or digit",
    "^https?://": "a URL that begins with http:// or https://",
    r"\S": "a text that is not blank",
}


def file_fault(error: ValidationError) -> str:
    """The first fault of a file, such as a manifest, in words."""
    fault = error.errors(include_url=False)[0]
    name = path_of(fault["loc"]) or "the file"
    return fault_text(fault, name, texts=_TEXTS | _OF_FILES).rstrip(".")


def fault_text(fault: Any, name: str, where: str = "", texts: Mapping[str, str] = _TEXTS) -> str:
    """The message for a pydantic error about `name`: its value, the limit and what to do.

    The value is omitted if the error has no input. `where` is the place to send a missing value.
    """
    kind = fault["type"]
    if kind == "extra_forbidden" and _URL.search(name):
        kind = "url_forbidden"
    text = texts.get(kind)
    if text is None and fault["type"] in _PYDANTIC:
        text = _UNUSABLE
    if text is None:
        message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return message if fault["type"] == "out_of_range" else f"{name}: {message}."
    given, limits = fault.get("input"), fault.get("ctx", {})
    value = repr(shown(given)) if isinstance(given, str) else shown(given)
    return text.format(
        name=name,
        given=f"{name} = {value}" if "input" in fault else name,
        got=f" (got {value})" if "input" in fault else "",
        count=f"{len(given):,}" if isinstance(given, Sized) else "too many or too few",
        form=_form(str(limits.get("pattern", ""))),
        where=where,
        **{key: limits[key] for key in _LIMITS if key in limits},
    )


def path_of(location: Sequence[str | int]) -> str:
    """A location inside a body as a client writes it: images[0].crops."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f"{'.' if name else ''}{part[:_SHOWN]}"
    return name


def shown(value: Any) -> str:
    """A short text for a value of a request, for messages."""
    if isinstance(value, str):
        return value[:_SHOWN_CHARACTERS]
    if isinstance(value, int) and abs(value) > _LARGEST_SHOWN:
        return "a number of more than 18 digits"
    if isinstance(value, int | float | None):
        return str(value)
    return reprlib.repr(value)[:_SHOWN_CHARACTERS] if isinstance(value, list) else "something else"


def _form(pattern: str) -> str:
    """Describe a regular expression in words."""
    if digits := _HEX.fullmatch(pattern):
        least, _, most = digits[1].partition(",")
        return f"{least}{most and f' to {most}'} of the characters 0-9 and a-f"
    return _FORMS.get(pattern, f"a text that matches {pattern}")
