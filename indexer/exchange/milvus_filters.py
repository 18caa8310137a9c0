"""Translate filters to Milvus expressions over the JSON field `attributes`.

A comparison with a missing attribute is false in Milvus 2.3, and null in later versions, which
`not` does not change. So what is negated also asks whether the attribute exists.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
"""Maximum depth of a filter, in which its conditions count as one level. Milvus limits messages to
100 levels, and a filter level takes two."""

_MIN_INT = -(2**63)
_Part = tuple[str, int]  # an expression and its depth


def expression(where: Filter, *, has_lists: bool = True) -> str:
    """The filter as a Milvus expression.

    has_lists: whether the server compares an attribute with a list; else with one value at a time.

    Raises: FilterError if it is nested too deeply.
    """
    text, levels = _Writer(has_lists).part(where)
    if levels > MAX_LEVELS:
        raise FilterError(
            f"The filter has {levels} nested levels of and, or, not; the limit of Milvus is "
            f"{MAX_LEVELS}. Simplify it."
        )
    return text


def one_of(field: str, values: Iterable[str | int]) -> str:
    """A condition that `field` has one of these values."""
    return f"{field} in [{', '.join(literal(value) for value in values)}]"


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the parts of a filter. In a negation, each comparison is either true or false."""

    has_lists: bool
    is_negated: bool = False

    def part(self, where: Filter) -> _Part:
        if isinstance(where, And | Or):
            word = "and" if isinstance(where, And) else "or"
            return _joined([self.part(part) for part in where.parts], word)
        if isinstance(where, Exists):
            return f"exists {_field(where.name)}", 1
        if isinstance(where, Not):
            if isinstance(where.part, Not):
                return self.part(where.part.part)
            text, levels = _Writer(self.has_lists, True).part(where.part)
            return f"not ({text})", levels + 1
        text, levels = self._compared(where)
        return (f"((exists {_field(where.name)}) and {text})" if self.is_negated else text), levels

    def _compared(self, where: Equals | In | Range | StartsWith) -> _Part:
        field = _field(where.name)
        if isinstance(where, Equals):
            return f"{field} == {literal(where.value)}", 1
        if isinstance(where, In):
            return self._one_of(field, where)
        if isinstance(where, StartsWith):
            return _prefix(where), 1
        limits = [(f"{field} {SIGNS[n]} {literal(value)}", 1) for n, value in where.limits]
        return _joined(limits, "and")

    def _one_of(self, field: str, where: In) -> _Part:
        """Split integers and decimals into two lists: Milvus accepts one type per list."""
        texts = [literal(value) for value in where.values]
        if not self.has_lists:
            return _joined([(f"{field} == {text}", 1) for text in texts], "or")
        decimal = [where.value_type == "number" and not t.lstrip("-").isdigit() for t in texts]
        lists = [
            ", ".join(
                text for text, is_decimal in zip(texts, decimal, strict=True) if is_decimal == d
            )
            for d in sorted(set(decimal))
        ]
        return _joined([(f"{field} in [{values}]", 1) for values in lists], "or")


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


def _joined(parts: Sequence[_Part], word: str) -> _Part:
    """Join as a balanced tree: the parser of Milvus takes seconds for a long chain of `or`."""
    if len(parts) == 1:
        text, levels = parts[0]
        return f"({text})", levels
    middle = len(parts) // 2
    left, left_levels = _joined(parts[:middle], word)
    right, right_levels = _joined(parts[middle:], word)
    return f"({left} {word} {right})", 1 + max(left_levels, right_levels)
