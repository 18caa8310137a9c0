"""The answer to one query: vectors of its views, hits or groups, and how likely each is right.

The service, the commands and the Python library search through this module:

    views, words, liked items ─► targets_of ─► results_of: hits or groups ─► probabilities
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.calibration import CANDIDATES
from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Embeddings, Hit, ItemId, first_numbers
from kinlens.embedder.views.text import TextEncoder
from kinlens.indexer.entries import Entry, Item
from kinlens.indexer.filters.text import Where
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.live.ranking import check_at_least, check_number
from kinlens.indexer.types import SAME_SCORE, Group, Grouping, SearchOptions, SortBy
from kinlens.quality.calibration import Calibrated, Shares, identity
from kinlens.quality.guarantee import RANKED, Guarantee
from kinlens.values import single

Result = TypeVar("Result", Hit, Group)

_CANCELLED = 1e-3  # norm below which a combination of likes and dislikes has no direction


class Searchable(Protocol):
    """What is searched: a gallery in a folder or on Milvus, or the part that a key may see."""

    @property
    def dim(self) -> int: ...

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]: ...

    def search_groups(
        self, queries: Embeddings, k: int, grouping: Grouping, options: SearchOptions | None = None
    ) -> list[list[Group]]: ...

    def entries(self, keys: Sequence[str]) -> list[Entry]: ...

    def stored(self, keys: Sequence[str]) -> dict[str, Item]: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a search returns.

    Attributes:
        grouping: return groups in place of hits.
        best_view: search with each vector separately, and score an item by its best one.
        min_probability: omit hits and groups that are less likely right.

    Raises: InvalidParameterError for a `k` or `min_probability` out of range, or with `sort_by`.
    """

    k: int
    options: SearchOptions = SearchOptions()  # noqa: RUF009 (it is frozen)
    grouping: Grouping | None = None
    best_view: bool = False
    min_probability: float | None = None

    def __post_init__(self) -> None:
        check_at_least("k", self.k, 1)
        check_likely(self.min_probability, self.options.sort_by)

    @property
    def by(self) -> str:
        """The attribute that groups have in common; empty without groups."""
        return "" if self.grouping is None else self.grouping.by


def check_likely(least: float | None, sort_by: SortBy | str | None) -> None:
    """Check `min_probability`. Raises: InvalidParameterError."""
    if least is None:
        return
    check_number("min_probability", least, 0, 1)
    if sort_by:
        raise InvalidParameterError(
            "min_probability cannot be combined with sort_by. Send min_score with sort_by, or "
            "omit one of them."
        )


@dataclass(frozen=True, slots=True)
class Results:
    """What a search found, best first.

    Attributes:
        hits: empty for groups.
        groups: None unless groups were asked for.
        views: with `best_view`, the number of the view that found each hit, or the best hit of each
            group, by the id of the hit.
        shares: the probabilities of the hits; None without calibration.
        none: the probability that none of them is right.
    """

    hits: Sequence[Hit]
    groups: Sequence[Group] | None = None
    views: Mapping[ItemId, int] | None = None
    shares: Shares | None = None
    none: float | None = None

    def __bool__(self) -> bool:
        return bool(self.hits or self.groups)


class Words(NamedTuple):
    """The texts of a query: their vectors (M, D) and weights, and the tower that made them."""

    encoder: TextEncoder
    vectors: Embeddings
    weights: Sequence[float]


class Targets(NamedTuple):
    """What to search for.

    Attributes:
        vectors: one query (1, D), or one for each view.
        exclude: ids of items that the results must not have: those that were liked or disliked.
        liked: the liked items.
    """

    vectors: Embeddings
    exclude: frozenset[ItemId] = frozenset()
    liked: Sequence[Item] = ()


