"""Compare two galleries of the same items by different models, before one replaces the other."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from statistics import median
from time import perf_counter

import numpy as np
from pydantic import BaseModel

from kinlens.embedder.errors import ItemNotFoundError
from kinlens.embedder.types import SHORT, Hit
from kinlens.golden import Interval, wilson
from kinlens.indexer.gallery import Gallery
from kinlens.quality.calibration import identity
from kinlens.quality.intervals import over_classes
from kinlens.reports import Report
from kinlens.values import AttributeValue, Scalar

_SEED = 0
_SAMPLED = 10_000  # items to draw, from which those in both galleries are taken


class Side(BaseModel, frozen=True):
    """One of the two galleries.

    Recalls are in [0, 1], or None if no item can be judged. The interval is Wilson's.
    `ms_per_query` is the median latency of single searches, in milliseconds.
    """

    bundle_id: str
    generation: str
    items: int
    recall_at_1: float | None
    recall_at_1_interval: Interval | None
    recall_at_k: float | None
    ms_per_query: float | None


class Comparison(Report, BaseModel, frozen=True):
    """Results of two galleries for the same queries, which are stored items.

    The query item itself is excluded from its results.

    Attributes:
        class_attribute: a hit is right if it has the query's value of this attribute.
        judged: number of queries with another item of their class, of `classes` classes.
        change_interval: of recall@1 of the new gallery minus that of the old one. A bootstrap over
            classes, because images of one class are similar; None for fewer than two classes.
        overlap_at_k: fraction of the top `k` hits that both galleries return.
    """

    class_attribute: str
    k: int
    queries: int
    judged: int
    classes: int
    change_interval: Interval | None
    old: Side
    new: Side
    overlap_at_k: float | None

    def lines(self) -> Iterator[str]:
        """What was compared, and a table of both sides."""
        yield (
            f"{self.judged:,} of {self.queries:,} queries have another item with their "
            f"{self.class_attribute}, of {self.classes:,}."
        )
        sides = (self.old, self.new)
        yield f"{'':12}  {'old':>12}  {'new':>12}"
        for name, values in (
            ("bundle", [side.bundle_id[:SHORT] for side in sides]),
            ("items", [f"{side.items:,}" for side in sides]),
            ("recall@1", [_figure(side.recall_at_1) for side in sides]),
            (f"recall@{self.k}", [_figure(side.recall_at_k) for side in sides]),
            ("ms per query", [_figure(side.ms_per_query) for side in sides]),
        ):
            yield f"{name:12}  {values[0]:>12}  {values[1]:>12}"
        if self.change_interval is not None:
            low, high = self.change_interval
            yield f"recall@1 changes by {low:+.4f} to {high:+.4f} (95 %)."
        if self.overlap_at_k is not None:
            yield f"{self.overlap_at_k:.1%} of the first {self.k} hits are the same."


def compare(
    old: Gallery,
    new: Gallery,
    class_attribute: str = "class",
    k: int = 10,
    sample: int = 1000,
    asked: Collection[str] | None = None,
) -> Comparison:
    """Search both galleries for the neighbours of up to `sample` items that both have.

    With `asked`, only the items with these keys are queries; all items can be found.

    Raises: GalleryCorruptError.
    """
    classes = _classes(old, new, class_attribute, sample, asked)
    keys = [*classes]
    known = {value for value in classes.values() if isinstance(value, Scalar)}
    _, counts = old.product_counts(class_attribute, [*known])
    sizes = {identity(value): count for value, count in counts.items()}
    answers, times = zip(*(_answers(gallery, keys, k) for gallery in (old, new)), strict=True)
    judged = [
        key
        for key in keys
        if sizes.get(identity(classes[key]), 0) > 1 and all(key in found for found in answers)
    ]
    right = [
        [_right(found[key], class_attribute, classes[key]) for key in judged] for found in answers
    ]
    sides = [_side(*side) for side in zip((old, new), right, times, strict=True)]
    change = [any(now[:1]) - any(before[:1]) for before, now in zip(*right, strict=True)]
    names = [identity(classes[key]) for key in judged]
    return Comparison(
        class_attribute=class_attribute,
        k=k,
        queries=len(keys),
        judged=len(judged),
        classes=len(set(names)),
        change_interval=over_classes(change, names),
        old=sides[0],
        new=sides[1],
        overlap_at_k=_overlap(answers[0], answers[1]),
    )


def _classes(
    old: Gallery, new: Gallery, name: str, sample: int, asked: Collection[str] | None
) -> dict[str, AttributeValue | None]:
    """The classes of up to `sample` items in both galleries, by key.

    They are drawn from a limited number of items, so memory does not grow with the gallery.
    """
    if asked is None:
        items, _ = old.sample(max(_SAMPLED, sample))
    else:
        items = [*old.stored(sorted(asked)).values()]
    known = new.stored([item.key for item in items])
    common = [item for item in items if item.key in known]
    if len(common) > sample:
        chosen = np.random.default_rng(_SEED).choice(len(common), sample, replace=False)
        common = [common[number] for number in np.sort(chosen)]
    return {item.key: item.attributes.get(name) for item in common}


def _answers(
    gallery: Gallery, keys: Sequence[str], k: int
) -> tuple[dict[str, list[Hit]], list[float]]:
    """The best `k` other items for each key, and the latency of each search in milliseconds."""
    answers: dict[str, list[Hit]] = {}
    times = []
    for key in keys:
        with contextlib.suppress(ItemNotFoundError):  # removed in the meantime
            [entry] = gallery.entries([key])
            started = perf_counter()
            [hits] = gallery.search(entry.vector[None], k + 1)
            times.append(1e3 * (perf_counter() - started))
            answers[key] = [hit for hit in hits if hit.key != key][:k]
    return answers, times


def _right(hits: Sequence[Hit], name: str, wanted: AttributeValue | None) -> list[bool]:
    return [identity(hit.attributes.get(name)) == identity(wanted) for hit in hits]


def _side(gallery: Gallery, right: Sequence[list[bool]], times: Sequence[float]) -> Side:
    first = [any(marks[:1]) for marks in right]
    within = [any(marks) for marks in right]
    return Side(
        bundle_id=gallery.bundle_id,
        generation=gallery.generation,
        items=gallery.size,
        recall_at_1=round(float(np.mean(first)), 6) if first else None,
        recall_at_1_interval=wilson(sum(first), len(first)) if first else None,
        recall_at_k=round(float(np.mean(within)), 6) if within else None,
        ms_per_query=round(median(times), 3) if times else None,
    )


def _overlap(old: dict[str, list[Hit]], new: dict[str, list[Hit]]) -> float | None:
    parts = []
    for key in old.keys() & new.keys():
        ours, theirs = ({hit.key for hit in side[key]} for side in (old, new))
        if ours or theirs:
            parts.append(len(ours & theirs) / max(len(ours), len(theirs)))
    return round(float(np.mean(parts)), 6) if parts else None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
