"""How likely a hit is right, judged by the gallery that answers: what is fitted, kept and used.

    GENERATION/calibration.json     curves that were fitted to this generation

A curve comes from the best of three sources: the golden set of the gallery; its own labelled items,
each of which searches among the others; the curves of the bundle. The file is derived from the rest
of the generation: without it the first change or compaction makes it again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from embedder.calibration import (
    CANDIDATES,
    MIN_SEARCHES,
    Calibration,
    Curve,
    Searches,
    fit_curve,
)
from embedder.errors import CalibrationError
from embedder.types import AttributeValue, Embeddings, Hit
from indexer.types import Group, Item, Progress, SearchOptions

CALIBRATION = "calibration.json"
"""The file of a calibration, in the folder of its generation."""

PRODUCTS = ("product", "class")
"""Attributes that name the product of an item, the best first: what an upload says, and the folder
that a build found the image in."""

MIN_VIEWS = 3
"""Images of a product from which on its items can search for each other. An item cannot find
itself: with two images it would have only half of the matches that a customer has."""

MIN_PRODUCTS = 16
"""With fewer products a curve is as much about them as about the gallery."""

DEFAULT_PRIOR = 0.1
"""The probability that a product which is searched for is not in the gallery, before the search."""

_QUERIES = 1000
_SAMPLED = 2000
_AT_ONCE = 32
_REACH = 200  # hits of a fitted search: the candidates, and the own product to look past
_COPY = 1 - 1e-4  # a hit with this cosine is the query itself, or a copy of it
_CHANGED = 0.2  # part of the items that may come or go before the curve is fitted again

Source = Literal["golden", "gallery", "bundle"]

Labelled = tuple[NDArray[np.float32], str, Callable[[Hit], bool] | None]
"""A photo of a golden set: its vector (D,), its label, and what tells a right hit; None if nothing
is right.
"""


class Fit(BaseModel, frozen=True):
    """A curve and what it was fitted to: `searches` of `items` items, half of them for absent
    products, with `wrong_hits` among the ten best. `errors`: the expected calibration error of the
    best hit and of the ten best, each half of the searches judged by the curve of the other.
    """

    curve: Curve
    items: int
    searches: int
    wrong_hits: int
    errors: tuple[float, float] | None


class GalleryCalibration(BaseModel, frozen=True):
    """What is known of one generation, when it had `items` items: `labelled` ones have `product`,
    the attribute that names their product, with `products` values. `gallery` and `golden` are the
    curves of these sources, or else the reason why there is none; `golden` may be of other `items`.
    """

    items: int
    product: str | None = None
    products: int = 0
    labelled: int = 0
    gallery: Fit | str
    golden: Fit | str = "The gallery has no golden set, or it was not run"

    @property
    def views(self) -> float:
        """Images of a product, on average."""
        return self.labelled / max(self.products, 1)

    def is_outdated(self, items: int) -> bool:
        """Whether so many items have come or gone that the curve may have moved."""
        return _is_changed(self.items, items)

    @property
    def current(self) -> Fit | str:
        """The curve of the golden set, unless the gallery has become another one since."""
        golden = self.golden
        if isinstance(golden, str) or not _is_changed(golden.items, self.items):
            return golden
        return (
            f"The golden set was run when the gallery had {golden.items:,} items, now it has "
            f"{self.items:,}: run it again"
        )


def _is_changed(before: int, now: int) -> bool:
    return abs(now - before) > _CHANGED * before


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The curve that a gallery answers with, and the best of the sources that it is from.

    `reason` says why a better source was not used. `fit` has the figures of a fit to the gallery.
    """

    source: Source
    curve: Curve
    product: str
    products: int
    views: float
    fit: Fit | None = None
    reason: str | None = None


def choose(
    stored: GalleryCalibration | None, bundle: Calibration | None, no_calibration: str | None
) -> Calibrated | str:
    """The best source that there is; else why there is none."""
    if stored is None:
        return "The gallery was not calibrated yet: kinlens-index calibrate"
    if stored.product is None:
        names = " or ".join(f"`{name}`" for name in PRODUCTS)
        return (
            f"No attribute says which items show one product. Give items an attribute {names}, "
            "or name another one: kinlens-index calibrate --product"
        )
    about = (stored.product, stored.products, stored.views)
    golden = stored.current
    if isinstance(golden, Fit):
        return Calibrated("golden", golden.curve, *about, golden)
    if isinstance(stored.gallery, Fit):
        return Calibrated("gallery", stored.gallery.curve, *about, stored.gallery, golden)
    reasons = f"{golden}. {stored.gallery}"
    if bundle is None:
        return f"{reasons}. {no_calibration or 'The bundle has no calibration'}"
    try:
        curve = bundle.curve_for(stored.products, stored.views)
    except CalibrationError as error:
        return f"{reasons}. {error}"
    return Calibrated("bundle", curve, *about, reason=reasons)


