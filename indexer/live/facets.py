"""Facets and attribute statistics, computed from value counts."""

import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from kinlens.embedder.errors import InvalidParameterError
from kinlens.indexer.columns.columns import Chosen
from kinlens.indexer.live.attributes import Spread, StateAttributes
from kinlens.indexer.types import MAX_COUNTED_VALUES, MAX_FACETS, AttributeFacts, Facet
from kinlens.values import AttributeType

MAX_BINS = 20
"""Maximum bins of a histogram. Up to this number of distinct values each value is counted."""

_LARGEST = 2**63 - 1


def checked_names(names: Sequence[str]) -> list[str]:
    """The attribute names without repetition. Raises: InvalidParameterError for too many."""
    different = list(dict.fromkeys(names))
    if len(different) > MAX_FACETS:
        raise InvalidParameterError(
            f"facets = {len(different)} attributes; at most {MAX_FACETS} are counted at once. Name "
            "fewer, or send several requests."
        )
    return different


def facet_of(spread: Spread, type_: AttributeType) -> Facet:
    """The facet of an attribute of this type."""
    if type_ == "number" and spread.different > MAX_BINS:
        return Facet(None, _histogram(spread), missing=spread.missing)
    shown = _most_frequent(spread)
    if type_ == "number":
        return Facet(tuple(sorted(shown)), missing=spread.missing)
    other = spread.total - sum(count for _, count in shown)
    return Facet(shown, other=other, missing=spread.missing)


def facts_of(
    name: str, type_: AttributeType, attributes: StateAttributes, selected: Chosen
) -> AttributeFacts:
    """The value statistics of an attribute of this type over the selected items."""
    if attributes.is_nearly_unique(name):
        return AttributeFacts(name, type_, None)
    return facts_of_spread(name, type_, attributes.spread(name, selected))


def facts_of_spread(name: str, type_: AttributeType, spread: Spread) -> AttributeFacts:
    """The value statistics of an attribute of this type with these values."""
    if type_ != "number":
        return AttributeFacts(name, type_, _most_frequent(spread))
    minimum, maximum = spread.ends() or (None, None)
    is_listed = spread.different <= MAX_COUNTED_VALUES
    values = _most_frequent(spread) if is_listed else None
    return AttributeFacts(name, type_, values, minimum, maximum)


def _most_frequent(spread: Spread) -> tuple[tuple[Any, int], ...]:
    """The most frequent values with their counts, ties by value."""
    present = np.flatnonzero(spread.counts)
    if len(present) > MAX_COUNTED_VALUES:
        counts = spread.counts[present]
        least = np.partition(counts, -MAX_COUNTED_VALUES)[-MAX_COUNTED_VALUES]
        more = np.flatnonzero(counts > least)
        equal = np.flatnonzero(counts == least)[: MAX_COUNTED_VALUES - len(more)]
        present = present[np.concatenate([more, equal])]
    found = [(spread.values[code], int(spread.counts[code])) for code in present.tolist()]
    found += spread.later.items()
    return tuple(sorted(found, key=lambda one: (-one[1], one[0]))[:MAX_COUNTED_VALUES])


def _histogram(spread: Spread) -> tuple[tuple[float, float, int], ...]:
    """(lower, upper, count) of bins of equal width; only the last bin includes its upper end."""
    values, counts = spread.values, spread.counts
    edges = bin_edges(*(spread.ends() or (0, 1)))
    cuts = [*(bisect_left(values, edge) for edge in edges[:-1]), bisect_right(values, edges[-1])]
    found = [int(counts[first:end].sum()) for first, end in pairwise(cuts)]
    for value, items in spread.later.items():
        found[min(bisect_right(edges, value), len(found)) - 1] += items
    return tuple((*ends, count) for ends, count in zip(pairwise(edges), found, strict=True))


def bin_edges(low: float, high: float) -> list[float]:
    """Edges of at most `MAX_BINS` bins of equal width that cover `low` < `high`.

    Edges are multiples of 1, 2 or 5 times a power of ten.
    """
    least, greatest = Fraction(low), Fraction(high)  # exact: a rounded quotient could miss an end
    power = Fraction(10) ** math.floor(math.log10((greatest - least) / MAX_BINS))
    for factor in (1, 2, 5, 10, 20):
        step = factor * power
        first, last = math.floor(least / step), math.ceil(greatest / step)
        if last - first <= MAX_BINS:
            break
    return sorted({_number(multiple * step) for multiple in range(first, last + 1)})


def _number(exact: Fraction) -> float:
    """Convert to a stored number: an integer of 64 bits if exact, else the nearest float."""
    if exact.denominator == 1 and abs(exact) <= _LARGEST:
        return int(exact)
    most = Fraction(sys.float_info.max)
    return float(max(-most, min(most, exact)))
