"""A Milvus collection with one generation of a gallery.

The key of an item is the primary key, so every write is an upsert. The collection's properties
store the facts of the gallery, the type of each attribute and how many values of it an item may
have, and a mark that every change replaces.
"""

import contextlib
import hashlib
import logging
import logging.config
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, zip_longest
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from kinlens.embedder.errors import (
    EngineUnavailableError,
    GalleryCorruptError,
    GalleryNotFoundError,
    InvalidParameterError,
    ItemNotFoundError,
    PlanError,
)
from kinlens.embedder.sources.names import by_key, spellings
from kinlens.embedder.types import Embeddings, ItemId
from kinlens.indexer.entries import Entry, Item, Schema
from kinlens.indexer.exchange.milvus_filters import expression, one_of
from kinlens.indexer.exchange.milvus_index import (
    MilvusIndex,
    clusters_of,
    index_parameters,
    search_parameters,
)
from kinlens.indexer.filters.text import Where, as_filter
from kinlens.indexer.types import OnCall, no_key, unobserved
from kinlens.values import AttributeValue, plain_attributes

MAX_HITS = 16_384
"""The maximum number of hits per query on Milvus."""

MAX_LIST = 32
"""The maximum number of values of an attribute. A range compares each in turn: with 32, a search
takes four times as long; with 1,000, longer than a request may.
"""

ID_LIMIT = 2**53
"""Upper bound of item ids. JSON and JavaScript represent integers up to here exactly."""

LONG_S = 24 * 3600.0
"""Timeout of requests whose duration depends on the size of the collection."""

ITEM = ("key", "number", "path", "sha256", "format", "attributes")
ENTRY = (*ITEM, "vector")
"""Fields of a row to request."""

_LENGTHS = {"key": 4_096, "path": 16_384, "sha256": 64, "format": 64}  # bytes
_PAGE_BYTES = 16 * 2**20  # well below the limit of 64 MB per message
_ROW_BYTES = 2_048  # estimate for a row without its vector
_ATTEMPTS, _PAUSE_S = 5, 0.2
_MAX_VALUES = 1_000  # in one expression
_MAX_ROWS = 65_536  # hits of all queries in one message
_FACTS, _KIND, _CHANGE = "kinlens.gallery", "kinlens.attribute.", "kinlens.change"
_SEVERAL = "kinlens.several."
_NOT_FOUND, _INVALID = 100, 1100  # codes of Milvus

Row = Mapping[str, Any]
T = TypeVar("T")


class MilvusFacts(BaseModel, frozen=True, extra="forbid"):
    """The facts of a generation and its index.

    Attributes:
        nlist: number of clusters of the index; 0 without clusters.
        effort: default number of clusters to visit, or of candidates, per search.
        recall: recall@10, measured with held-out queries after the load; None for an index that
            compares with every vector.
    """

    schema_version: Literal[2] = 2
    name: str
    generation: str
    bundle_id: str
    precision: str = Field(default="fp32", exclude_if=lambda value: value == "fp32")
    dim: int
    created_at: str
    source: str = ""
    source_root: str = ""
    nlist: int = 0
    index: MilvusIndex | None = Field(default=None, exclude_if=lambda value: value is None)
    effort: int = Field(default=0, exclude_if=lambda value: value == 0)
    recall: float | None = Field(default=None, exclude_if=lambda value: value is None)

    @property
    def kind(self) -> MilvusIndex:
        """The index type, inferred for generations of earlier versions."""
        return self.index or ("ivf-flat" if self.nlist else "flat")


