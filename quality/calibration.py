"""Calibration of a gallery: the probability that a hit is right.

A curve comes from the best available source:

1. the golden set of the gallery,
2. its labelled items, each of which is a query against the others,
3. the curves of the bundle.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel

from kinlens.embedder.calibration import CANDIDATES, Calibration, Curve
from kinlens.embedder.errors import CalibrationError
from kinlens.embedder.types import Hit, ItemId
from kinlens.indexer.ingest.products import PRODUCTS
from kinlens.indexer.types import Group
from kinlens.quality.guarantee import Guarantee
from kinlens.reports import Report
from kinlens.values import AttributeValue, single, values_in

LABELLED = 0.95
"""Minimum share of items that name their product. An unlabelled image would count as a wrong
hit."""

DEFAULT_PRIOR = 0.1
"""Prior probability that the searched product is not in the gallery."""

NO_GOLDEN = "The gallery has no golden set, or it was not run"

REBUILT = (
    "The gallery or its product attribute is another one, and its golden set was not run since"
)

REBUILT_ITEMS = (
    "The gallery or its product attribute is another one, and its items were not judged since. "
    "Judge them again with kinlens-index guarantee --from-items"
)

_NO_PRODUCT = (
    "No attribute names the product of an item. Give items an attribute "
    f"{' or '.join(f'`{name}`' for name in PRODUCTS)}, or name another one: kinlens-index "
    "calibrate --product"
)
_EVEN = 0.9  # share of products with nearly the average number of images, for a bundle's curve

Source = Literal["golden", "gallery", "bundle"]


class Fit(BaseModel, frozen=True):
    """A fitted curve.

    Attributes:
        items, last: number of items of the gallery and the highest item id at the time of the fit.
        searches: number of searches; half of them are for absent products.
        wrong_hits: wrong hits among the ten best of the other searches.
        errors: expected calibration error of the best hit and of the ten best hits, by
            cross-validation: each half of the searches is judged by the curve of the other half.
    """

    curve: Curve
    items: int
    last: ItemId
    searches: int
    wrong_hits: int
    errors: tuple[float, float] | None


class GalleryCalibration(Report, BaseModel, frozen=True):
    """The calibration of one generation.

    Attributes:
        items, last: number of items and highest item id at the time of the fit.
        product: the attribute that names the product of an item.
        is_chosen: whether the owner chose that attribute.
        products, labelled: number of its values, and of the items that have it.
        even: share of the products with nearly the average number of images.
        gallery: the curve fitted to the items, or the reason why there is none.
        golden: the curve fitted to the golden set, perhaps at another time, or the reason.
        guarantee: the labelled queries behind guarantees, or why there are none.
    """

    items: int
    last: ItemId
    product: str | None = None
    is_chosen: bool = False
    products: int = 0
    labelled: int = 0
    even: float = 0.0
    gallery: Fit | str
    golden: Fit | str = NO_GOLDEN
    guarantee: Guarantee | str = NO_GOLDEN

    @property
    def views(self) -> float:
        """Average number of images per product."""
        return self.labelled / max(self.products, 1)

    @property
    def is_labelled(self) -> bool:
        """Whether enough items name their product."""
        return self.labelled >= LABELLED * self.items

    def without_queries(self) -> "GalleryCalibration":
        """This without the labelled queries of the guarantee, which would fill a page."""
        if isinstance(self.guarantee, str):
            return self
        text = f"{len(self.guarantee.queries):,} labelled queries of {self.guarantee.at}"
        return self.model_copy(update={"guarantee": text})

    def lines(self) -> Iterator[str]:
        """The products, and the source and the errors of each curve."""
        if self.product is not None:
            yield (
                f"{self.products:,} products by the attribute {self.product}, with "
                f"{self.views:.1f} images of each; {self.labelled:,} of {self.items:,} items have "
                "it"
            )
        for source, fit in (("gallery", self.gallery), ("golden", self.golden)):
            if isinstance(fit, str):
                yield f"{source}: none. {fit}."
                continue
            off = ""
            if fit.errors is not None:
                best, ten = fit.errors
                off = f"; calibration error {best:.3f} (best hit), {ten:.3f} (ten)"
            yield f"{source}: fitted to {fit.searches:,} searches{off}"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The curve that a gallery uses, and its source.

    Attributes:
        fit: the figures of the fit; None for a curve of the bundle.
        reason: why a better source was not used.
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
    """The curve of the best source, or the reason why there is none."""
    if stored is None:
        return "The gallery is not calibrated yet. Run kinlens-index calibrate"
    if stored.product is None:
        return _NO_PRODUCT
    if not stored.is_labelled:
        return (
            f"{stored.labelled:,} of {stored.items:,} items have the attribute "
            f"`{stored.product}`, which names their product; at least {LABELLED:.0%} are needed. "
            "Set it for the others, then run kinlens-index calibrate"
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
            f"{reasons}. The curves of the bundle are for products with equal numbers of images, "
            f"and {1 - stored.even:.0%} of the products have far more or fewer than the average of "
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
        prior: probability that the product is absent.
        candidates: the best items of the whole gallery, without filter, best first.
        shown: the hits of the answer.
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
            [numbers.setdefault(product_of(hit, self._name), len(numbers)) for hit in self._hits]
        )
        found = calibrated.curve.shares(scores, products, len(best), prior)
        self._shares: list[float] = found.tolist()
        self._products: dict[object, float] = {}
        for hit, share in zip(self._hits, self._shares, strict=True):
            product = product_of(hit, self._name)
            self._products[product] = self._products.get(product, 0.0) + share

    def of(self, hit: Hit) -> float:
        """Probability that a hit is right, i.e. shows the searched product."""
        return min(1.0, self._products[product_of(hit, self._name)])

    def of_group(self, group: Group, by: str) -> float:
        """Probability that a group of items with the same value of `by` has the product."""
        if group.value is None:
            members = {hit.id for hit in group.hits}
            return sum(s for h, s in zip(self._hits, self._shares, strict=True) if h.id in members)
        value = identity(group.value)
        return sum(
            share
            for hit, share in zip(self._hits, self._shares, strict=True)
            if value in map(identity, values_in(hit.attributes.get(by)))
        )

    def of_none(self, hits: Iterable[Hit], groups: Iterable[Group] | None, by: str = "") -> float:
        """Probability that none of these hits, or of these groups, is right."""
        if groups is not None:
            found = sum(self.of_group(group, by) for group in groups)
        else:
            shown = {product_of(hit, self._name) for hit in hits}
            found = sum(self._products[product] for product in shown)
        return min(max(1.0 - found, 0.0), 1.0)


def product_of(hit: Hit, name: str) -> object:
    """What identifies the product of a hit; a hit without one is its own product."""
    value = single(hit.attributes.get(name))
    return ("item", hit.id) if value is None else identity(value)


def identity(value: AttributeValue | None) -> object:
    """The value, distinguished from equal ones of another type: 1 and true are two values."""
    return isinstance(value, bool), value
