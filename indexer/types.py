"""What every engine of a gallery can do: the FAISS gallery and the one on Milvus."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Embeddings, Hit, ItemId
from kinlens.indexer.attributes import Schema, as_stored
from kinlens.indexer.filters.tree import Filter
from kinlens.values import AttributeKind, AttributeValue, Scalar, values_in

Ids = NDArray[np.int64]
"""Item numbers, shape (N,)."""

Scores = NDArray[np.float32]
"""Cosine similarities in [-1, 1], shape (Q, k)."""

SAME_SCORE = 1e-5
"""Scores this close count as equal: two vectors of one image differ by rounding, on another device
a little more, and which of two equal items is found does not matter."""


@dataclass(frozen=True, slots=True)
class IndexPlace:
    """Where an index is searched, and the MiB that it takes of the machine and of the GPU.

    reason: why it is not the GPU that was asked for.
    """

    kind: str
    device: Literal["cpu", "cuda"]
    memory_mb: float
    gpu_memory_mb: float = 0.0
    reason: str | None = None


VectorType = Literal["fp32", "fp16"]
"""How a gallery keeps its vectors: whole, or rounded to half precision in half the space."""

NUMBER_BYTES: dict[VectorType, int] = {"fp32": 4, "fp16": 2}
"""Of one number of a vector that is kept so."""

StoredRows = NDArray[np.float32] | NDArray[np.float16]
"""Vectors (N, D) as they are kept."""

Progress = Callable[[int], None]
"""Told how much more is done since the last call: images, items or bytes."""


CANDIDATES = 200
"""So many of the first hits, or groups, may change places; all others follow in plain order."""

MAX_BOOST = 0.2
"""The largest weight of an attribute beside the cosine similarity."""

Consistency = Literal["Strong", "Session", "Bounded", "Eventually"]
"""The levels of Milvus, as its documentation defines them: when a read sees a change."""

OnCall = Callable[[str, float, bool], None]
"""Told of a request to a server: its method, its seconds, and whether it was answered."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNITS_S = {"ms": 1e-3, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(text: str) -> float | None:
    """The seconds of a text such as 5s, 250ms or 2m; None for another text."""
    found = _DURATION.fullmatch(text.strip())
    return float(found[1]) * _UNITS_S[found[2]] if found else None


MILVUS = "milvus://"
"""What the address of a gallery on Milvus begins with."""

GALLERY_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""What the name of a gallery looks like, since it stands in addresses."""

_CANCELLED = 1e-3  # a combination of likes and dislikes that is shorter has no direction


@dataclass(frozen=True, slots=True)
class Entry:
    """An item to store: its unit vector (D,), and the sha256 (hex) of the content it was made of.

    `path` is relative to the image root of the gallery; empty for an item without an image. An
    attribute may have several values, as a list or a tuple; an empty one is omitted. With `keeps`,
    attributes of a stored item that the entry does not give stay, as they are at the moment of the
    write.
    """

    key: str
    vector: NDArray[np.float32] = field(repr=False)
    sha256: str
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    path: str = ""
    format: str = ""
    keeps: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", as_stored(self.attributes))


@dataclass(frozen=True, slots=True)
class Item:
    """A stored item; `path` is relative to the image root of its gallery."""

    id: ItemId
    key: str
    path: str
    sha256: str
    attributes: Mapping[str, AttributeValue]
    format: str


MAX_COUNTED_VALUES = 50
"""Values of an attribute that are counted, the most frequent first."""


@dataclass(frozen=True, slots=True)
class AttributeFacts:
    """How the values of an attribute are spread: what a page of filters is made of.

    `values` are the most frequent ones with their numbers of items; None for numbers of which there
    are too many to choose from, and for texts of which nearly every item has its own. `minimum` and
    `maximum` are of numbers.
    """

    name: str
    kind: AttributeKind
    values: tuple[tuple[Scalar, int], ...] | None
    minimum: float | None = None
    maximum: float | None = None


MAX_FACETS = 8
"""Attributes whose values are counted at once."""


@dataclass(frozen=True, slots=True)
class Facet:
    """How many of some items have which value of an attribute; `missing` have none. An item with
    several values counts for each.

    values: the most frequent texts or truth values first, at most `MAX_COUNTED_VALUES`, equal ones
        by value; `other` counts the others. Or all numbers, ascending, if there are few.
    bins: in place of values where numbers are many: lower end, upper end, items from the lower to
        below the upper end; the last bin has its upper end too.
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
    """What became of the entries of an `add`; they sum to the number of entries."""

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
    """Rank by score + `weight` * x, with x from 0 to 1: a numeric attribute, scaled.

    `low` and `high` are the values that become 0 and 1, those outside the same; without them the
    lowest and highest of the gallery. An item without the attribute is at the end that is not
    preferred.
    """

    attribute: str
    weight: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class SortBy:
    """Order by the values of an attribute, items without it last. Of several values the lowest
    counts, or the highest if `descending`.
    """

    attribute: str
    descending: bool = False

    def value_of(self, attributes: Mapping[str, AttributeValue]) -> Any:
        """What an item with these attributes is sorted by; None if it has no value."""
        values = values_in(attributes.get(self.attribute))
        chosen = max if self.descending else min
        return chosen(values) if values else None


