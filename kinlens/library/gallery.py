"""A gallery in the caller's process: searched and changed with the nouns of the client."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from kinlens.calls import QueryText, QueryVector
from kinlens.calls import SearchOptions as Asked
from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.programs.progress import progress_bar
from kinlens.embedder.types import Embeddings, ItemId
from kinlens.indexer.checks.duplicates import near_score
from kinlens.indexer.entries import Item, Schema
from kinlens.indexer.filters.json import filter_from_json
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.filters.tree import Exists, Filter, check_attribute
from kinlens.indexer.ingest.build import BuildReport
from kinlens.indexer.ingest.products import changes_by_key
from kinlens.indexer.live.ranking import check_at_least
from kinlens.indexer.types import Facet, Grouping, SearchOptions, boost_of, sort_by_of
from kinlens.library.additions import GalleryAdditions
from kinlens.library.bundles import check_choice
from kinlens.library.hits import Hit, Hits, Items, Shape, table_of
from kinlens.library.images import (
    Crops,
    about,
    listed_images,
    named_attributes,
    vectors_in,
    weighted_texts,
)
from kinlens.library.quality import Duplicates, GalleryCare, duplicates
from kinlens.library.stores import folder_of
from kinlens.quality.answers import Wanted
from kinlens.quality.calibration import DEFAULT_PRIOR
from kinlens.values import AUTO, AttributeInput, AttributeType, plain

_NAMED = 3

FilterInput = str | Mapping[str, Any] | Filter | None
Changes = Mapping[str, Mapping[str, AttributeInput | None]]

_PAGE = 1_000


class NearDuplicates(list[Hits]):
    """Groups of items that probably show one product, and the `report` about them."""

    def __init__(self, groups: Iterable[Hits], report: Duplicates) -> None:
        super().__init__(groups)
        self.report = report

    def __str__(self) -> str:
        return str(self.report)

    def _repr_html_(self) -> str:
        shown = "".join(group._repr_html_() for group in self[:_NAMED])
        return self.report._repr_html_() + shown


class Gallery(GalleryCare, GalleryAdditions):
    """A gallery of images or vectors, as `open_gallery`, `build` and `create_gallery` return it.

    The methods have the names of `kinlens.Client`, without the name of the gallery. It is a context
    manager. Several processes may search and change one gallery at the same time; a change is
    durable when the call returns.

    Attributes:
        store: the gallery of the indexer, for what has no method here.
        report: what `build` has done; `report.failures` lists the images that were skipped.
        shown: whether progress bars are shown; None: in terminals and notebooks.
        warn: called with a text about images that were skipped, and failures of the upkeep.

    Examples:
        >>> gallery = kinlens.open_gallery("galleries/shop", "bundles/shop")
        >>> hits = gallery.search("photo.jpg", k=3, filter="price < 60")
        >>> [hit.key for hit in hits]
        ['photo.jpg', 'second.jpg', 'third.jpg']
    """

    report: BuildReport | None = None

    @property
    def name(self) -> str:
        """The name of the gallery in URLs."""
        return self.store.name

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.store.dim

    @property
    def size(self) -> int:
        """Number of items."""
        return self.store.size

    @property
    def bundle_id(self) -> str:
        """The id of the bundle that computed the vectors."""
        return self.store.bundle_id

    @property
    def version(self) -> str:
        """sha256 (hex) that changes with every change."""
        return self.store.version

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return True  # an empty gallery is one, too

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self.store.stored([key])

    def __repr__(self) -> str:
        return f"<Gallery {self.name}: {self.size:,} items of {self.dim} numbers>"

    def _repr_html_(self) -> str:
        return self.items(limit=8)._repr_html_()

    def close(self) -> None:
        """Release files, memory and connections. The gallery cannot be used afterwards."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def search(
        self,
        query: Any = None,
        k: int = 20,
        options: SearchOptions | None = None,
        *,
        text: str | None = None,
        texts: str | Sequence[str | QueryText] | None = None,
        vectors: Sequence[QueryVector] | None = None,
        positives: Sequence[str] = (),
        negatives: Sequence[str] = (),
        crops: Crops = None,
        combine: Literal["mean", "best"] | None = None,
        filter: FilterInput = None,
        offset: int = 0,
        min_score: float | None = None,
        min_probability: float | None = None,
        group_by: str | None = None,
        group_size: int = 1,
        distinct: bool | Literal["near"] = False,
        exact: bool = False,
        facets: Sequence[str] = (),
        fields: Sequence[str] | None = None,
        diversity: float = 0.0,
        boost: str | None = None,
        sort_by: str | None = None,
        no_match_prior: float = DEFAULT_PRIOR,
        guarantee: float | None = None,
        accept: float | None = None,
    ) -> Any:
        """Search with images, vectors, words, or items of the gallery.

        Args:
            query: an image: a path, the bytes of a file, an image of Pillow, or an array uint8
                (H, W, 3); several images are one query. Or a vector (D,), or vectors (Q, D) of
                floats, each of which is a query.
            k: the number of hits, or groups.
            options: options of the indexer, in place of those with the same names here.
            text, texts: words, or mappings `{"text": "green", "weight": 0.5}`; they need a bundle
                with a text tower. A weight below 0 leads away from them.
            vectors: mappings `{"vector": [...], "weight": 0.5}`, as further views of the query.
            positives, negatives: keys of items that the hits must be like and unlike.
            crops: "auto", for busy photos: the whole image and parts of it. Or a list of (left,
                top, width, height) as fractions of each image.
            combine: "mean" of all views, or "best": an item counts with its most similar view.
            filter: only items that match, such as `'colour = "red" and price < 20'`.
            min_probability: omit hits that are less likely right.
            group_by: return groups of items with one value of this attribute, as `hits.groups`.
            distinct: of items with equal images return the best; "near": also of near-duplicates.
            facets: attributes whose values are counted over all matching items, as `hits.facets`.
            fields: the only attributes of the hits.
            boost: NAME:WEIGHT or NAME:WEIGHT:FROM:TO, an attribute that is added to the score.
            sort_by: NAME or NAME:desc, to sort the best 200.
            no_match_prior: probability that the product is not in the gallery.
            guarantee: level of the smallest set of products that has the right one, as
                `hits.guarantee.groups`; it needs labelled queries, and one whole image or vector,
                without offset, exact, another order and minimum scores.
            accept: share of right ones among the best products that are taken without a person,
                as `hits.accepted`.

        Returns:
            The hits, a list with photos in a notebook. For vectors (Q, D), a list with the hits
            of each, which have no probabilities.

        Raises:
            SourceError, ImageError: an image that cannot be read, by name.
            InvalidParameterError, FilterError: a parameter outside its range.
            BundleError: words without a text tower.
        """
        others = (filter, min_score is not None, offset, distinct, exact, diversity, boost, sort_by)
        if options is not None and any(others):
            raise InvalidParameterError(
                "options of the indexer stand in place of filter, min_score, offset, distinct, "
                "exact, diversity, boost and sort_by. Pass them in options."
            )
        check_choice("combine", combine, (None, "mean", "best"))
        check_choice("distinct", distinct, (None, False, True, "near"))
        if combine == "mean" and crops == AUTO:
            raise InvalidParameterError(
                'crops = "auto" searches with each part of an image. Omit combine = "mean".'
            )
        wanted = Wanted(
            plain(k),
            options
            or SearchOptions(
                where=_filter(filter),
                min_score=min_score,
                offset=plain(offset),
                distinct=bool(distinct),
                near=self._nearness() if distinct == "near" else None,
                exact=exact,
                diversity=diversity,
                boost=boost_of(boost) if boost else None,
                sort_by=sort_by_of(sort_by) if sort_by else None,
            ),
            Grouping(group_by, plain(group_size)) if group_by else None,
            combine == "best" or (combine is None and crops == AUTO),
            min_probability,
        )
        shape = Shape(_names("facets", facets), self._checked(fields))
        words = weighted_texts([*([] if text is None else [text]), *listed_images(texts)])
        rows = vectors_in(query)
        if rows is not None and rows.ndim == 2:
            if words[0] or vectors or positives or negatives or crops:
                raise InvalidParameterError(
                    "Vectors (Q, D) are searched each alone. Pass one vector (D,) to combine it "
                    "with words, items or other vectors."
                )
            if guarantee is not None or accept is not None:
                raise InvalidParameterError("guarantee and accept need one query: a vector (D,).")
            return self._answers(rows, wanted, shape)
        images = listed_images(query) if rows is None else []
        given = [*([] if rows is None else [rows]), *(vectors or ())]
        views = self._views(images, given, crops, bool(words[0]))
        liked, disliked = _names("positives", positives), _names("negatives", negatives)
        keys = [*dict.fromkeys(liked)], [*dict.fromkeys(disliked)]  # one named twice counts once
        return self._answer(views, words, keys, wanted, no_match_prior, shape, guarantee, accept)

    def similar(self, item: str | ItemId, **options: Unpack[Asked]) -> Hits:
        """Search with an item of the gallery, by key or id; the item itself is not returned."""
        given: dict[str, Any] = {name: v for name, v in options.items() if v is not None}
        hits: Hits = self.search(positives=[self.item(item).key], **given)
        return hits

    def items(
        self,
        *,
        offset: int = 0,
        limit: int = 50,
        after: ItemId = -1,
        filter: FilterInput = None,
        key_prefix: str = "",
        sort_by: str | None = None,
    ) -> Items:
        """A page of items, with photos in a notebook; `total` is the number of all that match.

        Args:
            after: only items with a higher id.
            key_prefix: only items whose key starts with this.
            sort_by: an attribute, "price" or "price:desc"; by default items are ordered by id.

        Raises: FilterError, InvalidParameterError.
        """
        order = sort_by_of(sort_by) if sort_by else None
        for name, value, least in (
            ("offset", offset, 0),
            ("limit", limit, 0),
            ("after", after, -1),
        ):
            check_at_least(name, value, least)
        page = self.store.page(
            plain(offset), plain(limit), _filter(filter), key_prefix, plain(after), order
        )
        return Items(page.items, page.total, page.last, self._thumbnail)

    def each_item(self, *, filter: FilterInput = None, key_prefix: str = "") -> Iterator[Item]:
        """Iterate over all matching items, by ascending id."""
        after, where = -1, _filter(filter)
        while items := self.store.page(0, _PAGE, where, key_prefix, after).items:
            yield from items
            after = items[-1].id

    def count(self, filter: FilterInput = None) -> int:
        """The number of items, or of those that match a filter."""
        return self.store.page(0, 0, _filter(filter)).total

    def facets(self, names: Sequence[str], filter: FilterInput = None) -> dict[str, Facet]:
        """The value counts of attributes over the items that match."""
        options = SearchOptions(where=_filter(filter))
        return self.store.facets(_names("names", names), None, options)

    def schema(self) -> Schema:
        """The attributes that items have had so far, and their types."""
        return self.store.schema()

    def vector(self, item: str | ItemId) -> NDArray[np.float32]:
        """The stored vector (D,) of an item, by key or id."""
        [entry] = self.store.entries([self.item(item).key])
        return entry.vector

    def vectors(self, keys: Sequence[str] | None = None) -> Embeddings:
        """The stored vectors (N, D) of items in this order; None: of all, by ascending id."""
        if keys is None:
            found = [entry.vector for batch in self.store.scan() for entry in batch]
        else:
            found = [entry.vector for entry in self.store.entries(_names("keys", keys))]
        return np.array(found, np.float32).reshape(-1, self.dim)

    def to_arrow(self, *, vectors: bool = False, filter: FilterInput = None) -> Any:
        """All matching items as a table with the columns id, key, attributes and, if asked for,
        vector. Needs `kinlens[parquet]`.
        """
        items = [*self.each_item(filter=filter)]
        columns: dict[str, list[Any]] = {
            "id": [item.id for item in items],
            "key": [item.key for item in items],
        }
        if vectors:
            columns["vector"] = [*self.vectors([item.key for item in items])]
        return table_of(columns, items)

    def to_pandas(self, *, vectors: bool = False, filter: FilterInput = None) -> Any:
        """The table of `to_arrow` as a DataFrame. Needs pandas."""
        return self.to_arrow(vectors=vectors, filter=filter).to_pandas()

    def patch(self, changes: Changes) -> int:
        """Change attributes of items by key, all items or none; None removes an attribute. Returns
        the number of changed items.

        Raises: ItemNotFoundError, InvalidParameterError.
        """
        return self.store.update(_by_key(changes))

    def update(self, changes: Changes) -> int:
        """The former name of `patch`."""
        return self.patch(changes)

    def patch_products(self, changes: Changes) -> int:
        """Change attributes of all items of each product, all or none. The products are values of
        the attribute `product`.
        """
        return self.store.update(changes_by_key(self.store, _by_key(changes)))

    def patch_where(self, filter: FilterInput, changes: Mapping[str, AttributeInput | None]) -> int:
        """Change attributes of all items that match a filter; None removes an attribute."""
        return self.store.update_where(_needed(filter), named_attributes("changes", changes))

    def remove(self, keys: str | Sequence[str], keep: Sequence[str] = ()) -> int:
        """Remove items by key; returns the number. Unknown keys are not counted.

        With `keep`, items are only removed if an item with one of these other keys exists.
        """
        several = [keys] if isinstance(keys, str) else _names("keys", keys)
        if not keep:
            return self.store.remove(several)
        folder = folder_of(self.store, "cannot keep the last copy of a product")
        return folder.remove(several, keep=_names("keep", keep))

    def remove_where(self, filter: FilterInput) -> int:
        """Remove all items that match a filter; returns the number."""
        return self.store.remove_where(_needed(filter))

    def restore(self, keys: str | Sequence[str]) -> list[Item]:
        """Restore removed items by key, within a day and before the next `compact`."""
        several = [keys] if isinstance(keys, str) else keys
        return folder_of(self.store, "does not keep removed items").restore(several)

    def drop_attribute(self, name: str) -> int:
        """Remove an attribute from every item; returns the number of items."""
        folder = folder_of(self.store, "keeps attributes as they are")
        with progress_bar(self.count(Exists(name)), "Changing", shown=self.shown) as advance:
            return folder.drop_attribute(name, advance)

    def retype_attribute(self, name: str, kind: AttributeType) -> int:
        """Convert every value of an attribute to another type; returns the number of items."""
        folder = folder_of(self.store, "keeps attributes as they are")
        with progress_bar(self.count(Exists(name)), "Changing", shown=self.shown) as advance:
            return folder.retype_attribute(name, kind, advance)

    def duplicates(self, *, min_score: float | None = None, exact: bool = False) -> NearDuplicates:
        """Groups of items that probably show one product, each with the score to its first item.

        Args:
            min_score: minimum cosine; by default 0.95, or higher if products look alike.
            exact: compare all items with all, without the index.

        Returns:
            A list of groups, with images in a notebook. Its `report` has the groups that are too
            large for copies of one product, and a warning if no item should be removed.
        """
        folder = folder_of(self.store, "cannot search for near-duplicates")
        report = duplicates(folder, min_score=min_score, exact=exact, shown=self.shown)
        thumbnail = self._thumbnail
        groups = [
            Hits((_hit_of(one.item, one.score) for one in group), thumbnail)
            for group in report.groups
        ]
        return NearDuplicates(groups, report)

    def _nearness(self) -> float:
        return near_score(folder_of(self.store, "cannot search for near-duplicates"))

    def _checked(self, fields: Sequence[str] | None) -> list[str] | None:
        """Names of attributes to return. Raises: FilterError for an unknown one."""
        if fields is None:
            return None
        schema = self.schema()
        for name in _names("fields", fields):
            check_attribute(name, schema, "return")
        return [*fields]