def targets_of(
    gallery: Searchable,
    vectors: Sequence[Embeddings],
    weights: Sequence[float],
    positives: Sequence[str] = (),
    negatives: Sequence[str] = (),
    *,
    words: Words | None = None,
    best_view: bool = False,
) -> Targets:
    """The query of views, liked and disliked items, and words.

    Views and liked items are one vector: their mean, moved away from the disliked items and towards
    the words. With `best_view`, each view is a query, moved by the words.

    Args:
        vectors: a vector (D,) for each view; with `words`, that of the whole model.
        positives, negatives: keys of items.

    Raises: ItemNotFoundError; InvalidParameterError if nothing is liked, or the parts cancel out.
    """
    if words is None:
        return _liked(gallery, vectors, weights, positives, negatives, best_view)
    encoder, dim = words.encoder, gallery.dim
    if (positives or negatives) and encoder.dim != dim:
        raise InvalidParameterError(
            f"texts cannot be combined with items in a gallery of the first {dim:,} numbers "
            "of each vector; send an image of the item, or omit texts."
        )
    if not (vectors or positives):
        alone = first_numbers(encoder.joined(None, words.vectors, words.weights), dim)
        return _liked(gallery, list(alone), [1.0], (), negatives, False)
    targets = _liked(gallery, vectors, weights, positives, negatives, best_view)
    moved = encoder.joined(targets.vectors, words.vectors, words.weights)
    return targets._replace(vectors=first_numbers(moved, dim))


def _liked(
    gallery: Searchable,
    vectors: Sequence[Embeddings],
    weights: Sequence[float],
    positives: Sequence[str],
    negatives: Sequence[str],
    best_view: bool,
) -> Targets:
    if best_view:
        return Targets(np.stack(vectors))
    keys = [*positives, *negatives]
    if not keys and [*weights] == [1.0]:
        return Targets(np.ascontiguousarray(vectors[0][np.newaxis]))
    stored = [entry.vector for entry in gallery.entries(keys)] if keys else []
    liked = np.array([*vectors, *stored[: len(positives)]], np.float32)
    disliked = np.asarray(stored[len(positives) :], dtype=np.float32)
    items = gallery.stored(keys) if keys else {}
    target = combined_query(liked, disliked, [*weights, *[1.0] * len(positives)])
    return Targets(
        target[np.newaxis],
        frozenset(item.id for item in items.values()),
        [items[key] for key in positives if key in items],
    )


def results_of(
    gallery: Searchable,
    vectors: Embeddings,
    wanted: Wanted,
    calibrated: Calibrated | str = "",
    prior: float = 0.0,
) -> Results:
    """The hits or groups of one query (1, D), or of a view in each row with `best_view`.

    Args:
        calibrated: the curve for probabilities, or why there is none.
        prior: probability that the product is not in the gallery.

    Raises: InvalidParameterError, FilterError, GalleryError.
    """
    if isinstance(calibrated, str):
        return _search(gallery, vectors, wanted)
    options = wanted.options
    # Probabilities come from the best hits of all items: a filter makes no product likelier.
    of_all = SearchOptions(
        exclude=options.exclude, exact=options.exact, checkpoint=options.checkpoint
    )
    is_of_all = wanted.grouping is None and options == of_all  # then one search is enough
    depth = max(wanted.k, CANDIDATES) if is_of_all else wanted.k
    found = _search(gallery, vectors, replace(wanted, k=depth))
    best, hits, groups = found.hits, found.hits[: wanted.k], found.groups
    if not is_of_all:
        plain = replace(wanted, k=CANDIDATES, options=of_all, grouping=None)
        best = _search(gallery, vectors, plain).hits
    answered = [*hits, *(hit for group in groups or () for hit in group.hits)]
    shares, by = Shares(calibrated, prior, best, answered), wanted.by
    if (least := wanted.min_probability) is not None:
        hits = [hit for hit in hits if shares.of(hit) >= least]
        groups = groups and [group for group in groups if shares.of_group(group, by) >= least]
    none = shares.of_none(hits, groups, by)
    return Results(hits, groups, found.views, shares, none)


def _search(gallery: Searchable, vectors: Embeddings, wanted: Wanted) -> Results:
    grouping, k, options = wanted.grouping, wanted.k, wanted.options
    if not wanted.best_view:
        if grouping is None:
            return Results(gallery.search(vectors, k, options)[0])
        return Results([], gallery.search_groups(vectors, k, grouping, options)[0])
    if grouping is None:
        best = best_of_views(lambda depth, whole: gallery.search(vectors, depth, whole), k, options)
        return Results([hit for hit, _ in best], None, {hit.id: view for hit, view in best})
    groups = best_of_views(
        lambda depth, whole: gallery.search_groups(vectors, depth, grouping, whole), k, options
    )
    found_by = {group.hits[0].id: view for group, view in groups}
    return Results([], [group for group, _ in groups], found_by)


