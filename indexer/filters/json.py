"""Filters as JSON: {"colour": "red", "price": {"<": 20}, "or": [{...}, {...}]}."""

from collections.abc import Callable, Mapping
from typing import Any

from kinlens.embedder.errors import FilterError
from kinlens.indexer.filters.tree import (
    LIMITS,
    MAX_DEPTH,
    And,
    Equals,
    Exists,
    Filter,
    In,
    Not,
    Or,
    Range,
    StartsWith,
)

_SIGNS = ("=", "==", "!=", *LIMITS, "in", "not in", "exists", "starts with")


def filter_from_json(value: object) -> Filter:
    """The filter that a decoded JSON object says; several names in one object are joined by and.

    {"name": value}, {"name": {sign: value}} with the signs = != < <= > >=, {"name": {"in": [...]}},
    {"name": {"not in": [...]}}, {"name": {"exists": true}}, {"name": {"starts with": "A"}},
    {"and": [...]}, {"or": [...]}, {"not": {...}}. Attributes that are called and, or, not can be
    named in the text form alone.

    Raises: FilterError with the place and what was expected there.
    """
    return _filter(value, "$", 0)


def _filter(value: object, place: str, depth: int) -> Filter:
    if depth > MAX_DEPTH:
        raise FilterError(f"The filter is more than {MAX_DEPTH} levels deep. Make it flatter.")
    if not isinstance(value, Mapping) or not value:
        raise _unexpected(value, place, 'an object such as {"colour": "red"}')
    return _all([_member(name, part, f"{place}.{name}", depth) for name, part in value.items()])


def _member(name: str, value: Any, place: str, depth: int) -> Filter:
    if name in ("and", "or"):
        if not isinstance(value, list | tuple) or not value:
            raise _unexpected(value, place, "a list of filters")
        parts = [_filter(part, f"{place}[{n}]", depth + 1) for n, part in enumerate(value)]
        return _all(parts) if name == "and" else _any(parts)
    if name == "not":
        return Not(_filter(value, place, depth + 1))
    if not isinstance(value, Mapping):
        return _at(place, lambda: Equals(name, value))
    return _compared(name, value, place)


def _compared(name: str, signs: Mapping[str, Any], place: str) -> Filter:
    if not signs or any(sign not in _SIGNS for sign in signs):
        raise _unexpected(dict(signs), place, f"an object with signs of {', '.join(_SIGNS)}")
    limits = {LIMITS[sign]: value for sign, value in signs.items() if sign in LIMITS}
    parts: list[Filter] = [
        _leaf(name, s, signs[s], f"{place}.{s}") for s in signs if s not in LIMITS
    ]
    if limits:
        if None in limits.values():
            raise _unexpected(None, place, "a number or a text")
        parts.append(_at(place, lambda: Range(name, **limits)))
    return _all(parts)


def _leaf(name: str, sign: str, value: Any, place: str) -> Filter:
    found: Filter
    if sign in ("in", "not in"):
        if not isinstance(value, list | tuple):
            raise _unexpected(value, place, "a list of values")
        found = _at(place, lambda: In(name, tuple(value)))
    elif sign == "starts with":
        found = _at(place, lambda: StartsWith(name, value))
    elif sign == "exists":
        if not isinstance(value, bool):
            raise _unexpected(value, place, "true or false")
        found = _at(place, lambda: Exists(name))
        return found if value else Not(found)
    else:
        found = _at(place, lambda: Equals(name, value))
    return Not(found) if sign in ("!=", "not in") else found


def _all(parts: list[Filter]) -> Filter:
    return parts[0] if len(parts) == 1 else And(tuple(parts))


def _any(parts: list[Filter]) -> Filter:
    return parts[0] if len(parts) == 1 else Or(tuple(parts))


def _at(place: str, make: Callable[[], Filter]) -> Filter:
    try:
        return make()
    except FilterError as error:
        raise FilterError(f"{error} (at {place[:200]})") from error


def _unexpected(value: object, place: str, expected: str) -> FilterError:
    return FilterError(f"The filter has {value!r:.80} at {place[:200]}. Expected {expected}.")
