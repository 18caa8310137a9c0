"""Products: the attribute that names them, and changes of all items of one."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Protocol

from kinlens.embedder.errors import ItemNotFoundError
from kinlens.embedder.sources.names import composed
from kinlens.embedder.sources.tables import PRODUCT
from kinlens.embedder.types import ItemId
from kinlens.indexer.entries import Item, Schema, parse_value
from kinlens.indexer.filters.tree import Filter, In
from kinlens.indexer.types import Page
from kinlens.values import AttributeValue, Scalar, single, values_in

PRODUCTS = (PRODUCT, "class")
"""Attributes that name the product of an item, the best first: the first one comes from uploads,
the second one from the folder of the image in a build."""

_PART = 1_000
_PAGE = 10_000


def product_attribute(items: Sequence[Item]) -> str | None:
    """The first of `PRODUCTS` that half of the items have, with several values."""
    for name in PRODUCTS:
        named = [single(item.attributes.get(name)) for item in items]
        values = [value for value in named if value is not None]
        if 2 * len(values) >= len(items) and len(set(values)) > 1:
            return name
    return None


class Pages(Protocol):
    """Items by filter: a gallery on disk, on Milvus, or the part of one that a key may see."""

    def schema(self) -> Schema: ...

    def page(
        self,
        offset: int,
        limit: int,
        where: Filter | None = None,
        prefix: str = "",
        after: ItemId = -1,
    ) -> Page: ...


def changes_by_key(
    store: Pages, changes: Mapping[str, Mapping[str, AttributeValue | None]]
) -> dict[str, Mapping[str, AttributeValue | None]]:
    """Changes by product as changes by key, for `VectorStore.update`: all or none.

    Raises: ItemNotFoundError naming a product that no item has.
    """
    by_value = {_value(store, name): name for name in changes}
    found: dict[str, Mapping[str, AttributeValue | None]] = {}
    missing = dict(by_value)
    values = iter(by_value)
    known = PRODUCT in store.schema()
    while known and (part := [*islice(values, _PART)]):
        last = -1
        while items := store.page(0, _PAGE, In(PRODUCT, tuple(part)), "", last).items:
            for item in items:
                for value in values_in(item.attributes.get(PRODUCT)):
                    value = composed(value) if isinstance(value, str) else value
                    if value in by_value:
                        found[item.key] = changes[by_value[value]]
                        missing.pop(value, None)
            last = items[-1].id
    if missing:
        raise ItemNotFoundError(
            f"No item has the {PRODUCT} {next(iter(missing.values()))!r:.200}. Add its images "
            "first, or name items by key."
        )
    return found


def _value(store: Pages, name: str) -> Scalar:
    """A product in the type of the attribute."""
    try:
        return parse_value(composed(name), store.schema().get(PRODUCT, "text"))
    except ValueError:
        return name
