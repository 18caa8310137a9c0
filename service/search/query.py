"""What is asked of a search: one value, with a digest that names all of it. And what it answers:
results as JSON, and what a cache keeps of them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor
from typing import Any, Literal
from urllib.parse import quote

from pydantic_core import to_json

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.preprocess import Box
from kinlens.embedder.types import Hit, ItemId
from kinlens.indexer.calibration import Shares
from kinlens.indexer.checks.duplicates import LEAST_SCORE, near_score
from kinlens.indexer.filters.tree import Filter
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import Boost, Facet, Group, Grouping, SortBy, VectorStore
from kinlens.service.encoding.model import Stages, View
from kinlens.service.galleries.view import GalleryView

_HITS_OF_A_UNIT = 1_000

Combine = Literal["mean", "best"]
Distinct = bool | Literal["near"]


@dataclass(frozen=True)
class Query:
    """What is searched, and where; without `gallery` in the default one.

    views: what is looked for, each with a vector of its own.
    positives, negatives: keys of items; the query moves to the ones, away from the others, and
        none of them is an answer.
    like: the number of one more positive item, of `generation` if that is given.
    min_probability: only hits that are right with this probability, by the calibration of the
        gallery; groups likewise. It does not change what facets count.
    best_view: each view is looked for by itself, and what it finds counts with the best of them;
        else with their mean.
    facets: attributes whose values are counted over all that fits.
    distinct: of items with equal content only the best; "near": also of near-duplicates.
    """

    views: tuple[View, ...] = ()
    positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    like: ItemId | None = None
    generation: str | None = None
    gallery: str | None = None
    k: int = 20
    offset: int = 0
    min_score: float | None = None
    min_probability: float | None = None
    where: Filter | None = None
    grouping: Grouping | None = None
    distinct: Distinct = False
    exact: bool = False
    best_view: bool = False
    facets: tuple[str, ...] = ()
    diversity: float = 0.0
    boost: Boost | None = None
    sort_by: SortBy | None = None

    @property
    def units(self) -> int:
        """What it counts as in a rate: one for each view, and one more for each further 1,000 hits
        that a search has to find.
        """
        hits = (self.offset + self.k) * (self.grouping.size if self.grouping else 1)
        searches = len(self.views) if self.best_view else 1
        return max(1, len(self.views)) + searches * ((hits - 1) // _HITS_OF_A_UNIT)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of everything but the gallery: equal for equal questions."""
        views = [(view.digest, view.box or ()) for view in self.views]
        # Which view found something is a part of the answer; a mean knows no order.
        numbers = [view.number for view in self.views] if self.best_view else None
        parts = (views if self.best_view else sorted(views), numbers, self._rest)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @cached_property
    def _rest(self) -> str:
        """sha256 (hex) of all that `with_views` leaves as it is; a long filter takes 20 ms."""
        grouping = self.grouping
        parts = (
            sorted(self.positives),
            sorted(self.negatives),
            (self.like, self.generation),
            (self.k, self.offset),
            (_plain(self.min_score), _plain(self.min_probability)),
            None if self.where is None else repr(self.where),
            None if grouping is None else (grouping.by, grouping.size),
            (self.distinct, self.exact),
            self.best_view,
            self.facets,
            (_plain(self.diversity), repr(self.boost), repr(self.sort_by)),
        )
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def with_views(self, views: tuple[View, ...]) -> "Query":
        """The same about other views; what is known of the rest is not worked out again."""
        query = replace(self, views=views)
        query.__dict__["_rest"] = self._rest
        return query


def views_of(data: bytes, boxes: Sequence[Box] = (), number: int = 1) -> tuple[View, ...]:
    """The parts of one image that are looked for; without boxes the whole."""
    digest = hashlib.sha256(data).hexdigest()
    boxes_or_whole: Sequence[Box | None] = boxes or (None,)
    return tuple(View(data, digest, box, number) for box in boxes_or_whole)


def _plain(number: float | None) -> float | None:
    return None if number is None else float(number) + 0.0  # 0.0 and -0.0 are one number


