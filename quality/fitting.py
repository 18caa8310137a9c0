"""Fit the curve of a calibration: by searches for items of the gallery, or for labelled photos."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.calibration import CANDIDATES, MIN_SEARCHES, NEAREST, Searches, fit_curve
from kinlens.embedder.errors import CalibrationError
from kinlens.embedder.types import Embeddings, Hit, ItemId
from kinlens.indexer.entries import Item
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.products import product_attribute
from kinlens.indexer.types import Progress
from kinlens.quality.calibration import Fit, GalleryCalibration, identity, product_of
from kinlens.quality.guarantee import Labelled
from kinlens.values import Scalar, single

MIN_VIEWS = 3
"""Minimum number of images of a product whose items may represent products of the same size. With
two images, an item would find half of the images that a customer's photo finds."""

MIN_PRODUCTS = 16
"""Minimum number of products. A curve of fewer would not be representative of the gallery."""

SAMPLED = 2000
"""Number of items in the sample that represents the gallery."""

_QUERIES = 1000
_BATCH = 32
_DEPTH = 200  # maximum hits per fitted search: candidates, plus hits of the own product to skip
_COPY = 1 - 1e-4  # a hit with this cosine is the query itself, or a copy of it
_MISSED_SHARE, _MISSED_COUNT = 0.1, 3  # share plus number of drawn sizes without a suitable item

Sizes = Mapping[int, int]
"""Maps a number of images to the number of products with that many images."""