class Connection:
    """A connection to a Milvus server, with a timeout per request. Thread-safe.

    is_local: whether the server is milvus-lite, in this process.
    """

    def __init__(
        self, uri: str, token: str = "", timeout_s: float = 10.0, on_call: OnCall = unobserved
    ) -> None:
        """Connect to `uri`: http://127.0.0.1:19530, or shop.db for a file of milvus-lite.

        Raises: EngineUnavailableError.
        """
        self.uri, self.is_local = uri, uri.endswith(".db")
        self._on_call = on_call
        self._timeout_s = timeout_s
        client_class = _client_class()
        with _translated(uri):
            self._client = client_class(uri=uri, token=token, timeout=timeout_s)

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **options: Any) -> Any:
        """Call `method` of the client and return its result.

        Raises: EngineUnavailableError; GalleryNotFoundError for a missing collection;
            InvalidParameterError for arguments that the server rejects.
        """
        started, is_answered = time.perf_counter(), True
        try:
            with _translated(self.uri):
                request = getattr(self._client, method)
                return request(*args, timeout=timeout_s or self._timeout_s, **options)
        except EngineUnavailableError:
            is_answered = False
            raise
        finally:
            self._on_call(method, time.perf_counter() - started, is_answered)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


@dataclass(frozen=True, slots=True)
class Collection:
    """A generation, with its properties at the time of the last request.

    Attributes:
        kinds: the type of each attribute.
        several: the most values that an item has, or had, of each attribute with lists.
        consistency: the consistency level of reads.
    """

    connection: Connection
    collection: str
    facts: MilvusFacts
    kinds: Schema
    several: Mapping[str, int]
    version: str
    consistency: str

    @classmethod
    def current(cls, connection: Connection, name: str, consistency: str) -> "Collection":
        """The collection of an alias or name. Raises: GalleryNotFoundError, GalleryCorruptError."""
        found = connection.call("describe_collection", name)
        collection, properties = found["collection_name"], found.get("properties", {})
        try:
            facts = MilvusFacts.model_validate_json(properties.get(_FACTS, ""))
        except ValidationError as exc:
            raise GalleryCorruptError(
                f"The collection {name} on Milvus at {connection.uri} is not a gallery, or is from "
                "another version of Kinlens. Choose another name, or drop the collection and "
                "import the gallery again."
            ) from exc
        kinds = {n.removeprefix(_KIND): k for n, k in properties.items() if n.startswith(_KIND)}
        several = _several_of(
            n.removeprefix(_SEVERAL) for n in properties if n.startswith(_SEVERAL)
        )
        state = f"{collection} {properties.get(_CHANGE)}"
        version = hashlib.sha256(state.encode()).hexdigest()
        return cls(connection, collection, facts, kinds, several, version, consistency)

    @classmethod
    def create(cls, connection: Connection, facts: MilvusFacts) -> "Collection":
        """Create an empty collection without an index."""
        from pymilvus import CollectionSchema, DataType, FieldSchema

        texts = [
            FieldSchema(name, DataType.VARCHAR, max_length=size, is_primary=name == "key")
            for name, size in _LENGTHS.items()
        ]
        schema = CollectionSchema(
            [
                *texts,
                FieldSchema("number", DataType.INT64),
                FieldSchema("attributes", DataType.JSON),
                FieldSchema("vector", DataType.FLOAT_VECTOR, dim=facts.dim),
            ],
            auto_id=False,
            enable_dynamic_field=False,
        )
        collection = f"{facts.name}_{facts.generation}"
        properties = {_FACTS: facts.model_dump_json()}
        connection.call("create_collection", collection, schema=schema, properties=properties)
        return cls.current(connection, collection, "Strong")

    @property
    def page_rows(self) -> int:
        """Number of rows with vectors per request."""
        return max(1, min(4_096, _PAGE_BYTES // (4 * self.facts.dim + _ROW_BYTES)))

    def condition(self, where: Where | None) -> str:
        """The filter as an expression; empty for none. Raises: FilterError."""
        where = as_filter(where)
        if where is None:
            return ""
        where.check(self.kinds)
        return expression(where, self.several, has_in=not self.connection.is_local)

    def query(self, condition: str, fields: Sequence[str]) -> list[Row]:
        """The rows that match, in any order."""
        found = self.connection.call(
            "query",
            self.collection,
            filter=condition,
            output_fields=list(fields),
            consistency_level=self.consistency,
        )
        return list(found)

    def count(self, condition: str = "") -> int:
        """The number of rows that match."""
        [row] = self.query(condition, ["count(*)"])
        return int(row["count(*)"])

    def lookup(
        self, field: str, values: Sequence[str] | Sequence[int], fields: Sequence[str]
    ) -> Iterator[Row]:
        """The rows with one of these values; keys are found in any Unicode form."""
        if field == "key":
            values = [form for value in values for form in spellings(str(value))]
        for condition in lookups(field, values):
            yield from self.query(condition, fields)

    def claimed(self, entries: Sequence[Entry], vectors: Embeddings) -> tuple[list[Row], "FreeIds"]:
        """The rows with the keys of these entries or the ids that they may get, and free ids."""
        pairs = [*zip(entries, vectors, strict=True)]
        numbers = [
            number_of(entry.key, content)
            for entry, v in pairs
            for content in (entry.sha256, content_of(v))
        ]
        keys = [form for entry in entries for form in spellings(entry.key)]
        parts = zip_longest(lookups("key", keys), lookups("number", numbers), fillvalue="")
        rows = [row for part in parts for row in self.query(" or ".join(filter(None, part)), ENTRY)]
        return rows, FreeIds(self, rows, numbers)

    def known(self, keys: Sequence[str], fields: Sequence[str]) -> list[Row]:
        """The rows of these keys, in their order. Raises: ItemNotFoundError."""
        found = by_key(keys, {row["key"]: row for row in self.lookup("key", keys, fields)})
        missing = [key for key in keys if key not in found]
        if missing:
            raise ItemNotFoundError(no_key(missing[0]))
        return [found[key] for key in keys]

    def pages(
        self,
        condition: str,
        fields: Sequence[str],
        rows: int = 0,
        after: ItemId = -1,
        total: int | None = None,
    ) -> Iterator[list[Row]]:
        """The rows that match, about `rows` at a time, in the order of their ids.

        Ids are hashes and uniformly distributed, so the width of a range determines its row count.
        """
        total = self.count(condition) if total is None else total
        width = max(1, ID_LIMIT * (rows or self.page_rows) // max(1, total))
        for low in range(after + 1, ID_LIMIT if total else 0, width):
            window = f"number >= {low} and number < {min(low + width, ID_LIMIT)}"
            page = self.query(both(window, condition), fields)
            yield sorted(page, key=lambda row: int(row["number"]))

    def search(
        self, queries: Embeddings, n: int, condition: str, effort: int | None, exact: bool
    ) -> Iterator[list[Row]]:
        """The `n` best rows of each query (Q, D), with `distance` and the fields in `entity`."""
        facts = self.facts
        effort = effort or facts.effort or max(16, facts.nlist // 16)
        parameters = search_parameters(facts.kind, facts.nlist, effort, n, exact)
        step = max(1, _MAX_ROWS // n)
        for start in range(0, len(queries), step):
            yield from self.connection.call(
                "search",
                self.collection,
                data=queries[start : start + step],
                limit=n,
                filter=condition,
                anns_field="vector",
                search_params={"metric_type": "IP", "params": parameters},
                output_fields=[*ITEM],
                consistency_level=self.consistency,
            )

    def strong(self) -> "Collection":
        """A view with consistency "Strong", for reads that a write depends on."""
        return replace(self, consistency="Strong")

    def upsert(self, rows: Iterable[Row]) -> None:
        """Write rows, replacing rows with the same keys."""
        for batch in batches(rows, self.page_rows):
            for attempt in range(_ATTEMPTS):
                try:
                    self.connection.call("upsert", self.collection, batch)
                    break
                except EngineUnavailableError as error:
                    # Milvus 2.3 loses a collection for a moment while another writer alters it.
                    if "can't find collection" not in str(error) or attempt == _ATTEMPTS - 1:
                        raise
                    time.sleep(_PAUSE_S)

    def learn(self, kinds: Schema, lengths: Iterable[str]) -> None:
        """Store new attributes and changed types, and the `lengths_in` items."""
        new: dict[str, str] = {
            _KIND + name: kind for name, kind in kinds.items() if self.kinds.get(name) != kind
        }
        # A property for each number, so that writers at the same time do not undo the greater one.
        new |= {
            f"{_SEVERAL}{most} {name}": ""
            for name, most in _several_of(lengths).items()
            if most > self.several.get(name, 0)
        }
        if new:
            self._alter(new)

    def mark(self) -> None:
        """Store a new change mark, which changes the version."""
        self._alter({_CHANGE: uuid.uuid4().hex})

    def make_index(self, kind: MilvusIndex, count: int) -> "Collection":
        """Build the index of `count` vectors and wait until it can be searched.

        Returns the collection with the facts of the index. Raises: PlanError if the server does not
        support it.
        """
        from pymilvus import MilvusClient

        nlist = clusters_of(kind, count)
        params = MilvusClient.prepare_index_params()
        params.add_index("vector", metric_type="IP", **index_parameters(kind, nlist))
        is_local = self.connection.is_local  # milvus-lite has one type, which 2.3 lacks
        params.add_index("number", index_type="INVERTED" if is_local else "STL_SORT")
        params.add_index("sha256", index_type="INVERTED" if is_local else "Trie")
        if kind != "flat":
            self.connection.call("flush", self.collection, timeout_s=LONG_S)
        try:
            self.connection.call("create_index", self.collection, params, timeout_s=LONG_S)
        except EngineUnavailableError as error:
            if not self.connection.call("has_collection", self.collection):
                raise
            raise PlanError(
                f"Milvus at {self.connection.uri} cannot build the index {kind}: "
                f"{str(error).partition(': ')[2]:.300} Choose another one with --index."
            ) from error
        made = self.with_facts(index=kind, nlist=nlist)
        made.load()
        return made

    def with_facts(self, **changes: Any) -> "Collection":
        """Store other facts, as named in `MilvusFacts`."""
        facts = self.facts.model_copy(update=changes)
        self._alter({_FACTS: facts.model_dump_json()})
        return replace(self, facts=facts)

    def load(self) -> None:
        """Wait until the server can search the collection, which takes long after a restart."""
        self.connection.call("load_collection", self.collection, timeout_s=LONG_S)

    def _alter(self, properties: Mapping[str, str]) -> None:
        # Milvus 2.3 persists the state before an alteration. The second call persists the first.
        for _ in range(2):
            self.connection.call("alter_collection_properties", self.collection, dict(properties))


def number_of(key: str, content: str, salt: int = 0) -> ItemId:
    """The id of an item: 53 bits of a hash of its key and content, which is usually the sha256.

    So processes assign ids without coordination, and an id always means the same content. `salt`
    is for an item whose id another one has.
    """
    text = f"{content} {key} {salt}" if salt else f"{content} {key}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % ID_LIMIT


def content_of(vector: Embeddings) -> str:
    """The content of an item whose vector alone was replaced, for `number_of`."""
    return vector.tobytes().hex()


class FreeIds:
    """Ids that no other item has. Of 100 million hashes, two are equal with a chance of 40 %."""

    def __init__(self, strong: Collection, rows: Iterable[Row], asked: Iterable[ItemId]) -> None:
        """`rows`: all items with one of the ids `asked`, and perhaps others."""
        self._strong = strong
        self._owners: dict[ItemId, str | None] = dict.fromkeys(asked)
        self._owners |= {int(row["number"]): row["key"] for row in rows}

    def take(self, key: str, content: str) -> ItemId:
        """The id of the item with this key and content, which no other item gets afterwards."""
        for salt in count():
            number = number_of(key, content, salt)
            if number not in self._owners:
                found = list(self._strong.lookup("number", [number], ["key"]))
                self._owners[number] = found[0]["key"] if found else None
            if self._owners[number] in (None, key):
                break
        self._owners[number] = key
        return number


def lookups(field: str, values: Sequence[str] | Sequence[int]) -> Iterator[str]:
    """Conditions that together match these values, up to 1,000 values each."""
    for start in range(0, len(values), _MAX_VALUES):
        yield one_of(field, values[start : start + _MAX_VALUES])


def both(*parts: str) -> str:
    """Join the non-empty parts of a condition with `and`."""
    return " and ".join(f"({part})" for part in parts if part)


def batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """The values in lists of `size`; the last may be shorter."""
    remaining = iter(values)
    while batch := list(islice(remaining, size)):
        yield batch


def row_of(entry: Entry, vector: Embeddings) -> dict[str, Any]:
    """The row of an entry, with all fields."""
    return {
        "key": entry.key,
        "number": number_of(entry.key, entry.sha256),
        "path": entry.path,
        "sha256": entry.sha256,
        "format": entry.format,
        "attributes": dict(entry.attributes),
        "vector": vector,
    }


def attributes_of(row: Row) -> dict[str, AttributeValue]:
    """The attributes of a row. In JSON, several values are a list."""
    return dict(plain_attributes(row["attributes"]))


def lengths_in(key: str, attributes: Mapping[str, AttributeValue]) -> set[str]:
    """How many values attributes with several have, as in "8 sizes". Numbers are rounded up to a
    power of two, so that there are few.

    Raises: InvalidParameterError for more than `MAX_LIST` values.
    """
    lists = {name: value for name, value in attributes.items() if isinstance(value, tuple)}
    for name, value in lists.items():
        if len(value) > MAX_LIST:
            raise InvalidParameterError(
                f"Attribute {name!r} of {key!r:.200} has {len(value):,} values; the limit on "
                f"Milvus is {MAX_LIST}. Give fewer, or import the gallery into a folder."
            )
    return {f"{1 << (len(value) - 1).bit_length()} {name}" for name, value in lists.items()}


def _several_of(lengths: Iterable[str]) -> dict[str, int]:
    """The greatest number of values of each attribute in texts of `lengths_in`."""
    several: dict[str, int] = {}
    for length in lengths:
        most, _, name = length.partition(" ")
        several[name] = max(several.get(name, 0), int(most))
    return several


def item_of(row: Row) -> Item:
    """The item of a row with the fields `ITEM`."""
    number, attributes = int(row["number"]), attributes_of(row)
    return Item(number, row["key"], row["path"], row["sha256"], attributes, row["format"])


def entry_of(row: Row) -> Entry:
    """The entry of a row with the fields `ENTRY`."""
    vector, attributes = np.asarray(row["vector"], np.float32), attributes_of(row)
    return Entry(row["key"], vector, row["sha256"], attributes, row["path"], row["format"])


def _client_class() -> Callable[..., Any]:
    # At its import pymilvus configures the logging of the whole process, which closes the handlers
    # of all other loggers: a service would write no line any more.
    configure = logging.config.dictConfig
    logging.config.dictConfig = lambda config: None  # noqa: ARG005
    try:
        from pymilvus import MilvusClient
    except ImportError as exc:
        raise EngineUnavailableError(
            f"pymilvus cannot be imported ({exc}), and galleries on Milvus need it. Install it: "
            "pip install 'kinlens[milvus]'."
        ) from exc
    finally:
        logging.config.dictConfig = configure
    # Errors are raised. The log of pymilvus would repeat them with a traceback.
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    client: Callable[..., Any] = MilvusClient
    return client


@contextlib.contextmanager
def _translated(uri: str) -> Iterator[None]:
    from grpc import FutureTimeoutError, RpcError  # type: ignore[import-untyped]
    from pymilvus.exceptions import MilvusException

    try:
        yield
    except (MilvusException, RpcError, FutureTimeoutError, ValueError) as exc:
        code, message = getattr(exc, "code", 0), str(getattr(exc, "message", exc))
        raise _translation(uri, code, message or type(exc).__name__) from exc


def _translation(uri: str, code: object, message: str) -> Exception:
    if code == _NOT_FOUND:
        return GalleryNotFoundError(
            f"Milvus at {uri} did not find it: {message}. Check the name and the database, or "
            "import a gallery with this name."
        )
    if code == _INVALID:
        return InvalidParameterError(f"Milvus rejected the request: {message:.500}. Shorten it.")
    return EngineUnavailableError(
        f"Milvus at {uri} does not respond, or rejected the request: {message:.500}. Check the "
        "address, and that the server is running and healthy."
    )
