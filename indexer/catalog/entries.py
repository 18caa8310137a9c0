"""Checks of keys, vectors and attributes before they are written."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.attributes import check_name, checked_type, is_printable
from kinlens.indexer.filters.tree import Exists
from kinlens.indexer.types import Entry, Item, VectorStore, VectorType
from kinlens.values import AttributeType, AttributeValue, plain_attributes

MAX_KEY = 1024
NORM_TOLERANCE = 1e-3
"""A vector whose norm differs from 1 by more than this is refused."""

ROUNDING = 1e-6
"""A vector whose norm differs from 1 by more than this is normalised; others are unchanged."""

SAME_VECTOR: Mapping[VectorType, float] = {"fp32": 1e-5, "fp16": 2.0**-11}
"""Vectors are equal if no component differs by more: two calls of a model differ by rounding."""

_SHA256 = re.compile("[0-9a-f]{64}")


def checked_keys(keys: Iterable[str]) -> list[str]:
    """The keys as a list. Raises: InvalidParameterError for a single key or other types."""
    if isinstance(keys, str | bytes):
        raise InvalidParameterError(
            f"{keys!r:.200} is one key. Give a list of keys: [{keys!r:.200}]."
        )
    listed = list(keys)
    for key in listed:
        if not isinstance(key, str):
            raise InvalidParameterError(
                f"A key must be a text, not {key!r:.200}. Give a list of texts."
            )
    return listed


def as_entries(items: Sequence[Item], vectors: Embeddings) -> list[Entry]:
    """Items and their vectors (N, D) as they are added."""
    return [
        Entry(item.key, vector, item.sha256, item.attributes, item.path, item.format)
        for item, vector in zip(items, vectors, strict=True)
    ]


def is_key(key: str) -> bool:
    """Whether a key is valid: 1 to 1024 printable characters, no path component `..`."""
    if not 1 <= len(key) <= MAX_KEY or not is_printable(key):
        return False
    return ".." not in key or ".." not in key.split("/")


def checked_vectors(entries: Sequence[Entry], dim: int) -> Embeddings:
    """Check entries and return their vectors as one array (N, dim) of norm 1.

    Raises: InvalidParameterError naming the first invalid key.
    """
    seen: set[str] = set()
    for entry in entries:
        check_key(entry.key)
        if entry.key in seen:
            raise InvalidParameterError(
                f"Key {entry.key!r} occurs twice. Give each item a different key."
            )
        seen.add(entry.key)
        _check_vector(entry.key, entry.vector, dim)
        _check_content(entry)
    if not entries:
        return np.empty((0, dim), dtype=np.float32)
    vectors = np.stack([entry.vector for entry in entries], dtype=np.float32, casting="same_kind")
    norms = norms_of(vectors)
    _check_norms(entries, vectors, norms)
    return normalised(vectors, norms)


def norms_of(vectors: Embeddings) -> NDArray[np.float64]:
    """Length of each vector (N, D)."""
    norms: NDArray[np.float64] = np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64))
    return norms


def are_equal(
    some: Embeddings, others: Embeddings, vector_type: VectorType = "fp16"
) -> NDArray[np.bool_]:
    """Whether each vector (N, D) equals the one of `others` (N, D) in its row, up to rounding."""
    equal: NDArray[np.bool_] = (np.abs(some - others) <= SAME_VECTOR[vector_type]).all(axis=-1)
    return equal


def normalised(vectors: Embeddings, norms: NDArray[np.float64]) -> Embeddings:
    """Vectors (N, D) divided by their norms; vectors of norm 1 up to rounding are unchanged."""
    off = np.abs(norms - 1) > ROUNDING
    if not off.any():
        return vectors
    unit = vectors.copy()
    unit[off] = vectors[off] / norms[off, None]
    return unit


def merged(
    given: Mapping[str, AttributeValue],
    stored: Mapping[str, AttributeValue],
    owned: Collection[str],
) -> dict[str, AttributeValue]:
    """The new attributes of a stored item: the given ones, and stored ones that are not `owned`."""
    return {name: value for name, value in stored.items() if name not in owned} | dict(given)


def with_stored(
    entries: Sequence[Entry], known: Mapping[str, Item], owned: frozenset[str] | None
) -> Sequence[Entry]:
    """Entries with the attributes that they keep from stored items.

    known: the stored items, by key.
    owned: an attribute that an entry does not give is removed only if it is one of these names;
        None removes all.
    """

    def stored(entry: Entry) -> Entry:
        names = frozenset() if entry.keeps else owned
        if names is None or entry.key not in known:
            return entry
        attributes = merged(entry.attributes, known[entry.key].attributes, names)
        return replace(entry, attributes=attributes)

    return [stored(entry) for entry in entries]


class Retypable:
    """The attributes whose types may change while entries are checked: those that no item has."""

    def __init__(self, is_used: Callable[[str], bool]) -> None:
        """`is_used`: whether an item has the attribute; asked if a value has another type."""
        self._is_used = is_used
        self._given: set[str] = set()

    @classmethod
    def of(cls, store: VectorStore) -> "Retypable":
        """The attributes that no item of a gallery has."""
        return cls(lambda name: store.page(0, 1, Exists(name)).total > 0)

    def add(self, name: str) -> None:
        """A checked entry has the attribute."""
        self._given.add(name)

    def __contains__(self, name: str) -> bool:
        return name not in self._given and not self._is_used(name)


def learn_types(
    types: dict[str, AttributeType],
    key: str,
    attributes: Mapping[str, AttributeValue],
    retypable: Retypable | None = None,
) -> None:
    """Check attributes against the known types `types`, and add the types of new names to it.

    retypable: attributes whose types in `types` are replaced by those of their new values.

    Raises: InvalidParameterError naming attribute, type, value and key.
    """
    for name, value in plain_attributes(attributes).items():
        try:
            type_ = checked_type(value)
            known = types.get(name)
            if known is None:
                check_name(name)
                types[name] = known = type_
        except ValueError as error:
            raise InvalidParameterError(f"Attribute {name!r:.160} of {key!r}: {error}.") from error
        if type_ != known:
            if retypable is None or name not in retypable:
                raise InvalidParameterError(
                    f"Attribute {name!r} is a {known}, and {key!r} has {value!r:.80}, a {type_}. "
                    f"Give it a {known}, or choose another name."
                )
            types[name] = type_
        if retypable is not None:
            retypable.add(name)


def check_key(key: object) -> None:
    """Check a key with `is_key`. Raises: InvalidParameterError."""
    if not _is_text(key, is_key):
        raise InvalidParameterError(
            f"{key!r:.200} is not a valid key. Give 1 to {MAX_KEY:,} printable characters without "
            "a part '..'."
        )


def _check_content(entry: Entry) -> None:
    if not _is_text(entry.sha256, _SHA256.fullmatch):
        raise InvalidParameterError(
            f"The sha256 of {entry.key!r} is {entry.sha256!r:.80}. Give 64 digits of 0-9 and a-f."
        )
    for text in (entry.path, entry.format):
        if not _is_text(text, is_printable):
            raise InvalidParameterError(
                f"Path and format of {entry.key!r} must be texts without control characters and "
                f"invalid Unicode, not {text!r:.200}. Rename the file."
            )


def _check_vector(key: str, vector: object, dim: int) -> None:
    if not isinstance(vector, np.ndarray) or vector.dtype.kind not in "fiu":
        type_ = getattr(vector, "dtype", type(vector).__name__)
        raise InvalidParameterError(
            f"The vector of {key!r} is of type {type_}. Give a NumPy array ({dim},) of float32."
        )
    if vector.shape != (dim,):
        raise InvalidParameterError(
            f"The vector of {key!r} has the shape {vector.shape}; this gallery needs ({dim},). "
            "Embed it with the bundle of the gallery."
        )


def _is_text(value: object, test: Callable[[str], object]) -> bool:
    return isinstance(value, str) and bool(test(value))


def _check_norms(entries: Sequence[Entry], vectors: Embeddings, norms: NDArray[np.float64]) -> None:
    # `not <=` instead of `>`, so that NaN is refused as well.
    wrong = np.flatnonzero(~(np.abs(norms - 1) <= NORM_TOLERANCE))
    if len(wrong):
        row = int(wrong[0])
        fault = f"norm {norms[row]:g}" if np.isfinite(vectors[row]).all() else "NaN or infinity"
        raise InvalidParameterError(
            f"The vector of {entries[row].key!r} has {fault}; it must be a unit vector. "
            "Divide it by its norm, or embed the image again."
        )
