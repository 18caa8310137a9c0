"""Items on their way into a gallery: what may be sent, and what is known of each so far."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from embedder.errors import InvalidParameterError, KinlensError
from embedder.types import AttributeKind, AttributeValue
from indexer.gallery import check_item as check_stored
from indexer.types import Entry, Item
from service.galleries.types import Gallery

MAX_ATTRIBUTES = 64
"""Attributes that one item may have."""

Status = Literal["added", "replaced", "updated", "unchanged", "failed"]

_FORMATS = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG": "PNG",
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}


@dataclass(frozen=True, slots=True)
class NewItem:
    """An image to be stored under a key; with `error` it was refused before anyone looked at it."""

    key: str
    data: bytes = field(repr=False)
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    error: KinlensError | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an item; `id` is its number, `error` says why it failed."""

    key: str
    status: Status
    id: int | None = None
    error: KinlensError | None = None


@dataclass(slots=True)
class Draft:
    """An item that is being stored; one with an `error` goes no further."""

    item: NewItem
    sha256: str = ""
    vector: NDArray[np.float32] | None = None
    error: KinlensError | None = None

    @property
    def needs_vector(self) -> bool:
        """Whether nobody has embedded its image yet."""
        return self.error is None and self.vector is None

    def entry(self, stored: Item | None) -> Entry:
        """As it is to be stored; a picture that was indexed where it lies stays there."""
        assert self.vector is not None
        path, kind = "", format_of(self.item.data)
        if stored is not None and stored.sha256 == self.sha256 and stored.path:
            path, kind = stored.path, stored.format
        key, attributes = self.item.key, self.item.attributes
        return Entry(key, self.vector, self.sha256, attributes, path, kind)


def drafts_of(gallery: Gallery, items: Sequence[NewItem]) -> list[Draft]:
    """Each item checked against the gallery; the vector of a content that it has is reused."""
    drafts = [Draft(item, error=item.error) for item in items]
    kinds = dict(gallery.schema())
    seen: set[str] = set()
    for draft in drafts:
        if draft.error is None:
            try:
                check_item(draft.item, seen, kinds)
                draft.sha256 = hashlib.sha256(draft.item.data).hexdigest()
            except KinlensError as error:
                draft.error = error
            seen.add(draft.item.key)
    known = gallery.vectors_of_contents([draft.sha256 for draft in drafts if draft.sha256])
    for draft in drafts:
        draft.vector = known.get(draft.sha256)
    return drafts


def check_item(item: NewItem, seen: Collection[str], kinds: dict[str, AttributeKind]) -> None:
    """Check key and attributes, against `kinds`, to which new ones are added.

    Raises: InvalidParameterError naming the key, or the attribute, and the limit.
    """
    if item.key in seen:
        raise InvalidParameterError(
            f"The key {item.key!r:.200} is in the request twice. Send each item once."
        )
    check_count(item.key, item.attributes)
    check_stored(item.key, item.attributes, kinds)


def check_count(key: str, attributes: Collection[str]) -> None:
    """Raises: InvalidParameterError for more than `MAX_ATTRIBUTES`."""
    if len(attributes) > MAX_ATTRIBUTES:
        raise InvalidParameterError(
            f"Item {key!r:.200} has {len(attributes):,} attributes, the limit is {MAX_ATTRIBUTES}. "
            "Leave some out."
        )


def status_of(stored: Item | None, entry: Entry) -> Status:
    """What storing `entry` makes of the item that had its key."""
    if stored is None:
        return "added"
    if stored.sha256 != entry.sha256:
        return "replaced"
    known = (stored.path, stored.format, dict(stored.attributes))
    same = known == (entry.path, entry.format, dict(entry.attributes))
    return "unchanged" if same else "updated"


def format_of(data: bytes) -> str:
    """The format of an image that was decoded, by its first bytes."""
    for signature, name in _FORMATS.items():
        if data.startswith(signature):
            return name
    return "WEBP"
