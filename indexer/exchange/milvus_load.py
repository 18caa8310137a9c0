"""Import a gallery to Milvus: load a new collection, index it, and move the alias to it."""

import contextlib
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import get_args

import numpy as np

from kinlens.embedder.durable import crash_point
from kinlens.embedder.errors import (
    EngineUnavailableError,
    GalleryCorruptError,
    GalleryNotFoundError,
    InvalidParameterError,
    PlanError,
)
from kinlens.embedder.types import SHORT
from kinlens.indexer.entries import AttributeTypes, Entry, checked_vectors
from kinlens.indexer.exchange.milvus import MilvusStore, check_name
from kinlens.indexer.exchange.milvus_collection import (
    ENTRY,
    Collection,
    Connection,
    FreeIds,
    MilvusFacts,
    batches,
    lengths_in,
    row_of,
)
from kinlens.indexer.exchange.milvus_index import (
    HeldOut,
    K,
    MilvusIndex,
    least_effort,
)
from kinlens.indexer.types import GalleryExport, Ids, Progress

_EXACT_BELOW = 200_000  # items up to which every vector is compared
_LOAD_S = 60.0  # timeout of a request that loads rows
_SCHEMA_S = 60.0  # timeout for the swap of an alias, which waits for other work of the server
_ORPHAN_AGE = timedelta(days=1)
_SWAP_S = 3.0  # grace period for searches that started in the old generation


def import_to_milvus(
    dump: GalleryExport,
    uri: str,
    name: str,
    *,
    token: str = "",
    index: str = "auto",
    on_progress: Progress = lambda _: None,
) -> MilvusStore:
    """Replace the content of gallery `name` on the server at `uri` by `dump`, and open it.

    The entries are loaded into a new collection, to which the alias is then moved. The old
    collection is dropped, with any changes that were made to it during the load. After an
    interruption nothing has changed; make the same call again.

    Args:
        index: one of `MilvusIndex`, or `auto`: `flat` for up to 200,000 items, else `hnsw`.

    Raises: InvalidParameterError; GalleryCorruptError for a collection that is not a gallery;
        PlanError for an index that the server lacks; RecallError for one that misses its target;
        EngineUnavailableError. The gallery is unchanged then.
    """
    check_name(name)
    kind = _kind_of(index, dump.count)
    facts = MilvusFacts(
        name=name,
        generation=uuid.uuid4().hex[:SHORT],
        bundle_id=dump.facts["bundle_id"],
        precision=dump.facts.get("precision", "fp32"),
        dim=dump.dim,
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        source=dump.facts.get("source", ""),
        source_root=dump.facts.get("source_root", ""),
    )
    with contextlib.closing(Connection(uri, token, _LOAD_S)) as connection:
        before = _current_name(connection, name)  # raises if it is not a gallery
        made = Collection.create(connection, facts)
        try:
            _fill(made, dump, kind, on_progress)
            swap = "alter_alias" if before else "create_alias"
            connection.call(swap, made.collection, name, timeout_s=_SCHEMA_S)
        except BaseException as error:
            is_moved = False  # the server may have moved the alias although the request failed
            with contextlib.suppress(EngineUnavailableError):  # the first error is to be seen
                is_moved = _current_name(connection, name) == made.collection
                if not is_moved:
                    connection.call("drop_collection", made.collection)
            if not is_moved or not isinstance(error, EngineUnavailableError):
                raise
        if before:
            time.sleep(_SWAP_S)
        with contextlib.suppress(EngineUnavailableError):  # the next import drops it
            _drop_old(connection, name, made.collection, before)
    return MilvusStore.open(uri, name, token=token)


def _kind_of(asked: str, count: int) -> MilvusIndex:
    if asked == "auto":
        return "flat" if count < _EXACT_BELOW else "hnsw"
    for kind in get_args(MilvusIndex):
        if kind == asked:
            found: MilvusIndex = kind
            return found
    raise PlanError(
        f"index = {asked!r:.40} is not an index type on Milvus. Choose auto, "
        f"{', '.join(get_args(MilvusIndex))}."
    )


def _fill(made: Collection, dump: GalleryExport, kind: MilvusIndex, on_progress: Progress) -> None:
    """Load the entries, build the index, wait until they can be searched, then measure recall.

    Raises: the errors of `import_to_milvus`.
    """
    is_exact = kind == "flat"
    held_out = None if is_exact else HeldOut(dump.entries(), dump.count, dump.dim)
    count, shared = _load(made, dump.entries(), held_out, on_progress)
    made = made.make_index(kind, count)
    if held_out is not None and held_out.entries:
        strong = made.strong()

        def search(effort: int) -> list[list[float]]:
            found = strong.search(held_out.queries, K, "", effort, exact=False)
            return [[float(row["distance"]) for row in best] for best in found]

        effort, recall = least_effort(kind, made.facts.nlist, held_out, search)
        made = made.with_facts(effort=effort, recall=recall)
        made.upsert(map(row_of, held_out.entries, held_out.queries))
    _separate(made, shared)
    stored = made.strong().count()
    if stored != count:
        raise EngineUnavailableError(
            f"Milvus at {made.connection.uri} has {stored:,} items, but {count:,} were sent. "
            "Run the import again."
        )


def _load(
    made: Collection, entries: Iterable[Entry], held_out: HeldOut | None, on_progress: Progress
) -> tuple[int, Ids]:
    """Insert all entries except the held-out ones into the collection `made`, and all types.

    Returns the number of entries, and the ids of more than one entry.

    Raises: InvalidParameterError for an invalid entry or a repeated key; EngineUnavailableError.
    """
    types, lengths = AttributeTypes({}), set[str]()
    excluded = frozenset() if held_out is None else held_out.keys
    keys, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]  # by page
    for page in batches(entries, made.page_rows):
        vectors = checked_vectors(page, made.facts.dim)
        for entry in page:
            types.check(entry.key, entry.attributes)
            lengths |= lengths_in(entry.key, entry.attributes)
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
    made.learn(types.types, lengths)
    return sum(map(len, keys)), _repeated(numbers)


def _separate(made: Collection, numbers: Ids) -> None:
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


def _current_name(connection: Connection, name: str) -> str | None:
    """The collection behind the alias `name`, if there is one. Raises: GalleryCorruptError."""
    if not connection.call("has_collection", name):
        return None
    return Collection.current(connection, name, "Strong").collection


def _drop_old(connection: Connection, name: str, made: str, before: str | None) -> None:
    """Drop the collection that `made` replaced, and those of publications that were interrupted
    more than a day ago; nothing if `made` was replaced itself.
    """
    if _current_name(connection, name) != made:
        return
    for collection in connection.call("list_collections"):
        if collection != made and re.fullmatch(rf"{name}_[0-9a-f]{{12}}", collection):
            with contextlib.suppress(GalleryCorruptError, GalleryNotFoundError):
                facts = Collection.current(connection, collection, "Strong").facts
                age = datetime.now(UTC) - datetime.fromisoformat(facts.created_at)
                if collection == before or age > _ORPHAN_AGE:
                    connection.call("drop_collection", collection)
