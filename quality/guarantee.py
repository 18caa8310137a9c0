r"""What answers guarantee, from the labelled queries of a gallery.

- A **set** of products contains the right one with at least the asked probability (split conformal
  prediction). A labelled query needs all products whose score is at most `behind` below the best
  one. The limit is an exact quantile of these numbers, so no model of the scores is assumed.
- A **decision** accepts the best product if it leads the second one by more than a threshold. The
  threshold is the lowest one at which an exact binomial test still shows, with the asked
  confidence, that few enough accepted queries are wrong.

Both hold for queries that are drawn as the labelled ones were. A query whose product is absent has
the right answer "none of these", with a limit of its own: so a set holds for any share of absent
products. The choices are measured in docs/decisions/0040.

References:
    Algorithmic Learning in a Random World (Vovk, Gammerman, Shafer 2005)
    Learn then Test (Angelopoulos, Bates, Candes, Jordan, Lei 2021), https://arxiv.org/abs/2110.01052
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from math import ceil, inf, log
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Hit, ItemId
from kinlens.indexer.entries import Item
from kinlens.indexer.types import SAME_SCORE, Group, Grouping, SearchOptions
from kinlens.quality.intervals import tail, upper_bound
from kinlens.values import Scalar, single

if TYPE_CHECKING:
    from kinlens.indexer.gallery import Gallery

Vector = NDArray[np.float32]


class Labelled(NamedTuple):
    """A labelled photo: its vector (D,), its label, a function that recognises a right hit (None if
    no item is right), a right item, for the category of a product that is not found, and the items
    that it must not find.
    """

    vector: Vector
    label: str
    is_right: Callable[[Hit], bool] | None
    item: Item | None = None
    exclude: frozenset[ItemId] = frozenset()


CONFIDENCE = 0.95
"""Confidence of a decision by default."""

LEVEL, ACCEPT = 0.95, 0.99
"""Level of sets and share of right decisions by default, in reports and checks."""

COPY = 1 - 1e-4
"""A hit with this cosine is the query itself, or a copy of it."""

KEPT = 20
"""Number of best products of a labelled query whose distances to the best one are stored."""

LOWEST, HIGHEST = 0.5, 0.9999
"""Shares that a guarantee may have: 29,956 labels prove the highest decision."""

RANKED = 50
"""Products to search for: an approximate index may rank otherwise if it is asked for others."""

_ITEMS = 2_000  # of the gallery that are judged, if its owner states that queries are like them
_RULES = 1_000  # of 300 galleries, with a set and two decisions each
_DEEPEST = 1_000  # products to look for the right one in, if it is not among these


class Judged(NamedTuple):
    """The answer to one labelled query.

    best: the score of the best product.
    gaps: how far the first `KEPT` products are below the best one; the first is 0.
    behind: how far the right product is below the best one; None if it is absent or not found.
    absent: whether the label is "none of these".
    images: number of images of the right product; 0 if it is absent or not found.
    kind, best_kind: the category of the right product (also if not found) and of the best one; ""
        without one.
    """

    best: float
    gaps: tuple[float, ...]
    behind: float | None
    absent: bool = False
    images: int = 0
    kind: str = ""
    best_kind: str = ""

    @property
    def scores(self) -> tuple[float, ...]:
        """The scores of the two best products."""
        return tuple(self.best - gap for gap in self.gaps[:2])

    @property
    def lead(self) -> float:
        """How far the second product is below the best one."""
        return self.gaps[1] if len(self.gaps) > 1 else _lead(self.scores)

    @property
    def is_right(self) -> bool:
        """Whether the best product is the right one. A tie counts as wrong."""
        return self.behind == 0 and self.lead > SAME_SCORE


Limits = dict[str, float]
"""A limit by category, for categories with enough labels; "" has that of all others."""


class SetRule(BaseModel, frozen=True):
    """Which products are in a set.

    Attributes:
        level: the asked probability.
        queries: number of labelled queries whose product is present.
        limits: a member is at most this far below the best product, by its category.
        none: "none of these" is a member if the best score plus its lead is at most this; None if
            no labelled query has an absent product.
        true: the probability that these labels reach is in this range, for 9 of 10 sets of labels;
            of the category with the fewest labels, if each has a limit.
    """

    level: float
    queries: int
    limits: Limits
    none: float | None
    true: tuple[float, float]

    def has(self, behind: float, kind: str) -> bool:
        """Whether a product of this category, so far below the best one, is a member."""
        return behind <= self.limits.get(kind, self.limits[""]) + SAME_SCORE

    def members(self, groups: Sequence[Group], by: str | None = None) -> list[Group]:
        """The members among the best products of a search, best first."""
        best = groups[0].score if groups else 0.0
        return [one for one in groups if self.has(best - one.score, _kind(one.hits[0], by))]

    def has_none(self, scores: Sequence[float]) -> bool | None:
        """Whether "none of these" is a member if the best products have these scores, of which two
        suffice; None if that is unknown.
        """
        return None if self.none is None else _evidence(scores) <= self.none + SAME_SCORE


class DecisionRule(BaseModel, frozen=True):
    """When the best product may be taken without a person.

    Attributes:
        accept: the asked share of right ones among those accepted.
        confidence: how sure that is, of all categories together.
        queries: number of labelled queries.
        leads: the best product must lead the second one by more than this, by its category.
        accepted, wrong: number of labelled queries that this accepts, and of wrong ones among them.
    """

    accept: float
    confidence: float
    queries: int
    leads: Limits
    accepted: int = 0
    wrong: int = 0

    def takes(self, lead: float, kind: str) -> bool:
        """Whether to take a product of this category with this lead."""
        return lead > self.leads.get(kind, self.leads[""])

    def accepts(self, groups: Sequence[Group], by: str | None = None) -> bool:
        """Whether to take the first of these best products of a search, of which two suffice."""
        scores = [group.score for group in groups[:2]]
        return bool(groups) and self.takes(_lead(scores), _kind(groups[0].hits[0], by))


class Choices(BaseModel, frozen=True):
    """What the owner of a gallery chose for its guarantees.

    Attributes:
        confidence: of decisions.
        by: an attribute of the items, to report its values apart.
        is_split: whether the values of `by` have limits of their own.
    """

    confidence: float = CONFIDENCE
    by: str | None = None
    is_split: bool = False


class Guarantee(Choices, frozen=True):
    """The labelled queries of a gallery, judged by its items.

    Attributes:
        at: when, ISO 8601.
        items, last: number of items and highest item id at that time.
        product: the attribute that names the product of an item.
        source: the golden set, or items of the gallery if its owner states that queries are drawn
            like them.
        drifted: when the queries that came were found to differ from these; None if they were not.
        products: a hash of the product (and the category) of some items, by their id.
    """

    at: str
    items: int
    last: ItemId
    product: str
    source: Literal["golden", "gallery"]
    queries: tuple[Judged, ...]
    drifted: str | None = None
    products: dict[ItemId, str] = {}

    def __hash__(self) -> int:
        return hash((self.at, self.last, len(self.queries)))  # cheap, as a key of cached rules

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of everything, for keys of caches."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def present(self) -> list[Judged]:
        """The queries whose product is in the gallery."""
        return [one for one in self.queries if not one.absent]

    def sets(self, level: float) -> SetRule:
        """The rule of sets. Raises: InvalidParameterError if the labels do not suffice."""
        if isinstance(found := set_rule(self, float(level)), str):
            raise InvalidParameterError(found)
        return found

    def decisions(self, accept: float) -> DecisionRule:
        """The rule of decisions. Raises: InvalidParameterError if the labels do not suffice."""
        if isinstance(found := decision_rule(self, float(accept)), str):
            raise InvalidParameterError(found)
        return found


def judge(
    gallery: "Gallery",
    product: str,
    queries: Iterable[Labelled] | None,
    choices: Choices = Choices(),  # noqa: B008 (it is frozen)
) -> Guarantee:
    """Judge labelled photos. An image of an item is skipped, and so is a photo that was judged
    already, perhaps with another crop: it is no further draw of what comes.

    queries: None for items of the gallery, each searched for among the others. Use it only if the
        owner states that queries are drawn like the items. The only one of its product counts as
        not found.

    Raises: GalleryError, InvalidParameterError.
    """
    _check("confidence", choices.confidence)
    asked: dict[bytes, Labelled] = {}
    for one in _items_of(gallery, product) if queries is None else queries:
        asked.setdefault(one.vector.tobytes(), one)
    by, grouping, judged = choices.by, Grouping(product), list[Judged]()
    values: list[Scalar | None] = []
    for vector, _, is_right, item, exclude in asked.values():
        options, right, score = SearchOptions(exclude=exclude), None, 0.0
        [groups] = gallery.search_groups(vector[np.newaxis], RANKED, grouping, options)
        if is_right is not None and (right := _first(groups, is_right)) is not None:
            score = right.score
        elif is_right is not None and len(groups) == RANKED:
            [deep] = gallery.search_groups(vector[np.newaxis], _DEEPEST, grouping, options)
            if (right := _first(deep, is_right)) is not None:
                score = min(right.score, groups[-1].score)  # customers would not see it
        if not groups or groups[0].score >= COPY:
            continue
        best = groups[0].score
        values.append(right.value if right is not None else None)
        judged.append(
            Judged(
                best=round(best, 6),
                gaps=tuple(round(best - group.score, 6) for group in groups[:KEPT]),
                behind=None if right is None else round(best - score, 6),
                absent=is_right is None,
                kind=_kind(item if right is None else right.hits[0], by),
                best_kind=_kind(groups[0].hits[0], by),
            )
        )
    _, counts = gallery.product_counts(product, [*{v for v in values if v is not None}])
    return Guarantee(
        **choices.model_dump(),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        items=gallery.size,
        last=gallery.last_id,
        product=product,
        source="gallery" if queries is None else "golden",
        queries=tuple(
            one if value is None else one._replace(images=counts.get(value, 1))
            for one, value in zip(judged, values, strict=True)
        ),
    )


def _items_of(gallery: "Gallery", product: str) -> Iterator[Labelled]:
    def is_of(value: Scalar) -> Callable[[Hit], bool]:
        return lambda hit: single(hit.attributes.get(product)) == value

    for item, vector in zip(*gallery.sample(_ITEMS), strict=True):
        if (value := single(item.attributes.get(product))) is not None:
            yield Labelled(vector, str(value), is_of(value), item, frozenset([item.id]))


def _first(groups: Iterable[Group], is_right: Callable[[Hit], bool]) -> Group | None:
    return next((group for group in groups if is_right(group.hits[0])), None)


def _lead(scores: Sequence[float]) -> float:
    """How far the second of the best scores is below the first; the lowest cosine is -1."""
    return scores[0] - (scores[1] if len(scores) > 1 else -1.0)


def _evidence(scores: Sequence[float]) -> float:
    """What separates present products from absent ones: the best score, plus its lead."""
    return scores[0] + _lead(scores) if scores else -inf


def _kind(item: Hit | Item | None, by: str | None) -> str:
    """The category of an item; "" without one."""
    value = None if item is None or by is None else single(item.attributes.get(by))
    return "" if value is None else str(value)


# Sets


def quantile(numbers: Sequence[float], level: float) -> float:
    r"""The limit that a new number keeps with a probability of at least `level`, if it is drawn as
    the n others were: the :math:`\lceil (n + 1) \, level \rceil`-th smallest; infinite if there are
    fewer.
    """
    rank = _rank(len(numbers), level)
    return sorted(numbers)[rank - 1] if rank <= len(numbers) else inf


def labels_for_sets(level: float) -> int:
    """The fewest labelled queries with which a set can be smaller than all products."""
    return ceil(_exact(level) / (1 - _exact(level)))


def _rank(count: int, level: float) -> int:
    return ceil((count + 1) * _exact(level))


def _exact(level: float) -> Fraction:
    """The number as it was typed: 0.95 is 19/20, and not the nearest binary number."""
    return Fraction(repr(float(level)))  # also a number of NumPy


def _check(name: str, value: float) -> None:
    if not LOWEST <= value <= HIGHEST:
        raise InvalidParameterError(
            f"{name} = {value:g} must be between {LOWEST:g} and {HIGHEST:g}, such as 0.95."
        )


@lru_cache(maxsize=_RULES)
def set_rule(guarantee: Guarantee, level: float) -> SetRule | str:
    """The rule of sets, or why the labels do not suffice. Raises: InvalidParameterError."""
    _check("guarantee", level)
    present, least = guarantee.present, labels_for_sets(level)
    count = len(present)
    if count < least:
        return (
            f"guarantee = {level:g} needs at least {least:,} labelled queries whose product is in "
            f"the gallery; there are {count:,}. Label {least - count:,} more, then run "
            "kinlens-index golden run; or ask for less."
        )
    parts = _parts(guarantee, present, lambda one: one.kind, least)
    limits = {kind: quantile([*map(_behind, own)], level) for kind, own in parts.items()}
    limits.setdefault("", max(limits.values()))  # of categories without a label
    if inf in limits.values():
        lost = sum(one.behind is None for one in present)
        return (
            f"guarantee = {level:g} is not possible: the right product of {lost:,} of {count:,} "
            f"labelled queries is not among the first {_DEEPEST:,}. Train the model on these "
            "products, or ask for less."
        )
    absent = [_evidence(one.scores) for one in guarantee.queries if one.absent]
    fewest = min(map(len, parts.values()))
    rank = _rank(fewest, level)
    return SetRule(
        level=level,
        queries=count,
        limits=limits,
        none=quantile(absent, level) if absent else None,
        true=(1 - upper_bound(fewest - rank, fewest, 0.95), upper_bound(rank - 1, fewest, 0.95)),
    )


def _behind(one: Judged) -> float:
    return inf if one.behind is None else one.behind


def _parts(
    guarantee: Guarantee,
    queries: Sequence[Judged],
    kind_of: Callable[[Judged], str],
    least: int,
) -> dict[str, Sequence[Judged]]:
    """The queries of each category with at least `least` of them, and by "" those of the others
    together. So that these are enough, they include the smallest of the categories.
    """
    found: dict[str, list[Judged]] = {}
    for one in queries:
        found.setdefault(kind_of(one), []).append(one)
    others = found.pop("", [])
    for kind in sorted(found, key=lambda kind: len(found[kind])):
        if not guarantee.is_split or len(found[kind]) < least or 0 < len(others) < least:
            others += found.pop(kind)
    return {**({"": others} if others or not found else {}), **found}


# Decisions


def labels_for_decisions(accept: float, confidence: float = CONFIDENCE) -> int:
    """The fewest labelled queries, all of them accepted and right, that prove the rate."""
    return ceil(log(1 - confidence) / log(accept) - 1e-9)


@lru_cache(maxsize=64)
def counts_to_test(accept: float, confidence: float, most: int) -> tuple[int, ...]:
    """The fewest queries that prove the share of right ones with 0, 1, 2, ... errors, of at most
    `most`: 299, 473, 628, ... for 0.99 at 0.95 confidence.
    """
    rate, found, count = float(1 - _exact(accept)), list[int](), 1
    while count <= most:
        if tail(len(found), count, rate) <= 1 - confidence:
            found.append(count)
        else:
            count += 1
    return tuple(found)


@lru_cache(maxsize=_RULES)
def decision_rule(guarantee: Guarantee, accept: float) -> DecisionRule | str:
    """The rule of decisions, or why the labels do not suffice. Raises: InvalidParameterError."""
    _check("accept", accept)
    queries, confidence, each = guarantee.queries, guarantee.confidence, guarantee.confidence
    parts: dict[str, Sequence[Judged]] = {}
    for _ in range(2):  # how many parts there are depends on how sure each has to be
        least = labels_for_decisions(accept, each)
        parts = _parts(guarantee, queries, lambda one: one.best_kind, least)
        each = 1 - (1 - confidence) / len(parts)  # Bonferroni: all limits hold together
    leads = {kind: lowest_lead(own, accept, each) for kind, own in parts.items()}
    if min(leads.values()) == inf:
        least = labels_for_decisions(accept, each)
        right = max(_right_before_wrong(own) for own in parts.values())
        cure = f"Label {least - len(queries):,} more queries, then run kinlens-index golden run"
        if len(queries) >= least:
            cure = f"Of {len(queries):,} labelled queries the next one is wrong: train the model"
        of_all = f" in one of {len(parts)} categories" if len(parts) > 1 else ""
        return (
            f"accept = {accept:g} is not possible: {least:,} accepted without an error are needed "
            f"for {100 * accept:.4g} % at {100 * confidence:.4g} % confidence{of_all}; there are "
            f"{right:,}. {cure}, or ask for less."
        )
    leads.setdefault("", inf)  # a category without a label is not accepted
    rule = DecisionRule(accept=accept, confidence=confidence, queries=len(queries), leads=leads)
    accepted = [one for one in queries if rule.takes(one.lead, one.best_kind)]
    wrong = sum(not one.is_right for one in accepted)
    return rule.model_copy(update={"accepted": len(accepted), "wrong": wrong})


def _right_before_wrong(queries: Sequence[Judged]) -> int:
    """How many of the surest queries are right, until the first wrong one."""
    order = sorted(queries, key=lambda one: one.lead, reverse=True)
    return next((n for n, one in enumerate(order) if not one.is_right), len(order))


def lowest_lead(queries: Sequence[Judged], accept: float, confidence: float) -> float:
    """The lead above which a product may be taken; infinite if no lead is proven.

    Fixed-sequence testing: the queries with the largest leads are tested, first as few as could
    prove the rate, then more of them, until a test fails. How many are tested depends on no label.
    If products with a smaller lead are not surer than those with a larger one, an unproven lead is
    taken with a probability of at most 1 - confidence: given how many leads are above the true
    limit, the first test beyond it has no fewer errors than a binomial of the rate.
    """
    order = sorted(queries, key=lambda one: one.lead, reverse=True)
    falling, lowest = [-one.lead for one in order], inf  # ascending, to search in it
    errors = [0, *accumulate(not one.is_right for one in order)]
    rate = float(1 - _exact(accept))
    for count in dict.fromkeys((*counts_to_test(accept, confidence, len(order)), len(order))):
        tested = bisect_right(falling, falling[count - 1]) if count else 0  # with all ties
        # Strictly above the next lead: whether that is right is not tested.
        least = max(-falling[tested] if tested < len(order) else 0.0, SAME_SCORE)
        accepted = bisect_left(falling, -least)
        if not accepted or tail(errors[accepted], accepted, rate) > 1 - confidence:
            break
        lowest = least
    return lowest
