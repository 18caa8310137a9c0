"""A gallery on Milvus: a thin layer over collections, filters and consistency levels.

A generation is a collection. An alias with the name of the gallery points to the current one. The
differences to a gallery in a folder are listed in docs/scaling.md.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import (
    BundleMismatchError,
    GalleryBusyError,
    InvalidParameterError,
    ItemNotFoundError,
)
from kinlens.embedder.sources.names import by_key
from kinlens.embedder.types import SHORT, Embeddings, Hit, ItemId
from kinlens.indexer.addresses import ImageRoot, image_root_of
from kinlens.indexer.catalog.vectors import are_equal
from kinlens.indexer.entries import (
    NO_IMAGE,
    AttributeTypes,
    Entry,
    Item,
    Schema,
    Written,
    as_stored,
    checked_keys,
    checked_vectors,
    with_stored,
)
from kinlens.indexer.exchange.milvus_collection import (
    ENTRY,
    ID_LIMIT,
    ITEM,
    Collection,
    Connection,
    MilvusFacts,
    Row,
    attributes_of,
    batches,
    both,
    content_of,
    entry_of,
    item_of,
    lengths_in,
    lookups,
    row_of,
)
from kinlens.indexer.exchange.milvus_filters import literal
from kinlens.indexer.exchange.milvus_search import (
    MilvusSearch,
    check_used,
    counted_rows,
    sorted_items,
    spread_of,
)
from kinlens.indexer.filters.text import Where
from kinlens.indexer.filters.tree import Exists, check_attribute
from kinlens.indexer.folder.manifest import GalleryFacts
from kinlens.indexer.live.facets import checked_names, facet_of, facts_of_spread
from kinlens.indexer.live.ranking import (
    best_groups,
    best_hits,
)
from kinlens.indexer.live.reader import check_sorted
from kinlens.indexer.store import VectorStore
from kinlens.indexer.types import (
    AttributeFacts,
    Consistency,
    Facet,
    Group,
    Grouping,
    OnCall,
    Page,
    SearchOptions,
    SortBy,
    no_item,
    unobserved,
)
from kinlens.values import AttributeValue

_NAME = re.compile(r"(?!.*_[0-9a-f]{12}$)[A-Za-z][A-Za-z0-9_]{0,63}")
_SAMPLE = 10_000
_BATCH = 1_000  # items per step of a change by filter
_INDEX_FIELDS = {"schema_version", "precision", "nlist", "index", "effort", "recall"}


class MilvusStore(VectorStore):
    """A gallery in a Milvus server, for any number of concurrent readers and writers. Thread-safe.

    When a call returns, its changes are durable, but not atomic. `consistency` determines when a
    search sees them. A new generation is used at once, also by processes that have the gallery
    open.
    """

    def __init__(
        self, connection: Connection, seen: Collection, image_root: ImageRoot | str | None
    ) -> None:
        self._connection = connection
        self._seen = seen
        self._image_root = image_root
        self._size = ("", 0)

    @classmethod
    def open(
        cls,
        uri: str,
        name: str,
        *,
        expected_bundle_id: str | None = None,
        image_root: ImageRoot | str | None = None,
        token: str = "",
        timeout_s: float = 10.0,
        consistency: Consistency = "Strong",
        on_call: OnCall = unobserved,
    ) -> Self:
        """Open gallery `name` on the server at `uri`, with a timeout per request.

        Waits until the server has loaded the gallery, which takes long after a restart.

        Raises: EngineUnavailableError, GalleryNotFoundError, GalleryCorruptError,
            BundleMismatchError.
        """
        check_name(name)
        connection = Connection(uri, token, timeout_s, on_call)
        try:
            now = Collection.current(connection, name, consistency)
            _check_bundle(now.facts, expected_bundle_id)
            now.load()
        except BaseException:
            connection.close()
            raise
        return cls(connection, now, image_root)

    @property
    def name(self) -> str:
        return self._seen.facts.name

    @property
    def dim(self) -> int:
        return self._seen.facts.dim

    @property
    def bundle_id(self) -> str:
        return self._seen.facts.bundle_id

    @property
    def precision(self) -> str:
        return self._seen.facts.precision

    def admit(self, precision: str) -> None:
        pass  # the facts of a collection do not change

    @property
    def generation(self) -> str:
        """The generation at the last request, without asking the server: 12 hex digits."""
        return self._seen.facts.generation

    @property
    def created_at(self) -> str:
        return self._seen.facts.created_at

    @property
    def image_root(self) -> ImageRoot:
        return image_root_of(self._image_root or self._seen.facts.source_root)

    @property
    def size(self) -> int:
        now = self._now()
        version, size = self._size
        if version != now.version:
            size = now.strong().count()
            self._size = (now.version, size)
        return size

    @property
    def version(self) -> str:
        """sha256 (hex) that changes after every completed change by Kinlens; takes one request.

        Changes by other programs are not reflected, and a change that failed half way only with the
        next one. Only reads with consistency "Strong" are sure to see the change.
        """
        return self._now().version

    def current_generation(self) -> str:
        """The current generation on the server: 12 hex digits.

        This store switches to it, unless it has another bundle.
        """
        with contextlib.suppress(BundleMismatchError):
            return self._now().facts.generation
        return Collection.current(self._connection, self.name, "Strong").facts.generation

    def facts(self) -> GalleryFacts:
        now = self._now()
        return GalleryFacts(
            **now.facts.model_dump(exclude=_INDEX_FIELDS),
            precision=now.facts.precision,
            version=now.version,
            size=now.count(),
            delta=0,
            tombstones=0,
            compaction_due=None,
            segment=None,
        )

    def index_text(self) -> str:
        """One line about the index: type, effort and measured recall."""
        facts = self._now().facts
        if facts.recall is None:
            return f"Index {facts.kind} on Milvus."
        return f"Index {facts.kind} on Milvus, effort {facts.effort}, recall@10 {facts.recall:.4f}."

    def schema(self) -> Schema:
        return self._now().kinds

    def has_attribute(self, name: str) -> bool:
        strong = self._now().strong()
        return strong.count(strong.condition(Exists(name))) > 0

    def attribute_facts(self, where: Where | None = None) -> tuple[AttributeFacts, ...]:
        """The values of each attribute, counted in a random sample of about 10,000 items."""
        now = self._now()
        sample = next(now.pages(now.condition(where), ["number", "attributes"], rows=_SAMPLE), [])
        given = list(map(attributes_of, sample))
        return tuple(
            facts_of_spread(name, kind, spread_of(name, given))
            for name, kind in sorted(now.kinds.items())
        )

    def add(self, entries: Iterable[Entry], owned: frozenset[str] | None = None) -> Written:
        """As `VectorStore.add`. After an error of the server, some entries may have been written:
        add them again. If two processes write one key at the same time, the later one wins.
        """
        entries = list(entries)
        now = self._now()
        vectors = checked_vectors(entries, now.facts.dim)
        now.learn(*self._checked_types(now, {entry.key: entry.attributes for entry in entries}))
        written, size = Written(), now.page_rows
        for start in range(0, len(entries), size):
            page = slice(start, start + size)
            written += _upsert_entries(now, entries[page], vectors[page], owned)
        if written.unchanged < len(entries):
            now.mark()
        return written

    def update_where(self, where: Where, change: Mapping[str, AttributeValue | None]) -> int:
        now = self._now()
        pages = now.pages(now.condition(where), ["key", "number"])
        keys = [str(row["key"]) for page in pages for row in page]
        parts = (keys[start : start + _BATCH] for start in range(0, len(keys), _BATCH))
        return sum(self.update(dict.fromkeys(part, change)) for part in parts)

    def update(self, changes: Mapping[str, Mapping[str, AttributeValue | None]]) -> int:
        now = self._now()
        stored = {key: as_stored(change) for key, change in changes.items()}
        given = {
            key: {name: value for name, value in change.items() if value is not None}
            for key, change in stored.items()
        }
        learnt = self._checked_types(now, given)
        rows = now.strong().known([*changes], ENTRY)
        now.learn(*learnt)
        became: dict[str, dict[str, AttributeValue]] = {}
        for key, row in zip(changes, rows, strict=True):  # two keys may be spellings of one
            before = became.get(row["key"], attributes_of(row))
            kept = {name: value for name, value in before.items() if name not in changes[key]}
            became[row["key"]] = kept | given[key]
        changed = [
            {**row, "attributes": became[row["key"]]}
            for row in {row["key"]: row for row in rows}.values()
            if became[row["key"]] != attributes_of(row)
        ]
        now.upsert(changed)
        if changed:
            now.mark()
        return len(changed)

    def remove(self, keys: Iterable[str]) -> int:
        wanted = list(dict.fromkeys(checked_keys(keys)))
        return _remove(self._now(), lookups("key", wanted))

    def remove_items(self, ids: Iterable[ItemId]) -> int:
        return _remove(self._now(), lookups("number", _possible(ids)))

    def remove_where(self, where: Where) -> int:
        now = self._now()
        return _remove(now, [now.condition(where)])

    def item(self, item_id: ItemId) -> Item:
        found = list(self._now().lookup("number", _possible([item_id]), ITEM))
        if not found:
            raise ItemNotFoundError(no_item(item_id))
        return item_of(found[0])

    def items_at(self, ids: Iterable[ItemId]) -> tuple[list[Item], Embeddings]:
        rows = sorted(
            self._now().lookup("number", _possible(ids), ENTRY), key=lambda row: int(row["number"])
        )
        vectors = np.array([row["vector"] for row in rows], np.float32).reshape(-1, self.dim)
        return [item_of(row) for row in rows], vectors

    def stored(self, keys: Sequence[str]) -> dict[str, Item]:
        # Always with consistency "Strong": changes depend on it.
        found = self._now().strong().lookup("key", keys, ITEM)
        return by_key(keys, {row["key"]: item_of(row) for row in found})

    def contents(self, sha256s: Sequence[str]) -> set[str]:
        found = self._now().strong().lookup("sha256", sha256s, ["sha256"])
        return {row["sha256"] for row in found}

    def kept_contents(self, sha256s: Sequence[str]) -> set[str]:
        """The given contents of which some item has the image."""
        # Always with consistency "Strong": unused images are deleted.
        found = self._now().strong().lookup("sha256", sha256s, ["sha256", "format"])
        return {row["sha256"] for row in found if row["format"] != NO_IMAGE}

    def vectors_of_contents(self, sha256s: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        found = self._now().lookup("sha256", sha256s, ["sha256", "vector"])
        return {row["sha256"]: np.asarray(row["vector"], np.float32) for row in found}

    def entries(self, keys: Sequence[str]) -> list[Entry]:
        return [entry_of(row) for row in self._now().known(keys, ENTRY)]

    def items(self) -> Iterator[Item]:
        return map(item_of, self._everything(ITEM))

    def scan(self, batch_size: int = 1000) -> Iterator[list[Entry]]:
        return batches(map(entry_of, self._everything(ENTRY)), batch_size)

    def _everything(self, fields: Sequence[str]) -> Iterator[Row]:
        """All rows. An item that is replaced during the iteration gets another id, so it may be
        missing or occur twice. Raises: GalleryBusyError at the end if the gallery was changed.
        """
        now = self._now()
        yield from chain.from_iterable(now.pages("", fields))
        if self._now().version != now.version:
            raise GalleryBusyError(
                "The gallery was changed while all its items were read. Try again "
                "when no other process changes it."
            )

    def page(
        self,
        offset: int,
        limit: int,
        where: Where | None = None,
        prefix: str = "",
        after: ItemId = -1,
        sort_by: SortBy | None = None,
    ) -> Page:
        now = self._now()
        condition = both(now.condition(where), _with_prefix(prefix))
        if sort_by is not None:
            check_sorted(offset, limit, after)
            items = sorted_items(now, condition, sort_by)
            return Page(len(items), items[offset : offset + limit], None)
        total, end = now.count(condition), offset + limit
        if offset >= total:
            return Page(total, [], None)
        pages = now.pages(condition, ITEM, min(2 * end, now.page_rows), after, total)
        found = list(islice(chain.from_iterable(pages), offset, end))
        return Page(total, [item_of(row) for row in found], None)

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]:
        options = options or SearchOptions()
        search = MilvusSearch(self._now(), queries, k, options)
        rows, reorder = len(search.queries), search.reorder()
        return best_hits(search.fetch, rows, k, options, search.vectors, reorder)

    def search_groups(
        self, queries: Embeddings, k: int, grouping: Grouping, options: SearchOptions | None = None
    ) -> list[list[Group]]:
        options = options or SearchOptions()
        now = self._now()
        search = MilvusSearch(now, queries, k, options, grouping.by)
        check_used(now, grouping.by, "group by")
        rows, reorder = len(search.queries), search.reorder()
        return best_groups(search, rows, k, grouping, options, search.vectors, reorder)

    def facets(
        self,
        names: Sequence[str],
        query: Embeddings | None = None,
        options: SearchOptions | None = None,
        prefix: str = "",
    ) -> dict[str, Facet]:
        options, names = options or SearchOptions(), checked_names(names)
        now = self._now()
        rows = counted_rows(now, query, options, _with_prefix(prefix), names)
        given = [attributes_of(row) for row in rows if int(row["number"]) not in options.exclude]
        if not rows and not now.count():
            return {name: Facet() for name in names}
        for name in names:
            check_attribute(name, now.kinds, "count")
        return {name: facet_of(spread_of(name, given), now.kinds[name]) for name in names}

    def close(self) -> None:
        self._connection.close()

    def _checked_types(
        self, now: Collection, given: Mapping[str, Mapping[str, AttributeValue]]
    ) -> tuple[Schema, set[str]]:
        """The types of all attributes after items with these keys get these attributes, and the
        `lengths_in` these.

        Raises: InvalidParameterError for a value of another type than an item has, and too many.
        """
        types = AttributeTypes(now.kinds, self.has_attribute)
        lengths = set[str]()
        for key, attributes in given.items():
            types.check(key, attributes)
            lengths |= lengths_in(key, attributes)
        return types.types, lengths

    def _now(self) -> Collection:
        """The current generation. Raises: BundleMismatchError if it has another bundle."""
        now = Collection.current(self._connection, self.name, self._seen.consistency)
        _check_bundle(now.facts, self.bundle_id)
        self._seen = now
        return now


def _upsert_entries(
    now: Collection, entries: Sequence[Entry], vectors: Embeddings, owned: frozenset[str] | None
) -> Written:
    found, numbers = now.strong().claimed(entries, vectors)
    stored = by_key([entry.key for entry in entries], {row["key"]: row for row in found})
    items = {key: item_of(row) for key, row in stored.items()}
    rows, became = [], Counter[str]()
    for entry, vector in zip(with_stored(entries, items, owned), vectors, strict=True):
        old, new, content = stored.get(entry.key), row_of(entry, vector), entry.sha256
        new["key"] = entry.key if old is None else old["key"]  # as an earlier version spelled it
        if old is None:
            became["added"] += 1
        elif old["sha256"] != entry.sha256:
            became["replaced"] += 1
        elif not are_equal(vector, np.asarray(old["vector"], np.float32), "fp32"):
            became["replaced"] += 1
            content = content_of(vector)  # another id
        else:
            new |= {"vector": old["vector"], "number": old["number"]}  # equal content keeps both
            if items[entry.key] == item_of(new):
                became["unchanged"] += 1
                continue
            became["updated"] += 1
            rows.append(new)
            continue
        rows.append(new | {"number": numbers.take(new["key"], content)})
    now.upsert(rows)
    return Written(**became)


def _remove(now: Collection, conditions: Iterable[str]) -> int:
    removed = 0
    for condition in conditions:
        if count := now.strong().count(condition):
            now.connection.call("delete", now.collection, filter=condition)
            removed += count
    if removed:
        now.mark()
    return removed


def _with_prefix(prefix: str) -> str:
    """A condition that keys start with `prefix`; empty for every key."""
    if not prefix:
        return ""
    return f"key >= {literal(prefix)} and key < {literal(prefix + chr(0x10FFFF))}"


def _possible(ids: Iterable[ItemId]) -> list[ItemId]:
    return [number for number in ids if 0 <= number < ID_LIMIT]


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidParameterError(
            f"{name!r:.160} is not a valid gallery name on Milvus. Use a letter, then up to 63 "
            "letters, digits and underscores. It must not end with an underscore and 12 hex digits."
        )


def _check_bundle(facts: MilvusFacts, expected_id: str | None) -> None:
    if expected_id is not None and facts.bundle_id != expected_id:
        raise BundleMismatchError(
            f"Gallery {facts.name} was built with bundle {facts.bundle_id[:SHORT]}, but the bundle "
            f"in use is {expected_id[:SHORT]}, and their vectors cannot be compared. Use the first "
            "bundle, or import the gallery again with vectors of the bundle in use."
        )
