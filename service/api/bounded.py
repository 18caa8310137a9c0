"""Models of requests that cost little to refuse, whatever is sent."""

from collections.abc import Callable, Sized
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from service.api.parameters import custom_error, shown
from service.search.query import SearchLimits

_UNKNOWN_KEPT = 5
_SHOWN = 80


class Strict(BaseModel):
    """Refuses unknown fields, and names the first few of them."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _keeps_few_unknown(cls, value: Any) -> Any:
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields) + _UNKNOWN_KEPT:
            return value
        kept = {name: value[name] for name in cls.model_fields if name in value}
        for name in value:
            if name not in kept:
                kept[name] = value[name]
                if len(kept.keys() - cls.model_fields.keys()) >= _UNKNOWN_KEPT:
                    break
        return kept


def at_most(what: str, limit: int) -> Callable[[Any], Any]:
    """A validator that counts a list or an object before anything looks at what is in it."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict):
            check_count(what, value, limit)
        return value

    return check


def at_most_within(what: str, bound: str) -> Callable[[Any, ValidationInfo], Any]:
    """As `at_most`, up to the field `bound` of the `SearchLimits` in the context."""

    def check(value: Any, info: ValidationInfo) -> Any:
        return at_most(what, getattr(limits_of(info), bound))(value)

    return check


def plain_values(value: Any) -> Any:
    """A validator of attributes that ends at the first one that cannot be."""
    for name, attribute in value.items() if isinstance(value, dict) else ():
        if not isinstance(attribute, str | int | float | None):
            raise custom_error(
                f"attribute {name[:_SHOWN]!r} = {shown(attribute)} is not a text, a number or "
                "true/false; send one of these."
            )
    return value


def plain_changes(value: Any) -> Any:
    """As `plain_values`, for the attributes of many items."""
    for key, attributes in value.items() if isinstance(value, dict) else ():
        if not isinstance(attributes, dict):
            raise custom_error(
                f"the changes of item {key[:_SHOWN]!r} = {shown(attributes)} are no object; send "
                '{"price": 49.9}.'
            )
        plain_values(attributes)
    return value


def limits_of(info: ValidationInfo) -> SearchLimits:
    """The limits that a request is checked against; the default ones without a context."""
    return info.context if isinstance(info.context, SearchLimits) else SearchLimits()


def check_count(what: str, values: Sized, limit: int) -> None:
    """Raises: PydanticCustomError above the limit."""
    if len(values) > limit:
        raise custom_error(
            f"{len(values):,} {what} are more than the limit of {limit:,}; send fewer."
        )
