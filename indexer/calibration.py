"""How likely a hit is right, judged by the gallery that answers: what is fitted, kept and used.

    GENERATION/calibration.json     curves that were fitted to this generation

A curve comes from the best of three sources: the golden set of the gallery; its own labelled items,
each of which searches among the others; the curves of the bundle. The file is derived from the rest
of the generation: without it the first change or compaction makes it again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from kinlens.embedder.calibration import (
    CANDIDATES,
    MIN_SEARCHES,
    NEAREST,
    Calibration,
    Curve,
    Searches,
    fit_curve,
)
from kinlens.embedder.errors import CalibrationError
from kinlens.embedder.types import Embeddings, Hit, ItemId
from kinlens.indexer.types import Group, Item, Progress, SearchOptions
from kinlens.values import Scalar, single, values_in

CALIBRATION = "calibration.json"
"""The file of a calibration, in the folder of its generation."""

PRODUCTS = ("product", "class")
"""Attributes that name the product of an item, the best first: what an upload says, and the folder
that a build found the image in."""

MIN_VIEWS = 3
"""Only from this many images on may an item stand for a product of the same size. With two images
it would find half of what a customer finds."""

MIN_PRODUCTS = 16
"""With fewer products a curve is as much about them as about the gallery."""

LABELLED = 0.95
"""The part of the items that need their product named: an unlabelled image of a product would count
as a wrong answer."""

SAMPLED = 2000
"""Items that stand for all of them."""

DEFAULT_PRIOR = 0.1
"""The probability that a product which is searched for is not in the gallery, before the search."""

_QUERIES = 1000
_AT_ONCE = 32
_REACH = 200  # hits of a fitted search: the candidates, and the own product to look past
_COPY = 1 - 1e-4  # a hit with this cosine is the query itself, or a copy of it
_CHANGED = 0.2  # part of the items that may come or go before the curve is fitted again
_EVEN = 0.9  # part of the products with about as many images as the average, for a bundle's curve
_MISSED, _FEW = 0.1, 3  # part, and number, of searches that may find nobody to stand for them

Source = Literal["golden", "gallery", "bundle"]

Sizes = Mapping[int, int]
"""From a number of images to the number of products that have so many."""

Labelled = tuple[NDArray[np.float32], str, Callable[[Hit], bool] | None]
"""A photo of a golden set: its vector (D,), its label, and what tells a right hit; None if nothing
is right.
"""


class Fit(BaseModel, frozen=True):
    """A curve and what it was fitted to: `searches` of `items` items (the highest id was `last`),
    half of them for absent products; the others have `wrong_hits` among the ten best. `errors`: the
    expected calibration error of the best hit and of the ten best, each half of the searches judged
    by the curve of the other half.
    """

    curve: Curve
    items: int
    last: ItemId
    searches: int
    wrong_hits: int
    errors: tuple[float, float] | None


class GalleryCalibration(BaseModel, frozen=True):
    """What is known of one generation, when it had `items` items, the highest id of which was
    `last`, after the write `seq`.

    `labelled` items have `product`, the attribute that names their product, with `products` values.
    `is_chosen`: the owner named that attribute. `even`: the part of the products with about as many
    images as the average. `gallery` and `golden` are the curves of these sources, or else the
    reason why there is none; `golden` may be of other `items`.
    """

    items: int
    last: ItemId
    seq: int = -1
    product: str | None = None
    is_chosen: bool = False
    products: int = 0
    labelled: int = 0
    even: float = 0.0
    gallery: Fit | str
    golden: Fit | str = "The gallery has no golden set, or it was not run"

    @property
    def views(self) -> float:
        """Images of a product, on average."""
        return self.labelled / max(self.products, 1)

    @property
    def is_labelled(self) -> bool:
        """Whether enough items name their product."""
        return self.labelled >= LABELLED * self.items


def is_changed(part: float) -> bool:
    """Whether a curve is outdated after this part of its items was added or removed."""
    return part > _CHANGED


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
    if not stored.is_labelled:
        return (
            f"{stored.labelled:,} of {stored.items:,} items have the attribute "
            f"`{stored.product}`, which names their product; at least {LABELLED:.0%} are needed. "
            "Give the others one too, then run kinlens-index calibrate"
        )
    about = (stored.product, stored.products, stored.views)
    golden = stored.golden
    if isinstance(golden, Fit):
        return Calibrated("golden", golden.curve, *about, golden)
    if isinstance(stored.gallery, Fit):
        return Calibrated("gallery", stored.gallery.curve, *about, stored.gallery, golden)
    reasons = f"{golden}. {stored.gallery}"
    if bundle is None:
        return f"{reasons}. {no_calibration or 'The bundle has no calibration'}"
    if stored.even < _EVEN:
        return (
            f"{reasons}. The curves of the bundle are for products with equally many images, and "
            f"{1 - stored.even:.0%} of the products have far more or fewer than the average of "
            f"{stored.views:.1f}. Label a golden set"
        )
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
            if value in map(_identity, values_in(hit.attributes.get(by)))
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
    value = single(hit.attributes.get(name))
    return ("item", hit.id) if value is None else _identity(value)


def _identity(value: Scalar) -> object:
    return isinstance(value, bool), value  # 1 and true are two values


# Fitting


class Searched(Protocol):
    """What a fit needs of a gallery."""

    @property
    def size(self) -> int: ...

    def sample(self, count: int) -> tuple[list[Item], Embeddings]: ...

    @property
    def last_id(self) -> ItemId: ...

    def product_counts(
        self, name: str, values: Sequence[Scalar]
    ) -> tuple[Sizes, Mapping[Scalar, int]]: ...

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
    items, vectors = gallery.sample(SAMPLED)
    size, last = gallery.size, gallery.last_id
    name = product or product_attribute(items)
    if name is None:
        reason = "No attribute names the product of an item"
        return GalleryCalibration(items=size, last=last, gallery=reason)
    named = {n: single(item.attributes.get(name)) for n, item in enumerate(items)}
    names = {n: value for n, value in named.items() if value is not None}
    sizes, counts = gallery.product_counts(name, [*{*names.values()}])
    names = {n: value for n, value in names.items() if value in counts}  # the rest has gone since
    products, images = sum(sizes.values()), sum(n * count for n, count in sizes.items())
    mean = images / max(products, 1)
    even = sum(count for n, count in sizes.items() if mean / NEAREST <= n <= mean * NEAREST)
    found = GalleryCalibration(
        items=size,
        last=last,
        product=name,
        is_chosen=product is not None,
        products=products,
        labelled=images,
        even=even / max(products, 1),
        gallery="",
    )
    if products < MIN_PRODUCTS:
        reason = f"It has {products:,} products; at least {MIN_PRODUCTS} are needed"
        return found.model_copy(update={"gallery": reason})
    stand_ins = _stand_ins(names, counts, sizes)
    if len({names[n] for n, _ in stand_ins}) < MIN_PRODUCTS or len(stand_ins) < MIN_SEARCHES:
        reason = (
            f"Its products have {mean:.1f} images on average; at least {MIN_PRODUCTS} products "
            f"need {MIN_VIEWS} images or more, or more images than the others"
        )
        return found.model_copy(update={"gallery": reason})
    asked = _search_own(gallery, items, vectors, stand_ins, name, names, counts, on_progress)
    return found.model_copy(update={"gallery": _fitted(asked, size, last)})


def _stand_ins(
    products: Mapping[int, Scalar], counts: Mapping[Scalar, int], sizes: Sizes
) -> list[tuple[int, int]]:
    """Which items search, each with the number of images that its product shall have.

    Customers ask for a product of one image as often as for one of twelve. An item cannot find
    itself, so it stands for a photo of a product with fewer images: the other images of its own
    product are left out of what it finds. Where fewer than `MIN_PRODUCTS` have more images, an item
    stands for a product with as many. Ends early when too few products have somebody to stand for
    them, since the rest would be another mixture.

    Args:
        products: of each item, by its place.
        counts: the images of each product.
        sizes: how many products have so many images.
    """
    rng = np.random.default_rng(0)
    turns: dict[Scalar, int] = {}
    order = []
    for place in rng.permutation([*products]).tolist():
        turns[products[place]] = turns.get(products[place], 0) + 1
        order.append((turns[products[place]], place))
    order.sort(key=lambda one: one[0])  # every product once, in any order, then each again
    ranked = [place for _, place in order]

    def able(size: int) -> Iterator[int]:
        larger = [place for place in ranked if counts[products[place]] > size]
        if size >= MIN_VIEWS and len({products[place] for place in larger}) < MIN_PRODUCTS:
            larger = [place for place in ranked if counts[products[place]] >= size]
        return iter(larger)

    share = np.array([*sizes.values()]) / sum(sizes.values())
    waiting: dict[int, Iterator[int]] = {}
    chosen: dict[int, int] = {}
    for drawn, size in enumerate(rng.choice([*sizes], _QUERIES, p=share).tolist()):
        if size not in waiting:
            waiting[size] = able(size)
        place = next((one for one in waiting[size] if one not in chosen), None)
        if place is not None:
            chosen[place] = size
        elif drawn + 1 - len(chosen) > _MISSED * drawn + _FEW:
            break
    return [*chosen.items()]


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
    return _fitted(asked, gallery.size, gallery.last_id)


def product_attribute(items: Sequence[Item]) -> str | None:
    """The first of `PRODUCTS` that half of the items have, with several values."""
    for name in PRODUCTS:
        named = [single(item.attributes.get(name)) for item in items]
        values = [value for value in named if value is not None]
        if 2 * len(values) >= len(items) and len(set(values)) > 1:
            return name
    return None


def _search_own(
    gallery: Searched,
    items: Sequence[Item],
    vectors: Embeddings,
    chosen: Sequence[tuple[int, int]],
    name: str,
    products: Mapping[int, Scalar],
    counts: Mapping[Scalar, int],
    on_progress: Progress,
) -> list[list[Searches]]:
    """What each chosen item finds among the others, with so many images of its own product, and
    among those of other products.
    """
    rng = np.random.default_rng(1)
    asked: list[list[Searches]] = []
    most = max(counts[products[n]] for n, _ in chosen)
    reach = min(CANDIDATES + 1 + most, _REACH)
    for start in range(0, len(chosen), _AT_ONCE):
        some = chosen[start : start + _AT_ONCE]
        found = gallery.search(vectors[[n for n, _ in some]], reach)
        for (n, size), hits in zip(some, found, strict=True):
            own = products[n]
            others = counts[own] - 1
            kept = rng.permutation(others) < size
            left = [hit for hit in hits if hit.id != items[n].id and hit.score < _COPY]
            own_hits = [hit.id for hit in left if _product_of(hit, name) == _identity(own)]
            omitted = {i for i, is_kept in zip(own_hits, kept, strict=False) if not is_kept}
            left = [hit for hit in left if hit.id not in omitted]
            right = [_product_of(hit, name) == _identity(own) for hit in left]
            handicap = log(size / others) if size > others else 0.0
            asked.append(_trials(left, right, name, handicap, len(hits) < reach))
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


def _fitted(asked: Sequence[Sequence[Searches]], items: int, last: ItemId) -> Fit | str:
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
        last=last,
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