def _by_key(changes: Any) -> Changes:
    """The attributes to change, by key. Raises: InvalidParameterError."""
    if not isinstance(changes, Mapping) or not all(isinstance(key, str) for key in changes):
        raise InvalidParameterError(
            f"changes = {about(changes)} must have the attributes to change by key, such as "
            '{"shoes/1": {"price": 49.9}}.'
        )
    return {key: named_attributes(f"changes of {key!r:.80}", of) for key, of in changes.items()}


def _filter(value: FilterInput) -> Filter | None:
    """A filter as text, as JSON or as it is. Raises: FilterError."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return parse_filter(value)
    return filter_from_json(value) if isinstance(value, Mapping) else value


def _needed(value: FilterInput) -> Filter:
    """The filter of a change. Raises: InvalidParameterError for none: it would change all items."""
    found = _filter(value)
    if found is None:
        raise InvalidParameterError("filter is empty. Name the items that are to be changed.")
    return found


def _names(what: str, names: Sequence[str]) -> list[str]:
    """Raises: InvalidParameterError for a single text, whose letters would be the names."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidParameterError(f"{what} = {names!r:.200} must be a list, as [{names!r:.80}].")
    return [*names]


def _hit_of(item: Item, score: float) -> Hit:
    return Hit(item.id, item.key, score, item.attributes, item.has_image)
