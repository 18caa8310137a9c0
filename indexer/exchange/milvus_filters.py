"""Filters as expressions of Milvus over the JSON field `attributes`.

A comparison with an attribute that is missing, or of another type, is false there as well.
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
"""Milvus reads no message nested deeper than 100, and a level of a filter takes two."""

_LEAST_INT = -(2**63)
_Part = tuple[str, int]  # an expression, and how many levels it has


def expression(where: Filter) -> str:
    """The filter in the language of Milvus. Raises: FilterError for one nested too deeply."""
    text, levels = _part(where)
    if levels > MAX_LEVELS:
        raise FilterError(
            f"The filter needs {levels} levels of and, or, not; Milvus reads {MAX_LEVELS}. Nest it "
            "less deeply."
        )
    return text


def one_of(field: str, values: Iterable[str | int]) -> str:
    """Whether the field of a row has one of these values."""
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
        return _beginning(where), 1
    if isinstance(where, And | Or):
        word = "and" if isinstance(where, And) else "or"
        return _joined([_part(part) for part in where.parts], word)
    if isinstance(where.part, Not):
        return _part(where.part.part)
    text, levels = _part(where.part)
    return f"not ({text})", levels + 1


def _beginning(where: StartsWith) -> str:
    if any(sign in where.start for sign in "%_\\"):
        raise FilterError(
            f"{where.name!r} starts with {where.start!r:.80}: Milvus takes no %, _ or backslash "
            "there. Choose a shorter start."
        )
    return f"{_field(where.name)} like {literal(where.start + '%')}"


def literal(value: AttributeValue) -> str:
    if isinstance(value, float):
        return repr(value)
    # Milvus reads the sign apart from the digits, which alone would be too large.
    return repr(float(value)) if value == _LEAST_INT else json.dumps(value, ensure_ascii=False)


def _field(name: str) -> str:
    return f"attributes[{json.dumps(name, ensure_ascii=False)}]"


def _one_of(where: In) -> _Part:
    """Whole and decimal numbers apart: Milvus takes one type in a list, and compares them all."""
    texts = [literal(value) for value in where.values]
    decimal = [where.value_type == "number" and not text.lstrip("-").isdigit() for text in texts]
    lists = [
        ", ".join(text for text, is_decimal in zip(texts, decimal, strict=True) if is_decimal == d)
        for d in sorted(set(decimal))
    ]
    return _joined([(f"{_field(where.name)} in [{values}]", 1) for values in lists], "or")


def _joined(parts: Sequence[_Part], word: str) -> _Part:
    """As a balanced tree: the parser of Milvus takes seconds for a long row of `or`."""
    if len(parts) == 1:
        text, levels = parts[0]
        return f"({text})", levels
    middle = len(parts) // 2
    left, left_levels = _joined(parts[:middle], word)
    right, right_levels = _joined(parts[middle:], word)
    return f"({left} {word} {right})", 1 + max(left_levels, right_levels)
