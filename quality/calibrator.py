"""The calibration of one gallery: stored with its items, and fitted again when it is outdated.

    GENERATION/calibration.json     GalleryCalibration: the curves fitted to this generation

The file is derived from the rest of the generation: if it is missing, it is fitted again.
"""

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

from kinlens.embedder.durable import stamp, write_whole
from kinlens.embedder.errors import (
    GalleryConflictError,
    GalleryError,
    GalleryWriteError,
    InvalidParameterError,
)
from kinlens.embedder.types import ItemId
from kinlens.indexer.entries import Item
from kinlens.indexer.folder.layout import GalleryFolder, disk_errors_explained
from kinlens.indexer.folder.manifest import CALIBRATION
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.products import PRODUCTS
from kinlens.indexer.types import Progress
from kinlens.quality.calibration import (
    LABELLED,
    NO_GOLDEN,
    REBUILT,
    REBUILT_ITEMS,
    Fit,
    GalleryCalibration,
)
from kinlens.quality.drift import FALSE_ALARMS, DriftTest
from kinlens.quality.fitting import SAMPLED, fit_gallery, fit_golden
from kinlens.quality.golden import GoldenSet
from kinlens.quality.guarantee import COPY, Choices, Guarantee, Labelled, Vector, judge

_CHANGED = 0.2  # share of items added or removed after which the curve is fitted again
_PRODUCTS = 500  # items whose products are compared: a share of a fifth is known to 0.02


