"""Filters as JSON: {"colour": "red", "price": {"<": 20}, "or": [{...}, {...}]}."""

from collections.abc import Mapping
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
    located,
)

_SIGNS = ("=", "==", "!=", *LIMITS, "in", "not in", "exists", "starts with")


def filter_from_json(value: object) -> Filter:
    """Convert a decoded JSON object to a filter. Several names in one object are joined by and.

    {"name": value}, {"name": {sign: value}} with the signs = != < <= > >=, {"name": {"in": [...]}},
    {"name": {"not in": [...]}}, {"name": {"exists": true}}, {"name": {"starts with": "A"}},
    {"and": [...]}, {"or": [...]}, {"not": {...}}. Attributes with the names and, or, not can only
    be used in the text form.

    Raises: FilterError with the JSON path and the expected value.
    """
    return _filter(value, "$", 0)


def _filter(value: object, path: str, depth: int) -> Filter:
    if depth > MAX_DEPTH:
        raise FilterError(f"The filter is more than {MAX_DEPTH} levels deep. Make it flatter.")
    if not isinstance(value, Mapping) or not value:
        raise _unexpected(value, path, 'an object such as {"colour": "red"}')
    return _joined([_member(name, part, f"{path}.{name}", depth) for name, part in value.items()])


def _member(name: str, value: Any, path: str, depth: int) -> Filter:
    if name in ("and", "or"):
        if not isinstance(value, list | tuple) or not value:
            raise _unexpected(value, path, "a list of filters")
        parts = [_filter(part, f"{path}[{n}]", depth + 1) for n, part in enumerate(value)]
        return _joined(parts, And if name == "and" else Or)
    if name == "not":
        return Not(_filter(value, path, depth + 1))
    if not isinstance(value, Mapping):
        return located(path[:200], lambda: Equals(name, value))
    return _compared(name, value, path)


def _compared(name: str, signs: Mapping[str, Any], path: str) -> Filter:
    if not signs or any(sign not in _SIGNS for sign in signs):
        raise _unexpected(dict(signs), path, f"an object with signs of {', '.join(_SIGNS)}")
    limits = {LIMITS[sign]: value for sign, value in signs.items() if sign in LIMITS}
    parts: list[Filter] = [
        _leaf(name, s, signs[s], f"{path}.{s}") for s in signs if s not in LIMITS
    ]
    if limits:
        if None in limits.values():
            raise _unexpected(None, path, "a number or a text")
        parts.append(located(path[:200], lambda: Range(name, **limits)))
    return _joined(parts)


def _leaf(name: str, sign: str, value: Any, path: str) -> Filter:
    found: Filter
    if sign in ("in", "not in"):
        if not isinstance(value, list | tuple):
            raise _unexpected(value, path, "a list of values")
        found = located(path[:200], lambda: In(name, tuple(value)))
    elif sign == "starts with":
        found = located(path[:200], lambda: StartsWith(name, value))
    elif sign == "exists":
        if not isinstance(value, bool):
            raise _unexpected(value, path, "true or false")
        found = located(path[:200], lambda: Exists(name))
        return found if value else Not(found)
    else:
        found = located(path[:200], lambda: Equals(name, value))
    return Not(found) if sign in ("!=", "not in") else found


def _joined(parts: list[Filter], by: type[And | Or] = And) -> Filter:
    return parts[0] if len(parts) == 1 else by(tuple(parts))


def _unexpected(value: object, path: str, expected: str) -> FilterError:
    return FilterError(f"The filter has {value!r:.80} at {path[:200]}. Expected {expected}.")
