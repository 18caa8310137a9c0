"""The query of a search, with a digest of all its parameters; and its answer, rendered as JSON in
the form that is cached.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from kinlens.embedder.preprocess import Box
from kinlens.embedder.types import Hit, ItemId
from kinlens.embedder.views.boxes import AUTO_BOXES, FoundBox
from kinlens.indexer.checks.duplicates import LEAST_SCORE, near_score
from kinlens.indexer.filters.tree import Filter
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.store import VectorStore
from kinlens.indexer.types import Boost, Facet, Group, Grouping, SortBy
from kinlens.models import Distinct, Timings
from kinlens.quality.answers import Results, Wanted
from kinlens.service.access.links import PREFIX, SIGNER, image_address, link_parts, with_links
from kinlens.service.encoding.model import Stages, View
from kinlens.service.encoding.vectors import VectorView
from kinlens.service.galleries.feedback import FeedbackStore, Question
from kinlens.service.galleries.view import GalleryView
from kinlens.values import AttributeValue

_HITS_OF_A_UNIT = 1_000
_STAGES = tuple(Timings.model_fields)

WORDS_NOT_CALIBRATED = "scores of words are not calibrated"


@dataclass(frozen=True)
class Query:
    """The parameters of a search; without `gallery` it runs in the default one.

    views: the images, crops and vectors to search for, each with its own vector.
    positives, negatives: keys of items. The query vector moves towards the positives and away from
        the negatives; the results contain none of them.
    like: the id of one more positive item, in `generation` if that is given.
    min_probability: omit hits and groups whose calibrated probability of being right is lower.
        It does not change the facets.
    texts: words with their weights, which move the query, or are the whole of it.
    best_view: search with each view separately and score an item by its best view; otherwise
        search with the mean of the views.
    facets: attributes whose values are counted over all matching items.
    fields: the only attributes that the answer has; None for all.
    distinct: of items with equal content return only the best; "near": also of near-duplicates.
    guarantee, accept: the level of the guaranteed set of products, and the share of right ones
        among the best products that are accepted.
    """

    views: tuple[View | VectorView, ...] = ()
    positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    texts: tuple[tuple[str, float], ...] = ()
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
    fields: tuple[str, ...] | None = None
    diversity: float = 0.0
    boost: Boost | None = None
    sort_by: SortBy | None = None
    guarantee: float | None = None
    accept: float | None = None

    @property
    def asks_guarantee(self) -> bool:
        """Whether the answer has to guarantee something."""
        return self.guarantee is not None or self.accept is not None

    @property
    def by(self) -> str:
        """The attribute that groups have in common; empty without groups."""
        return "" if self.grouping is None else self.grouping.by

    @cached_property
    def images(self) -> list[View]:
        """The views that need an image to be embedded."""
        return [view for view in self.views if isinstance(view, View)]

    @property
    def has_several_images(self) -> bool:
        """Whether an error has to name the image that it is about."""
        return len({view.digest for view in self.images}) > 1

    def with_boxes(self, boxes: Mapping[str, Sequence[FoundBox] | None]) -> "Query":
        """With the best boxes of an image, by its digest, in place of its windows. An image without
        boxes is searched for as a whole, and with its windows if the detector failed on it.
        """
        views: list[View | VectorView] = []
        for view in self.views:
            found = boxes[view.digest] if isinstance(view, View) and view.is_auto else None
            if not isinstance(view, View) or found is None:
                views.append(view)
            elif view.box is None:
                views += [view, *(replace(view, box=one.box) for one in found[:AUTO_BOXES])]
        return replace(self, views=tuple(views))

    @property
    def units(self) -> int:
        """Its cost for the rate limit: one unit for each view and text, and one more for every
        further 1,000 hits that each search has to find.
        """
        hits = (self.offset + self.k) * (self.grouping.size if self.grouping else 1)
        searches = len(self.views) if self.best_view else 1
        return max(1, len(self.views) + len(self.texts)) + searches * (
            (hits - 1) // _HITS_OF_A_UNIT
        )

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of everything but the gallery: equal queries have equal digests."""
        views = [(view.identity, float(view.weight) + 0.0) for view in self.views]
        grouping = self.grouping
        parts = (
            # With `best_view` the answer names the view of each hit. A mean needs no order.
            views if self.best_view else sorted(views),
            [view.number for view in self.views] if self.best_view else None,
            sorted(self.positives),
            sorted(self.negatives),
            sorted((text, float(weight) + 0.0) for text, weight in self.texts),
            (self.like, self.generation),
            (self.k, self.offset),
            (_plain(self.min_score), _plain(self.min_probability)),
            None if self.where is None else repr(self.where),
            None if grouping is None else (grouping.by, grouping.size),
            (self.distinct, self.exact),
            (self.facets, self.fields),
            (float(self.diversity) + 0.0, repr(self.boost), repr(self.sort_by)),
            (self.guarantee, self.accept),
        )
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def views_of(
    data: bytes, boxes: Sequence[Box | None] = (), number: int = 1, is_auto: bool = False
) -> tuple[View, ...]:
    """The views of one encoded image: one for each box, or the whole image without boxes."""
    digest = hashlib.sha256(data).hexdigest()
    boxes_or_whole: Sequence[Box | None] = boxes or (None,)
    return tuple([View(data, digest, box, number, is_auto) for box in boxes_or_whole])


def _plain(number: float | None) -> float | None:
    return None if number is None else float(number) + 0.0  # turns -0.0 into 0.0


