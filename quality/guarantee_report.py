"""What the labelled queries of a gallery guarantee, as a report for its owner."""

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np
from pydantic import BaseModel

from kinlens.quality.guarantee import (
    DecisionRule,
    Guarantee,
    Judged,
    Limits,
    SetRule,
    decision_rule,
    labels_for_decisions,
    labels_for_sets,
    set_rule,
)
from kinlens.quality.intervals import exact_interval
from kinlens.reports import Report

_DRAWS = 100
_MORE = (100, 200, 300)
_SIZES = ((1, 1), (2, 3), (4, 7), (8, 15), (16, 10**9))


class Part(BaseModel, frozen=True):
    """Some of the labelled queries.

    Attributes:
        covered: share of the queries whose set has the right answer.
        interval: its exact 95 % interval.
        members: mean number of products in a set, of which up to 20 are counted.
        accepted, wrong: number of accepted queries, and of wrong ones among them.
    """

    name: str
    queries: int
    covered: float | None = None
    interval: tuple[float, float] | None = None
    members: float | None = None
    accepted: int | None = None
    wrong: int | None = None


class GuaranteeReport(BaseModel, Report, frozen=True):
    """What the labelled queries guarantee, or why they do not.

    Attributes:
        none_needs: number of labels that are missing until "none of these" is not in each set.
        more: for more labels like these, their number, the mean share of accepted queries then, and
            the chance that no decision is possible.
        separate_needs: labels of each category for a limit of its own, in sets and in decisions.
    """

    at: str
    source: str
    product: str
    by: str | None
    queries: int
    absent: int
    sets: SetRule | str
    none_needs: int
    decisions: DecisionRule | str
    more: list[tuple[int, float, float]]
    parts: list[Part]
    separate_needs: tuple[int, int] | None

    def lines(self) -> Iterator[str]:
        """The text for people."""
        yield (
            f"{self.queries:,} labelled queries of {self.at}, {self.absent:,} of them without a "
            f"right product; products by {self.product}."
        )
        if self.source == "gallery":
            yield "They are items of the gallery: its owner states that queries are like them."
        yield from self._lines_of_sets()
        yield from self._lines_of_decisions()
        if self.separate_needs is not None:
            sets, decisions = self.separate_needs
            yield (
                f"With --separate, each {self.by} with {sets:,} labels gets a limit of its own for "
                f"sets, and with {decisions:,} one for decisions."
            )
        yield f"{'':36} {'queries':>8} {'covered':>8} {'products':>9} {'accepted':>9} {'wrong':>6}"
        for part in self.parts:
            cells = (
                f"{_percent(part.covered):>8}",
                f"{'-' if part.members is None else f'{part.members:.1f}':>9}",
                f"{'-' if part.accepted is None else part.accepted:>9}",
                f"{'-' if part.wrong is None else part.wrong:>6}",
            )
            yield f"{part.name:36.36} {part.queries:>8,} {' '.join(cells)}"

    def _lines_of_sets(self) -> Iterator[str]:
        sets = self.sets
        if isinstance(sets, str):
            yield sets
            return
        yield (
            f"A set has the right product for {100 * sets.level:.4g} % of such queries; with these "
            f"labels for {sets.true[0]:.1%} to {sets.true[1]:.1%} (9 of 10 cases)."
        )
        for kind, limit in sets.limits.items():
            which = self._of(kind, sets.limits)
            yield f"  members: up to {limit:.4f} below the best product{which}"
        if self.none_needs:
            yield f'  "none of these" is in every set until {self.none_needs:,} more are labelled'
        elif sets.none is None:
            yield '  "none of these" is in no set: no labelled query has an absent product'

    def _lines_of_decisions(self) -> Iterator[str]:
        found = self.decisions
        if isinstance(found, str):
            yield found
            return
        each = f" for all {self.by} together" if len(found.leads) > 1 else ""
        yield (
            f"Accepted without a person: {found.accepted / found.queries:.1%} of the queries, of "
            f"which {100 * found.accept:.4g} % are right at {100 * found.confidence:.4g} % "
            f"confidence{each} ({found.wrong:,} of {found.accepted:,} labelled ones are wrong)."
        )
        for kind, lead in found.leads.items():
            text = "none" if lead == inf else f"a lead above {lead:.4f}"
            yield f"  accepted: {text}{self._of(kind, found.leads)}"
        for count, share, refused in self.more:
            chance = f", or none ({refused:.0%})" if refused else ""
            yield f"  with {count:,} more labels like these: about {share:.1%}{chance}"

    def _of(self, kind: str, limits: Limits) -> str:
        return f", {self.by} = {kind}" if kind else ", others" if len(limits) > 1 else ""


