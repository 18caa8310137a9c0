"""The distinct values of an attribute in a compact, ascending array.

Ten million texts take 20 bytes each here, and 80 as Python objects. Texts are ordered by their
UTF-8 bytes, which is the order of their code points.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from kinlens.values import AttributeType, Scalar

Arrays = Mapping[str, NDArray[Any]]
"""The arrays that represent values on disk, by name."""

Values = Sequence[Scalar]
"""Distinct values of one type, ascending."""

_WHOLE = 2**53  # up to here a float64 represents every integer exactly


class Texts(Sequence[str]):
    """Texts (V,): `data` is their concatenated UTF-8, `ends` (V,) the end of each text."""

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.data = data
        self.ends = ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Texts":
        """These texts, in their order."""
        encoded = [text.encode() for text in texts]
        ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not 0 <= index < len(self.ends):
            raise IndexError(index)
        start = int(self.ends[index - 1]) if index else 0
        return self.data[start : int(self.ends[index])].tobytes().decode()


class Numbers(Sequence[Any]):
    """Integers, floats or booleans (V,), in an array of their type."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        # As Python numbers, which compare integers and floats exactly.
        found = self.array[index].tolist()
        return [_plain(one) for one in found] if isinstance(found, list) else _plain(found)


def packed(values: Sequence[Any], type_: AttributeType) -> Values:
    """Store ascending values of one type compactly.

    A mix of floats and integers that a float64 cannot represent stays a list.
    """
    if type_ == "text":
        return Texts.of(values)
    if type_ == "boolean":
        return Numbers(np.array(values, np.bool_))
    if all(type(value) is int for value in values):
        return Numbers(np.array(values, np.int64))
    if all(type(value) is float or abs(value) <= _WHOLE for value in values):
        return Numbers(np.array(values, np.float64))
    return list(values)


def spliced(
    values: Values,
    kept: NDArray[np.bool_],
    positions: NDArray[np.int64],
    new: Values,
    type_: AttributeType,
) -> Values:
    """Drop and insert values.

    kept: mask (V,) of the values to keep.
    positions: the index of the value before which each of the `new` values (M,) is inserted,
        ascending.
    """
    offsets = np.concatenate([[0], np.cumsum(kept)])[positions]  # among the kept values
    if isinstance(values, Texts) and isinstance(new, Texts):
        lengths = np.diff(values.ends, prepend=0)
        data = values.data if kept.all() else values.data[np.repeat(kept, lengths)]
        lengths = lengths[kept]
        starts = np.concatenate([[0], np.cumsum(lengths)])[offsets].tolist()
        ends = [0, *new.ends.tolist()]
        pieces, last = [], 0
        for index, start in enumerate(starts):
            pieces += [data[last:start], new.data[ends[index] : ends[index + 1]]]
            last = start
        both = np.insert(lengths, offsets, np.diff(new.ends, prepend=0))
        return Texts(np.concatenate([*pieces, data[last:]]), np.cumsum(both))
    if isinstance(values, Numbers) and isinstance(new, Numbers):
        own, others = values.array[kept], new.array
        if own.dtype != others.dtype and _is_exact(own) and _is_exact(others):
            own, others = own.astype(np.float64), others.astype(np.float64)
        if own.dtype == others.dtype:
            return Numbers(np.insert(own, offsets, others))
    rest = [value for value, is_kept in zip(values, kept.tolist(), strict=True) if is_kept]
    return packed(sorted([*rest, *new]), type_)


def places_of(new: Sequence[Any], values: Values, type_: AttributeType) -> NDArray[np.int64]:
    """The index (N,) of the first of the `values` that is not below each of the `new` ones."""
    own = packed(new, type_)
    if isinstance(own, Numbers) and isinstance(values, Numbers):
        ours, others = own.array, values.array
        if ours.dtype != others.dtype and _is_exact(ours) and _is_exact(others):
            ours, others = ours.astype(np.float64), others.astype(np.float64)
        if ours.dtype == others.dtype:
            return np.searchsorted(others, ours)
    return np.array([bisect_left(values, value) for value in new], np.int64)


def _is_exact(array: NDArray[Any]) -> bool:
    """Whether float64 represents all of these numbers exactly."""
    if array.dtype != np.int64:
        return array.dtype == np.float64
    return not len(array) or bool(max(-int(array.min()), int(array.max())) <= _WHOLE)


def to_arrays(values: Values) -> Arrays:
    """The arrays that represent values on disk; see `from_arrays`."""
    if isinstance(values, Texts):
        return {"data": values.data, "ends": values.ends}
    if isinstance(values, Numbers):
        return {"numbers": values.array}
    return {"json": np.frombuffer(json.dumps(list(values)).encode(), np.uint8)}


def from_arrays(arrays: Arrays) -> Values:
    """The values in these arrays. Raises: KeyError or ValueError for other arrays."""
    if "data" in arrays:
        return Texts(arrays["data"], arrays["ends"])
    if "numbers" in arrays:
        return Numbers(arrays["numbers"])
    found: list[Scalar] = json.loads(arrays["json"].tobytes())
    return found


def _plain(number: Any) -> Any:
    """Convert whole floats to int, so that JSON shows a price as 20 and not 20.0."""
    if isinstance(number, float) and number.is_integer() and abs(number) <= _WHOLE:
        return int(number)
    return number