def fit_gallery(
    gallery: Gallery, product: str | None = None, on_progress: Progress = lambda _: None
) -> GalleryCalibration:
    """Search for up to 1,000 labelled items among the others, and fit a curve to the results.

    `product` is the attribute that names the product; by default the first of `PRODUCTS` that half
    of the items have. Raises: GalleryError, InvalidParameterError.
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
    names = {n: value for n, value in names.items() if value in counts}  # others were removed since
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
        reason = f"The gallery has {products:,} products; at least {MIN_PRODUCTS} are needed"
        return found.model_copy(update={"gallery": reason})
    chosen = _choose_queries(names, counts, sizes)
    if len({names[n] for n, _ in chosen}) < MIN_PRODUCTS or len(chosen) < MIN_SEARCHES:
        reason = (
            f"The products have {mean:.1f} images on average; at least {MIN_PRODUCTS} products "
            f"need {MIN_VIEWS} images or more, or more images than the others"
        )
        return found.model_copy(update={"gallery": reason})
    asked = _search_own(gallery, items, vectors, chosen, name, names, counts, on_progress)
    return found.model_copy(update={"gallery": _fitted(asked, size, last)})


def _choose_queries(
    products: Mapping[int, Scalar], counts: Mapping[Scalar, int], sizes: Sizes
) -> list[tuple[int, int]]:
    """Choose the query items, each with the number of images that its product shall have.

    Customers search for products with one image as often as for products with twelve, so the sizes
    are drawn from the sizes of all products. An item cannot find itself, so it represents a photo
    of a product with fewer images: some images of its product are omitted from its hits. If fewer
    than `MIN_PRODUCTS` products have more images, an item represents a product of equal size. The
    draw stops early if too many sizes have no suitable item, as the remaining queries would have
    another distribution of sizes.

    Args:
        products: the product of each item, by row.
        counts: the number of images of each product.
        sizes: the number of products of each size.
    """
    rng = np.random.default_rng(0)
    turns: dict[Scalar, int] = {}
    order = []
    for row in rng.permutation([*products]).tolist():
        turns[products[row]] = turns.get(products[row], 0) + 1
        order.append((turns[products[row]], row))
    order.sort(key=lambda one: one[0])  # every product once, in random order, then a second time
    ranked = [row for _, row in order]

    def candidates_for(size: int) -> Iterator[int]:
        larger = [row for row in ranked if counts[products[row]] > size]
        if size >= MIN_VIEWS and len({products[row] for row in larger}) < MIN_PRODUCTS:
            larger = [row for row in ranked if counts[products[row]] >= size]
        return iter(larger)

    share = np.array([*sizes.values()]) / sum(sizes.values())
    available: dict[int, Iterator[int]] = {}
    chosen: dict[int, int] = {}
    for drawn, size in enumerate(rng.choice([*sizes], _QUERIES, p=share).tolist()):
        if size not in available:
            available[size] = candidates_for(size)
        row = next((one for one in available[size] if one not in chosen), None)
        if row is not None:
            chosen[row] = size
        elif drawn + 1 - len(chosen) > _MISSED_SHARE * drawn + _MISSED_COUNT:
            break
    return [*chosen.items()]


def fit_golden(
    gallery: Gallery,
    product: str,
    queries: Iterable[Labelled],
) -> Fit | str:
    """Fit a curve to the hits of labelled photos; returns the reason if it cannot be fitted.

    Raises: GalleryError.
    """
    asked: list[list[Searches]] = []
    labels: set[str] = set()
    for vector, label, is_right, *_ in queries:
        [hits] = gallery.search(vector[np.newaxis], _DEPTH)
        others = [hit for hit in hits if hit.score < _COPY]
        right = [is_right is not None and is_right(hit) for hit in others]
        trials = _trials(others, right, product, 0.0, len(hits) < _DEPTH)
        asked.append(trials[: 1 if is_right is None else 2])
        labels |= set() if is_right is None else {label}
    if len(labels) < MIN_PRODUCTS:
        return f"The golden set has {len(labels)} products; at least {MIN_PRODUCTS} are needed"
    return _fitted(asked, gallery.size, gallery.last_id)


def _search_own(
    gallery: Gallery,
    items: Sequence[Item],
    vectors: Embeddings,
    chosen: Sequence[tuple[int, int]],
    name: str,
    products: Mapping[int, Scalar],
    counts: Mapping[Scalar, int],
    on_progress: Progress,
) -> list[list[Searches]]:
    """Search for each chosen item.

    Returns, per item, the search among other products only and the one with the chosen number of
    images of its own product.
    """
    rng = np.random.default_rng(1)
    asked: list[list[Searches]] = []
    most = max(counts[products[n]] for n, _ in chosen)
    depth = min(CANDIDATES + 1 + most, _DEPTH)
    for start in range(0, len(chosen), _BATCH):
        some = chosen[start : start + _BATCH]
        found = gallery.search(vectors[[n for n, _ in some]], depth)
        for (n, size), hits in zip(some, found, strict=True):
            own = products[n]
            others = counts[own] - 1
            kept = rng.permutation(others) < size
            remaining = [hit for hit in hits if hit.id != items[n].id and hit.score < _COPY]
            own_hits = [hit.id for hit in remaining if product_of(hit, name) == identity(own)]
            omitted = {i for i, is_kept in zip(own_hits, kept, strict=False) if not is_kept}
            remaining = [hit for hit in remaining if hit.id not in omitted]
            right = [product_of(hit, name) == identity(own) for hit in remaining]
            handicap = log(size / others) if size > others else 0.0
            asked.append(_trials(remaining, right, name, handicap, len(hits) < depth))
        on_progress(len(some))
    return asked


def _trials(
    hits: Sequence[Hit], right: Sequence[bool], name: str, handicap: float, is_all: bool
) -> list[Searches]:
    """Two searches from `hits`: without the right product, and unchanged.

    Returns an empty list if the right product fills the hits, so too few others were found.
    `is_all` means that the gallery has no more items.
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
    products[0, : len(best)] = [codes.setdefault(product_of(hit, name), len(codes)) for hit in best]
    is_right = np.zeros((1, CANDIDATES), bool)
    is_right[0, : len(best)] = right[:CANDIDATES]
    return Searches(scores, products, is_right, np.array([absent]), np.array([handicap]))


def _fitted(asked: Sequence[Sequence[Searches]], items: int, last: ItemId) -> Fit | str:
    """Fit a curve to the searches of each query, with its error on queries outside the fit.

    Returns the reason if it cannot be fitted.
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
    """Cross-validated errors: each half of the queries is judged by the curve of the other half."""
    errors = []
    for fitted in (is_even, ~is_even):
        try:
            errors.append(searches[~fitted].error(fit_curve(searches[fitted]), 0.5))
        except CalibrationError:
            return None
    best, ten = np.mean(errors, axis=0).round(4).tolist()
    return best, ten
