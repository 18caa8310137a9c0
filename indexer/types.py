"""What galleries are asked and what they return: options, groups, facets and pages."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Hit, ItemId
from kinlens.indexer.entries import Entry, Item
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