_VERSION_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Answer:
    """Results as a JSON object, and where they come from."""

    bundle_id: str
    gallery: str
    gallery_version: str
    query: Query
    results: bytes
    cached: bool
    stages: Stages


@dataclass(frozen=True, slots=True)
class HitRenderer:
    """How the items of a gallery are shown: what their links begin and end with."""

    prefix: str
    suffix: str

    @classmethod
    def of(cls, name: str, generation: str) -> "HitRenderer":
        """For gallery `name`; a link holds for one generation."""
        items = f"/galleries/{quote(name, safe='')}/items/"
        return cls(items, f"/image?version={generation[:_VERSION_DIGITS]}")

    def hits(self, hits: Sequence[Hit], shares: Shares | None) -> list[dict[str, Any]]:
        """Ranked hits as they go over the wire; without `shares` no probability is known."""
        return [
            {
                "id": hit.id,
                "key": hit.key,
                "score": _floored(hit.score, 6),
                "probability": None if shares is None else _floored(shares.of(hit), 4),
                "attributes": hit.attributes,
                "image": f"{self.prefix}{hit.id}{self.suffix}",
            }
            for hit in hits
        ]

    def groups(
        self, groups: Sequence[Group], by: str, shares: Shares | None
    ) -> list[dict[str, Any]]:
        """Ranked groups of attribute `by` as they go over the wire."""
        return [
            {
                "value": group.value,
                "score": _floored(group.score, 6),
                "probability": None if shares is None else _floored(shares.of_group(group, by), 4),
                "hits": self.hits(group.hits, shares),
            }
            for group in groups
        ]


def _floored(value: float, digits: int) -> float:
    """Down, so probabilities sum to at most 1, and a score is a `min_score` that its hit passes."""
    scale = 10.0**digits
    return floor(value * scale + 1e-6) / scale


def encode_results(
    renderer: HitRenderer,
    hits: Sequence[Hit],
    groups: Sequence[Group] | None,
    *,
    match: bool,
    by: str = "",
    shares: Shares | None = None,
    none: float | None = None,
    views: Mapping[ItemId, View] | None = None,
    facets: Mapping[str, Facet] | None = None,
) -> bytes:
    """The part of an answer that a cache keeps, as a JSON object in its final form.

    by: the attribute that groups have in common. none: the probability that nothing of the answer
    is right. views: which part of the query found each hit, or the best hit of each group.
    """
    count = len(hits) if groups is None else len(groups)
    shown = renderer.hits(hits, shares)
    grouped = None if groups is None else renderer.groups(groups, by, shares)
    if views is not None:
        for row, hit in zip(shown, hits, strict=True):
            row["view"] = _named(views[hit.id])
        for row, group in zip(grouped or [], groups or [], strict=True):
            row["view"] = _named(views[group.hits[0].id])
    results: dict[str, Any] = {
        "count": count,
        "match": match,
        "no_match_probability": None if none is None else _floored(none, 4),
        "hits": shown,
        "groups": grouped,
    }
    if facets:
        results["facets"] = {name: facet.described() for name, facet in facets.items()}
    return to_json(results)


def _named(view: View) -> dict[str, Any]:
    return {"image": view.number, "crop": view.box}


def nearness(distinct: Distinct, gallery: VectorStore | GalleryView) -> float | None:
    """The cosine from which on `distinct` omits items; None unless it is "near"."""
    if distinct != "near":
        return None
    # A gallery on Milvus refuses the search itself, with the reason. The score of a gallery is one
    # of all its items, so a caller who sees a part of them gets the least one.
    return near_score(gallery) if isinstance(gallery, Gallery) else LEAST_SCORE


def uncalibrated(probability: float, reason: str) -> InvalidParameterError:
    """`min_probability` was asked for, and `reason` says why there is none."""
    return InvalidParameterError(
        f"min_probability = {probability:g} needs probabilities, and this gallery has none "
        f"({reason.rstrip('.')}). Send min_score instead."
    )
