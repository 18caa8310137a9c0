"""What is asked of a search: one value, with a digest that names all of it. And what it answers:
results as JSON, what a cache keeps of them, and from scores to probabilities.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from embedder.calibration import Calibration, near_score, score_of
from embedder.errors import InvalidParameterError
from embedder.preprocess import Box
from embedder.types import Hit, ItemId
from indexer.filters.tree import Filter
from indexer.types import Boost, Facet, Group, Grouping, Rerank

Combine = Literal["mean", "best", "separate"]
Distinct = bool | Literal["near"]


@dataclass(frozen=True, slots=True)
class View:
    """A part of an encoded image, the whole without `box`; `digest` is the sha256 of the image.

    `number` counts the images of a query, from 1.
    """

    data: bytes
    digest: str
    box: Box | None = None
    number: int = 1


@dataclass(frozen=True)
class Query:
    """What is searched, and where; without `gallery` in the default one.

    views: what is looked for, each with a vector of its own.
    positives, negatives: keys of items; the query moves to the ones, away from the others, and
        none of them is an answer.
    like: the number of one more positive item, of `generation` if that is given.
    min_probability: as `min_score`, in the calibrated probability of the model.
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
    rerank: Rerank | None = None
    diversity: float = 0.0
    boost: Boost | None = None

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
        """sha256 (hex) of all that `apart` leaves as it is; a long filter takes 20 ms."""
        grouping = self.grouping
        parts = (
            sorted(self.positives),
            sorted(self.negatives),
            (self.like, self.generation),
            (self.k, self.offset),
            (_plain(self.min_score), _plain(self.min_probability)),
            None if self.where is None else repr(self.where),
            None if grouping is None else (grouping.by, grouping.score, grouping.size),
            (self.distinct, self.exact),
            self.best_view,
            self.facets,
            (self.rerank, _plain(self.diversity), repr(self.boost)),
        )
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def apart(self) -> list["Query"]:
        """A query for each view, which share all the rest; this one if there are not several."""
        if len(self.views) < 2:
            return [self]
        return [self.with_views((view,)) for view in self.views]

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
class Stages:
    """Milliseconds in each stage; 0 for one that a cache made unnecessary."""

    decode: float = 0.0
    embed: float = 0.0
    search: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Results as a JSON object, and where they come from; `min_score` is the effective one."""

    bundle_id: str
    gallery: str
    gallery_version: str
    query: Query
    min_score: float | None
    results: bytes
    cached: bool
    stages: Stages


@dataclass(frozen=True, slots=True)
class HitRenderer:
    """How the items of a gallery are shown: what their links begin and end with, the calibration
    of its model for a gallery of its size, and how many better ones are left out.
    """

    prefix: str
    suffix: str
    calibration: Calibration | None
    offset: int = 0

    @classmethod
    def of(
        cls, name: str, generation: str, calibration: Calibration | None, offset: int = 0
    ) -> "HitRenderer":
        """For gallery `name`; a link holds for one generation."""
        items = f"/galleries/{quote(name, safe='')}/items/"
        return cls(items, f"/image?version={generation[:_VERSION_DIGITS]}", calibration, offset)

    def likely(self, hits: Sequence[Hit], least: float) -> list[Hit]:
        """Those of the ranked hits, best first, that are right with this probability."""
        return [hit for hit, p in zip(hits, self._ranked(hits), strict=True) if _reaches(p, least)]

    def likely_groups(self, groups: Sequence[Group], least: float) -> list[Group]:
        """The same of ranked groups, and of the hits that each shows."""
        kept = []
        for place, (group, p) in enumerate(zip(groups, self._ranked(groups), strict=True)):
            if _reaches(p, least):
                likely = self._beside(group, place)
                hits = [h for h, q in zip(group.hits, likely, strict=True) if _reaches(q, least)]
                kept.append(replace(group, hits=hits))
        return kept

    def _ranked(self, ranked: Sequence[Hit | Group]) -> list[float] | list[None]:
        """The probability of each, best first; None without a calibration."""
        ranks = self.offset + 1 + np.arange(len(ranked))
        return self._probabilities([one.score for one in ranked], ranks)

    def _beside(self, group: Group, place: int) -> list[float] | list[None]:
        """The probability of each hit of a group, at the rank of the group."""
        ranks = np.full(len(group.hits), self.offset + 1 + place)
        return self._probabilities([hit.score for hit in group.hits], ranks)

    def _probabilities(
        self, scores: Sequence[float], ranks: NDArray[np.integer]
    ) -> list[float] | list[None]:
        if self.calibration is None:
            return [None] * len(scores)
        found: list[float] = self.calibration.probability(np.array(scores), ranks).tolist()
        return found

    def hits(self, hits: Sequence[Hit]) -> list[dict[str, Any]]:
        """Ranked hits as they go over the wire."""
        return self._hits(hits, self._ranked(hits))

    def _hits(self, hits: Sequence[Hit], likely: Sequence[float | None]) -> list[dict[str, Any]]:
        return [
            {
                "id": hit.id,
                "key": hit.key,
                "score": hit.score,
                "probability": probability,
                "attributes": hit.attributes,
                "image": f"{self.prefix}{hit.id}{self.suffix}",
            }
            for hit, probability in zip(hits, likely, strict=True)
        ]

    def groups(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Ranked groups as they go over the wire."""
        return [
            {
                "value": group.value,
                "score": group.score,
                "probability": probability,
                "hits": self._hits(group.hits, self._beside(group, place)),
            }
            for place, (group, probability) in enumerate(
                zip(groups, self._ranked(groups), strict=True)
            )
        ]


