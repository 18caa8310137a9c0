"""A filter, answered by the attribute index of a catalogue: one query for each condition, and the
sorted item numbers that they give joined as sets. (SQLite's own INTERSECT and UNION build a tree of
single rows for that, which takes ten times as long.)
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexer.catalog.schema import stored
from indexer.filters.tree import SIGNS, And, Condition, Equals, Filter, In, Not, Or

_Ids = NDArray[np.int64]


def condition_sql(where: Condition, what: str, at_most: int = -1) -> tuple[Any, ...]:
    """The statement that selects `what` of the attributes that fit, and its parameters."""
    if isinstance(where, Equals):
        test, values = "value = ?", [where.value]
    elif isinstance(where, In):
        test, values = f"value IN ({', '.join('?' * len(where.values))})", [*where.values]
    else:
        test = " AND ".join(f"value {SIGNS[limit]} ?" for limit, _ in where.limits)
        values = [value for _, value in where.limits]
    sql = (
        f"SELECT {what} FROM attributes WHERE name = (SELECT id FROM names WHERE name = ?) "  # noqa: S608 (values are parameters)
        f"AND {test} LIMIT ?"
    )
    return sql, where.name, *(stored(value) for value in values), at_most


def fitting(where: Filter, read: Callable[[Condition], _Ids], live: Callable[[], _Ids]) -> _Ids:
    """Ascending numbers of the items that fit; `read` gives those of one condition, ascending, and
    `live` those of all items.
    """
    found = _found(where, read)
    return _without(live(), found.ids) if found.others else found.ids


class _Found(NamedTuple):
    """These items, or all but these: what "not" gives costs nothing until it is asked for."""

    ids: _Ids
    others: bool = False


def _found(where: Filter, read: Callable[[Condition], _Ids]) -> _Found:
    if isinstance(where, Not):
        return _complement(_found(where.part, read))
    if isinstance(where, And):
        return _in_all([_found(part, read) for part in where.parts])
    if isinstance(where, Or):
        return _complement(_in_all([_complement(_found(part, read)) for part in where.parts]))
    return _Found(read(where))


def _complement(found: _Found) -> _Found:
    return _Found(found.ids, not found.others)


def _in_all(sets: Sequence[_Found]) -> _Found:
    without = _union([each.ids for each in sets if each.others])
    within = sorted((each.ids for each in sets if not each.others), key=len)
    if not within:
        return _Found(without, others=True)
    return _Found(_without(reduce(_intersection, within), without))


def _intersection(left: _Ids, right: _Ids) -> _Ids:
    return np.intersect1d(left, right, assume_unique=True)


def _without(left: _Ids, right: _Ids) -> _Ids:
    return np.setdiff1d(left, right, assume_unique=True) if len(right) else left


def _union(parts: Sequence[_Ids]) -> _Ids:
    # Not np.unique, which hashes and is slower than a sort by a factor of ten.
    ids = np.sort(np.concatenate([np.empty(0, np.int64), *parts]))
    return ids[np.r_[True, ids[1:] != ids[:-1]]] if len(ids) else ids