def prior_of(gallery: Gallery, product: str, liked: Sequence[Item], prior: float) -> float:
    """The prior probability that no other item shows a product of the `liked` items, which are
    excluded from the results. If all of them name their product it is known: 0 or 1.
    """
    named = [single(item.attributes.get(product)) for item in liked]
    values = [value for value in named if value is not None]
    if len(values) < len(liked):
        return prior
    counts = Counter((isinstance(value, bool), value) for value in values)
    has_more = [gallery.has_more(product, value, n) for (_, value), n in counts.items()]
    return 0.0 if any(has_more) else 1.0


@dataclass(frozen=True, slots=True)
class Guaranteed:
    """What an answer guarantees for queries that are drawn as the labelled ones were.

    Attributes:
        queries: number of labelled queries behind it.
        source: the golden set, or items of the gallery.
        product: the attribute that names a product.
        level: the probability that the set has the right product; None if no set was asked for.
        groups: the set, best first; without a level, the best product.
        none: whether "none of these" is in the set; None if no labelled query has an absent
            product.
        cut: what removed products from the set: its size `k`, or the filter.
        accept, confidence: the share of accepted answers that are right, and how sure that is.
        accepted: whether the best product may be taken; None if that was not asked for.
        best: the score of the best of all products; None in an empty gallery.
    """

    queries: int
    source: Literal["golden", "gallery"]
    product: str
    level: float | None
    groups: Sequence[Group]
    none: bool | None
    cut: Literal["k", "filter"] | None
    accept: float | None
    confidence: float | None
    accepted: bool | None
    best: float | None

    @property
    def holds(self) -> bool | None:
        """Whether the level holds: nothing cut the set. None if no set was asked for."""
        return None if self.level is None else self.cut is None

    def lines(self) -> Iterator[str]:
        """The set and the decision, as text for people."""
        names = [group.hits[0].key if group.value is None else group.value for group in self.groups]
        if self.level is not None:
            members = [*map(str, names), *(["none of these"] if self.none else [])]
            often = f"right for {100 * self.level:.4g} %" if self.holds else f"cut by {self.cut}"
            yield f"Products ({often}): {', '.join(members)}"
        if self.accepted is not None:
            yield f"Accepted: {names[0]}" if self.accepted else "Not accepted"


def guaranteed(
    gallery: Searchable,
    target: Embeddings,
    guarantee: Guarantee,
    level: float | None,
    accept: float | None,
    wanted: Wanted,
) -> Guaranteed:
    """What the answer to the query vector `target` (1, D) guarantees, in a set of up to `k`.

    The products are ranked as those of the labelled queries were: among all items, by the index,
    and as many for each `k`; only a larger set takes more.

    Raises: InvalidParameterError if the labels do not suffice, or for options that rank or omit
        hits in another way; FilterError.
    """
    options, k = wanted.options, wanted.k
    plain = replace(options, where=None, distinct=False, near=None)
    if plain != SearchOptions() or wanted.min_probability is not None:
        raise InvalidParameterError(
            "guarantee and accept are about the most similar products, as for labelled queries. "
            "Omit offset, sort_by, diversity, boost, exact, min_score and min_probability."
        )
    sets = None if level is None else guarantee.sets(level)
    decisions = None if accept is None else guarantee.decisions(accept)

    def search(where: Where | None, depth: int = RANKED) -> list[Group]:
        same = SearchOptions(where=where, checkpoint=options.checkpoint)
        [groups] = gallery.search_groups(target, depth, Grouping(guarantee.product), same)
        return groups

    deepest = max(k + 1, RANKED)  # one more product shows whether the set is cut
    best = ranked = search(None)
    cut: Literal["k", "filter"] | None = None
    if sets is None:
        members = best[:1]
    else:
        widest = max(sets.limits.values()) + SAME_SCORE
        if deepest > RANKED and _reaches(best, RANKED, widest):
            ranked = search(None, deepest)
        members = sets.members(ranked, guarantee.by)
        if len(members) > k or _reaches(ranked, deepest, widest):
            members, cut = members[:k], "k"
    first = [_identity(group) for group in best[:1]]
    is_first = first == [_identity(group) for group in members[:1]]  # of the set, and of all hits
    if options.where is not None:
        matching = [_identity(group) for group in search(options.where, deepest)]
        is_first = is_first and matching[:1] == first
        kept = [group for group in members if _identity(group) in matching]
        if len(kept) < len(members):
            members, cut = kept, "filter"
    return Guaranteed(
        queries=len(guarantee.queries) if sets is None else sets.queries,
        source=guarantee.source,
        product=guarantee.product,
        level=level,
        groups=members,
        none=None if sets is None else sets.has_none([group.score for group in best]),
        cut=cut,
        accept=accept,
        confidence=None if decisions is None else decisions.confidence,
        accepted=None if decisions is None else is_first and decisions.accepts(best, guarantee.by),
        best=best[0].score if best else None,
    )