def no_checkpoint() -> None:
    """The checkpoint of a search that nobody ends early."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How to search, beside the query itself; the defaults leave everything out.

    where: only items that fit this filter.
    min_score: only items (groups) whose cosine similarity (group score) reaches it, in [-1, 1].
    offset: leave out that many of the best.
    distinct: of items with equal content only the best, and of equals the one with the lowest id.
    near: of items whose vectors have at least this cosine to a better one that is an answer only
        the better one, in [-1, 1]; neither for groups nor on Milvus.
    exclude: leave out the items with these numbers.
    exact: compare with every vector, whatever the index.
    effort: how hard an approximate index tries, in place of its tuned value (efSearch or nprobe).
    diversity, boost: another order of the first `CANDIDATES` hits, or groups; the score of
        a hit stays its cosine similarity. Diversity d in [0, 1]: next comes the hit with the
        highest (1 - d) * its score - d * its similarity to the most similar hit before it.
    sort_by: the first `CANDIDATES` hits, or groups, in the order of an attribute; without the two
        above.
    checkpoint: called between pieces of the work; what it raises ends the search.
    """

    where: Filter | None = None
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

    @property
    def reorders(self) -> bool:
        """Whether hits come in another order than that of their scores."""
        return bool(self.diversity or self.boost or self.sort_by)


@dataclass(frozen=True, slots=True)
class Grouping:
    """Search for groups: items with the same value of attribute `by`, ranked by their best item;
    each shows `size` items. An item with several values is in the group of each.

    Items without the attribute are groups of one.
    """

    by: str
    size: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """One answer of a search for groups: `hits` are its best items, best first.

    `value` is None for an item without the attribute.
    """

    value: Scalar | None
    score: float
    hits: Sequence[Hit]


class Page(NamedTuple):
    """Some of `total` items, the highest number of which is `last`.

    `last` is None if there are none, or if the engine would have to read them all to know.
    """

    total: int
    items: list[Item]
    last: ItemId | None


@dataclass(frozen=True, slots=True)
class Dump:
    """A gallery on its way to another place: `count` entries with vectors of length `dim`.

    `facts` holds at least `name` and `bundle_id`; also `source`, `source_root` and `created_at`
    where they are known. `entries()` reads them from the first; it raises SourceError for one that
    is damaged.
    """

    facts: Mapping[str, str]
    dim: int
    count: int
    entries: Callable[[], Iterator[Entry]] = field(repr=False)