class Calibrator:
    """Fits and keeps the calibration of a gallery. Thread safe.

    A calibration that cannot be stored, as in a read-only folder, is kept in memory. `golden` is
    the golden set, if it is that of another gallery, which this one will replace.
    """

    def __init__(self, gallery: Gallery, golden: GoldenSet | None = None) -> None:
        self._gallery = gallery
        self._golden = golden or GoldenSet(gallery.path)
        self._file = gallery.generation_folder / CALIBRATION
        self._stamp: tuple[int, ...] | None = None  # of the file when `_known` was read or kept
        self._known: GalleryCalibration | None = None
        self._examined = ""  # the version of the gallery that was last examined
        # What was found for this gallery and golden set, and this calibration.
        self._found: tuple[object, GalleryCalibration | None, Guarantee | str] = ("", None, "")
        self._outdated = (
            "The golden set was run when the gallery had other items or products. Run it again: "
            f"kinlens-index golden run {gallery.path}"
        )
        self._lock = threading.Lock()
        self._drift: tuple[str, DriftTest] = ("", DriftTest(()))  # of the labels with this digest

    def stored(self) -> GalleryCalibration | None:
        """The calibration of this generation; None if it has none. Costs one `stat` per call."""
        now = stamp(str(self._file))
        if now != self._stamp:
            try:
                self._known = None if now is None else self._read()
            except (OSError, ValueError) as error:  # keep the last known one
                text = "%s cannot be read, and is fitted again when that is due: %s"
                logging.getLogger(__name__).warning(text, self._file, error)
            self._stamp = now
        return self._known

    def _read(self) -> GalleryCalibration:
        return GalleryCalibration.model_validate_json(self._file.read_bytes())

    def fit(
        self,
        product: str | None = None,
        on_progress: Progress = lambda _: None,
    ) -> GalleryCalibration:
        """Fit the probabilities of hits to the current items, and store the calibration.

        product: the attribute that identifies the product of an item; by default that of the last
            calibration. The curve of a golden set is kept until the set is run again.

        Raises: InvalidParameterError for an attribute that no item has; GalleryWriteError;
            GalleryConflictError for a copy, which uses the calibration of its original.
        """
        gallery = self._gallery
        GalleryFolder(gallery.path).refuse_copy()
        before, schema = self.stored(), gallery.schema()
        if product is not None and product not in schema:
            raise InvalidParameterError(
                f"There is no attribute {product!r}. The gallery has {', '.join(schema) or 'none'}."
            )
        if product is None and before is not None and before.is_chosen:
            product = before.product if before.product in schema else None
        fitted = fit_gallery(gallery, product, on_progress)

        def with_golden(now: GalleryCalibration | None) -> GalleryCalibration:
            if now is None or now.product != fitted.product:
                return fitted
            golden = self._outdated if self._is_outdated(now.golden) else now.golden
            return fitted.model_copy(update={"golden": golden, "guarantee": now.guarantee})

        return self._keep(with_golden)

    def fit_golden(self, queries: Callable[[str], Iterable[Labelled]]) -> GalleryCalibration:
        """Fit the probabilities of hits to labelled photos, and store them.

        `queries` is called with the attribute that identifies the product of an item.

        Raises: GalleryError, GalleryWriteError.
        """
        known = self.stored() or self.fit()
        if known.product is None:
            return known
        name, choices = known.product, self._golden.choices() or Choices()
        judged = self._with_products(judge(self._gallery, name, queries(name), choices))
        fitted = {"golden": fit_golden(self._gallery, name, queries(name)), "guarantee": judged}
        kept = self._keep_fitted(known, fitted)
        self._golden.choose(choices)
        return kept

    def fit_guarantee(
        self,
        queries: Callable[[str], Iterable[Labelled]] | None,
        choices: Choices,
    ) -> Guarantee:
        """Judge labelled photos, as for `fit_golden`, for guarantees, and store the result. What
        the owner chose holds for later runs too, also of a gallery that replaces this one.

        queries: None for items of the gallery, if the owner states that queries are like them.

        Raises: GalleryError, GalleryWriteError, InvalidParameterError if no attribute names the
            product of an item.
        """
        gallery, known = self._gallery, self.stored() or self.fit()
        for name in (choices.by, known.product):
            if name not in (None, *gallery.schema()) or known.product is None:
                raise InvalidParameterError(
                    f"No item has the attribute {name or 'product'}. Give the attribute that names "
                    "the product with kinlens-index calibrate --product, and one of the gallery "
                    "with --by."
                )
        assert known.product is not None
        asked = None if queries is None else queries(known.product)
        fitted = self._with_products(judge(gallery, known.product, asked, choices))
        self._keep_fitted(known, {"guarantee": fitted})
        self._golden.choose(choices)
        return fitted

    def _with_products(self, fitted: Guarantee) -> Guarantee:
        items, _ = self._gallery.sample(_PRODUCTS)
        return fitted.model_copy(update={"products": _products_of(items, fitted)})

    def _keep_fitted(
        self, known: GalleryCalibration, fitted: Mapping[str, object]
    ) -> GalleryCalibration:
        """Store what was fitted with the product of `known`; not if another was chosen since."""

        def with_fitted(now: GalleryCalibration | None) -> GalleryCalibration:
            other = now is not None and now.product != known.product
            return (now or known).model_copy(update={} if other else fitted)

        return self._keep(with_fitted)

    def guarantee(self) -> Guarantee:
        """The labelled queries that guarantee answers now.

        Raises: InvalidParameterError with the cure if there are none, or if the guarantee was
            withdrawn.
        """
        found, known = self._guarantee(), self.stored()
        if known is not None and known.product is None:
            raise InvalidParameterError(
                "This gallery guarantees no answer: no attribute names the product of an item. "
                f"Name one with kinlens-index calibrate {self._gallery.path} --product."
            )
        if isinstance(found, str):
            raise InvalidParameterError(
                f"This gallery guarantees no answer: {found.rstrip('.')}. Label queries with "
                f"kinlens-index golden add, then run kinlens-index golden run {self._gallery.path}."
            )
        return found

    def withdrawn(self) -> str | None:
        """Why answers are no longer guaranteed: a fifth of the items was added, removed or given
        another product since the labelled queries were judged, the gallery was rebuilt, or other
        queries come.

        Empty while they are; None if no guarantee was ever fitted.
        """
        found = self._guarantee()
        return "" if isinstance(found, Guarantee) else None if found == NO_GOLDEN else found

    def observe(self, guarantee: Guarantee, best: float, vector: Vector) -> bool:
        """Compare the best score of a query that comes with those of the labelled ones. After an
        alarm, of which the answer is true, the guarantee is withdrawn until it is fitted again.

        A query counts once. Takes microseconds. The comparison begins again with each process.
        """
        if best >= COPY:  # such labelled queries are skipped too
            return False
        with self._lock:
            if self._drift[0] != guarantee.digest:
                self._drift = guarantee.digest, DriftTest(one.best for one in guarantee.queries)
            query = hashlib.sha256(vector.tobytes()).digest()
            is_alarm = self._drift[1].add(best, query)
        if is_alarm:
            self._withdraw(guarantee)
        return is_alarm

    def _withdraw(self, guarantee: Guarantee) -> None:
        """Store that other queries come, so that all processes refuse, also after a restart."""
        known, at = self.stored(), datetime.now(UTC).isoformat(timespec="seconds")
        if known is None:
            return

        def with_drift(now: GalleryCalibration | None) -> GalleryCalibration:
            now = now or known
            if now.guarantee != guarantee:  # it was fitted again meanwhile
                return now
            return now.model_copy(
                update={"guarantee": guarantee.model_copy(update={"drifted": at})}
            )

        try:
            self._keep(with_drift)
        except GalleryWriteError:
            pass  # it is kept in memory
        except GalleryConflictError:  # a copy: its file is that of the original
            self._known = with_drift(known)

    def _guarantee(self) -> Guarantee | str:
        """The labelled queries that guarantee answers, or why there are none. Looks at the items
        again only if the gallery, its golden set or its calibration has changed.
        """
        known, now = self.stored(), (self._gallery.version, stamp(str(self._golden.file)))
        if self._found[0] != now or self._found[1] is not known:
            found = NO_GOLDEN if known is None else known.guarantee
            try:
                self._found = now, known, self._why_not(found) or found
            except GalleryError:  # a busy or damaged golden set stops no search
                return found
        return self._found[2]

    def _why_not(self, found: Guarantee | str) -> str | None:
        if isinstance(found, str):
            if self._golden.choices() is None:
                return None
            return REBUILT_ITEMS if self._golden.is_empty() else REBUILT
        if found.drifted is not None:
            return (
                f"Queries that came until {found.drifted} differ from the labelled ones. If they "
                "do not, this is a false alarm, which a service process has in "
                f"1 of {1 / FALSE_ALARMS:.0f} starts. Label some of them"
            )
        if self._is_outdated(found):
            return self._outdated
        has_labels = found.source == "golden" and self._gallery.copy_of is None
        return NO_GOLDEN if has_labels and self._golden.is_empty() else None

    def fit_if_outdated(self, on_progress: Progress = lambda _: None) -> bool:
        """Fit again if a fifth of the items was added or removed, or items got a product attribute
        since the last fit; returns whether it did. A gallery that has not changed since the last
        call is not examined.

        Raises: GalleryError.
        """
        version, known = self._gallery.version, self.stored()
        if version == self._examined or self._gallery.copy_of is not None:
            return False
        is_outdated = self._gallery.size > 0 and (
            known is None
            or self._is_outdated(known)
            or self._is_outdated(known.golden)
            or self._has_more_labels(known)
        )
        if is_outdated:
            with contextlib.suppress(GalleryWriteError):  # then it is kept in memory only
                self.fit(on_progress=on_progress)
        self._examined = version
        return is_outdated

    def _has_more_labels(self, known: GalleryCalibration) -> bool:
        """Whether enough items of a sample have a product attribute now, but had not at the fit."""
        wanted = PRODUCTS if known.product is None else (known.product,)
        if (known.product and known.is_labelled) or {*wanted}.isdisjoint(self._gallery.schema()):
            return False
        items, _ = self._gallery.sample(SAMPLED)
        least = LABELLED if known.product else 0.5
        parts = [sum(name in item.attributes for item in items) for name in wanted]
        return max(parts) >= least * len(items)

    def _is_outdated(self, fitted: GalleryCalibration | Fit | Guarantee | str) -> bool:
        """Whether enough items were added or removed since the fit to change the curve, or were
        given other products for a guarantee.
        """
        if isinstance(fitted, str):
            return False
        size, added = self._gallery.counts_after(fitted.last)
        removed = fitted.items - (size - added)
        changed = added + removed
        if isinstance(fitted, Guarantee) and fitted.products:
            items, _ = self._gallery.items_at(fitted.products)
            others = _products_of(items, fitted).items() - fitted.products.items()
            changed += round(len(others) / len(fitted.products) * fitted.items)
        return changed > _CHANGED * max(fitted.items, 1)

    def _keep(
        self, change: Callable[[GalleryCalibration | None], GalleryCalibration]
    ) -> GalleryCalibration:
        """Store a change of the calibration as it is now: another fit may have ended meanwhile."""
        GalleryFolder(self._gallery.path).refuse_copy()
        with self._lock:
            changed = change(self.stored())
            try:
                with disk_errors_explained(self._file.parent):
                    data = changed.model_dump_json(indent=2).encode() + b"\n"
                    write_whole(self._file, data, "calibration")
                    self._file.chmod(0o644)  # another user may serve the gallery
            except GalleryWriteError:
                self._stamp, self._known = stamp(str(self._file)), changed
                raise
        return changed


def _products_of(items: Iterable[Item], fitted: Guarantee) -> dict[ItemId, str]:
    """A hash of the product of each item, and of its category if that has a limit of its own."""
    names = (fitted.product, fitted.by if fitted.is_split else None)
    return {
        item.id: hashlib.sha256(
            repr([name and item.attributes.get(name) for name in names]).encode()
        ).hexdigest()[:8]
        for item in items
    }
