"""How a gallery lies in Milvus: fields, index, and rows as items."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from embedder.errors import InvalidParameterError
from embedder.types import AttributeValue, Embeddings, ItemId
from indexer.types import Entry, Item

if TYPE_CHECKING:
    from pymilvus import CollectionSchema
    from pymilvus.milvus_client.index import IndexParams

ITEM_FIELDS = ("id", "key", "path", "sha256", "format", "attributes")
ENTRY_FIELDS = (*ITEM_FIELDS, "vector")
MAX_DIM = 32_768
TOP_K = 16_384
"""The most rows that one search or query gives."""

_EXACT_BELOW = 200_000
_MAX_JSON = 65_536
_MAX_PAGE = 4_096
_PAGE_BYTES = 16 * 2**20  # of the 64 MB that a request or an answer may have
_ROW_BYTES = 2_048  # what a row has beside its vector, usually
_LENGTHS = {"key": 4_096, "path": 16_384, "sha256": 64, "format": 64}

Row = Mapping[str, Any]


def page_rows(dim: int) -> int:
    """How many rows with vectors to send, or to ask for, at once."""
    return max(1, min(_MAX_PAGE, _PAGE_BYTES // (4 * dim + _ROW_BYTES)))


def clusters(size: int) -> int:
    """For how many clusters an index of `size` vectors has room: 0 compares with every vector."""
    return 0 if size < _EXACT_BELOW else 4 * math.isqrt(size)


def collection_schema(dim: int) -> "CollectionSchema":
    """The fields of a collection. Raises: InvalidParameterError for a dimension out of range."""
    from pymilvus import CollectionSchema, DataType, FieldSchema

    if not 2 <= dim <= MAX_DIM:
        raise InvalidParameterError(
            f"Milvus stores vectors of 2 to {MAX_DIM:,} numbers, not of {dim}. Use a bundle with "
            "such a dimension."
        )
    return CollectionSchema(
        [
            FieldSchema("id", DataType.INT64, is_primary=True, auto_id=False),
            *(FieldSchema(n, DataType.VARCHAR, max_length=size) for n, size in _LENGTHS.items()),
            FieldSchema("attributes", DataType.JSON),
            FieldSchema("vector", DataType.FLOAT_VECTOR, dim=dim),
        ],
        enable_dynamic_field=False,
    )


def index_params(nlist: int) -> "IndexParams":
    """An exact index, or one of `nlist` clusters, over the inner product."""
    from pymilvus import MilvusClient

    params = MilvusClient.prepare_index_params()
    if nlist:
        params.add_index("vector", index_type="IVF_FLAT", metric_type="IP", nlist=nlist)
    else:
        params.add_index("vector", index_type="FLAT", metric_type="IP")
    return params


def entry_row(number: ItemId, entry: Entry, vector: Embeddings) -> Row:
    """A new item as a row. Raises: InvalidParameterError for a text that is too long."""
    item = Item(number, entry.key, entry.path, entry.sha256, entry.attributes, entry.format)
    return item_row(item, entry.attributes, vector)


def item_row(item: Item, attributes: Mapping[str, AttributeValue], vector: Embeddings) -> Row:
    """An item with these attributes as a row. Raises: InvalidParameterError."""
    texts = {"key": item.key, "path": item.path, "sha256": item.sha256, "format": item.format}
    sizes = {name: (len(text.encode()), _LENGTHS[name]) for name, text in texts.items()}
    sizes["attributes"] = len(json.dumps(dict(attributes), ensure_ascii=False).encode()), _MAX_JSON
    for name, (size, limit) in sizes.items():
        if size > limit:
            raise InvalidParameterError(
                f"{name} of {item.key!r:.160} has {size:,} bytes, Milvus stores {limit:,}. Shorten "
                "it."
            )
    return {"id": item.id, **texts, "attributes": dict(attributes), "vector": vector}


def item_of(row: Row) -> Item:
    """The item of a row with `ITEM_FIELDS`."""
    return Item(
        row["id"], row["key"], row["path"], row["sha256"], dict(row["attributes"]), row["format"]
    )


def entry_of(row: Row) -> Entry:
    """The entry of a row with `ENTRY_FIELDS`."""
    return Entry(
        row["key"],
        np.asarray(row["vector"], dtype=np.float32),
        row["sha256"],
        dict(row["attributes"]),
        row["path"],
        row["format"],
    )


def vectors_of(rows: Sequence[Row], dim: int) -> Embeddings:
    """The vectors (N, dim) of rows."""
    return np.array([row["vector"] for row in rows], dtype=np.float32).reshape(-1, dim)