class VectorStore(Protocol):
    """A gallery: unit vectors with keys and typed attributes, changed while it is searched.

    Every change is durable when the call returns, and later searches of every process see it; on
    Milvus, if they ask for its level Strong. All methods are thread safe.
    """

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def bundle_id(self) -> str: ...
    @property
    def precision(self) -> str:
        """The precision of its vectors, or several, as in fp32+int8."""

    def admit(self, precision: str) -> None:
        """Note that vectors in `precision` are added from now on; Milvus does not keep it."""

    @property
    def generation(self) -> str:
        """12 hex digits that another publication of the whole gallery changes."""

    @property
    def version(self) -> str:
        """sha256 (hex) that changes with every change; cheap enough to be part of a cache key."""

    @property
    def created_at(self) -> str:
        """When the generation was made: ISO 8601, UTC."""

    @property
    def image_root(self) -> Path:
        """The folder that paths of items start from; it may be missing."""

    def add(self, entries: Iterable[Entry], owned: frozenset[str] | None = None) -> Written:
        """Store entries. Equal key and content: nothing, or new attributes alone; other content
        under an old key replaces the item, which gets a new number.

        An entry replaces all attributes of the item under its key. With `owned`, those that it
        does not give are taken away only if they have one of these names; the others stay, as they
        are at the moment of the write.

        Raises: InvalidParameterError for a wrong dimension, a vector that is not finite or not of
            unit norm, a key twice in one call; GalleryWriteError; GalleryBusyError.
        """

    def update(self, changes: Mapping[str, Mapping[str, AttributeValue | None]]) -> int:
        """Change attributes by key; None takes an attribute away. How many items differ now.

        Raises: ItemNotFoundError for an unknown key, and then nothing was changed;
            InvalidParameterError for a value of another type than the attribute has.
        """

    def update_where(self, where: Filter, change: Mapping[str, AttributeValue | None]) -> int:
        """Make one change of attributes in every item that fits. How many items differ now.

        Raises: FilterError; InvalidParameterError as `update`.
        """

    def remove(self, keys: Iterable[str]) -> int:
        """Remove items by key; unknown keys are left out of the count.

        Raises: InvalidParameterError for what is not a list of texts.
        """

    def remove_items(self, ids: Iterable[ItemId]) -> int:
        """Remove items by number; unknown numbers are left out of the count."""

    def remove_where(self, where: Filter) -> int:
        """Remove every item that fits. Raises: FilterError."""

    def schema(self) -> Schema:
        """The attributes that items have had so far, and their kinds."""

    def attribute_facts(self, where: Filter | None = None) -> Sequence[AttributeFacts]:
        """The values of each attribute, counted."""

    def item(self, item_id: ItemId) -> Item:
        """What is known of an item. Raises: ItemNotFoundError."""

    def stored(self, keys: Sequence[str]) -> dict[str, Item]:
        """The items with these keys, by key; unknown keys are left out."""

    def held(self, sha256s: Sequence[str]) -> set[str]:
        """Which of these contents some item has."""

    def vectors_of_contents(self, sha256s: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """A stored vector (D,) for each of these contents that some item has."""

    def page(
        self,
        offset: int,
        limit: int,
        where: Filter | None = None,
        prefix: str = "",
        after: ItemId = -1,
        sort_by: SortBy | None = None,
    ) -> Page:
        """Items from place `offset` on, at most `limit`, of those that fit `where`, whose keys
        begin with `prefix` and whose numbers are above `after`; in the order of their numbers, or
        of an attribute. `total` and `last` are of all that fit, whatever their numbers.

        Raises: FilterError; InvalidParameterError for `after` with `sort_by`, and on Milvus for
            `sort_by`.
        """

    def items(self) -> Iterator[Item]:
        """Every item, in the order of its number; in a folder of one state."""

    def entries(self, keys: Sequence[str]) -> list[Entry]:
        """Items with their vectors, in the order asked for. Raises: ItemNotFoundError."""

    def scan(self, batch_size: int = 1000) -> Iterator[list[Entry]]:
        """Every item with its vector, as `items`."""

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]:
        """For each query (Q, D) its `k` best items: best first, equal scores by number.

        Raises: InvalidParameterError, FilterError.
        """

    def search_groups(
        self,
        queries: Embeddings,
        k: int,
        grouping: Grouping,
        options: SearchOptions | None = None,
    ) -> list[list[Group]]:
        """For each query its `k` best groups, exactly k if there are as many.

        Raises: as `search`.
        """

    def search_like(
        self,
        liked: Sequence[str],
        disliked: Sequence[str],
        k: int,
        options: SearchOptions | None = None,
    ) -> list[Hit]:
        """The `k` items most like the items with keys `liked` and least like `disliked`, without
        these. One liked key: the items most similar to it.

        Raises: ItemNotFoundError, InvalidParameterError.
        """

    def facets(
        self,
        names: Sequence[str],
        query: Embeddings | None = None,
        options: SearchOptions | None = None,
        prefix: str = "",
    ) -> dict[str, Facet]:
        """How the values of these attributes are spread over all items that fit and, with
        `options.min_score`, reach it. Raises: InvalidParameterError, also on Milvus; FilterError.
        """

    def close(self) -> None:
        """Let go of files and memory."""