class Shares:
    """The probabilities of one search: of hits, of groups, and that none of them is right.

    Args:
        candidates: the best items of the whole gallery, without filter, best first.
        shown: what the answer holds.
        prior: that the product is absent.
    """

    def __init__(
        self, calibrated: Calibrated, prior: float, candidates: Sequence[Hit], shown: Iterable[Hit]
    ) -> None:
        self._name = calibrated.product
        best = candidates[:CANDIDATES]
        self._hits = list({hit.id: hit for hit in (*best, *shown)}.values())
        scores = np.array([hit.score for hit in self._hits])
        numbers: dict[object, int] = {}
        products = np.array(
            [numbers.setdefault(_product_of(hit, self._name), len(numbers)) for hit in self._hits]
        )
        found = calibrated.curve.shares(scores, products, len(best), prior)
        self._shares: list[float] = found.tolist()
        self._products: dict[object, float] = {}
        for hit, share in zip(self._hits, self._shares, strict=True):
            product = _product_of(hit, self._name)
            self._products[product] = self._products.get(product, 0.0) + share

    def of(self, hit: Hit) -> float:
        """That a hit is right: that its product is the one that was asked for."""
        return min(1.0, self._products[_product_of(hit, self._name)])

    def of_group(self, group: Group, by: str) -> float:
        """That the product is in a group of items with the same value of attribute `by`."""
        if group.value is None:
            members = {hit.id for hit in group.hits}
            return sum(s for h, s in zip(self._hits, self._shares, strict=True) if h.id in members)
        value = _identity(group.value)
        return sum(
            share
            for hit, share in zip(self._hits, self._shares, strict=True)
            if by in hit.attributes and _identity(hit.attributes[by]) == value
        )

    def of_none(self, hits: Iterable[Hit], groups: Iterable[Group] | None, by: str = "") -> float:
        """That none of these hits, or of these groups, is right."""
        if groups is not None:
            found = sum(self.of_group(group, by) for group in groups)
        else:
            shown = {_product_of(hit, self._name) for hit in hits}
            found = sum(self._products[product] for product in shown)
        return min(max(1.0 - found, 0.0), 1.0)


def _product_of(hit: Hit, name: str) -> object:
    value = hit.attributes.get(name)
    return ("item", hit.id) if value is None else _identity(value)


def _identity(value: AttributeValue) -> object:
    return isinstance(value, bool), value  # 1 and true are two values


# Fitting


class Searched(Protocol):
    """What a fit needs of a gallery."""

    @property
    def size(self) -> int: ...

    def sample(self, count: int) -> tuple[list[Item], Embeddings]: ...

    def product_counts(
        self, name: str, values: Sequence[AttributeValue]
    ) -> tuple[int, int, Mapping[AttributeValue, int]]: ...

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]: ...


def fit_gallery(
    gallery: Searched, product: str | None = None, on_progress: Progress = lambda _: None
) -> GalleryCalibration:
    """Let up to 1,000 labelled items search among the others, and fit a curve to what they find.

    `product` names the attribute of the product; by default the first of `PRODUCTS` that half of
    the items have. Raises: GalleryError, InvalidParameterError.
    """
    items, vectors = gallery.sample(_SAMPLED)
    size = gallery.size
    name = product or product_attribute(items)
    if name is None:
        return GalleryCalibration(items=size, gallery="No attribute names the product of an item")
    wanted = [n for n, item in enumerate(items) if name in item.attributes]
    rng = np.random.default_rng(0)
    chosen = np.sort(rng.permutation(wanted)[:_QUERIES]).astype(np.int64).tolist()
    values = list({items[n].attributes[name] for n in chosen})
    products, labelled, counts = gallery.product_counts(name, values)
    found = GalleryCalibration(
        items=size, product=name, products=products, labelled=labelled, gallery=""
    )
    repeated = [n for n in chosen if counts.get(items[n].attributes[name], 0) >= MIN_VIEWS]
    reason = ""
    if products < MIN_PRODUCTS:
        reason = f"It has {products:,} products; at least {MIN_PRODUCTS} are needed"
    elif len(repeated) < MIN_SEARCHES or found.views < MIN_VIEWS:
        reason = (
            f"It has {found.views:.1f} images of a product; its items can search for each other "
            f"with {MIN_VIEWS} or more"
        )
    if reason:
        return found.model_copy(update={"gallery": reason})
    asked = _search_own(gallery, items, vectors, repeated, name, counts, on_progress)
    return found.model_copy(update={"gallery": _fitted(asked, size)})


