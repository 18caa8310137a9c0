"""Judge galleries: labelled queries, calibration and near-duplicates.

`GalleryCare` has what concerns one gallery, and its upkeep, as methods of `kinlens.Gallery`.
"""

import contextlib
import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from numpy.typing import ArrayLike

from kinlens.embedder.errors import ImageError, InvalidParameterError, SourceError
from kinlens.embedder.preprocess import ImageLimits, decode
from kinlens.embedder.programs.progress import progress_bar
from kinlens.embedder.session import Embedder, fitted
from kinlens.embedder.sources.names import printable
from kinlens.embedder.views.text import MAX_CHARACTERS
from kinlens.golden import (
    Crop,
    GoldenQueries,
    GoldenQuery,
    GoldenRun,
    GoldenRuns,
    Label,
    Words,
)
from kinlens.indexer.checks.duplicates import (
    Cluster,
    Floor,
    Member,
    clusters_of,
    find_duplicates,
    members_of,
)
from kinlens.indexer.checks.stats import stats_of
from kinlens.indexer.checks.verify import VerifyReport
from kinlens.indexer.galleries import current_manifest
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.images import read_image
from kinlens.indexer.ingest.tables import read_table
from kinlens.library import upkeep
from kinlens.library.bundles import user_path
from kinlens.library.hits import Searcher
from kinlens.library.images import crop_of
from kinlens.library.images import read_image as given_image
from kinlens.library.stores import Store, folder_of
from kinlens.quality.calibration import GalleryCalibration
from kinlens.quality.calibrator import Calibrator
from kinlens.quality.golden import GoldenSet, NewQuery
from kinlens.quality.guarantee import ACCEPT, CONFIDENCE, LEVEL, Choices
from kinlens.quality.guarantee_report import GuaranteeReport, report_of
from kinlens.quality.judging import Embedded, GoldenResults, embedded, labelled, threshold_of
from kinlens.reports import Report
from kinlens.values import Scalar

P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X")

_LIMITS = ImageLimits()
_KEYS, _TEXT, _CROP = "keys", "text", "crop"
_SHOWN = 10


def golden(path: Path | str) -> GoldenQueries:
    """The labelled queries of the gallery in folder `path`. Raises: GalleryNotFoundError."""
    current_manifest(path)
    return GoldenQueries(queries=GoldenSet(path).queries())


def add_golden(
    gallery: Gallery,
    image: Any = None,
    *,
    keys: Sequence[str] | None = None,
    attribute: str | None = None,
    value: Scalar | None = None,
    crop: Crop | None = None,
    texts: str | Sequence[str] = (),
    name: str = "",
) -> GoldenQuery:
    """Add a query with its right items; one that is labelled gets the new label.

    The right items are those with these `keys`, or those whose `attribute` has this `value`.
    Without either, the label is that no item is right.

    Args:
        image: a path, the bytes of a file, an image of Pillow, or an array uint8 (H, W, 3).
        crop: the part of the image to search with, or "auto" for each of several parts.
        texts: words that are added to the image, or the whole query without one.
        name: of the query in reports; by default that of the file.

    Raises: SourceError for an image that cannot be used; InvalidParameterError, FilterError.
    """
    if isinstance(keys, str):
        raise InvalidParameterError(f"keys = {keys!r:.80} must be a list of keys.")
    is_none = keys is None and attribute is None
    label = Label(keys=tuple(keys or ()), attribute=attribute, value=value, no_match=is_none)
    words = tuple(_words(text) for text in ([texts] if isinstance(texts, str) else texts))
    data = b""
    if image is not None:
        named = given_image(image, _LIMITS.max_bytes)
        with _refusals(named.name):
            data = named.data
            decode(data, _LIMITS)
        name = name or (Path(image).name if isinstance(image, str | Path) else "")
    [query] = GoldenSet(gallery.path).add([NewQuery(data, label, name, crop, words)], gallery)
    return query


