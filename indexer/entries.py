"""What may be stored: the checks of entries before they are written."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from embedder.errors import InvalidParameterError
from embedder.types import AttributeValue, Embeddings
from indexer.attributes import (
    MAX_TEXT,
    AttributeKind,
    check_name,
    checked_kind,
    is_printable,
)
from indexer.engine import Entry

MAX_KEY = 1024
NORM_TOLERANCE = 1e-3
_SHA256 = re.compile("[0-9a-f]{64}")


def is_key(key: str) -> bool:
    """1 to 1024 printable characters, and no part of a path that leads upwards."""
    if not 1 <= len(key) <= MAX_KEY or not is_printable(key):
        return False
    return ".." not in key or ".." not in key.split("/")


def checked_vectors(entries: Sequence[Entry], dim: int) -> Embeddings:
    """Check keys, contents and vectors; the vectors (N, dim) as one array.

    Raises: InvalidParameterError naming the first key at fault.
    """
    seen: set[str] = set()
    for entry in entries:
        _check_key(entry.key)
        if entry.key in seen:
            raise InvalidParameterError(
                f"Key {entry.key!r} is there twice. Give each item a key of its own."
            )
        seen.add(entry.key)
        _check_content(entry)
        if entry.vector.shape != (dim,):
            raise InvalidParameterError(
                f"The vector of {entry.key!r} has the shape {entry.vector.shape}, the gallery "
                f"holds ({dim},). Embed it with the bundle of the gallery."
            )
    if not entries:
        return np.empty((0, dim), dtype=np.float32)
    vectors = np.stack([entry.vector for entry in entries], dtype=np.float32, casting="same_kind")
    _check_norms(entries, vectors)
    return vectors


def learn_kinds(
    kinds: dict[str, AttributeKind], key: str, attributes: Mapping[str, AttributeValue]
) -> None:
    """Check attributes against the kinds known so far, and add those of new names.

    Raises: InvalidParameterError naming attribute, kind, value and key.
    """
    for name, value in attributes.items():
        try:
            kind = checked_kind(value)
            known = kinds.get(name)
            if known is None:
                check_name(name)
                kinds[name] = known = kind
        except ValueError as error:
            raise InvalidParameterError(f"Attribute {name!r:.160} of {key!r}: {error}.") from error
        if kind != known:
            raise InvalidParameterError(
                f"Attribute {name!r} is a {known}, and {key!r} has {value!r:.80}, a {kind}. Give "
                f"it a {known}, or choose another name."
            )
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise InvalidParameterError(
                f"Attribute {name!r} of {key!r} has {len(value):,} characters, the limit is "
                f"{MAX_TEXT:,}. Shorten it."
            )


def _check_key(key: str) -> None:
    if not is_key(key):
        raise InvalidParameterError(
            f"{key!r:.200} is not a key, which has 1 to {MAX_KEY} printable characters and no part "
            "'..'. Choose another one."
        )


def _check_content(entry: Entry) -> None:
    if not _SHA256.fullmatch(entry.sha256):
        raise InvalidParameterError(
            f"The sha256 of {entry.key!r} is {entry.sha256!r:.80}. Give 64 digits of 0-9 and a-f."
        )
    for text in (entry.path, entry.format):
        if not is_printable(text):
            raise InvalidParameterError(
                f"{text!r:.200} of {entry.key!r} has control characters or broken Unicode. Rename "
                "the file."
            )


def _check_norms(entries: Sequence[Entry], vectors: Embeddings) -> None:
    norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64))
    # Written so that NaN is at fault as well.
    wrong = np.flatnonzero(~(np.abs(norms - 1) <= NORM_TOLERANCE))
    if len(wrong):
        row = int(wrong[0])
        what = f"norm {norms[row]:g}" if np.isfinite(vectors[row]).all() else "NaN or infinity"
        raise InvalidParameterError(
            f"The vector of {entries[row].key!r} has {what}; the gallery holds unit vectors. "
            "Divide it by its norm, or embed the image again."
        )
