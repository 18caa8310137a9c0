"""Collections of a gallery on Milvus: one for each generation, and an alias for the current one."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from itertools import islice

from embedder.errors import (
    EngineUnavailableError,
    GalleryError,
    GalleryNotFoundError,
    GalleryWriteError,
    InvalidParameterError,
)
from indexer.catalog.attributes import AttributeKind
from indexer.catalog.entries import checked_vectors, learn_kinds
from indexer.exchange.milvus_connection import Connection
from indexer.exchange.milvus_schema import (
    clusters,
    collection_schema,
    entry_row,
    index_params,
    page_rows,
)
from indexer.exchange.milvus_state import State, new_mark, read_state, state_properties, write_state
from indexer.exchange.milvus_view import MilvusView
from indexer.types import Entry, Progress

_NAME = re.compile(r"(?!.*_\d+$)[A-Za-z][A-Za-z0-9_]{0,63}")
_LOAD_TIMEOUT_S = 24 * 3600.0


def check_name(name: str) -> None:
    """Whether a gallery on Milvus can have this name. Raises: InvalidParameterError."""
    if not _NAME.fullmatch(name):
        raise InvalidParameterError(
            f"{name!r:.160} cannot be a gallery on Milvus. Give it a letter and then at most 63 "
            "letters, digits and underscores, and no number after an underscore at the end."
        )


def publish_first(connection: Connection, state: State) -> None:
    """Make an empty gallery. Raises: GalleryError if there is one of this name."""
    with contextlib.suppress(GalleryNotFoundError):
        read_state(connection, state.name)
        raise GalleryError(
            f"Milvus at {connection.uri} has a gallery {state.name} already. Open it, or drop it "
            "first."
        )
    with _staged(connection, state) as collection:
        _serve(connection, collection, state)
        # Fails if another process was faster.
        connection.call("create_alias", collection, state.name)


def publish_next(
    connection: Connection, before: State, entries: Iterable[Entry], on_progress: Progress | None
) -> tuple[str, int]:
    """Load `entries` into a new collection, then let the alias point there; it and their number.

    Raises: InvalidParameterError, GalleryWriteError, EngineUnavailableError; nothing changed then.
    """
    fresh = {"writer": None, "changing": False, "change": new_mark()}
    state = before.model_copy(update=fresh)
    with _staged(connection, state) as collection:
        state, count = _fill(connection, collection, state, entries, on_progress)
        write_state(connection, collection, state)
        _serve(connection, collection, state)
        stored = MilvusView(connection, collection, state).count()
        if stored != count:
            raise GalleryWriteError(
                f"{count:,} items were sent to {collection} on Milvus at {connection.uri}, and "
                f"{stored:,} are there. The gallery is as it was before; try again."
            )
        connection.call("alter_alias", collection, state.name)
    return collection, count


def drop_generations(connection: Connection, name: str, keep: str | None = None) -> None:
    """Drop the collections of a gallery but `keep`. Raises: EngineUnavailableError."""
    for _, collection in _generations(connection, name):
        if collection != keep:
            connection.call("drop_collection", collection)


def load(connection: Connection, collection: str) -> None:
    """Wait until the server can search the collection. Raises: EngineUnavailableError."""
    connection.call("load_collection", collection, timeout_s=_LOAD_TIMEOUT_S)


def _generations(connection: Connection, name: str) -> list[tuple[int, str]]:
    pattern = re.compile(rf"{re.escape(name)}_(\d+)")
    matches = [pattern.fullmatch(known) for known in connection.call("list_collections")]
    return sorted((int(match[1]), match[0]) for match in matches if match)


@contextlib.contextmanager
def _staged(connection: Connection, state: State) -> Iterator[str]:
    """A new collection, dropped again if the block fails."""
    last, _ = max(_generations(connection, state.name), default=(0, ""))
    collection = f"{state.name}_{last + 1}"
    connection.call(
        "create_collection",
        collection,
        schema=collection_schema(state.dim),
        consistency_level="Strong",
        properties=state_properties(state),
    )
    try:
        yield collection
    except BaseException:
        # The first error says more than a second one here.
        with contextlib.suppress(EngineUnavailableError):
            connection.call("drop_collection", collection)
        raise


def _fill(
    connection: Connection,
    collection: str,
    state: State,
    entries: Iterable[Entry],
    on_progress: Progress | None,
) -> tuple[State, int]:
    rest, first = iter(entries), state.next_id
    number, keys, kinds = first, set[str](), dict[str, AttributeKind]()
    while batch := list(islice(rest, page_rows(state.dim))):
        vectors = checked_vectors(batch, state.dim)
        for entry in batch:
            learn_kinds(kinds, entry.key, entry.attributes)
            if entry.key in keys:
                raise InvalidParameterError(
                    f"Key {entry.key!r:.160} is there twice. Give each item a key of its own."
                )
            keys.add(entry.key)
        numbered = zip(range(number, number + len(batch)), batch, vectors, strict=True)
        connection.call("insert", collection, [entry_row(*item) for item in numbered])
        number += len(batch)
        if on_progress is not None:
            on_progress(len(batch))
    nlist = clusters(number - first)
    return state.model_copy(update={"next_id": number, "kinds": kinds, "nlist": nlist}), len(keys)


def _serve(connection: Connection, collection: str, state: State) -> None:
    if state.nlist:
        connection.call("flush", collection, timeout_s=_LOAD_TIMEOUT_S)
    params = index_params(state.nlist)
    connection.call("create_index", collection, params, timeout_s=_LOAD_TIMEOUT_S)
    load(connection, collection)