def add_golden_list(gallery: Gallery, file: Path | str) -> GoldenQueries:
    """Add all queries of a CSV list, or none.

    The column `image` has paths relative to the list. Columns `text` and `crop` have words and the
    part of an image to search with, unless the gallery has attributes of these names. The others
    are `keys` and attributes of the gallery. A line has one of them, or none if no item is right.

    Raises: SourceError, InvalidParameterError, FilterError.
    """
    file, new = Path(user_path(file)), []
    schema = gallery.schema()
    parts = [name for name in (_TEXT, _CROP) if name not in schema]
    for row in read_table(file, ("image",), {**schema, **dict.fromkeys((_KEYS, *parts), "text")}):
        given = {name: v for name, v in row.attributes.items() if v is not None and v != ""}
        asked = {name: str(given.pop(name)) for name in parts if name in given}
        if not (row.cells["image"] or _TEXT in asked):
            raise SourceError(f"{row.position} has no image and no text. Give one of them.")
        if len(given) > 1:
            raise SourceError(
                f"{row.position} has values in {', '.join(given)}. Give keys or one attribute per "
                "line, or neither if no item is right."
            )
        label = Label(no_match=True)
        for name, value in given.items():
            if isinstance(value, tuple):
                raise SourceError(
                    f"{row.position} has several values of {name}. Give one value per line."
                )
            label = Label(attribute=name, value=value)
            if name == _KEYS:
                label = Label(keys=split_keys(str(value)))
        root, path, data = file.resolve().parent, row.cells["image"], b""
        if path:
            with _refusals(f"image {printable(str(root / path))}"):
                data = read_image(root, path, _LIMITS.max_bytes)
                decode(data, _LIMITS)
        words = (_words(asked[_TEXT]),) if _TEXT in asked else ()
        crop = crop_of(asked[_CROP]) if _CROP in asked else None
        new.append(NewQuery(data, label, path, crop, words))
    if not new:
        raise SourceError(f"{file} lists no images. Write one per line below the header.")
    return GoldenQueries(queries=GoldenSet(gallery.path).add(new, gallery))


def split_keys(text: str) -> tuple[str, ...]:
    """Keys with commas between them; one with a comma is in double quotes.

    Raises: InvalidParameterError.
    """
    try:
        row = next(csv.reader([text], skipinitialspace=True, strict=True), [])
    except csv.Error as error:
        raise InvalidParameterError(
            f"The keys {text!r:.200} cannot be read: {error}. Separate keys by commas, and put a "
            "key with a comma into double quotes."
        ) from error
    return tuple(dict.fromkeys(key.strip() for key in row if key.strip()))


def remove_golden(path: Path | str, *ids: str) -> int:
    """Remove queries by the beginning of their ids, and their images. Reports of runs are kept.

    Returns: the number of removed queries.

    Raises: InvalidParameterError for an id of no query, or of several.
    """
    known = [query.sha256 for query in golden(path).queries]
    chosen = set()
    for number in ids:
        matching = [sha256 for sha256 in known if sha256.startswith(number.lower())]
        if len(matching) != 1:
            raise InvalidParameterError(
                f"{len(matching)} queries have an id that starts with {number!r:.80}. Use an id "
                "that `kinlens-index golden list` shows."
            )
        chosen.add(matching[0])
    return GoldenSet(path).remove(chosen)


def evaluate(
    gallery: Gallery,
    bundle: Embedder,
    *,
    min_score: float | None = None,
    worst: int = 10,
    shown: bool | None = None,
) -> GoldenRun:
    """Search with every labelled query, measure recall, and store the report.

    The probabilities of hits are fitted to these queries, too.

    Args:
        bundle: the model that the gallery was built with.
        min_score: minimum score of a match; None for the threshold for 1 % false matches.
        worst: number of worst queries in the report.

    Raises: InvalidParameterError if no query is labelled; BundleMismatchError.
    """
    queries, vectors = _asked(gallery, bundle, shown)
    threshold = threshold_of(bundle.calibration) if min_score is None else min_score
    report = GoldenResults.of(gallery, queries, vectors).report(threshold, worst)
    GoldenSet(gallery.path).keep(report)
    Calibrator(gallery).fit_golden(partial(labelled, gallery, queries, vectors))
    return report


def _asked(
    gallery: Gallery, bundle: Embedder, shown: bool | None
) -> tuple[list[GoldenQuery], Embedded]:
    """The labelled queries with their vectors. Raises: InvalidParameterError if there are none."""
    bundle = fitted(gallery, bundle)
    stored = GoldenSet(gallery.path)
    queries = stored.queries()
    if not queries:
        raise InvalidParameterError(
            f"The golden set of {gallery.path} is empty. Label queries first: kinlens-index "
            "golden add."
        )
    with progress_bar(len(queries), "Embedding", "images", shown) as advance:
        return queries, embedded(stored, queries, bundle, advance)