def fit_golden(
    gallery: Searched,
    product: str,
    queries: Iterable[Labelled],
) -> Fit | str:
    """Fit a curve to what labelled photos find. Else why it cannot be fitted.

    Raises: GalleryError.
    """
    asked: list[list[Searches]] = []
    labels: set[str] = set()
    for vector, label, is_right in queries:
        [hits] = gallery.search(vector[np.newaxis], _REACH)
        others = [hit for hit in hits if hit.score < _COPY]
        right = [is_right is not None and is_right(hit) for hit in others]
        trials = _trials(others, right, product, 0.0, len(hits) < _REACH)
        asked.append(trials[: 1 if is_right is None else 2])
        labels |= set() if is_right is None else {label}
    if len(labels) < MIN_PRODUCTS:
        return f"The golden set has {len(labels)} products; at least {MIN_PRODUCTS} are needed"
    return _fitted(asked, gallery.size)


def product_attribute(items: Sequence[Item]) -> str | None:
    """The first of `PRODUCTS` that half of the items have, with several values."""
    for name in PRODUCTS:
        values = [item.attributes[name] for item in items if name in item.attributes]
        if 2 * len(values) >= len(items) and len(set(values)) > 1:
            return name
    return None


def _search_own(
    gallery: Searched,
    items: Sequence[Item],
    vectors: Embeddings,
    chosen: Sequence[int],
    name: str,
    counts: Mapping[AttributeValue, int],
    on_progress: Progress,
) -> list[list[Searches]]:
    """What each chosen item finds among the others, and among those of other products."""
    asked: list[list[Searches]] = []
    most = max(counts[items[n].attributes[name]] for n in chosen)
    reach = min(CANDIDATES + 1 + most, _REACH)
    for start in range(0, len(chosen), _AT_ONCE):
        some = list(chosen[start : start + _AT_ONCE])
        for n, hits in zip(some, gallery.search(vectors[some], reach), strict=True):
            own = items[n].attributes[name]
            others = [h for h in hits if h.id != items[n].id and h.score < _COPY]
            right = [_product_of(hit, name) == _identity(own) for hit in others]
            handicap = log(counts[own] / (counts[own] - 1))
            asked.append(_trials(others, right, name, handicap, len(hits) < reach))
        on_progress(len(some))
    return asked


def _trials(
    hits: Sequence[Hit], right: Sequence[bool], name: str, handicap: float, is_all: bool
) -> list[Searches]:
    """A search without the right product, and as it is. Nothing if the right product has so many
    items that too few others were found; `is_all`: the gallery has no more items.
    """
    wrong = [hit for hit, good in zip(hits, right, strict=True) if not good]
    if len(wrong) < CANDIDATES and not is_all:
        return []
    absent = _search(wrong, [False] * len(wrong), name, 0.0, True)
    return [absent, _search(hits, right, name, handicap, False)]


def _search(
    hits: Sequence[Hit], right: Sequence[bool], name: str, handicap: float, absent: bool
) -> Searches:
    best = hits[:CANDIDATES]
    scores = np.full((1, CANDIDATES), -np.inf)
    scores[0, : len(best)] = [hit.score for hit in best]
    codes: dict[object, int] = {}
    products = np.full((1, CANDIDATES), -1, np.int64)
    products[0, : len(best)] = [
        codes.setdefault(_product_of(hit, name), len(codes)) for hit in best
    ]
    is_right = np.zeros((1, CANDIDATES), bool)
    is_right[0, : len(best)] = right[:CANDIDATES]
    return Searches(scores, products, is_right, np.array([absent]), np.array([handicap]))


def _fitted(asked: Sequence[Sequence[Searches]], items: int) -> Fit | str:
    """The curve of the searches of each query, in a gallery of so many items, with its error on
    queries that it was not fitted to.
    """
    usable = [
        (number, one)
        for number, trials in enumerate(asked)
        for one in trials
        if np.isfinite(one.scores[0, 0])
    ]
    if not usable:
        return "No search found anything"
    searches = Searches.joined([one for _, one in usable])
    is_even = np.array([number % 2 == 0 for number, _ in usable])
    try:
        curve = fit_curve(searches)
    except CalibrationError as error:
        return f"{error}"
    return Fit(
        curve=curve,
        items=items,
        searches=len(searches),
        wrong_hits=searches.wrong,
        errors=_crossed_errors(searches, is_even),
    )


def _crossed_errors(searches: Searches, is_even: NDArray[np.bool_]) -> tuple[float, float] | None:
    """The searches of every other query judged by the curve of the rest, and the reverse."""
    errors = []
    for fitted in (is_even, ~is_even):
        try:
            errors.append(searches[~fitted].error(fit_curve(searches[fitted]), 0.5))
        except CalibrationError:
            return None
    best, ten = np.mean(errors, axis=0).round(4).tolist()
    return best, ten
