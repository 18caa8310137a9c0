"""The view of a gallery for a caller whose key has a filter: only matching items exist in it.

Every read and every count adds the filter. Every change is limited, in its transaction, to items
that match the filter before and after the change. Facts that depend on other items are omitted:
the index and the calibration. Four things still depend on all items of the gallery:

- keys are unique,
- ids are numbered over all items,
- an attribute has one kind,
- each change makes a new version.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from kinlens.embedder.errors import (
    AccessError,
    FilterError,
    InvalidParameterError,
    ItemNotFoundError,
)
from kinlens.embedder.types import Embeddings, Hit, ItemId
from kinlens.indexer.entries import Entry, Item, Written
from kinlens.indexer.filters.tree import (
    And,
    Exists,
    Filter,
    check_attribute,
    check_boosted,
)
from kinlens.indexer.galleries import GalleryFacts, MilvusStore
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import (
    AttributeFacts,
    Facet,
    Group,
    Grouping,
    Page,
    SearchOptions,
    SortBy,
    no_item,
    no_key,
)
from kinlens.values import AttributeType, AttributeValue

Schema = Mapping[str, AttributeType]


class GalleryView:
    """The items of `whole` that match `where`, with the methods of a gallery that the service uses.

    If no item of the gallery has ever had an attribute of the filter, no item matches.
    """

    def __init__(self, whole: Gallery | MilvusStore, where: Filter) -> None:
        self.whole = whole
        self.where = where
        self.name, self.dim, self.bundle_id = whole.name, whole.dim, whole.bundle_id
        self.created_at, self.image_root = whole.created_at, whole.image_root

    @property
    def precision(self) -> str:
        return self.whole.precision

    @property
    def generation(self) -> str:
        return self.whole.generation

    @property
    def version(self) -> str:
        return self.whole.version

    @property
    def size(self) -> int:
        return self.page(0, 0).total

    def schema(self) -> Schema:
        return self.whole.schema()

    def facts(self) -> GalleryFacts:
        """Facts about the view, without the index, whose sizes count all items."""
        own = {"size": self.size, "delta": 0, "tombstones": 0}
        hidden = {"compaction_due": None, "segment": None}
        return self.whole.facts().model_copy(update=own | hidden)

    def attribute_facts(self) -> tuple[AttributeFacts, ...]:
        """Facts about the attributes that an item of the view has."""
        if not self._is_known():
            return ()
        return tuple(
            facts
            for facts in self.whole.attribute_facts(self.where)
            if facts.values
            or facts.minimum is not None
            or self.page(0, 0, Exists(facts.name)).total > 0
        )

    def item(self, item_id: ItemId) -> Item:
        found = self.whole.item(item_id)
        if not self.where.matches(found.attributes):
            raise ItemNotFoundError(no_item(item_id))
        return found

    def items_at(self, ids: Iterable[ItemId]) -> tuple[list[Item], Embeddings]:
        items, vectors = self.whole.items_at(ids)
        rows = [row for row, item in enumerate(items) if self.where.matches(item.attributes)]
        return [items[row] for row in rows], vectors[rows]

    def stored(self, keys: Sequence[str]) -> dict[str, Item]:
        found = self.whole.stored(keys)
        return {key: item for key, item in found.items() if self.where.matches(item.attributes)}

    def entries(self, keys: Sequence[str]) -> list[Entry]:
        known = self.stored(keys)
        for key in keys:
            if key not in known:
                raise ItemNotFoundError(no_key(key))
        found = self.whole.entries(keys)
        for entry in found:
            if not self.where.matches(entry.attributes):  # changed since it was looked up
                raise ItemNotFoundError(no_key(entry.key))
        return found

    def page(
        self,
        offset: int,
        limit: int,
        where: Filter | None = None,
        prefix: str = "",
        after: ItemId = -1,
        sort_by: SortBy | None = None,
    ) -> Page:
        if where is not None:
            self._check(where.check)
        if sort_by is not None:
            self.check_name(sort_by.attribute, "sort by")
        if not self._is_known():
            return Page(0, [], None)
        return self.whole.page(offset, limit, self._with(where), prefix, after, sort_by)

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]:
        limited = self._limited(options)
        if limited is None:
            return [[] for _ in queries]
        return self.whole.search(queries, k, limited)

    def search_groups(
        self,
        queries: Embeddings,
        k: int,
        grouping: Grouping,
        options: SearchOptions | None = None,
    ) -> list[list[Group]]:
        limited = self._limited(options)
        if limited is None:
            return [[] for _ in queries]
        self._check(lambda schema: check_attribute(grouping.by, schema, "group by"))
        return self.whole.search_groups(queries, k, grouping, limited)

    def facets(
        self,
        names: Sequence[str],
        query: Embeddings | None = None,
        options: SearchOptions | None = None,
        prefix: str = "",
    ) -> dict[str, Facet]:
        limited = self._limited(options)
        if limited is None:
            return {name: Facet() for name in names}
        for name in names:
            self.check_name(name, "count")
        return self.whole.facets(names, query, limited, prefix)

    def add(self, entries: Iterable[Entry], owned: frozenset[str] | None = None) -> Written:
        return self._changeable().add(entries, owned, self.where)

    def update(self, changes: Mapping[str, Mapping[str, AttributeValue | None]]) -> int:
        return self._changeable().update(changes, self.where)

    def update_where(self, where: Filter, change: Mapping[str, AttributeValue | None]) -> int:
        whole = self._changeable()
        self._check(where.check)
        if not self._is_known():
            return 0
        return whole.update_where(self._with(where), change, self.where)

    def remove(self, keys: Iterable[str], *, keep: Iterable[str] = ()) -> int:
        return self._changeable().remove(keys, keep=keep, within=self.where)

    def remove_items(self, ids: Iterable[ItemId]) -> int:
        return self._changeable().remove_items(ids, self.where)

    def remove_where(self, where: Filter) -> int:
        whole = self._changeable()
        self._check(where.check)
        return whole.remove_where(self._with(where)) if self._is_known() else 0

    def restore(self, keys: Iterable[str]) -> list[Item]:
        return self._changeable().restore(keys, self.where)

    def _changeable(self) -> Gallery:
        if isinstance(self.whole, Gallery):
            return self.whole
        raise AccessError(
            f"Gallery {self.name} is on Milvus, which has no transactions in which the filter of a "
            "key could be checked. Change it with a key that was made without --filter."
        )

    def _with(self, where: Filter | None) -> Filter:
        return self.where if where is None else And((self.where, where))

    def _limited(self, options: SearchOptions | None) -> SearchOptions | None:
        """The options with the filter; None if no item can match it.

        Raises: FilterError, InvalidParameterError.
        """
        options = options or SearchOptions()
        where, boost, sort_by = options.filter, options.boost, options.sort_by
        if where is not None:
            self._check(where.check)
        if boost is not None:
            self._check(lambda schema: check_boosted(boost.attribute, schema))
            if boost.low is None:
                raise InvalidParameterError(
                    f"boost = {boost.attribute}:{boost.weight:g} scales by the range in the whole "
                    "gallery, and the key has a filter. Send NAME:WEIGHT:FROM:TO."
                )
        if sort_by is not None:
            self.check_name(sort_by.attribute, "sort by")
        return replace(options, where=self._with(where)) if self._is_known() else None

    def _is_known(self) -> bool:
        """Whether the gallery has ever had the attributes of the filter, with the same kinds."""
        try:
            self.where.check(self.whole.schema())
        except FilterError:
            return False
        return True

    def _check(self, check: Callable[[Schema], None]) -> None:
        """Call `check` with the schema. Raises: FilterError naming only attributes of the view."""
        schema = self.whole.schema()
        if not schema:
            return
        try:
            check(schema)
        except FilterError:
            seen = {facts.name: facts.kind for facts in self.attribute_facts()}
            check(seen)
            raise

    def check_name(self, name: str, purpose: str) -> None:
        """Raises: FilterError if no visible item has an attribute of this name."""
        self._check(lambda schema: check_attribute(name, schema, purpose))


def check_names(
    gallery: Gallery | MilvusStore | GalleryView, names: Iterable[str], purpose: str
) -> None:
    """Check that attributes are known; `purpose` is for the message. Raises: FilterError."""
    for name in names:
        if isinstance(gallery, GalleryView):
            gallery.check_name(name, purpose)
        elif schema := gallery.schema():
            check_attribute(name, schema, purpose)