def report_of(guarantee: Guarantee, level: float, accept: float) -> GuaranteeReport:
    """The report for sets of this level, and decisions of this share of right ones."""
    queries = guarantee.queries
    absent = sum(one.absent for one in queries)
    sets, decisions = set_rule(guarantee, float(level)), decision_rule(guarantee, float(accept))
    refused = isinstance(decisions, str)
    each = 1 - (1 - guarantee.confidence) / max(len({one.best_kind for one in queries}), 1)
    return GuaranteeReport(
        at=guarantee.at,
        source=guarantee.source,
        product=guarantee.product,
        by=guarantee.by,
        queries=len(queries),
        absent=absent,
        sets=sets,
        none_needs=max(labels_for_sets(level) - absent, 0) if absent else 0,
        decisions=decisions,
        more=[] if refused else [(n, *outlook(guarantee, accept, n)) for n in _MORE],
        parts=[*_parts(guarantee, sets, decisions)],
        separate_needs=None
        if guarantee.by is None or guarantee.is_split
        else (labels_for_sets(level), labels_for_decisions(accept, each)),
    )


def outlook(guarantee: Guarantee, accept: float, more: int) -> tuple[float, float]:
    """What `more` labels like the known ones would bring: the mean share of accepted queries, and
    the chance that no decision is possible. From random draws.
    """
    rng, queries, shares = np.random.default_rng(0), guarantee.queries, list[float]()
    compute = decision_rule.__wrapped__  # nobody asks for these rules again
    for _ in range(_DRAWS):
        drawn = [queries[n] for n in rng.integers(0, len(queries), len(queries) + more)]
        labels = guarantee.model_copy(update={"queries": (*drawn,)})
        if not isinstance(rule := compute(labels, float(accept)), str):
            taken = sum(rule.takes(one.lead, one.best_kind) for one in queries)
            shares.append(taken / len(queries))
    return round(sum(shares) / _DRAWS, 4), (_DRAWS - len(shares)) / _DRAWS


def _parts(
    guarantee: Guarantee, sets: SetRule | str, decisions: DecisionRule | str
) -> Iterator[Part]:
    """All labelled queries; those of each category, of products with few and with many images, and
    of absent products.
    """
    queries = guarantee.queries
    named = {"all": [*queries]}
    for kind in dict.fromkeys(one.kind for one in queries if one.kind):
        named[f"{guarantee.by} = {kind}"] = [one for one in queries if one.kind == kind]
    for low, high in _SIZES:
        text = f"{low}" if low == high else f"{low} to {high}" if high < 10**9 else f"{low} or more"
        own = [one for one in queries if low <= one.images <= high]
        named[f"products with {text} images"] = own
    missed = [one for one in queries if one.behind is None and not one.absent]
    named["right product not found"] = missed
    named["none of these"] = [one for one in queries if one.absent]
    return (_part(name, own, sets, decisions) for name, own in named.items() if own)


def _part(
    name: str, queries: Sequence[Judged], sets: SetRule | str, decisions: DecisionRule | str
) -> Part:
    found: dict[str, object] = {}
    if isinstance(sets, SetRule):
        covered = sum(_is_covered(one, sets) for one in queries)
        sizes = [sum(sets.has(gap, one.best_kind) for gap in one.gaps) for one in queries]
        found["covered"] = round(covered / len(queries), 4)
        found["interval"] = exact_interval(covered, len(queries))
        found["members"] = round(float(np.mean(sizes)), 2)
    if isinstance(decisions, DecisionRule):
        accepted = [one for one in queries if decisions.takes(one.lead, one.best_kind)]
        found["accepted"] = len(accepted)
        found["wrong"] = sum(not one.is_right for one in accepted)
    return Part(name=name, queries=len(queries)).model_copy(update=found)


def _is_covered(one: Judged, sets: SetRule) -> bool:
    if one.absent:
        return bool(sets.has_none(one.scores))
    return one.behind is not None and sets.has(one.behind, one.kind)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
