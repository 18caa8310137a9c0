"""Searches of a gallery and what they return: lists that show their images in a notebook."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import InvalidParameterError, ItemNotFoundError, KinlensError
from kinlens.embedder.preprocess import render_jpeg
from kinlens.embedder.session import Embedder, fitted
from kinlens.embedder.types import Embeddings, ItemId, first_numbers
from kinlens.embedder.types import Hit as PlainHit
from kinlens.indexer.entries import Item
from kinlens.indexer.exchange.parquet import ATTRIBUTE, load_pyarrow
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.images import ANY_SIZE, item_image
from kinlens.indexer.ingest.add import checked_fit
from kinlens.indexer.types import Facet, no_key
from kinlens.indexer.types import Group as PlainGroup
from kinlens.indexer.uploads import UploadFolder
from kinlens.library.bundles import load_bundle
from kinlens.library.images import Crops, View, Viewer, about, weighted_vectors
from kinlens.library.stores import Say, Store, bundle_of, folder_of
from kinlens.quality.answers import (
    Guaranteed,
    Results,
    Wanted,
    Words,
    guaranteed,
    prior_of,
    results_of,
    targets_of,
)
from kinlens.quality.calibration import Calibrated, choose
from kinlens.quality.calibrator import Calibrator
from kinlens.quality.guarantee import Guarantee
from kinlens.reports import THUMBNAIL_PX, listing, photo_card, photo_grid, written
from kinlens.values import AttributeValue, values_in

Thumbnail = Callable[[ItemId], bytes | None]
"""The thumbnail of an item, as JPEG; None if it has no image that can be shown."""

_SHOWN = 60
"""Number of items that a notebook shows."""


@dataclass(slots=True)
class Hit(PlainHit):
    """One result of a search: an item and its cosine similarity to the query, in [-1, 1].

    Attributes:
        probability: that it shows the right product, if the gallery is calibrated.
        view: with several views, the one that found it.
    """

    probability: float | None = None
    view: View | None = None


@dataclass(frozen=True, slots=True)
class Group(PlainGroup):
    """Items with one value of an attribute, best first; None for an item without a value."""

    hits: Sequence[Hit]
    probability: float | None = None
    view: View | None = None


class Items(list[Item]):
    """Items of a gallery, with photos in a notebook.

    Attributes:
        total: number of items that match, of which these are a page.
        last: the highest id of all of them; None if it is not known.
    """

    def __init__(
        self, items: Iterable[Item], total: int, last: ItemId | None, thumbnail: Thumbnail
    ) -> None:
        super().__init__(items)
        self.total, self.last = total, last
        self._thumbnail = thumbnail

    def to_arrow(self) -> Any:
        """A table with the columns id, key and the attributes. Needs `kinlens[parquet]`."""
        return table_of({"id": [i.id for i in self], "key": [i.key for i in self]}, self)

    def to_pandas(self) -> Any:
        """The table of `to_arrow` as a DataFrame. Needs pandas."""
        return self.to_arrow().to_pandas()

    def __repr__(self) -> str:
        return listing(f"{len(self)} of {self.total:,} items", map(_line, self))

    def _repr_html_(self) -> str:
        cards = (photo_card(i.key, i.attributes, self._thumbnail(i.id)) for i in self[:_SHOWN])
        return photo_grid(cards, f"{len(self)} of {self.total:,} items")


class Hits(list[Hit]):
    """The hits of one query, best first, with photos in a notebook.

    Attributes:
        groups: with `group_by`, the groups in place of hits.
        no_match_probability: that none of them is right, if the gallery is calibrated.
        facets: the value counts that were asked for, over all matching items.
        guarantee: with `guarantee` or `accept`, what holds.
    """

    guarantee: Guaranteed | None = None

    @property
    def accepted(self) -> bool | None:
        """With `accept`: whether the best product, the first of `guarantee.groups`, may be taken
        without a person.
        """
        return None if self.guarantee is None else self.guarantee.accepted

    def __init__(
        self,
        hits: Iterable[Hit],
        thumbnail: Thumbnail,
        groups: Sequence[Group] | None = None,
        no_match_probability: float | None = None,
        facets: Mapping[str, Facet] | None = None,
    ) -> None:
        super().__init__(hits)
        self.groups = groups
        self.no_match_probability = no_match_probability
        self.facets = facets
        self._thumbnail = thumbnail

    def all(self) -> list[Hit]:
        """The hits, also those in groups."""
        return [*self, *(hit for group in self.groups or () for hit in group.hits)]

    def to_arrow(self) -> Any:
        """A table with the columns id, key, score, probability and the attributes; with groups also
        their value, as `group`. Needs `kinlens[parquet]`.
        """
        hits = self.all()
        columns: dict[str, list[Any]] = {
            name: [getattr(hit, name) for hit in hits]
            for name in ("id", "key", "score", "probability")
        }
        if self.groups is not None:
            columns["group"] = [group.value for group in self.groups for _ in group.hits]
        return table_of(columns, hits)

    def to_pandas(self) -> Any:
        """The table of `to_arrow` as a DataFrame. Needs pandas."""
        return self.to_arrow().to_pandas()

    def lines(self) -> Iterator[str]:
        """The hits or groups, one line for each item, and the counts that were asked for."""
        for hit in self:
            yield f"{hit.score:.4f}{_percent(hit)}  {_line(hit, _part(hit.view))}"
        for group in self.groups or ():
            value = "(no value)" if group.value is None else group.value
            yield f"{group.score:.4f}{_percent(group)}  {value}{_part(group.view)}"
            yield from (f"    {hit.score:.4f}  {_line(hit)}" for hit in group.hits)
        if self.no_match_probability is not None:
            yield f"None of these: {100 * self.no_match_probability:.0f} %"
        if self.guarantee is not None:
            yield from self.guarantee.lines()
        for name, facet in (self.facets or {}).items():
            yield _counts(name, facet.described())

    def _summary(self) -> str:
        found = f"{len(self)} hits" if self.groups is None else f"{len(self.groups)} groups"
        if self.no_match_probability is None:
            return found
        return f"{found}; none of these: {100 * self.no_match_probability:.0f} %"

    def __repr__(self) -> str:
        return listing(self._summary(), self.lines())

    def _repr_html_(self) -> str:
        if self.groups is None:
            return photo_grid(self._cards(self), self._summary())
        rows = (
            f"<p>{escape('(no value)' if group.value is None else str(group.value))} "
            f"{group.score:.4f}</p>{photo_grid(self._cards(group.hits))}"
            for group in self.groups[:_SHOWN]
        )
        return f"<p>{self._summary()}</p>{''.join(rows)}"

    def _cards(self, hits: Sequence[Hit]) -> Iterator[str]:
        for hit in hits[:_SHOWN]:
            head = f"{hit.score:.4f}{_percent(hit)}"
            yield photo_card(hit.key, hit.attributes, self._thumbnail(hit.id), head)


class Views(NamedTuple):
    """The views of a query, their vectors (D,) and weights."""

    parts: list[View]
    vectors: list[NDArray[np.float32]]
    weights: list[float]


class Shape(NamedTuple):
    """What hits have besides their items: counts of `facets`, and only the attributes `fields`."""

    facets: list[str]
    fields: list[str] | None


def built_bundle(store: Store) -> Embedder:
    """The bundle that built a gallery. Raises: GalleryError if its folder is unknown or gone."""
    return load_bundle(bundle_of(store))


class Searcher:
    """A gallery that is open, and answers queries by the model of its bundle.

    Attributes:
        store: the gallery of the indexer, for what has no method here.
        shown: whether progress bars are shown; None: in terminals and notebooks.
        warn: called with a text about images that were skipped, and failures of the upkeep.
    """

    shown: bool | None = None

    def __init__(
        self,
        store: Store,
        bundle: Embedder | None = None,
        open_bundle: Callable[[Store], Embedder] = built_bundle,
    ) -> None:
        """Use `open_gallery`, `build` or `create_gallery`."""
        self.store = store
        self.warn: Say = warnings.warn
        self._bundle = bundle
        self._open_bundle = open_bundle
        self._viewer: Viewer | None = None
        self._calibrator = Calibrator(store) if isinstance(store, Gallery) else None
        if bundle is not None:
            fitted(store, bundle)

    @property
    def bundle(self) -> Embedder:
        """The model for queries; by default the bundle that built the gallery, opened when needed.

        Raises: GalleryError if that is unknown or gone; BundleMismatchError; BundleError.
        """
        if self._bundle is None:
            bundle = self._open_bundle(self.store)
            checked_fit(self.store, bundle)
            self._bundle = bundle
        return self._bundle

    def item(self, item: str | ItemId) -> Item:
        """An item by its key or id. Raises: ItemNotFoundError, InvalidParameterError."""
        if isinstance(item, int | np.integer):
            return self.store.item(int(item))
        if not isinstance(item, str):
            raise InvalidParameterError(
                f"item = {about(item)} must be a key, or the id of an item."
            )
        found = self.store.stored([item]).get(item)
        if found is None:
            raise ItemNotFoundError(no_key(item))
        return found

    def image(self, item: str | ItemId, size: int | None = None) -> bytes:
        """The image of an item, in a format that browsers show; with `size`, the longest side in
        pixels, a JPEG.

        Raises: ItemNotFoundError for an item without an image; ImageMissingError.
        """
        found = self.item(item)
        if found.path or not found.has_image:
            data = item_image(self.store.image_root, found).data
        else:
            folder = folder_of(self.store, "has its uploaded images elsewhere")
            data = UploadFolder(folder.path).read(found.sha256)
        return data if size is None else render_jpeg(data, ANY_SIZE, size)

    def _thumbnail(self, item_id: ItemId) -> bytes | None:
        """A thumbnail of an item; None if it has no image that can be shown."""
        try:
            return self.image(item_id, THUMBNAIL_PX)
        except (KinlensError, OSError):
            return None  # such as a file that was removed: the others are shown

    def _views(
        self, images: Sequence[Any], vectors: Sequence[Any], crops: Crops, has_words: bool
    ) -> Views:
        """The views of a query; with words, their vectors are those of the whole model.

        Raises: SourceError, ImageError, InvalidParameterError, BundleError.
        """
        if crops and not images:
            raise InvalidParameterError("crops are parts of an image, and the search has none.")
        dim = self.store.dim
        whole = self.bundle.dim if has_words else dim
        parts: list[View] = []
        found: list[NDArray[np.float32]] = []
        if images:
            if self._viewer is None:
                self._viewer = Viewer(self.bundle)
            parts, made = self._viewer.views(images, crops)
            found = [*first_numbers(made, whole)]
        more, weights = weighted_vectors(vectors, whole)
        parts += [View(vector=number) for number in range(1, len(more) + 1)]
        return Views(parts, [*found, *more], [*[1.0] * len(found), *weights])

    def _answer(
        self,
        views: Views,
        texts: tuple[list[str], list[float]],
        keys: tuple[list[str], list[str]],
        wanted: Wanted,
        prior: float,
        shape: Shape,
        level: float | None = None,
        accept: float | None = None,
    ) -> Hits:
        """The answer to one query of views, words, liked and disliked items, with a guaranteed set
        of this `level` and a decision.

        Raises: InvalidParameterError, ItemNotFoundError, FilterError, BundleError.
        """
        store, words = self.store, self._words(*texts) if texts[0] else None
        wanted = replace(wanted, best_view=wanted.best_view and bool(views.parts))
        _check(views, words, keys, wanted)
        targets = targets_of(
            store, views.vectors, views.weights, *keys, words=words, best_view=wanted.best_view
        )
        exclude = wanted.options.exclude | targets.exclude
        wanted = replace(wanted, options=replace(wanted.options, exclude=exclude))
        calibrated = self._calibrated() if words is None else "scores of words are not calibrated"
        if isinstance(calibrated, str) and wanted.min_probability is not None:
            raise InvalidParameterError(
                f"min_probability = {wanted.min_probability:g} needs probabilities, and this "
                f"search has none ({calibrated.rstrip('.')}). Pass min_score instead."
            )
        if not views.parts and isinstance(store, Gallery) and isinstance(calibrated, Calibrated):
            prior = prior_of(store, calibrated.product, targets.liked, prior)
        results = results_of(store, targets.vectors, wanted, calibrated, prior)
        hits = self._shaped(results, targets.vectors, wanted, shape, views.parts)
        if level is not None or accept is not None:
            if words or any(keys) or views.weights != [1.0] or views.parts[0].crop is not None:
                raise InvalidParameterError(
                    "guarantee and accept hold for queries like the labelled ones: one whole "
                    "image, or its vector."
                )
            known = self._guarantee()
            hits.guarantee = guaranteed(store, targets.vectors, known, level, accept, wanted)
        return hits

    def _guarantee(self) -> Guarantee:
        """The labelled queries of the gallery. Raises: InvalidParameterError with the cure."""
        if self._calibrator is None:
            raise InvalidParameterError(
                "Galleries on Milvus guarantee no answer. Use a gallery in a folder."
            )
        return self._calibrator.guarantee()

    def _answers(self, queries: Embeddings, wanted: Wanted, shape: Shape) -> list[Hits]:
        """The answers to vectors (Q, D), in one search of the index.

        Raises: InvalidParameterError, FilterError.
        """
        k, options = wanted.k, wanted.options
        if wanted.min_probability is not None:
            raise InvalidParameterError(
                "min_probability needs one query. Pass one vector (D,), or min_score."
            )
        if wanted.grouping is None:
            results = [Results(hits) for hits in self.store.search(queries, k, options)]
        else:
            grouped = self.store.search_groups(queries, k, wanted.grouping, options)
            results = [Results([], groups) for groups in grouped]
        return [
            self._shaped(found, query[None], wanted, shape)
            for found, query in zip(results, queries, strict=True)
        ]

    def _words(self, texts: Sequence[str], weights: Sequence[float]) -> Words:
        encoder = self.bundle.words()
        return Words(encoder, encoder.embed(texts), weights)

    def _calibrated(self) -> Calibrated | str:
        """The curve for probabilities, or the reason why there is none."""
        if self._calibrator is None:
            return "galleries on Milvus are not calibrated"
        if (stored := self._calibrator.stored()) is None:
            return choose(None, None, None)
        if self._bundle is None:
            return choose(stored, None, "no bundle is open")
        bundle = fitted(self.store, self._bundle)
        return choose(stored, bundle.calibration, bundle.no_calibration)

    def _shaped(
        self,
        results: Results,
        queries: Embeddings,
        wanted: Wanted,
        shape: Shape,
        views: Sequence[View] = (),
    ) -> Hits:
        """The results of one query; `views` are its views if results name some."""
        numbers, shares = results.views or {}, results.shares

        def hit_of(hit: PlainHit) -> Hit:
            attributes = hit.attributes
            if shape.fields is not None:
                attributes = {n: attributes[n] for n in shape.fields if n in attributes}
            probability = None if shares is None else shares.of(hit)
            view = views[numbers[hit.id]] if hit.id in numbers else None
            return Hit(hit.id, hit.key, hit.score, attributes, hit.has_image, probability, view)

        def group_of(group: PlainGroup) -> Group:
            members = [hit_of(hit) for hit in group.hits]
            probability = None if shares is None else shares.of_group(group, wanted.by)
            return Group(group.value, group.score, members, probability, members[0].view)

        names, facets = shape.facets, None
        if names:
            facets = self.store.facets(names, queries, wanted.options)
        groups = None if results.groups is None else [*map(group_of, results.groups)]
        return Hits(map(hit_of, results.hits), self._thumbnail, groups, results.none, facets)


def _check(
    views: Views, words: Words | None, keys: tuple[list[str], list[str]], wanted: Wanted
) -> None:
    """Raise InvalidParameterError for parts of a query that do not fit each other."""
    if not (views.parts or words or keys[0]):
        raise InvalidParameterError(
            "The search has nothing to look for. Pass an image, a vector, text or positives."
        )
    options = wanted.options
    is_moved = any((*keys, options.distinct, options.near is not None, options.reorders))
    if wanted.best_view and is_moved:
        raise InvalidParameterError(
            'combine = "best", as with crops = "auto", searches with each view; omit positives, '
            "negatives, distinct, diversity, boost and sort_by."
        )
    if wanted.best_view and any(weight != 1 for weight in views.weights):
        raise InvalidParameterError(
            'combine = "best" searches with each vector alone, where a weight has no effect; omit '
            'the weights, or pass combine = "mean".'
        )


def table_of(
    columns: Mapping[str, Sequence[Any]], items: Sequence[PlainHit] | Sequence[Item]
) -> Any:
    """A table of Arrow: these columns, and one for each attribute of the items.

    An attribute with the name of another column gets the prefix `attribute.`; one of which an item
    has several values is a list for all.
    """
    names = sorted({name for item in items for name in item.attributes})
    table = dict(columns)
    for name in names:
        values = [item.attributes.get(name) for item in items]
        if any(isinstance(value, tuple) for value in values):
            values = [None if value is None else values_in(value) for value in values]
        table[f"{ATTRIBUTE}{name}" if name in columns else name] = values
    return load_pyarrow().table(table)


def _percent(result: Hit | Group) -> str:
    return "" if result.probability is None else f"  {100 * result.probability:3.0f} %"


def _line(item: Item | Hit, part: str = "") -> str:
    return f"{item.key}{part}  {shown(item.attributes)}".rstrip()


def _part(view: View | None) -> str:
    """The part of the query that found a result."""
    if view is None:
        return ""
    if view.vector is not None:
        return f"  (vector {view.vector})"
    if view.crop is None:
        return "  (whole image)"
    return f"  (crop {','.join(f'{side:.3g}' for side in view.crop)})"


def _counts(name: str, facet: Mapping[str, Any]) -> str:
    """One line per attribute."""
    parts = [f"{written(each['value'])} ({each['count']:,})" for each in facet.get("values", ())]
    bins = facet.get("bins", ())
    parts += [f"{each['from']} to {each['to']} ({each['count']:,})" for each in bins]
    parts += [f"{rest} ({facet[rest]:,})" for rest in ("other", "missing") if facet.get(rest)]
    return f"{name}: {', '.join(parts)}"


def shown(attributes: Mapping[str, AttributeValue]) -> str:
    """Attributes on one line."""
    return ", ".join(f"{name}={written(value)}" for name, value in attributes.items())
