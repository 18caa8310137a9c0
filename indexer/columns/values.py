"""The distinct values of an attribute in a compact, ascending array.

Ten million texts take 20 bytes each here, and 80 as Python objects. Texts are ordered by their
UTF-8 bytes, which is the order of their code points.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from kinlens.values import AttributeType, Scalar

Arrays = Mapping[str, NDArray[Any]]
"""The arrays that represent values on disk, by name."""

Values = Sequence[Scalar]
"""Distinct values of one type, ascending."""

_MANY = 16  # values, from which on it is faster to look them up together
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

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of bytes of each text (V,)."""
        return np.diff(self.ends, prepend=0)

    def spans(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first byte of each of these texts (N,), and the number of its bytes."""
        starts = np.where(indices > 0, self.ends[indices - 1], 0)
        return starts, self.ends[indices] - starts

    def words(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Eight bytes from each of these (N,) on as a number, with zeros for all after `lengths`.

        Numbers are ordered as the bytes.
        """
        first = np.minimum(starts, len(self._words) - 1)
        unused = (64 - 8 * np.minimum(lengths, 8)).view(np.uint64)
        words = self._words[first].astype(np.uint64) << (8 * (starts - first)).view(np.uint64)
        return words >> unused << unused

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        """The eight bytes from each byte of the data on."""
        data = self.data if len(self.data) >= 8 else np.pad(self.data, (0, 8))
        return np.ndarray(len(data) - 7, ">u8", data, strides=1)

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


def merged_values(
    values: Values,
    kept: NDArray[np.int64],
    new: Values,
    is_new: NDArray[np.bool_],
    type_: AttributeType,
) -> Values:
    """Some of the values, and new ones.

    kept: the indices of the values to keep, ascending.
    is_new: for each value of the result, whether it is one of the `new` ones.
    """
    if isinstance(values, Texts) and isinstance(new, Texts):
        lengths = np.empty(len(is_new), np.int64)
        lengths[is_new], lengths[~is_new] = new.lengths, values.lengths[kept]
        own = np.zeros(len(values), np.bool_)
        own[kept] = True
        is_new = np.repeat(is_new, lengths)
        data = np.empty(len(is_new), np.uint8)
        data[is_new], data[~is_new] = new.data, values.data[np.repeat(own, values.lengths)]
        return Texts(data, np.cumsum(lengths))
    if isinstance(values, Numbers) and isinstance(new, Numbers):
        ours, others = _alike(values.array, new.array)
        if ours.dtype == others.dtype:
            array = np.empty(len(is_new), ours.dtype)
            array[is_new], array[~is_new] = others, ours[kept]
            return Numbers(array)
    return packed(sorted([*(values[index] for index in kept.tolist()), *new]), type_)


def places_of(
    wanted: Sequence[Any], values: Values, type_: AttributeType
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The index (N,) of the first of the `values` that is not below each of the `wanted` ones, and
    whether it is equal.
    """
    if len(wanted) >= _MANY:
        own = packed(wanted, type_)
        if isinstance(own, Texts) and isinstance(values, Texts):
            return _places_of_texts(own, values)
        if isinstance(own, Numbers) and isinstance(values, Numbers):
            ours, others = _alike(own.array, values.array)
            if ours.dtype == others.dtype:
                places = np.searchsorted(others, ours)
                equal = places < len(others)
                equal[equal] = others[places[equal]] == ours[equal]
                return places, equal
    found = [bisect_left(values, value) for value in wanted]
    pairs = zip(found, wanted, strict=True)
    known = [place < len(values) and values[place] == value for place, value in pairs]
    return np.array(found, np.int64), np.array(known, np.bool_)


def are_at(
    places: NDArray[np.int64], wanted: Sequence[Any], values: Values, type_: AttributeType
) -> NDArray[np.bool_]:
    """Whether each of the `wanted` values (N,) is the one of the `values` with the index given."""
    own = packed(wanted, type_)
    if isinstance(own, Texts) and isinstance(values, Texts):
        compared = _compared(values, places, own, np.arange(len(own)))
        return np.equal(compared, 0, dtype=np.bool_)
    if isinstance(own, Numbers) and isinstance(values, Numbers):
        ours, others = _alike(own.array, values.array[places])
        if ours.dtype == others.dtype:
            return np.asarray(ours == others, np.bool_)
    pairs = zip(places.tolist(), wanted, strict=True)
    return np.array([values[place] == value for place, value in pairs], np.bool_)


def _places_of_texts(wanted: Texts, texts: Texts) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Bisects for all wanted texts at once."""
    every = np.arange(len(wanted))
    first, end = np.zeros(len(wanted), np.int64), np.full(len(wanted), len(texts))
    while len(left := np.flatnonzero(first < end)):
        middle = (first[left] + end[left]) // 2
        is_below = _compared(texts, middle, wanted, left) < 0
        first[left[is_below]] = middle[is_below] + 1
        end[left[~is_below]] = middle[~is_below]
    equal = first < len(texts)
    equal[equal] = _compared(texts, first[equal], wanted, every[equal]) == 0
    return first, equal


def _compared(
    texts: Texts, indices: NDArray[np.int64], others: Texts, places: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Below, equal to or above 0 (N,), as is each of the texts compared with one of the others."""
    starts, lengths = texts.spans(indices)
    own_starts, own_lengths = others.spans(places)
    found = lengths - own_lengths  # the order of texts of which one begins with the other
    left, offset = np.arange(len(found)), 0
    while len(left):
        words = texts.words(starts[left] + offset, lengths[left] - offset)
        given = others.words(own_starts[left] + offset, own_lengths[left] - offset)
        differ = words != given
        found[left[differ]] = np.where(words < given, -1, 1)[differ]
        offset += 8
        left = left[~differ & (np.minimum(lengths, own_lengths)[left] > offset)]
    return found


def _alike(one: NDArray[Any], other: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both numbers as floats if they differ in type and floats represent them exactly."""
    if one.dtype != other.dtype and _is_exact(one) and _is_exact(other):
        return one.astype(np.float64), other.astype(np.float64)
    return one, other


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