def places_of(ids: Ids, known: Ids) -> Ids:
    """Where each of these numbers stands among the ascending `known`; -1 for those that do not."""
    if not len(known):
        return np.full(ids.shape, -1, np.int64)
    places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return np.where(known[places] == ids, places, -1)


def no_item(gallery: str, item_id: ItemId) -> str:
    """What to say about an item that a gallery does not have."""
    return (
        f"Gallery {gallery} has no item {item_id}; it may have been removed. Take the number from "
        "the answer of a search."
    )


def no_key(key: str) -> str:
    """What to say about a key that no item of a gallery has."""
    return (
        f"The gallery has no item with the key {key!r}. Keys are compared letter by letter; "
        "`kinlens-index show` prints an item."
    )


def unobserved(method: str, seconds: float, is_answered: bool) -> None:
    """Nobody is told of a request."""


def checked_name(name: str) -> str:
    """`name` itself, if it can stand in the address of a gallery.

    Raises: InvalidParameterError.
    """
    if not re.fullmatch(GALLERY_NAME, name):
        raise InvalidParameterError(
            f"The gallery name {name!r} cannot stand in an address. Give up to 64 letters, "
            "digits, '.', '_' or '-' with --name, beginning with a letter or digit."
        )
    return name


def milvus_address(text: str) -> tuple[str, str]:
    """The server, as in http://HOST:PORT, and the name in milvus://HOST:PORT/NAME.

    Raises: InvalidParameterError.
    """
    server, _, name = text.removeprefix(MILVUS).partition("/")
    if not re.fullmatch(r"[^\s@?#/]+", server) or not name or "/" in name:
        raise InvalidParameterError(
            f"{text!r} is not the address of a gallery. Write milvus://HOST:PORT/NAME; a token "
            "for the server stands in KINLENS_MILVUS_TOKEN."
        )
    return f"http://{server}", name


def boost_of(text: str) -> Boost:
    """The boost that is written NAME:WEIGHT or NAME:WEIGHT:FROM:TO, such as price:-0.1:0:50.

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
    """The order that is written NAME, NAME:asc or NAME:desc."""
    name, _, direction = text.rpartition(":")
    if direction in ("asc", "desc") and name:
        return SortBy(name, direction == "desc")
    return SortBy(text)


def combined_query(liked: Embeddings, disliked: Embeddings) -> Embeddings:
    """One unit vector (D,) near `liked` (P, D) and far from `disliked` (N, D), N may be 0.

    Rocchio's rule with equal weights: the mean of the liked, moved away from the mean of the
    disliked by their difference. Raises: InvalidParameterError if nothing is liked, or if likes
    and dislikes cancel.
    """
    if not len(liked):
        raise InvalidParameterError("No liked items. Give at least one key of a liked item.")
    target = liked.mean(axis=0, dtype=np.float64)
    if len(disliked):
        target = 2 * target - disliked.mean(axis=0, dtype=np.float64)
    norm = np.linalg.norm(target)
    if norm < _CANCELLED:
        raise InvalidParameterError(
            f"{len(liked)} liked and {len(disliked)} disliked items cancel each other: their "
            f"combination has length {norm:.1g}. Leave some of them out."
        )
    combined: Embeddings = (target / norm).astype(np.float32)
    return combined
