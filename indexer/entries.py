"""Items as they are stored: keys, vectors and attributes, and the checks of each."""

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.sources.names import composed
from kinlens.embedder.types import Embeddings, ItemId
from kinlens.values import (
    AttributeType,
    AttributeValue,
    Scalar,
    date_text,
    is_missing,
    plain_attributes,
)

Schema = Mapping[str, AttributeType]
"""The attributes of a gallery: name -> type."""

MAX_KEY = 1024
MAX_NAME = 128
MAX_TEXT = 4096
MAX_LIST = 1000
DATE = "date"
"""Type name of a date. It is stored as text in a format that sorts by time."""

_WHOLE = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_DIGITS = 100  # including leading zeros
BOOLEANS = {"true": True, "false": False}
_TYPES: Mapping[type, AttributeType] = {
    bool: "boolean",
    str: "text",
    int: "number",
    float: "number",
}
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
NORM_TOLERANCE = 1e-3
"""A vector whose norm differs from 1 by more than this is refused."""

ROUNDING = 1e-6
"""A vector whose norm differs from 1 by more than this is normalised; others are unchanged."""

_SHA256 = re.compile("[0-9a-f]{64}")

NO_IMAGE = "none"
"""The format of an item whose image was embedded and not kept."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An item to store.

    key: in any Unicode form; it is stored composed (NFC), as are texts of attributes.
    vector: unit vector (D,).
    sha256: hash (hex) of the image that the vector was computed from; without an image, by default
        that of the bytes of the vector.
    attributes: a list or tuple gives an attribute several values; an empty one is omitted.
    path: relative to the image root of the gallery; empty for an item without an image.
    keeps: keep attributes of the stored item that the entry does not give.
    """

    key: str
    vector: NDArray[np.float32] = field(repr=False)
    sha256: str = ""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    path: str = ""
    format: str = ""
    keeps: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", as_stored(self.attributes))
        if isinstance(self.key, str):
            object.__setattr__(self, "key", composed(self.key))
        if self.sha256 == "" and isinstance(self.vector, np.ndarray):
            content = np.ascontiguousarray(self.vector, np.float32).tobytes()
            object.__setattr__(self, "sha256", hashlib.sha256(content).hexdigest())


def has_image(path: str, format_: str) -> bool:
    """Whether an item has an image: at a path below the image root, or uploaded."""
    return bool(path) or format_ not in ("", NO_IMAGE)


@dataclass(frozen=True, slots=True)
class Item:
    """A stored item; `path` is relative to the image root of its gallery."""

    id: ItemId
    key: str
    path: str
    sha256: str
    attributes: Mapping[str, AttributeValue]
    format: str

    @property
    def has_image(self) -> bool:
        """Whether it has an image, and not only a vector."""
        return has_image(self.path, self.format)


@dataclass(frozen=True, slots=True)
class Written:
    """Result of `add`; the counts sum to the number of entries."""

    added: int = 0
    replaced: int = 0
    updated: int = 0
    unchanged: int = 0

    def __add__(self, other: "Written") -> "Written":
        return Written(
            self.added + other.added,
            self.replaced + other.replaced,
            self.updated + other.updated,
            self.unchanged + other.unchanged,
        )


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


class AttributeTypes:
    """The types of attributes, while items with new values are checked one after the other."""

    def __init__(self, known: Schema, is_used: Callable[[str], bool] = lambda _: True) -> None:
        """`is_used`: whether a stored item has an attribute; the type of others may change."""
        self.types = dict(known)
        self._is_used = is_used
        self._checked: set[str] = set()

    def check(self, key: str, attributes: Mapping[str, AttributeValue]) -> None:
        """Check attributes, and learn the types of new names.

        Raises: InvalidParameterError naming attribute, type, value and key.
        """
        for name, value in plain_attributes(attributes).items():
            try:
                type_ = checked_type(value)
                if name not in self.types:
                    check_name(name)
            except ValueError as error:
                text = f"Attribute {name!r:.160} of {key!r}: {error}."
                raise InvalidParameterError(text) from error
            known = self.types.setdefault(name, type_)
            if type_ != known and (name in self._checked or self._is_used(name)):
                raise InvalidParameterError(
                    f"Attribute {name!r} is a {known}, and {key!r} has {value!r:.80}, a {type_}. "
                    f"Give it a {known}, or choose another name."
                )
            self.types[name] = type_
            self._checked.add(name)


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