def _reaches(groups: Sequence[Group], depth: int, widest: float) -> bool:
    """Whether more products than these `depth` may be so near to the best one."""
    return len(groups) >= depth and groups[0].score - groups[-1].score <= widest


def combined_query(liked: Embeddings, disliked: Embeddings, weights: Sequence[float]) -> Embeddings:
    """A unit query vector (D,) for items like `liked` (P, D) and unlike `disliked` (N, D).

    Rocchio's rule: the mean of the liked vectors by their `weights` (P,), plus its difference to
    the mean of the disliked ones. N may be 0. A vector with a negative weight is subtracted.

    Raises: InvalidParameterError if nothing is liked, or if likes and dislikes cancel out.
    """
    if not len(liked):
        raise InvalidParameterError("No liked items. Give at least one key of a liked item.")
    target = weighted_mean(liked, weights)
    if len(disliked):
        target = 2 * target - disliked.mean(axis=0, dtype=np.float64)
    norm = np.linalg.norm(target)
    if norm < _CANCELLED:
        raise InvalidParameterError(
            f"{len(liked)} liked and {len(disliked)} disliked items cancel out: their "
            f"combination has length {norm:.1g}. Omit some of them."
        )
    combined: Embeddings = (target / norm).astype(np.float32)
    return combined


def weighted_mean(vectors: Embeddings, weights: Sequence[float]) -> NDArray[np.float64]:
    """The sum (D,) of vectors (P, D) times their weights, by the sum of the absolute weights."""
    factors = np.array(weights, np.float64)
    mean: NDArray[np.float64] = factors @ vectors.astype(np.float64)
    return mean / max(float(np.abs(factors).sum()), np.finfo(np.float64).tiny)


def best_of_views(
    search: Callable[[int, SearchOptions], Sequence[Sequence[Result]]],
    k: int,
    options: SearchOptions,
) -> list[tuple[Result, int]]:
    """One page of results over several views of a query, best first, ties by id. A result that
    several views find appears once, with its best score and the number of that view.

    `search(depth, options)` returns the `depth` best results of each view. The page is exact: the
    best `depth` of all are among the best `depth` of each view.
    """
    depth = options.offset + k
    best: dict[object, tuple[Result, int]] = {}
    for view, results in enumerate(search(depth, replace(options, offset=0))):
        for result in results:
            known = best.get(_identity(result))
            if known is None or result.score > known[0].score:
                best[_identity(result)] = result, view
    ranked = sorted(best.values(), key=lambda each: (-each[0].score, _first_id(each[0])))
    return ranked[options.offset : depth]


def _first_id(result: Hit | Group) -> ItemId:
    return result.id if isinstance(result, Hit) else result.hits[0].id


def _identity(result: Hit | Group) -> object:
    """What identifies an item or a product; an item without a product is its own."""
    if isinstance(result, Hit):
        return result.id
    return ("item", _first_id(result)) if result.value is None else identity(result.value)
