"""The different values of an attribute: ascending, compact, and read one at a time.

Ten million texts take 20 bytes each here and 80 as objects of Python. Texts are ordered by their
UTF-8 bytes, which is the order of their code points.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from kinlens.values import AttributeKind, Scalar

Arrays = Mapping[str, NDArray[Any]]
"""What values consist of on the disk, by name."""

Values = Sequence[Scalar]
"""Ascending, each once, all of one kind."""

_WHOLE = 2**53  # up to here a float64 holds every whole number


class Texts(Sequence[str]):
    """`data` holds all texts as UTF-8, one after the other; `ends` (V,) is where each one ends."""

    def __init__(self, data: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.data = data
        self.ends = ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Texts":
        """These texts, in their order."""
        encoded = [text.encode() for text in texts]
        ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    @classmethod
    def joined(cls, parts: Sequence["Texts"]) -> "Texts":
        """One after the other."""
        lengths = [np.diff(part.ends, prepend=0) for part in parts]
        data = np.concatenate([np.empty(0, np.uint8), *(part.data for part in parts)])
        return cls(data, np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths])))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        if not 0 <= place < len(self.ends):
            raise IndexError(place)
        start = int(self.ends[place - 1]) if place else 0
        return self.data[start : int(self.ends[place])].tobytes().decode()


class Numbers(Sequence[Any]):
    """Whole numbers, decimal numbers or truth values (V,), in an array of their type."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        # As numbers of Python, which compare whole and decimal numbers exactly.
        found = self.array[place].tolist()
        return [_plain(one) for one in found] if isinstance(found, list) else _plain(found)


def packed(values: Sequence[Any], kind: AttributeKind) -> Values:
    """Ascending values of one kind, compact.

    Whole numbers that no float64 holds, among decimal ones, stay a list.
    """
    if kind == "text":
        return Texts.of(values)
    if kind == "boolean":
        return Numbers(np.array(values, np.bool_))
    if all(type(value) is int for value in values):
        return Numbers(np.array(values, np.int64))
    if all(type(value) is float or abs(value) <= _WHOLE for value in values):
        return Numbers(np.array(values, np.float64))
    return list(values)


def joined(parts: Sequence[Values], kind: AttributeKind) -> Values:
    """The values of all parts, which follow each other in order."""
    if kind == "text":
        return Texts.joined([part for part in parts if isinstance(part, Texts)])
    arrays = [part.array for part in parts if isinstance(part, Numbers)]
    if len(arrays) == len(parts) and len({array.dtype for array in arrays}) == 1:
        return Numbers(np.concatenate(arrays))
    return packed([value for part in parts for value in part], kind)


def spliced(
    values: Values,
    kept: NDArray[np.bool_],
    places: NDArray[np.int64],
    new: Values,
    kind: AttributeKind,
) -> Values:
    """The values (V,) that are kept, with `new` ones (M,) in between, each before the value at its
    place, ascending.
    """
    before = np.concatenate([[0], np.cumsum(kept)])[places]  # of those that are kept
    if isinstance(values, Texts) and isinstance(new, Texts):
        lengths = np.diff(values.ends, prepend=0)
        data = values.data if kept.all() else values.data[np.repeat(kept, lengths)]
        lengths = lengths[kept]
        starts = np.concatenate([[0], np.cumsum(lengths)])[before].tolist()
        ends = [0, *new.ends.tolist()]
        pieces, last = [], 0
        for place, start in enumerate(starts):
            pieces += [data[last:start], new.data[ends[place] : ends[place + 1]]]
            last = start
        both = np.insert(lengths, before, np.diff(new.ends, prepend=0))
        return Texts(np.concatenate([*pieces, data[last:]]), np.cumsum(both))
    if isinstance(values, Numbers) and isinstance(new, Numbers):
        own, others = values.array[kept], new.array
        if own.dtype != others.dtype and _is_exact(own) and _is_exact(others):
            own, others = own.astype(np.float64), others.astype(np.float64)
        if own.dtype == others.dtype:
            return Numbers(np.insert(own, before, others))
    left = [value for value, stays in zip(values, kept.tolist(), strict=True) if stays]
    return packed(sorted([*left, *new]), kind)


def _is_exact(array: NDArray[Any]) -> bool:
    """Whether float64 holds all of these numbers."""
    if array.dtype != np.int64:
        return array.dtype == np.float64
    return not len(array) or bool(max(-int(array.min()), int(array.max())) <= _WHOLE)


def to_arrays(values: Values) -> Arrays:
    """What `from_arrays` makes the same values of."""
    if isinstance(values, Texts):
        return {"data": values.data, "ends": values.ends}
    if isinstance(values, Numbers):
        return {"numbers": values.array}
    return {"json": np.frombuffer(json.dumps(list(values)).encode(), np.uint8)}


def from_arrays(arrays: Arrays) -> Values:
    """The values in these arrays. Raises: KeyError, ValueError for arrays of something else."""
    if "data" in arrays:
        return Texts(arrays["data"], arrays["ends"])
    if "numbers" in arrays:
        return Numbers(arrays["numbers"])
    found: list[Scalar] = json.loads(arrays["json"].tobytes())
    return found


def _plain(number: Any) -> Any:
    """A whole number as such: JSON writes 20 and not 20.0 for a price that is whole."""
    if isinstance(number, float) and number.is_integer() and abs(number) <= _WHOLE:
        return int(number)
    return number