def as_stored(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Plain attributes whose texts are in the composed Unicode form."""
    plain = plain_attributes(attributes)
    if all(isinstance(value, str) and value.isascii() for value in plain.values()):
        return plain
    return {name: _composed(value) for name, value in plain.items()}


def _composed(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_composed, value))
    return composed(value) if isinstance(value, str) else value


def type_of(value: object) -> AttributeType:
    """The attribute type of one value. Raises: ValueError for None, a list and other objects."""
    found = _TYPES.get(type(value))
    if found is not None:
        return found
    for known, type_ in _TYPES.items():
        if isinstance(value, known):
            return type_
    if is_missing(value):
        raise ValueError(f"{value!r:.80} is a missing value. Omit the attribute")
    raise ValueError(f"{value!r:.80} must be a string, a number or true/false")


def checked_type(value: AttributeValue) -> AttributeType:
    """The attribute type of a value or a tuple of values, after checking that it can be stored.

    Raises: ValueError for no value, NaN, infinity, integers beyond 64 bits, invalid Unicode, values
        of different types, too many values, or too long texts.
    """
    if isinstance(value, tuple):
        return _type_of_all(value)
    type_ = type_of(value)
    if isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            raise ValueError(f"{value!r:.80} is not valid Unicode")
        if len(value) > MAX_TEXT:
            raise ValueError(
                f"a text has {len(value):,} characters, the limit is {MAX_TEXT:,}. Shorten it"
            )
    elif isinstance(value, float):
        if not math.isfinite(value):
            cure = ". Omit the attribute" if math.isnan(value) else ""
            raise ValueError(f"{value} is not a finite number{cure}")
    elif not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"a whole number of {value.bit_length()} bits does not fit in 64 bits")
    return type_


def _type_of_all(values: tuple[Scalar, ...]) -> AttributeType:
    if len(values) > MAX_LIST:
        raise ValueError(f"a list of {len(values):,} values; give at most {MAX_LIST:,}")
    if any(isinstance(value, list | tuple) for value in values):
        raise ValueError("a list in a list. Give texts, numbers or true/false in a list")
    types = [checked_type(value) for value in values]
    for type_, value in zip(types, values, strict=True):
        if type_ != types[0]:
            raise ValueError(
                f"a list with {values[0]!r:.80}, a {types[0]}, and {value!r:.80}, a {type_}. Give "
                "values of one type"
            )
    return types[0]


def is_printable(text: str) -> bool:
    """Whether a text has no control characters, line breaks or invalid Unicode."""
    return text.isprintable() or _UNPRINTABLE.search(text) is None


def check_name(name: object) -> None:
    """Check an attribute name: 1 to 128 printable characters. Raises: ValueError."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not is_printable(name):
        raise ValueError(
            f"an attribute name must have 1 to {MAX_NAME} printable characters, not {name!r:.160}"
        )


def parse_value(text: str, kind: str) -> Scalar:
    """Convert `text` to a value of type `kind`. Raises: ValueError with the expected format."""
    word = text.strip()
    if kind == "text":
        return text
    if kind == DATE:
        try:
            short = len(word) <= len("2026-11-25")
            return date_text((date if short else datetime).fromisoformat(word))
        except ValueError as error:
            raise ValueError("expected a date such as 2026-11-25 or 2026-11-25T10:30Z") from error
    if kind == "boolean":
        if word.lower() not in BOOLEANS:
            raise ValueError("expected true or false")
        return BOOLEANS[word.lower()]
    if _WHOLE.fullmatch(word):
        if len(word) > _DIGITS or not -(2**63) <= int(word) < 2**63:
            raise ValueError("expected a 64-bit integer, or a number with a point such as 1.5e20")
        return int(word)
    if not _DECIMAL.fullmatch(word) or not math.isfinite(float(word)):
        raise ValueError("expected a finite number such as 12 or 12.5, with a decimal point")
    return float(word)
