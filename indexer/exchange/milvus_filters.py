"""Translate filters to Milvus expressions over the JSON field `attributes`.

A comparison with a missing attribute is false in Milvus 2.3, and null in later versions, which
`not` does not change. So what is negated also asks whether the attribute exists. A comparison with
a list is false or null as well, so the elements of lists are compared one by one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
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
from kinlens.values import Scalar

MAX_LEVELS = 40
"""Maximum depth of a filter, in which its conditions count as one level. Milvus limits messages to
100 levels, and a filter level takes two."""

_MIN_INT = -(2**63)
_WHOLE = 2**53  # below, a float64 represents every integer exactly
_Part = tuple[str, int]  # an expression and its depth


def expression(where: Filter, several: Mapping[str, int], *, has_in: bool = True) -> str:
    """The filter as a Milvus expression.

    Args:
        several: the most values of an item, of each attribute of which some items have several.
        has_in: whether the server compares an attribute with many values at once.

    Raises: FilterError if it is nested too deeply, or Milvus cannot compare with its prefix.
    """
    text, levels = _Writer(several, has_in).part(where)
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

    several: Mapping[str, int]
    has_in: bool
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
            text, levels = _Writer(self.several, self.has_in, True).part(where.part)
            return f"not ({text})", levels + 1
        text, levels = self._compared(where)
        return (f"((exists {_field(where.name)}) and {text})" if self.is_negated else text), levels

    def _compared(self, where: Equals | In | Range | StartsWith) -> _Part:
        field, most = _field(where.name), self.several.get(where.name, 0)
        if isinstance(where, Equals | In):
            values = where.values if isinstance(where, In) else (where.value,)
            listed = _having(field, values) if most else []
            return _joined([*self._equal(field, values), *listed], "or")
        if not most:
            return _ordered(field, where)
        elements = [f"{field}[{place}]" for place in range(most)]
        listed = [self._if(f"exists {one}", _ordered(one, where)) for one in elements]
        single = self._if(f"not (exists {elements[0]})", _ordered(field, where))
        return _joined([single, *listed], "or")

    def _if(self, condition: str, part: _Part) -> _Part:
        """In a negation, the part is false where the condition is, and not null."""
        return _joined([(condition, 1), part], "and") if self.is_negated else part

    def _equal(self, field: str, values: Sequence[Scalar]) -> list[_Part]:
        texts = list(map(literal, values))
        if len(texts) == 1 or not self.has_in:
            return [(f"{field} == {text}", 1) for text in texts]
        return [(f"{field} in [{part}]", 1) for part in _of_one_type(texts)]


def _having(field: str, values: Sequence[Scalar]) -> list[_Part]:
    """Conditions of which one is true of a list with one of these values."""
    # An integer among decimals is compared as a decimal, but a decimal never as an integer.
    numbers = [float(v) if type(v) is int and -_WHOLE < v < _WHOLE else v for v in values]
    texts = _of_one_type(list(map(literal, numbers)))
    return [(f"json_contains_any({field}, [{part}])", 1) for part in texts]


def _of_one_type(texts: Sequence[str]) -> list[str]:
    """The literals in one list, or integers and others in two: Milvus takes one type per list."""
    whole = [text for text in texts if text.lstrip("-").isdigit()]
    others = [text for text in texts if not text.lstrip("-").isdigit()]
    return [", ".join(part) for part in (whole, others) if part]


def _ordered(field: str, where: Range | StartsWith) -> _Part:
    """Compare one value with a range or a prefix."""
    if isinstance(where, Range):
        limits = [(f"{field} {SIGNS[n]} {literal(value)}", 1) for n, value in where.limits]
        return _joined(limits, "and")
    if any(sign in where.start for sign in "%_\\"):
        raise FilterError(
            f"{where.name!r} starts with {where.start!r:.80}: on Milvus a prefix must not contain "
            "%, _ or a backslash. Use a shorter prefix."
        )
    return f"{field} like {literal(where.start + '%')}", 1


def literal(value: Scalar) -> str:
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
