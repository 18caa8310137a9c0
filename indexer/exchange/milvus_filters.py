"""Translate filters to Milvus expressions over the JSON field `attributes`.

In Milvus too, a comparison is false if the attribute is missing or has another type.
"""

import json
from collections.abc import Iterable, Sequence

from kinlens.embedder.errors import FilterError
from kinlens.indexer.filters.tree import (
    SIGNS,
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
from kinlens.values import AttributeValue

MAX_LEVELS = 40
"""Maximum depth of a filter. Milvus limits messages to 100 levels, and a filter level takes two."""

_MIN_INT = -(2**63)
_Part = tuple[str, int]  # an expression and its depth


def expression(where: Filter) -> str:
    """The filter as a Milvus expression. Raises: FilterError if it is nested too deeply."""
    text, levels = _part(where)
    if levels > MAX_LEVELS:
        raise FilterError(
            f"The filter has {levels} nested levels of and, or, not; the limit of Milvus is "
            f"{MAX_LEVELS}. Simplify it."
        )
    return text


def one_of(field: str, values: Iterable[str | int]) -> str:
    """A condition that `field` has one of these values."""
    return f"{field} in [{', '.join(literal(value) for value in values)}]"


def _part(where: Filter) -> _Part:
    if isinstance(where, Equals):
        return f"{_field(where.name)} == {literal(where.value)}", 1
    if isinstance(where, In):
        return _one_of(where)
    if isinstance(where, Range):
        field = _field(where.name)
        limits = [f"{field} {SIGNS[n]} {literal(value)}" for n, value in where.limits]
        return _joined([(limit, 1) for limit in limits], "and")
    if isinstance(where, Exists):
        return f"exists {_field(where.name)}", 1
    if isinstance(where, StartsWith):
        return _prefix(where), 1
    if isinstance(where, And | Or):
        word = "and" if isinstance(where, And) else "or"
        return _joined([_part(part) for part in where.parts], word)
    if isinstance(where.part, Not):
        return _part(where.part.part)
    text, levels = _part(where.part)
    return f"not ({text})", levels + 1


def _prefix(where: StartsWith) -> str:
    if any(sign in where.start for sign in "%_\\"):
        raise FilterError(
            f"{where.name!r} starts with {where.start!r:.80}: on Milvus a prefix must not contain "
            "%, _ or a backslash. Use a shorter prefix."
        )
    return f"{_field(where.name)} like {literal(where.start + '%')}"


def literal(value: AttributeValue) -> str:
    if isinstance(value, float):
        return repr(value)
    # Milvus parses the sign separately, and the digits of this number alone would overflow.
    return repr(float(value)) if value == _MIN_INT else json.dumps(value, ensure_ascii=False)


def _field(name: str) -> str:
    return f"attributes[{json.dumps(name, ensure_ascii=False)}]"


def _one_of(where: In) -> _Part:
    """Split integers and decimals into two lists: Milvus accepts one type per list."""
    texts = [literal(value) for value in where.values]
    decimal = [where.value_type == "number" and not text.lstrip("-").isdigit() for text in texts]
    lists = [
        ", ".join(text for text, is_decimal in zip(texts, decimal, strict=True) if is_decimal == d)
        for d in sorted(set(decimal))
    ]
    return _joined([(f"{_field(where.name)} in [{values}]", 1) for values in lists], "or")


def _joined(parts: Sequence[_Part], word: str) -> _Part:
    """Join as a balanced tree: the parser of Milvus takes seconds for a long chain of `or`."""
    if len(parts) == 1:
        text, levels = parts[0]
        return f"({text})", levels
    middle = len(parts) // 2
    left, left_levels = _joined(parts[:middle], word)
    right, right_levels = _joined(parts[middle:], word)
    return f"({left} {word} {right})", 1 + max(left_levels, right_levels)