def _reaches(probability: float | None, least: float) -> bool:
    return probability is not None and probability >= least


def encode_results(
    renderer: HitRenderer,
    hits: Sequence[Hit],
    groups: Sequence[Group] | None,
    *,
    match: bool,
    views: Mapping[ItemId, View] | None = None,
    facets: Mapping[str, Facet] | None = None,
) -> bytes:
    """The part of an answer that a cache keeps, as a JSON object in its final form.

    views: which part of the query found each hit, or the best hit of each group.
    """
    count = len(hits) if groups is None else len(groups)
    shown = renderer.hits(hits)
    grouped = None if groups is None else renderer.groups(groups)
    if views is not None:
        for row, hit in zip(shown, hits, strict=True):
            row["view"] = _named(views[hit.id])
        for row, group in zip(grouped or [], groups or [], strict=True):
            row["view"] = _named(views[group.hits[0].id])
    results = {"count": count, "match": match, "hits": shown, "groups": grouped}
    if facets:
        results["facets"] = {name: facet.described() for name, facet in facets.items()}
    return to_json(results)


def _named(view: View) -> dict[str, Any]:
    return {"image": view.number, "crop": view.box}


def least_score(
    min_score: float | None,
    min_probability: float | None,
    calibration: Calibration | None,
    no_calibration: str | None = None,
) -> float | None:
    """The score that the best hit needs for both, or None if any will do.

    Args:
        calibration: for the gallery as large as it is.
        no_calibration: why there is none.

    Raises: InvalidParameterError for a probability without a calibration.
    """
    if min_probability is None:
        return min_score
    if calibration is None:
        raise uncalibrated(f"min_probability = {min_probability:g}", no_calibration, "min_score")
    likely = score_of(calibration, min_probability)
    if likely is None or min_score is None:
        return min_score if likely is None else likely
    return max(min_score, likely)


def nearness(
    distinct: Distinct, calibration: Calibration | None, no_calibration: str | None
) -> float | None:
    """The cosine from which on `distinct` leaves items out; None unless it is "near".

    Raises: InvalidParameterError without a calibration.
    """
    if distinct != "near":
        return None
    if calibration is None:
        raise uncalibrated("distinct = near", no_calibration, "distinct = true")
    return near_score(calibration)


def uncalibrated(what: str, no_calibration: str | None, instead: str) -> InvalidParameterError:
    """`what` was asked for, and `no_calibration` says why it cannot be had."""
    reason = "" if no_calibration is None else f" ({no_calibration.rstrip('.')})"
    return InvalidParameterError(
        f"{what} needs a calibration, and the model of this gallery has none{reason}. Send "
        f"{instead}, or export the model again with held-out classes."
    )
