"""The interface of a gallery engine (FAISS, Milvus) and the types that it shares."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.sources.names import composed
from kinlens.embedder.types import Embeddings, Hit, ItemId
from kinlens.indexer.addresses import ImageRoot
from kinlens.indexer.attributes import Schema, as_stored
from kinlens.indexer.filters.text import Where, as_filter
from kinlens.indexer.filters.tree import Filter
from kinlens.values import AttributeType, AttributeValue, Scalar, values_in

Ids = NDArray[np.int64]
"""Item ids, shape (N,)."""

Scores = NDArray[np.float32]
"""Cosine similarities in [-1, 1], shape (Q, k)."""

RESTORE = "Restore a backup: kinlens-index restore."
REBUILD = "Rebuild the index from the catalogue: kinlens-index compact GALLERY --rebuild."
"""What to do about damaged items, and about a damaged index."""

SAME_SCORE = 1e-5
"""Scores this close count as equal: vectors of one image differ by rounding, and a little more on
another device. Which of two equal items is found does not matter."""


@dataclass(frozen=True, slots=True)
class IndexLocation:
    """The device that searches an index, and the host and GPU memory that it uses, in MiB.

    reason: why the requested GPU is not used.
    """

    kind: str
    device: Literal["cpu", "cuda"]
    memory_mb: float
    gpu_memory_mb: float = 0.0
    reason: str | None = None


VectorType = Literal["fp32", "fp16"]
"""The type of stored vectors: full precision, or half precision in half the space."""

NUMBER_BYTES: dict[VectorType, int] = {"fp32": 4, "fp16": 2}
"""Bytes per component of a stored vector."""

StoredRows = NDArray[np.float32] | NDArray[np.float16]
"""Vectors (N, D) as they are stored."""

Progress = Callable[[int], None]
"""Called with the progress since the last call: a number of images, items or bytes."""


CANDIDATES = 200
"""Number of top hits, or groups, that are reordered; all others follow in the order of scores."""

MAX_BOOST = 0.2
"""The largest weight of an attribute relative to the cosine similarity."""

Consistency = Literal["Strong", "Session", "Bounded", "Eventually"]
"""The consistency levels of Milvus, which define when a read sees a change."""

OnCall = Callable[[str, float, bool], None]
"""Called after a request to a server: its method, its duration in seconds, and whether the server
answered."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNITS_S = {"ms": 1e-3, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(text: str) -> float | None:
    """The duration in seconds of a text such as 5s, 250ms or 2m; None for other texts."""
    found = _DURATION.fullmatch(text.strip())
    return float(found[1]) * _UNITS_S[found[2]] if found else None


MILVUS = "milvus://"
"""The scheme of the address of a gallery on Milvus."""

OTHER_MODEL = "model:"
"""The begin of the bundle id of vectors that were imported with --model NAME."""

