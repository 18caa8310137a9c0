"""A gallery on Milvus."""

import contextlib
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from indexer.catalog.entries import checked_keys
from indexer.exchange.milvus_changes import Changes, Plan, plan_add, plan_update, send
from indexer.exchange.milvus_connection import Connection
from indexer.exchange.milvus_generation import (
    check_name,
    drop_generations,
    publish_first,
    publish_next,
)
from indexer.exchange.milvus_reader import MilvusReader
from indexer.exchange.milvus_state import State, StateKeeper, new_mark
from indexer.exchange.milvus_view import MilvusView
from indexer.filters.tree import Filter
from indexer.types import Entry, Item, Progress, Written


class MilvusStore(MilvusReader):
    """A gallery in a Milvus server, changed while it is searched.

    Implements `indexer.types.VectorStore`. One process writes at a time; another one is refused
    meanwhile, see `indexer.exchange.milvus_state`. Thread safe.
    """

    def __init__(
        self, connection: Connection, state: State, consistency: str, image_root: Path | None
    ) -> None:
        super().__init__(connection, state, consistency, image_root)
        self._keeper = StateKeeper(connection)

    @classmethod
    def create(
        cls,
        uri: str,
        name: str,
        *,
        dim: int,
        bundle_id: str,
        source: str = "",
        source_root: Path | str = "",
        token: str = "",
    ) -> Self:
        """A new gallery without items on the server at `uri`, opened.

        Raises: EngineUnavailableError, GalleryError if there is one of this name,
            InvalidParameterError for a name or dimension that Milvus cannot have.
        """
        check_name(name)
        state = State(
            name=name,
            bundle_id=bundle_id,
            dim=dim,
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            source=source,
            source_root=str(source_root),
            change=new_mark(),
        )
        with contextlib.closing(Connection(uri, token)) as connection:
            publish_first(connection, state)
        return cls.open(uri, name, token=token)

    @staticmethod
    def drop(uri: str, name: str, *, token: str = "") -> None:
        """Remove a gallery with all its items. Raises: EngineUnavailableError."""
        check_name(name)
        with contextlib.closing(Connection(uri, token)) as connection:
            connection.call("drop_alias", name)
            drop_generations(connection, name)

    def add(self, entries: Iterable[Entry], owned: frozenset[str] | None = None) -> Written:
        """Store entries. Equal key and content: nothing, or new attributes alone; other content
        under an old key replaces the item, which gets a new number.

        With `owned`, stored attributes that an entry does not give are taken away only if they have
        one of these names. They are read before the write: of two processes that write within the
        same few milliseconds, one may lose its change, see `indexer.exchange.milvus_state`.

        Raises: InvalidParameterError, and then nothing was written; GalleryBusyError;
            EngineUnavailableError, and then a part may have been written: add them again.
        """
        entries = list(entries)
        return self._change(lambda view: plan_add(view, entries, owned)).written

    def update(self, changes: Changes) -> int:
        """Change attributes by key; None takes an attribute away. How many items differ now.

        Raises: ItemNotFoundError, InvalidParameterError, and then nothing was changed;
            GalleryBusyError; EngineUnavailableError.
        """
        return len(self._change(lambda view: plan_update(view, changes)).changed)

    def remove(self, keys: Iterable[str]) -> int:
        """Remove items by key; unknown keys are left out of the count.

        Raises: InvalidParameterError for what is not a list of texts; GalleryBusyError;
            EngineUnavailableError.
        """
        wanted = list(dict.fromkeys(checked_keys(keys)))
        found = dict[str, list[Item]]()

        def plan(view: MilvusView) -> Plan:
            found.update(view.by_key(wanted))
            gone = [item.id for items in found.values() for item in items]
            return Plan(dict(view.state.kinds), gone=gone)

        self._change(plan)
        return len(found)

    def remove_where(self, where: Filter) -> int:
        """Remove every item that fits.

        Raises: FilterError, GalleryBusyError, EngineUnavailableError.
        """

        def plan(view: MilvusView) -> Plan:
            pages = view.matching([where], ["id"])
            return Plan(dict(view.state.kinds), gone=[row["id"] for page in pages for row in page])

        return len(self._change(plan).gone)

    def rebuild(self, entries: Iterable[Entry], on_progress: Progress | None = None) -> int:
        """Replace all items by `entries`, which get new numbers; how many there are now.

        They are loaded beside the current generation, which answers until then, with an index that
        fits their number. Searches go from one to the other at once. Other changes are refused
        meanwhile.

        Raises: InvalidParameterError, GalleryBusyError, GalleryWriteError, EngineUnavailableError;
            the gallery is as it was before then.
        """
        with self._keeper.reading(self.name) as (collection, state):
            with self._keeper.writing(collection, state, state):
                current, count = publish_next(self._connection, state, entries, on_progress)
            drop_generations(self._connection, self.name, keep=current)
        return count

    def _change(self, plan: Callable[[MilvusView], Plan]) -> Plan:
        with self._keeper.reading(self.name) as (collection, state):
            made = plan(MilvusView(self._connection, collection, state))
            if made.is_empty and not state.changing:
                return made
            known = {"kinds": made.kinds, "next_id": state.next_id + len(made.new)}
            during = state.model_copy(update=known | {"changing": True})
            with self._keeper.writing(collection, state, during):
                send(self._connection, collection, made, self.dim)
        return made
