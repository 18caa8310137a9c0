"""Reads one collection of a gallery on Milvus."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from embedder.errors import ItemNotFoundError
from embedder.types import Embeddings
from indexer.exchange.milvus_connection import Connection
from indexer.exchange.milvus_filters import expression, one_of
from indexer.exchange.milvus_schema import ITEM_FIELDS, TOP_K, Row, item_of, page_rows, vectors_of
from indexer.exchange.milvus_state import State
from indexer.filters.tree import Filter
from indexer.types import Item

_LOOKUP = 1_000
_FOLLOWING = "Bounded"
T = TypeVar("T")


class MilvusView:
    """The rows of a collection, for one operation of one thread.

    The first read waits until the server has caught up with every write, if `consistency` is
    Strong; those after it need not wait again.
    """

    def __init__(
        self, connection: Connection, collection: str, state: State, consistency: str = "Strong"
    ) -> None:
        self.collection = collection
        self.state = state
        self._connection = connection
        self._consistency = consistency

    def count(self) -> int:
        """Number of items."""
        [row] = self._query("id >= 0", ["count(*)"])
        return int(row["count(*)"])

    def by_key(self, keys: Sequence[str]) -> dict[str, list[Item]]:
        """The items with these keys, by key; a writer that died may have left an older one too,
        which then comes first. Unknown keys are left out.
        """
        found: dict[str, list[Item]] = {}
        for row in self._lookup("key", keys, ITEM_FIELDS):
            found.setdefault(row["key"], []).append(item_of(row))
        return {key: sorted(items, key=lambda item: item.id) for key, items in found.items()}

    def known(self, keys: Sequence[str]) -> list[Item]:
        """The items with these keys, in their order. Raises: ItemNotFoundError."""
        found = self.by_key(keys)
        missing = [key for key in keys if key not in found]
        if missing:
            raise ItemNotFoundError(
                f"Gallery {self.state.name} has no item with the key {missing[0]!r:.200}. Keys are "
                "compared letter by letter; add it first."
            )
        return [found[key][-1] for key in keys]

    def get(self, ids: Sequence[int]) -> list[Item]:
        """The items with these numbers; unknown numbers are left out."""
        return [item_of(row) for row in self._lookup("id", ids, ITEM_FIELDS)]

    def vectors(self, ids: Sequence[int]) -> Embeddings:
        """The vectors (N, D) of known items, in the order asked for.

        Raises: ItemNotFoundError, if one was removed meanwhile.
        """
        rows = {row["id"]: row for row in self._lookup("id", ids, ("id", "vector"))}
        missing = [number for number in ids if number not in rows]
        if missing:
            raise ItemNotFoundError(
                f"Gallery {self.state.name} has no item {missing[0]}; it may have been removed "
                "meanwhile. Try again."
            )
        return vectors_of([rows[number] for number in ids], self.state.dim)

    def of_contents(self, sha256s: Sequence[str]) -> dict[str, Row]:
        """A row with its vector for each of these contents that an item has."""
        rows = self._lookup("sha256", sha256s, ("id", "sha256", "vector"))
        return {row["sha256"]: row for row in rows}

    def matching(self, wheres: Sequence[Filter], fields: Sequence[str]) -> Iterator[list[Row]]:
        """Pages of the rows that fit all filters, in the order of their numbers.

        Raises: FilterError.

        Windows of numbers, not limits: the order of a limited query is up to the server.
        """
        fits = [f" and ({self.condition(where)})" for where in wheres]
        rows = min(page_rows(self.state.dim), TOP_K - 1)
        low, width = 0, rows
        while low < self.state.next_id:
            high = min(low + width, self.state.next_id)
            window = f"id >= {low} and id < {high}" + "".join(fits)
            page = self._query(window, fields, limit=rows + 1)
            if len(page) > rows:
                width = max(rows, width // 2)
                continue
            if page:
                yield sorted(page, key=lambda row: int(row["id"]))
            low = high
            width *= 2 if len(page) < rows // 2 else 1

    def condition(self, where: Filter | None) -> str:
        """The filter as an expression; empty for none. Raises: FilterError."""
        if where is None:
            return ""
        where.check(self.state.kinds)
        return expression(where)

    def search(
        self, queries: Embeddings, n: int, condition: str, parameters: dict[str, int]
    ) -> list[list[Row]]:
        """The n best rows of each query (Q, D), each with `distance` and, in `entity`, fields."""
        found: list[list[Row]] = self._connection.call(
            "search",
            self.collection,
            data=queries,
            limit=n,
            filter=condition,
            anns_field="vector",
            search_params={"metric_type": "IP", "params": parameters},
            output_fields=["key", "sha256", "attributes"],
            consistency_level=self._level(),
        )
        return [list(rows) for rows in found]

    def _lookup(
        self, field: str, values: Sequence[str] | Sequence[int], fields: Sequence[str]
    ) -> Iterator[Row]:
        size = min(_LOOKUP, page_rows(self.state.dim))
        for start in range(0, len(values), size):
            yield from self._query(one_of(field, values[start : start + size]), fields)

    def _query(self, condition: str, fields: Iterable[str], **options: int) -> list[Row]:
        found = self._connection.call(
            "query",
            self.collection,
            filter=condition,
            output_fields=list(fields),
            consistency_level=self._level(),
            **options,
        )
        return list(found)

    def _level(self) -> str:
        level = self._consistency
        if level == "Strong":
            self._consistency = _FOLLOWING
        return level
