"""Search with the queries of a golden set, judge the results, and compare two galleries by them.

The caller embeds the images.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from kinlens.embedder.calibration import Calibration
from kinlens.embedder.errors import (
    BundleError,
    FilterError,
    ImageError,
    InvalidParameterError,
    ItemNotFoundError,
    KinlensError,
)
from kinlens.embedder.sources.names import composed
from kinlens.embedder.types import Hit, first_numbers
from kinlens.golden import GoldenOutcome, GoldenQuery, GoldenRun, Interval, Label, wilson
from kinlens.indexer.filters.tree import Equals
from kinlens.indexer.store import VectorStore
from kinlens.indexer.types import SAME_SCORE, Progress, SearchOptions
from kinlens.quality.answers import best_of_views
from kinlens.quality.golden import MAX_RIGHT, GoldenSet, right_items
from kinlens.quality.guarantee import Labelled
from kinlens.quality.intervals import over_classes
from kinlens.values import AUTO, Scalar, single

if TYPE_CHECKING:
    from kinlens.embedder.session import Embedder

MIN_JUDGED = 20
"""Minimum number of queries with which a golden set decides about a new model."""

_BATCH = 16
_KS = (1, 5, 10)
_TIE_HITS = 16  # extra hits to fetch, so that ties at the last rank are complete
_WORST_SHOWN = 20
_FALSE_MATCHES = 0.01

Vector = NDArray[np.float32]
Embedded = Mapping[str, Vector | KinlensError]
"""The vector (D,) of each query by its sha256; (V, D) of the parts of an image, of which the best
counts; or the error if there is none.
"""


def judge_of(label: Label) -> Callable[[Hit], bool]:
    """A function that returns whether a hit is right."""
    if label.attribute is not None and label.value is not None:
        condition = Equals(label.attribute, label.value)
        return lambda hit: condition.matches(hit.attributes)
    keys = frozenset(map(composed, label.keys))
    return lambda hit: composed(hit.key) in keys


class GoldenChange(BaseModel, frozen=True):
    """Comparison of two galleries on the `judged` queries that have right items in both.

    `change_interval` is that of the change of recall@1, by a paired bootstrap over labels; None for
    fewer than two labels.
    """

    judged: int
    labels: int
    old: GoldenRun
    new: GoldenRun
    old_recall_at_1: float | None
    new_recall_at_1: float | None
    change_interval: Interval | None

    @property
    def decides(self) -> bool:
        """Whether there are enough queries to judge a new model by."""
        return self.judged >= MIN_JUDGED

    def verdict(self, max_loss: float, least: float | None) -> tuple[bool, str]:
        """Whether recall@1 falls by at most `max_loss` and reaches `least`, and a text about it."""
        old, new = self.old_recall_at_1 or 0.0, self.new_recall_at_1 or 0.0
        low, high = self.change_interval or (new - old, new - old)
        text = (
            f"On the golden set: recall@1 {new:.4f} after {old:.4f}, a change of {new - old:+.4f} "
            f"({low:+.4f} to {high:+.4f}, paired), on {self.judged:,} queries of {self.labels:,} "
            f"labels"
        )
        for name, after, before in (
            ("MAP@R", self.new.map_at_r, self.old.map_at_r),
            ("no-match precision", self.new.no_match_precision, self.old.no_match_precision),
        ):
            if after is not None or before is not None:
                text += f"; {name} {_figure(after)} after {_figure(before)}"
        if old - new > max_loss + 1e-9:
            chance = ", which may be chance" if high >= 0 else ""
            return False, f"{text}: {old - new:.4f} is lost{chance}; {max_loss:.4f} is allowed."
        if least is not None and new < least:
            return False, f"{text}: at least {least:.4f} is required."
        return True, f"{text}."


def _figure(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def embedded(
    golden: GoldenSet,
    queries: Sequence[GoldenQuery],
    embedder: "Embedder",
    on_progress: Progress | None = None,
) -> dict[str, Vector | KinlensError]:
    """Embed the queries. An image that is refused, or was removed since, gets its error, and so do
    words that the model cannot read.

    Raises: GalleryCorruptError.
    """
    found: dict[str, Vector | KinlensError] = {}
    for start in range(0, len(queries), _BATCH):
        batch = queries[start : start + _BATCH]
        pixels: dict[str, list[NDArray[np.uint8]]] = {}
        for query in batch:
            try:
                pixels[query.sha256] = _pixels(golden, query, embedder)
            except (ImageError, ItemNotFoundError) as error:
                found[query.sha256] = error
        images = [image for parts in pixels.values() for image in parts]
        vectors = iter(embedder.whole.embed(np.stack(images)) if images else ())
        for query in batch:
            if query.sha256 in pixels:
                parts = [next(vectors) for _ in pixels[query.sha256]]
                found[query.sha256] = _joined(query, parts, embedder)
        if on_progress is not None:
            on_progress(len(batch))
    return found


def _pixels(golden: GoldenSet, query: GoldenQuery, embedder: "Embedder") -> list[NDArray[np.uint8]]:
    """The parts of the image of a query; none for words alone.

    Raises: ImageError, ItemNotFoundError, GalleryCorruptError.
    """
    data = golden.image(query.sha256)
    if query.image is None:
        return []
    parts = embedder.parts(data) if isinstance(query.crop, str) else [query.crop]
    return [embedder.preprocess(data, box) for box in parts]


def _joined(
    query: GoldenQuery, parts: Sequence[Vector], embedder: "Embedder"
) -> Vector | KinlensError:
    """What to search with for whole vectors of the parts of an image, and the words of a query."""
    vectors = np.stack(parts) if parts else None
    if query.texts:
        try:
            words = embedder.words()
            texts = words.embed([each.text for each in query.texts])
            vectors = words.joined(vectors, texts, [each.weight for each in query.texts])
        except (BundleError, InvalidParameterError) as error:
            return error
    assert vectors is not None
    vectors = first_numbers(vectors, embedder.dim)
    return vectors if len(vectors) > 1 else vectors[0]


def labelled(
    store: VectorStore, queries: Iterable[GoldenQuery], vectors: Embedded, product: str
) -> Iterator[Labelled]:
    """The queries that are photos with a label by product.

    A label with keys accepts every image of the products of these items, by the attribute
    `product`. Queries whose items were removed are skipped, as are labels with another attribute,
    which do not identify a product; and words and several parts of a photo, whose scores are no
    cosines of one photo.
    """
    for query in queries:
        vector = vectors.get(query.sha256)
        if not isinstance(vector, np.ndarray) or query.texts or query.crop == AUTO:
            continue
        if query.no_match:
            yield Labelled(vector, query.wanted, None)
        elif query.keys:
            items = [*store.stored(query.keys).values()]
            stored = [single(item.attributes.get(product)) for item in items]
            named = {value for value in stored if value is not None}
            label = ", ".join(sorted(map(str, named))) or query.wanted
            if items:
                yield Labelled(vector, label, _of_products(query, product, named), items[0])
        elif query.attribute == product and query.value is not None:
            with contextlib.suppress(FilterError):  # the attribute no longer exists
                for item in store.page(0, 1, Equals(product, query.value)).items:
                    yield Labelled(vector, str(query.value), judge_of(query), item)


def _of_products(query: GoldenQuery, product: str, named: set[Scalar]) -> Callable[[Hit], bool]:
    is_named, known = judge_of(query), [Equals(product, value) for value in named]
    return lambda hit: is_named(hit) or any(one.matches(hit.attributes) for one in known)


def ask(store: VectorStore, query: GoldenQuery, vector: Vector | KinlensError) -> GoldenOutcome:
    """Search for a query in the same way as for customers, through the index.

    Raises: GalleryError, InvalidParameterError for a vector of another length.
    """
    if isinstance(vector, KinlensError):
        is_image = isinstance(vector, ImageError | ItemNotFoundError)
        what = "image" if is_image else "query"
        return GoldenOutcome(query=query, problem=f"Its {what} cannot be used: {vector}")
    right = 0
    if not query.no_match:
        with contextlib.suppress(FilterError):  # the gallery was swapped, the attribute is missing
            right = right_items(query, store)
        if not 1 <= right <= MAX_RIGHT:
            return GoldenOutcome(
                query=query, problem=f"{right:,} items of the gallery match its label."
            )
    hits = _hits(store, vector, max(_KS) if right else 1)
    best: dict[str, Any] = {}
    if hits:
        best = {"best_key": hits[0].key, "best_id": hits[0].id, "best_score": hits[0].score}
    rank, precision = None, 0.0
    if right:
        rank, precision = _judged(query, hits, right)
    # A deeper search, for MAP@R. It may also improve the first ranks of an approximate index, so
    # the rank of the normal search takes precedence.
    if right > max(_KS):
        later, precision = _judged(query, _hits(store, vector, right), right)
        if rank is None and later is not None:
            rank = max(later, max(_KS) + 1)
    return GoldenOutcome(query=query, right=right, rank=rank, precision=precision, **best)


def _judged(query: GoldenQuery, hits: Sequence[Hit], right: int) -> tuple[int | None, float]:
    return ranked([hit.score for hit in hits], [*map(judge_of(query), hits)], right)


def _hits(store: VectorStore, vector: Vector, least: int) -> list[Hit]:
    """The best `least` hits, and further hits that tie with the last one."""
    hits: list[Hit] = []
    for k in (least + _TIE_HITS, 4 * (least + _TIE_HITS), 16 * (least + _TIE_HITS)):
        if vector.ndim == 1:
            [hits] = store.search(vector[np.newaxis], k)
        else:
            best = best_of_views(partial(store.search, vector), k, SearchOptions())
            hits = [hit for hit, _ in best]
        if len(hits) < k or hits[-1].score < hits[least - 1].score - 2 * SAME_SCORE:
            break
    return hits


def ranked(
    scores: Sequence[float], is_right: Sequence[bool], right: int
) -> tuple[int | None, float]:
    r"""The rank, from 1, of the first right hit, and the average precision at R = `right`:

    .. math:: \frac{1}{R} \sum_{i = 1}^{R} P(i) \, [\text{hit } i \text{ is right}]

    with P(i) the precision of the i best hits. A wrong hit ranks before a right one unless its
    score is lower by more than 1e-5, as in the evaluation of a training.

    References: A Metric Learning Reality Check (MAP@R), https://arxiv.org/abs/2003.08505
    """
    lowered = [
        (SAME_SCORE * good - score, good) for score, good in zip(scores, is_right, strict=True)
    ]
    ranks = [rank for rank, (_, good) in enumerate(sorted(lowered), 1) if good]
    precision = sum(found / rank for found, rank in enumerate(ranks, 1) if rank <= right)
    return ranks[0] if ranks else None, precision / right


def threshold_of(calibration: Calibration | None) -> float | None:
    """The minimum score of a match: the threshold with a false match rate nearest to 1 %, among
    those of the model; None without one.
    """
    usable = [
        one for one in (calibration.thresholds if calibration else ()) if one.search_score < 1
    ]
    if not usable:
        return None
    return min(usable, key=lambda one: abs(log(one.false_matches / _FALSE_MATCHES))).search_score


@dataclass(frozen=True, slots=True)
class GoldenResults:
    """The results of a golden set on a gallery, in the order of the queries.

    `version` is the version of the gallery before the first query.
    """

    bundle_id: str
    generation: str
    version: str
    items: int
    own_pictures: int
    outcomes: list[GoldenOutcome] = field(default_factory=list)

    @classmethod
    def begin(cls, store: VectorStore, queries: Sequence[GoldenQuery]) -> "GoldenResults":
        """Read the facts of the gallery before the first query."""
        own = len(store.contents([query.image for query in queries if query.image]))
        return cls(store.bundle_id, store.generation, store.version, store.size, own)

    @classmethod
    def of(
        cls, store: VectorStore, queries: Sequence[GoldenQuery], vectors: Embedded
    ) -> "GoldenResults":
        """Search for all queries. Raises: the errors of `ask`."""
        begun = cls.begin(store, queries)
        begun.outcomes.extend(ask(store, query, vectors[query.sha256]) for query in queries)
        return begun

    def report(self, threshold: float | None, worst: int = _WORST_SHOWN) -> GoldenRun:
        """The report. Without a `threshold`, the figures that need one are None."""
        judged = [one for one in self.outcomes if one.right]
        nothing = [one for one in self.outcomes if one.query.no_match and not one.problem]
        skipped = [one for one in self.outcomes if one.problem]
        recall = {k: _mean([one.rank is not None and one.rank <= k for one in judged]) for k in _KS}
        first = [one for one in judged if one.rank == 1]
        silent = found = None
        if threshold is not None:
            silent = _mean([one.quality(threshold) for one in nothing])
            found = _mean([one.rank == 1 and one.best_score >= threshold for one in judged])
        bad = [one for one in (*judged, *nothing) if one.quality(threshold) < 1]
        bad.sort(key=lambda one: one.quality(threshold))
        return GoldenRun(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            bundle_id=self.bundle_id,
            generation=self.generation,
            version=self.version,
            items=self.items,
            queries=len(self.outcomes),
            judged=len(judged),
            no_match=len(nothing),
            left_out=len(skipped),
            own_pictures=self.own_pictures,
            recall_at_1=recall[1],
            recall_at_1_interval=wilson(len(first), len(judged)) if judged else None,
            recall_at_5=recall[5],
            recall_at_10=recall[10],
            map_at_r=_mean([one.precision for one in judged]),
            threshold=threshold,
            no_match_precision=silent,
            found=found,
            worst=tuple([*bad, *skipped][:worst]),
        )


def _mean(values: Sequence[float]) -> float | None:
    return round(float(np.mean(values)), 6) if values else None


def change(
    old: GoldenResults, new: GoldenResults, old_threshold: float | None, new_threshold: float | None
) -> GoldenChange:
    """Compare results of the same queries, in the same order, each with the threshold of its
    model.
    """
    pairs = [
        (before, after)
        for before, after in zip(old.outcomes, new.outcomes, strict=True)
        if before.right and after.right
    ]
    first = [(before.rank == 1, after.rank == 1) for before, after in pairs]
    labels = [before.query.wanted for before, _ in pairs]
    return GoldenChange(
        judged=len(pairs),
        labels=len(set(labels)),
        old=old.report(old_threshold),
        new=new.report(new_threshold),
        old_recall_at_1=_mean([before for before, _ in first]),
        new_recall_at_1=_mean([after for _, after in first]),
        change_interval=over_classes([after - before for before, after in first], labels),
    )