def guarantee(
    gallery: Gallery,
    bundle: Embedder | None = None,
    *,
    level: float = LEVEL,
    accept: float = ACCEPT,
    confidence: float | None = None,
    by: str | None = None,
    separate: bool = False,
    from_items: bool = False,
    shown: bool | None = None,
) -> GuaranteeReport:
    """What answers guarantee: sets of products, and decisions without a person.

    Without `bundle` and `from_items`, of the queries that the last `evaluate` judged. Otherwise the
    labelled queries are judged again and services use the result; `confidence`, `by` and `separate`
    are kept for later evaluations.

    Args:
        bundle: the model that the gallery was built with, to judge the golden set again.
        level: share of the queries whose set has the right product.
        accept: share of the accepted queries whose best product is right.
        confidence: how sure `accept` is; 0.95 by default.
        by: an attribute, to report each of its values.
        separate: whether each value of `by` with enough labels has limits of its own.
        from_items: judge items of the gallery instead; you state that queries are drawn like them.

    Raises: InvalidParameterError if there are no labelled queries; BundleMismatchError.
    """
    calibrator = Calibrator(gallery)
    if bundle is not None and from_items:
        raise InvalidParameterError("Give either a bundle or from_items.")
    if separate and by is None:
        raise InvalidParameterError(
            "`separate` needs `by`, the attribute whose values are separate."
        )
    choices = Choices(
        by=by, is_split=separate, confidence=CONFIDENCE if confidence is None else confidence
    )
    if bundle is not None:
        known = partial(labelled, gallery, *_asked(gallery, bundle, shown))
        found = calibrator.fit_guarantee(known, choices)
    elif from_items:
        found = calibrator.fit_guarantee(None, choices)
    elif by is not None or confidence is not None:
        raise InvalidParameterError("`by` and `confidence` need a bundle or from_items.")
    else:
        found = calibrator.guarantee()
    return report_of(found, level, accept)


def golden_runs(path: Path | str) -> GoldenRuns:
    """The reports of earlier evaluations, newest first. Raises: GalleryNotFoundError."""
    current_manifest(path)
    return GoldenRuns(runs=GoldenSet(path).runs())


def calibrate(
    gallery: Gallery, product: str | None = None, *, shown: bool | None = None
) -> GalleryCalibration:
    """Fit the probability that a hit is right, by searching for items of the gallery.

    product: the attribute that names the product; None for that of the last time, else `product`,
        else `class`.

    Raises: InvalidParameterError, GalleryConflictError, GalleryWriteError.
    """
    with progress_bar(1000, "Searching", shown=shown) as advance:
        return Calibrator(gallery).fit(product, advance)


@dataclass(frozen=True)
class Duplicates(Report):
    """Groups of items that probably show the same product.

    Attributes:
        min_score: least cosine of an item of a group to the first one.
        floor: the default of `min_score` in this gallery, and how it was found.
        recall: the part of the pairs that the index finds; 1 if all items were compared.
        items: number of items in groups.
        warning: why no item should be removed because of its group; None if it may.
        crowds: groups that are too large for copies of one product.
    """

    name: str
    version: str
    size: int
    min_score: float
    floor: Floor
    recall: float
    items: int
    warning: str | None
    crowds: list[Cluster]
    groups: list[list[Member]]

    def lines(self) -> Iterator[str]:
        """The first groups, the figures and the warnings."""
        for group in self.groups[:_SHOWN]:
            yield "  ".join(f"{one.item.key} {one.score:.4f}" for one in group[:_SHOWN])
        yield (
            f"Groups of near-duplicates: {len(self.groups):,}, with {self.items:,} of the "
            f"{self.size:,} items of {self.name}; cosine at least {self.min_score:.5f}; "
            f"recall {self.recall:.3f}."
        )
        if self.warning is not None:
            yield f"Warning: {self.warning}"
        for one in self.crowds:
            yield f"Warning: {one.detail} The first one: {one.examples[0].key}."