GALLERY_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""The pattern of a gallery name, which is used in URLs."""

_CANCELLED = 1e-3  # norm below which a combination of likes and dislikes has no direction


@dataclass(frozen=True, slots=True)
class Entry:
    """An item to store.

    key: in any Unicode form; it is stored composed (NFC), as are texts of attributes.
    vector: unit vector (D,).
    sha256: hash (hex) of the image that the vector was computed from; without an image, by default
        that of the bytes of the vector.
    attributes: a list or tuple gives an attribute several values; an empty one is omitted.
    path: relative to the image root of the gallery; empty for an item without an image.
    keeps: keep attributes of the stored item that the entry does not give.
    """

    key: str
    vector: NDArray[np.float32] = field(repr=False)
    sha256: str = ""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    path: str = ""
    format: str = ""
    keeps: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", as_stored(self.attributes))
        if isinstance(self.key, str):
            object.__setattr__(self, "key", composed(self.key))
        if self.sha256 == "" and isinstance(self.vector, np.ndarray):
            content = np.ascontiguousarray(self.vector, np.float32).tobytes()
            object.__setattr__(self, "sha256", hashlib.sha256(content).hexdigest())


NO_IMAGE = "none"
"""The format of an item whose image was embedded and not kept."""


IMAGELESS = ("", NO_IMAGE)
"""The formats of items without an image, unless they have a path."""


def has_image(path: str, format_: str) -> bool:
    """Whether an item has an image: at a path below the image root, or uploaded."""
    return bool(path) or format_ not in IMAGELESS


@dataclass(frozen=True, slots=True)
class Item:
    """A stored item; `path` is relative to the image root of its gallery."""

    id: ItemId
    key: str
    path: str
    sha256: str
    attributes: Mapping[str, AttributeValue]
    format: str

    @property
    def has_image(self) -> bool:
        """Whether it has an image, and not only a vector."""
        return has_image(self.path, self.format)


MAX_COUNTED_VALUES = 50
"""Maximum values listed with their counts, the most frequent first."""


@dataclass(frozen=True, slots=True)
class AttributeFacts:
    """Value statistics of an attribute, for choosing filters.

    values: the most frequent values with their numbers of items; None for numbers with too many
        distinct values, and for texts that differ in nearly every item.
    minimum, maximum: for numbers only.
    """

    name: str
    kind: AttributeType
    values: tuple[tuple[Scalar, int], ...] | None
    minimum: float | None = None
    maximum: float | None = None


MAX_FACETS = 8
"""Maximum attributes per facet request."""


@dataclass(frozen=True, slots=True)
class Facet:
    """Value counts of an attribute over some items. An item with several values counts for each.

    values: texts or booleans by descending count, ties by value, up to `MAX_COUNTED_VALUES`. For
        few distinct numbers: all of them, ascending.
    bins: instead of `values` for many distinct numbers: (lower end, upper end, count). Only the
        last bin includes its upper end.
    other: the count of all values that are not listed.
    missing: the number of items without the attribute.
    """

    values: Sequence[tuple[Scalar, int]] | None = ()
    bins: Sequence[tuple[float, float, int]] | None = None
    other: int = 0
    missing: int = 0

    def described(self) -> dict[str, Any]:
        """As JSON: `bins` and `missing`, or `values`, `other` and `missing`."""
        if self.bins is not None:
            bins = [{"from": low, "to": high, "count": count} for low, high, count in self.bins]
            return {"bins": bins, "missing": self.missing}
        values = [{"value": value, "count": count} for value, count in self.values or ()]
        return {"values": values, "other": self.other, "missing": self.missing}


@dataclass(frozen=True, slots=True)
class Written:
    """Result of `add`; the counts sum to the number of entries."""

    added: int = 0
    replaced: int = 0
    updated: int = 0
    unchanged: int = 0

    def __add__(self, other: "Written") -> "Written":
        return Written(
            self.added + other.added,
            self.replaced + other.replaced,
            self.updated + other.updated,
            self.unchanged + other.unchanged,
        )


@dataclass(frozen=True, slots=True)
class Boost:
    """Rank by score + `weight` * x, where x in [0, 1] is a scaled numeric attribute.

    low, high: the values that are scaled to 0 and 1, with values outside clipped; by default the
        lowest and highest value in the gallery.

    An item without the attribute gets the least preferred value.
    """

    attribute: str
    weight: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class SortBy:
    """Sort by an attribute; items without it come last.

    Of several values, the lowest counts, or the highest if `descending`.
    """

    attribute: str
    descending: bool = False

    def value_of(self, attributes: Mapping[str, AttributeValue]) -> Any:
        """The value that sorts an item with these attributes; None if it has none."""
        values = values_in(attributes.get(self.attribute))
        chosen = max if self.descending else min
        return chosen(values) if values else None


def no_checkpoint() -> None:
    """The checkpoint of a search that cannot be cancelled: does nothing."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options of a search. By default, none applies.

    where: only items that match this filter, or its text, such as `price < 20`.
    min_score: minimum cosine similarity of hits, or score of groups, in [-1, 1].
    offset: number of top hits to skip.
    distinct: of items with one sha256 and equal vectors, return only the best one; of ties, the
        lowest id.
    near: drop a hit whose cosine to a better hit is at least this, in [-1, 1]; not for groups, and
        not on Milvus.
    exclude: ids of items to skip.
    exact: compare with every vector instead of using the index.
    effort: search parameter of an approximate index (efSearch or nprobe) instead of the tuned one.
    diversity: reorder the top `CANDIDATES` hits or groups. With d in [0, 1], the next hit has the
        highest (1 - d) * score - d * (similarity to the most similar hit before it).
    boost: reorder the top `CANDIDATES` hits or groups by an attribute; their scores stay the same.
    sort_by: sort the top `CANDIDATES` hits or groups by an attribute; not with `diversity` or
        `boost`.
    checkpoint: called regularly during the search; an exception from it cancels the search.
    """

    where: Where | None = None
    min_score: float | None = None
    offset: int = 0
    distinct: bool = False
    near: float | None = None
    exclude: frozenset[ItemId] = frozenset()
    exact: bool = False
    effort: int | None = None
    diversity: float = 0.0
    boost: Boost | None = None
    sort_by: SortBy | None = None
    checkpoint: Callable[[], None] = field(default=no_checkpoint, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.where is not None:
            object.__setattr__(self, "where", as_filter(self.where))

    @property
    def filter(self) -> Filter | None:
        """`where`, parsed."""
        return cast("Filter | None", self.where)

    @property
    def reorders(self) -> bool:
        """Whether hits are not in the order of their scores."""
        return bool(self.diversity or self.boost or self.sort_by)


@dataclass(frozen=True, slots=True)
class Grouping:
    """Search for groups of items with the same value of the attribute `by`.

    Groups are ranked by their best item and return up to `size` items. An item with several values
    is in several groups; each item without the attribute is a group of its own.
    """

    by: str
    size: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """One result of a grouped search: `hits` are its best items, best first.

    `value` is None for an item without the attribute.
    """

    value: Scalar | None
    score: float
    hits: Sequence[Hit]


Result = TypeVar("Result", Hit, Group)


class Page(NamedTuple):
    """Some of `total` items; `last` is the highest item id of all of them.

    `last` is None if there are none, or if the engine would have to read all items to find it.
    """

    total: int
    items: list[Item]
    last: ItemId | None


@dataclass(frozen=True, slots=True)
class GalleryExport:
    """An export of a gallery: `count` entries with vectors of length `dim`.

    facts: at least `name` and `bundle_id`; also `source`, `source_root` and `created_at` if known,
        and `shortened` if the vectors are the first numbers of those of the bundle.
    entries: returns an iterator from the first entry; it raises SourceError for a damaged entry.
    """

    facts: Mapping[str, str]
    dim: int
    count: int
    entries: Callable[[], Iterator[Entry]] = field(repr=False)


class VectorStore(Protocol):
    """A gallery: unit vectors with keys and typed attributes. It can be changed during searches.

    Every change is durable when the call returns, and later searches of every process see it (on
    Milvus: with the consistency level Strong). All methods are thread safe.

    Engines inherit these docstrings, and write down only what they do differently.

    Every change raises GalleryWriteError and GalleryBusyError, and every method
    GalleryCorruptError; on Milvus, EngineUnavailableError instead.
    """

    @property
    def name(self) -> str:
        """The name of the gallery in URLs."""

    @property
    def dim(self) -> int:
        """Length of a vector."""

    @property
    def size(self) -> int:
        """Number of items."""

    @property
    def bundle_id(self) -> str:
        """The id of the bundle that computed the vectors."""

    @property
    def precision(self) -> str:
        """The model precision that computed the vectors, or several, such as fp32+int8."""

    def admit(self, precision: str) -> None:
        """Record that vectors in `precision` will be added; on Milvus this is not stored."""

    @property
    def generation(self) -> str:
        """12 hex digits that change when the whole gallery is replaced, and with it all ids."""

    @property
    def version(self) -> str:
        """sha256 (hex) that changes with every change; cheap enough for a cache key."""

    @property
    def created_at(self) -> str:
        """When the generation was created: ISO 8601, UTC."""

    @property
    def image_root(self) -> ImageRoot:
        """The folder or address that paths of items are relative to; it may not exist."""

    def add(self, entries: Iterable[Entry], owned: frozenset[str] | None = None) -> Written:
        """Store entries.

        They are stored in one transaction. In a folder, the call waits while the delta is full, or
        is refused; its own entries are not counted, and a request over HTTP has at most 256.

        An entry with the key, sha256 and vector of an item updates its attributes. An entry with
        another sha256 or vector replaces the item, which gets a new id. So does, in a folder, an
        entry with the image of an item that had none.

        owned: stored attributes that an entry does not give are removed only if they have one of
            these names; None removes all.

        Raises: InvalidParameterError for a wrong dimension, a vector that is not finite or not of
            unit norm, a repeated key, an attribute of another type than before. Then nothing was
            written.
        """

    def update(self, changes: Mapping[str, Mapping[str, AttributeValue | None]]) -> int:
        """Change attributes by key; None removes one. Returns the number of changed items.

        Raises: ItemNotFoundError for an unknown key, and then nothing was changed;
            InvalidParameterError for a value of another type than the attribute has.
        """

    def update_where(self, where: Where, change: Mapping[str, AttributeValue | None]) -> int:
        """Change attributes of every item that matches; None removes one. Returns the number of
        changed items. After an error, the same call continues with the rest.

        Raises: FilterError; InvalidParameterError for a value of another type than the attribute
            has.
        """

    def remove(self, keys: Iterable[str]) -> int:
        """Remove items by key; returns the number. Unknown keys are not counted.

        Raises: InvalidParameterError if the keys are not a list of texts.
        """

    def remove_items(self, ids: Iterable[ItemId]) -> int:
        """Remove items by id; returns the number. Unknown ids are not counted."""

    def remove_where(self, where: Where) -> int:
        """Remove every item that matches; returns the number. After an error, the same call removes
        the rest. Raises: FilterError.
        """

    def schema(self) -> Schema:
        """The attributes that items have had so far, and their types."""

    def attribute_facts(self, where: Where | None = None) -> Sequence[AttributeFacts]:
        """The value counts of each attribute, of items that match. Raises: FilterError."""

    def item(self, item_id: ItemId) -> Item:
        """The stored item with this id. Raises: ItemNotFoundError."""

    def items_at(self, ids: Iterable[ItemId]) -> tuple[list[Item], Embeddings]:
        """The items with these ids, by ascending id, and their vectors (N, D); unknown omitted."""

    def stored(self, keys: Sequence[str]) -> dict[str, Item]:
        """The items with these keys, by key; unknown keys are omitted."""

    def contents(self, sha256s: Sequence[str]) -> set[str]:
        """The given contents that some item has."""

    def vectors_of_contents(self, sha256s: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """A stored vector (D,) for each of these contents that some item has."""

    def page(
        self,
        offset: int,
        limit: int,
        where: Where | None = None,
        prefix: str = "",
        after: ItemId = -1,
        sort_by: SortBy | None = None,
    ) -> Page:
        """Up to `limit` items from index `offset` on, in the order of their ids or of `sort_by`.

        where, prefix: only items that match the filter and whose keys start with `prefix`.
        after: only items with higher ids; `total` and `last` of the page ignore it.

        Raises: FilterError; InvalidParameterError for `sort_by` with `after` or beyond 10,000
            items; on Milvus, if more than 10,000 match.
        """

    def items(self) -> Iterator[Item]:
        """Every item, by ascending id; a local gallery returns one consistent state."""

    def entries(self, keys: Sequence[str]) -> list[Entry]:
        """Items with their vectors, in the order of `keys`. Raises: ItemNotFoundError."""

    def scan(self, batch_size: int = 1000) -> Iterator[list[Entry]]:
        """Batches of every item with its vector, by ascending id, of one state as in `items`."""

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]:
        """The `k` best items for each query (Q, D), best first, ties by id.

        Raises: InvalidParameterError, FilterError.
        """

    def search_groups(
        self, queries: Embeddings, k: int, grouping: Grouping, options: SearchOptions | None = None
    ) -> list[list[Group]]:
        """The `k` best groups for each query (Q, D), best first; fewer only if fewer exist.

        Raises: InvalidParameterError, FilterError.
        """

    def facets(
        self,
        names: Sequence[str],
        query: Embeddings | None = None,
        options: SearchOptions | None = None,
        prefix: str = "",
    ) -> dict[str, Facet]:
        """The value counts of these attributes over the selected items.

        An item is selected if it matches `options.where`, its key starts with `prefix` and it is
        not in `options.exclude`. With `options.min_score`, its score for at least one of the
        queries (Q, D) must also be that high: up to 1,000 such items are found by the index, more
        by comparing every item, as with `exact`. `distinct`, `offset` and the order are ignored.

        Raises: InvalidParameterError for more than 8 attributes, and on Milvus for more than 10,000
            items; FilterError for an unknown attribute.
        """

    def close(self) -> None:
        """Release files, memory and connections. The gallery cannot be used afterwards."""


def find_sorted(ids: Ids, known: Ids) -> Ids:
    """The position of each id in the ascending array `known`; -1 for ids that are not in it."""
    if not len(known):
        return np.full(ids.shape, -1, np.int64)
    positions = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return np.where(known[positions] == ids, positions, -1)


def numbers_in(starts: Ids, sizes: Ids) -> Ids:
    """The numbers from each of these starts (N,) on, `sizes` (N,) of them, one after the other."""
    shifts = starts - np.cumsum(sizes) + sizes
    numbers: Ids = np.repeat(shifts, sizes) + np.arange(int(sizes.sum()))
    return numbers


def no_item(item_id: ItemId) -> str:
    """The error message for an unknown item id. The gallery may be served under another name."""
    return (
        f"The gallery has no item {item_id}; it may have been removed. Use an item id from the "
        "result of a search."
    )


def no_key(key: str) -> str:
    """The error message for an unknown key."""
    return (
        f"The gallery has no item with the key {key!r:.200}. Keys are case-sensitive; "
        "`kinlens-index show` prints an item."
    )


def unobserved(method: str, seconds: float, is_answered: bool) -> None:
    """The default `OnCall`: does nothing."""


def mismatch(bundle_id: str, otherwise: str) -> str:
    """Why a bundle does not fit the vectors of a gallery; `otherwise` for those of a bundle."""
    if not bundle_id.startswith(OTHER_MODEL):
        return otherwise
    return (
        f"Its vectors are of the model {bundle_id.removeprefix(OTHER_MODEL)!r}, which has no "
        "bundle, so they cannot be compared with images. Search it with kinlens-index search "
        "--vector or --like, or in Python; if they are of a bundle, import them with --bundle."
    )


def checked_name(name: str) -> str:
    """Check a gallery name and return it. Raises: InvalidParameterError."""
    if not re.fullmatch(GALLERY_NAME, name):
        raise InvalidParameterError(
            f"The gallery name {name!r} cannot be used in a URL. Give up to 64 letters, "
            "digits, '.', '_' or '-' with --name, starting with a letter or digit."
        )
    return name


def milvus_address(text: str) -> tuple[str, str]:
    """Split milvus://HOST:PORT/NAME into the server (http://HOST:PORT) and the gallery name.

    Raises: InvalidParameterError.
    """
    server, _, name = text.removeprefix(MILVUS).partition("/")
    if not re.fullmatch(r"[^\s@?#/]+", server) or not name or "/" in name:
        raise InvalidParameterError(
            f"{text!r} is not the address of a gallery. Write milvus://HOST:PORT/NAME; set a token "
            "for the server in KINLENS_MILVUS_TOKEN."
        )
    return f"http://{server}", name


def boost_of(text: str) -> Boost:
    """Parse a boost NAME:WEIGHT or NAME:WEIGHT:FROM:TO, such as price:-0.1:0:50.

    Raises: InvalidParameterError.
    """
    name, *numbers = text.rsplit(":", 3 if re.search(r":[^:]*:[^:]*:[^:]*$", text) else 1)
    try:
        weight, *ends = map(float, numbers)
        return Boost(name, weight, *ends)
    except ValueError as error:
        raise InvalidParameterError(
            f"boost = {text!r:.80} is not NAME:WEIGHT or NAME:WEIGHT:FROM:TO. Write price:-0.1, or "
            "price:-0.1:0:50 for prices from 0 to 50."
        ) from error


def sort_by_of(text: str) -> SortBy:
    """Parse a sort order NAME, NAME:asc or NAME:desc."""
    name, _, direction = text.rpartition(":")
    if direction in ("asc", "desc") and name:
        return SortBy(name, direction == "desc")
    return SortBy(text)


def combined_query(
    liked: Embeddings, disliked: Embeddings, weights: Sequence[float] | None = None
) -> Embeddings:
    """A unit query vector (D,) for items like `liked` (P, D) and unlike `disliked` (N, D).

    Rocchio's rule: the mean of the liked vectors, plus its difference to the mean of the disliked
    ones. N may be 0. With `weights` (P,) the mean of the liked vectors is weighted; a vector with a
    negative weight is subtracted.

    Raises: InvalidParameterError if nothing is liked, or if likes and dislikes cancel out.
    """
    if not len(liked):
        raise InvalidParameterError("No liked items. Give at least one key of a liked item.")
    target = weighted_mean(liked, weights)
    if len(disliked):
        target = 2 * target - disliked.mean(axis=0, dtype=np.float64)
    norm = np.linalg.norm(target)
    if norm < _CANCELLED:
        raise InvalidParameterError(
            f"{len(liked)} liked and {len(disliked)} disliked items cancel out: their "
            f"combination has length {norm:.1g}. Omit some of them."
        )
    combined: Embeddings = (target / norm).astype(np.float32)
    return combined


def weighted_mean(
    vectors: Embeddings, weights: Sequence[float] | None = None
) -> NDArray[np.float64]:
    """The sum (D,) of vectors (P, D) times their weights, by the sum of the absolute weights."""
    factors = np.ones(len(vectors)) if weights is None else np.array(weights, np.float64)
    mean: NDArray[np.float64] = factors @ vectors.astype(np.float64)
    return mean / max(float(np.abs(factors).sum()), np.finfo(np.float64).tiny)


def best_of_views(
    search: Callable[[int, SearchOptions], Sequence[Sequence[Result]]],
    k: int,
    options: SearchOptions,
) -> list[tuple[Result, int]]:
    """One page of results over several views of a query, best first, ties by id. A result that
    several views find appears once, with its best score and the number of that view.

    `search(depth, options)` returns the `depth` best results of each view. The page is exact: the
    best `depth` of all are among the best `depth` of each view.
    """
    depth = options.offset + k
    best: dict[object, tuple[Result, int]] = {}
    for view, results in enumerate(search(depth, replace(options, offset=0))):
        for result in results:
            known = best.get(_identity(result))
            if known is None or result.score > known[0].score:
                best[_identity(result)] = result, view
    ranked = sorted(best.values(), key=lambda each: (-each[0].score, _first_id(each[0])))
    return ranked[options.offset : depth]


def _first_id(result: Hit | Group) -> ItemId:
    return result.id if isinstance(result, Hit) else result.hits[0].id


def _identity(result: Hit | Group) -> object:
    if isinstance(result, Hit):
        return result.id
    value = result.value  # 1 and true are different; an item without a value is its own group
    return ("item", _first_id(result)) if value is None else (isinstance(value, bool), value)
