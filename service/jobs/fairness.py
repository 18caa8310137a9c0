"""The items on which an old and a new model can be compared without favouring one of them."""

import contextlib
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import BundleError
from kinlens.embedder.seen import Seen
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import Item
from kinlens.values import Scalar, single


@dataclass(frozen=True, slots=True)
class Questions:
    """The items that serve as queries to compare two models.

    keys: of these items; None for all items.
    clause: describes these items in the verdict.
    unfair: why no item is a fair query, or "".
    seen: the record of both models, as far as it is known; None if the new model has none.
    """

    keys: Set[str] | None = None
    clause: str = ""
    unfair: str = ""
    seen: Seen | None = field(default_factory=Seen.of)


def seen_by_bundle(folder: Path | None) -> Seen | None:
    """What the model in `folder` was trained on; None if that is not recorded or cannot be read."""
    with contextlib.suppress(BundleError):
        return None if folder is None else Bundle.open(folder).seen()
    return None


def fair_questions(
    gallery: Gallery, class_attribute: str, old: Seen | None, new: Seen | None
) -> Questions:
    """The items of classes that neither model was trained on, nor a model that it continued.

    A model was trained on a class if it was trained on a class of that name or on one of its
    images: classes are renamed, and images move from class to class.
    """
    if new is None:
        text = "the new model does not record the classes that it was trained on"
        return Questions(frozenset(), unfair=text, seen=None)
    if old is None:
        text = (
            "the model in service does not record the classes that it was trained on, as it comes "
            "from an earlier version or its bundle is not here"
        )
        return Questions(frozenset(), unfair=text, seen=new)
    seen = old | new
    if not len(seen.hashes):
        return Questions()

    is_trained: dict[Scalar, bool] = {}
    for item in gallery.items():
        value = single(item.attributes.get(class_attribute))
        if value is None:
            continue
        if value not in is_trained:
            is_trained[value] = seen.has_class(class_name(value))
        is_trained[value] |= seen.has_image(item.sha256)

    def is_fair(item: Item) -> bool:
        value = single(item.attributes.get(class_attribute))
        return value is not None and not is_trained.get(value, True)  # added since: not compared

    keys = {item.key for item in gallery.items() if is_fair(item)}
    return Questions(keys, ", classes that neither model was trained on", seen=seen)


def class_name(value: Scalar) -> str:
    """The value of an attribute as the name of a class, as in the CSV or the folder it is from."""
    if isinstance(value, bool):
        return str(value).lower()
    is_whole = isinstance(value, float) and value.is_integer()
    return f"{value:.0f}" if is_whole else str(value)
