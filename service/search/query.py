"""What is asked of a search: one value, with a digest that names all of it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from embedder.preprocess import Box
from embedder.types import ItemId
from indexer.filters.tree import Filter
from indexer.types import Grouping

Combine = Literal["mean", "separate"]


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """How much one request may ask for; `max_k` also bounds `offset + k`.

    max_views: images and crops that are looked for, in all queries of the request together.
    """

    default_k: int = 20
    max_k: int = 10_000
    max_images: int = 32
    max_crops: int = 16
    max_queries: int = 64
    max_batch_hits: int = 100_000
    max_views: int = 256


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
    distinct: bool = False
    exact: bool = False

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of everything but the gallery: equal for equal questions."""
        parts = (sorted((view.digest, view.box or ()) for view in self.views), self._rest)
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