def duplicates(
    gallery: Gallery,
    *,
    min_score: float | None = None,
    exact: bool = False,
    shown: bool | None = None,
) -> Duplicates:
    """Find groups of items that probably show the same product, the largest first.

    Args:
        min_score: minimum cosine; None for 0.95, or more if different products look alike.
        exact: compare all items with all, without the index.

    Raises: InvalidParameterError for a score outside -1..1.
    """
    with progress_bar(gallery.size, "Comparing", shown=shown) as advance:
        near = find_duplicates(gallery, min_score=min_score, exact=exact, on_progress=advance)
    groups = list(members_of(gallery, near.groups))
    segment = None if exact else gallery.facts().segment
    return Duplicates(
        name=gallery.name,
        version=gallery.version,
        size=gallery.size,
        min_score=near.min_score,
        floor=near.floor,
        recall=1.0 if segment is None else segment.recall,
        items=sum(map(len, groups)),
        warning=near.warning,
        crowds=list(clusters_of(gallery, near)),
        groups=groups,
    )


def _store(opened: Searcher) -> Store:
    return opened.store


def _gallery(opened: Searcher) -> Gallery:
    return folder_of(opened.store, "is searched and changed only")


def _path(opened: Searcher) -> Path:
    return _gallery(opened).path


def _method(
    of: Callable[[Any], X], function: Callable[Concatenate[X, P], R]
) -> Callable[Concatenate[Any, P], R]:
    """A function as a method; `of` is what the function takes first of the gallery."""
    taken = {"shown", "warn"} & signature(function).parameters.keys()

    @wraps(function)
    def method(self: Searcher, /, *args: P.args, **options: P.kwargs) -> R:
        for name in taken:
            options.setdefault(name, getattr(self, name))
        return function(of(self), *args, **options)

    return method


class GalleryCare(Searcher):
    """What a gallery can do besides searches and changes."""

    stats = _method(_store, stats_of)
    export = _method(_store, upkeep.export)
    backup = _method(_path, upkeep.backup)
    publish = _method(_path, upkeep.publish)
    compact = _method(_gallery, upkeep.compact)
    calibrate = _method(_gallery, calibrate)
    golden = _method(_path, golden)
    add_golden = _method(_gallery, add_golden)
    add_golden_list = _method(_gallery, add_golden_list)
    remove_golden = _method(_path, remove_golden)
    golden_runs = _method(_path, golden_runs)
    guarantee = _method(_gallery, guarantee)

    def evaluate(self, *, min_score: float | None = None, worst: int = 10) -> GoldenRun:
        """Search with every labelled query, measure recall, and store the report.

        The probabilities of hits are fitted to these queries, too.

        Args:
            min_score: minimum score of a match; None for the threshold for 1 % false matches.
            worst: number of worst queries in the report.

        Raises: InvalidParameterError if no query is labelled.

        Examples:
            >>> query = gallery.add_golden("customer.jpg", keys=["shoes/1"])
            >>> gallery.evaluate().recall_at_1
            1.0
        """
        return evaluate(
            _gallery(self), self.bundle, min_score=min_score, worst=worst, shown=self.shown
        )

    def verify(
        self,
        *,
        images: bool = False,
        sample: int | None = None,
        queries: ArrayLike | Path | str | None = None,
        target_recall: float | None = None,
    ) -> VerifyReport:
        """Check the files of the gallery, that items find themselves, and recall.

        Args:
            images: embed the images again. Without it a vector that is stored for the wrong item
                is not detected.
            sample: number of items to check; None for all, or 1,000 of more than 10,000.
            queries: vectors (Q, D) of your users' queries, or a .npy file, to measure the recall
                that they get.
            target_recall: the recall that is required; None for that of the index.

        Returns:
            A report; `is_good` is whether all checks passed.

        Raises: GalleryCorruptError for a damaged file; InvalidParameterError.
        """
        gallery = _gallery(self)
        return upkeep.verify(
            gallery.path,
            self.bundle if images else None,
            sample=sample,
            image_root=gallery.image_root,
            queries=queries,
            target_recall=target_recall,
            shown=self.shown,
        )


@contextlib.contextmanager
def _refusals(image: str) -> Iterator[None]:
    """Name the image in errors about it."""
    try:
        yield
    except (ImageError, OSError) as error:
        raise SourceError(f"The {image} cannot be used: {error}") from error


def _words(text: str) -> Words:
    if not 0 < len(text.strip()) <= MAX_CHARACTERS:
        raise InvalidParameterError(
            f"The words {text!r:.80} must have 1 to {MAX_CHARACTERS:,} characters. Describe the "
            "product in a few words."
        )
    return Words(text=text)
