"""Load rows into a new collection, each with an id of its own."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kinlens.embedder.durable import crash_point
from kinlens.embedder.errors import EngineUnavailableError, InvalidParameterError
from kinlens.indexer.catalog.entries import checked_vectors, learn_types
from kinlens.indexer.exchange.milvus_collection import ENTRY, Collection, FreeIds, batches, row_of
from kinlens.indexer.exchange.milvus_index import HeldOut
from kinlens.indexer.types import Entry, Ids, Progress
from kinlens.values import AttributeType


def refuse_lists(key: str, attributes: Mapping[str, object]) -> None:
    """Raise InvalidParameterError for list values, on which Milvus has no range filters."""
    for name, value in attributes.items():
        if isinstance(value, list | tuple):
            raise InvalidParameterError(
                f"Attribute {name!r} of {key!r:.200} has several values, which a gallery on Milvus "
                "does not store. Give it one value, or import the gallery into a folder."
            )


def load(
    made: Collection, entries: Iterable[Entry], held_out: HeldOut | None, on_progress: Progress
) -> tuple[int, dict[str, AttributeType], Ids]:
    """Insert all entries except the held-out ones into the collection `made`.

    Returns the number of entries, the types of attributes, and the ids of more than one entry.

    Raises: InvalidParameterError for an invalid entry or a repeated key; EngineUnavailableError.
    """
    types: dict[str, AttributeType] = {}
    excluded = frozenset() if held_out is None else held_out.keys
    keys, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]  # by page
    for page in batches(entries, made.page_rows):
        vectors = checked_vectors(page, made.facts.dim)
        for entry in page:
            refuse_lists(entry.key, entry.attributes)
            learn_types(types, entry.key, entry.attributes)
        own = [n for n, entry in enumerate(page) if entry.key not in excluded]
        if held_out is not None:
            held_out.see(vectors[own])
        rows = [row_of(entry, vector) for entry, vector in zip(page, vectors, strict=True)]
        keys.append(np.array([hash(entry.key) for entry in page], np.int64))
        numbers.append(np.array([row["number"] for row in rows], np.int64))
        made.connection.call("insert", made.collection, [rows[n] for n in own])
        crash_point("milvus: page loaded")
        on_progress(len(page))
    if len(_repeated(keys)):
        raise InvalidParameterError("A key occurs twice. Give each item its own key.")
    return sum(map(len, keys)), types, _repeated(numbers)


def separate(made: Collection, numbers: Ids) -> None:
    """Give another id to each item but one of those with one of these ids."""
    strong = made.strong()
    for number in numbers.tolist():
        rows = sorted(strong.lookup("number", [number], ENTRY), key=lambda row: str(row["key"]))
        free = FreeIds(strong, rows[:1], [number])
        made.upsert({**row, "number": free.take(row["key"], row["sha256"])} for row in rows[1:])


def _repeated(parts: Sequence[Ids]) -> Ids:
    """The numbers that occur more than once, ascending."""
    every = np.sort(np.concatenate(parts))
    return np.unique(every[1:][every[1:] == every[:-1]])


def check_count(made: Collection, count: int) -> None:
    """Raise EngineUnavailableError if the number of rows on the server is not `count`."""
    found = made.strong().count()
    if found != count:
        raise EngineUnavailableError(
            f"Milvus at {made.connection.uri} has {found:,} items, but {count:,} were sent. "
            "Run the import again."
        )
