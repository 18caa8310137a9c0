"""Load rows into a new collection."""

from collections.abc import Iterable, Mapping

import numpy as np

from kinlens.embedder.durable import crash_point
from kinlens.embedder.errors import EngineUnavailableError, InvalidParameterError
from kinlens.indexer.catalog.entries import checked_vectors, learn_types
from kinlens.indexer.exchange.milvus_collection import Collection, batches, row_of
from kinlens.indexer.exchange.milvus_index import HeldOut
from kinlens.indexer.types import Entry, Progress
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
) -> tuple[int, dict[str, AttributeType]]:
    """Insert all entries except the held-out ones into the collection `made`.

    Returns the number of entries and the types of attributes.

    Raises: InvalidParameterError for an invalid entry or a repeated key; EngineUnavailableError.
    """
    types: dict[str, AttributeType] = {}
    excluded = frozenset() if held_out is None else held_out.keys
    hashes: list[int] = []
    for page in batches(entries, made.page_rows):
        vectors = checked_vectors(page, made.facts.dim)
        for entry in page:
            refuse_lists(entry.key, entry.attributes)
            learn_types(types, entry.key, entry.attributes)
        hashes += [hash(entry.key) for entry in page]
        own = [n for n, entry in enumerate(page) if entry.key not in excluded]
        if held_out is not None:
            held_out.see(vectors[own])
        rows = [row_of(page[n], vectors[n]) for n in own]
        made.connection.call("insert", made.collection, rows)
        crash_point("milvus: page loaded")
        on_progress(len(page))
    if len(np.unique(np.array(hashes, np.int64))) < len(hashes):
        raise InvalidParameterError("A key occurs twice. Give each item its own key.")
    return len(hashes), types


def check_count(made: Collection, count: int) -> None:
    """Raise EngineUnavailableError if the number of rows on the server is not `count`."""
    found = made.strong().count()
    if found != count:
        raise EngineUnavailableError(
            f"Milvus at {made.connection.uri} has {found:,} items, but {count:,} were sent. "
            "Run the import again."
        )