@dataclass(frozen=True)
class Answer:
    """`results` is a JSON object; the other fields identify what produced it."""

    bundle_id: str
    gallery: str
    gallery_version: str
    query: Query
    results: bytes
    cached: bool
    stages: Stages

    @cached_property
    def timings(self) -> dict[str, float]:
        """The milliseconds of each stage."""
        return {name: round(getattr(self.stages, name), 3) for name in _STAGES}

    def encoded(self, feedback: FeedbackStore | None, like: str = "") -> bytes:
        """The answer as JSON; the results are encoded already and are not parsed again.

        feedback: signs the id of the answer, if the service accepts feedback.
        like: the key of the item of the URL that was searched with.
        """
        head = to_json(
            {
                "bundle_id": self.bundle_id,
                "gallery": self.gallery,
                "gallery_version": self.gallery_version,
                "k": self.query.k,
                "offset": self.query.offset,
                "cached": self.cached,
                "min_score": self.query.min_score,
                "timings_ms": self.timings,
                **({"no_probabilities": WORDS_NOT_CALIBRATED} if self.query.texts else {}),
                **({} if feedback is None else {"answer_id": self._id(feedback, like)}),
            }
        )
        results = self.results
        if SIGNER.get() is not None or PREFIX.get():
            results = with_links(results)
        return head[:-1] + b"," + results[1:]

    def _id(self, feedback: FeedbackStore, like: str) -> str | None:
        """The id for feedback on this answer; None unless the query is one whole image or an item,
        or one text alone in a service that keeps what customers send.

        For several liked items without an image, it is about the first item.
        """
        query, image, text = self.query, "", ""
        if len(query.views) == 1 and isinstance(view := query.views[0], View) and view.box is None:
            image = view.digest
        item = "" if query.views else like or next(iter(query.positives), "")
        is_text = len(query.texts) == 1 and not (query.views or item or query.negatives)
        if is_text and feedback.keeps_words:
            text = " ".join(query.texts[0][0].split())
        elif query.texts or not (image or item):
            return None
        question = Question(self.gallery, self.gallery_version, image, item, text)
        return feedback.sign(question)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    results: the hits or groups, with their probabilities.
    vector, wanted: what was searched for.
    match: whether anything matches, also on an earlier page.
    facets: the requested counts.
    guaranteed: the fields about what the answer guarantees.
    """

    query: Query
    results: Results
    vector: NDArray[np.float32]
    wanted: Wanted
    match: bool
    facets: Mapping[str, Facet]
    guaranteed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranked(self) -> Sequence[Hit] | None:
        """The full list of hits; None if the recall of the search cannot be measured."""
        results, least = self.results, self.query.min_probability
        is_whole = results.groups is None and results.views is None and least is None
        return results.hits if is_whole else None

    def encoded(self, gallery: str, generation: str, image_url: str = "") -> bytes:
        """The cacheable part of an answer as JSON bytes, with the attributes that the query asks
        for. `image_url` is where hits without an image have one.
        """
        start, end = link_parts(gallery, generation)
        results, fields, by = self.results, self.query.fields, self.query.by
        shares, views, imageless = results.shares, self.query.views, {"has_image": False}

        def listed(hits: Sequence[Hit]) -> list[dict[str, Any]]:
            return [
                {
                    "id": hit.id,
                    "key": hit.key,
                    "score": floor(hit.score * 1e6 + 1e-6) / 1e6,  # as `_floored`
                    "probability": None if shares is None else _floored(shares.of(hit), 4),
                    "attributes": hit.attributes
                    if fields is None
                    else chosen(hit.attributes, fields),
                    "image": f"{start}{hit.id}{end}",
                    **({} if hit.has_image else elsewhere(hit) if image_url else imageless),
                }
                for hit in hits
            ]

        def elsewhere(hit: Hit) -> dict[str, Any]:
            address = image_address(image_url, hit.key, hit.attributes)
            return {**imageless, **({"image_url": address} if address else {})}

        def grouped(group: Group) -> dict[str, Any]:
            return {
                "value": group.value,
                "score": _floored(group.score, 6),
                "probability": None if shares is None else _floored(shares.of_group(group, by), 4),
                "hits": listed(group.hits),
            }

        hits = listed(results.hits)
        groups = None if results.groups is None else [*map(grouped, results.groups)]
        if (numbers := results.views) is not None:
            for row, hit in zip(hits, results.hits, strict=True):
                row["view"] = views[numbers[hit.id]].described()
            for row, group in zip(groups or [], results.groups or [], strict=True):
                row["view"] = views[numbers[group.hits[0].id]].described()
        answer: dict[str, Any] = {
            "count": len(hits if groups is None else groups),
            "match": self.match,
            "no_match_probability": None if results.none is None else _floored(results.none, 4),
            "hits": hits,
            "groups": groups,
            **self.guaranteed,
        }
        if self.facets:
            answer["facets"] = {name: facet.described() for name, facet in self.facets.items()}
        return to_json(answer)


def chosen(
    attributes: Mapping[str, AttributeValue], fields: Sequence[str]
) -> dict[str, AttributeValue]:
    """Those of the attributes that `fields` names, in its order."""
    return {name: attributes[name] for name in fields if name in attributes}


def _floored(value: float, digits: int) -> float:
    """Round down, so probabilities sum to at most 1 and a hit passes its score as `min_score`."""
    scale = 10.0**digits
    return floor(value * scale + 1e-6) / scale


def nearness(distinct: Distinct, gallery: VectorStore | GalleryView) -> float | None:
    """The cosine at which items count as near-duplicates; None unless `distinct` is "near"."""
    if distinct != "near":
        return None
    # A gallery on Milvus refuses the search later, with the reason. A gallery's own threshold
    # depends on all its items, so a caller with a filter gets the default.
    return near_score(gallery) if isinstance(gallery, Gallery) else LEAST_SCORE
