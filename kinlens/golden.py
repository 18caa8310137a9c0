"""Golden sets in responses of the service: labelled queries and reports of runs."""

from pydantic import BaseModel

from kinlens.values import Scalar

Interval = tuple[float, float]
"""Lower and upper bound of a 95 % confidence interval."""


class Label(BaseModel, frozen=True, extra="forbid"):
    """The right items of a query, in exactly one of three ways: items with these `keys`, items
    whose `attribute` has this `value`, or none (`no_match`).
    """

    keys: tuple[str, ...] = ()
    attribute: str | None = None
    value: Scalar | None = None
    no_match: bool = False

    @property
    def wanted(self) -> str:
        """The label as a short text for people."""
        if self.attribute is not None:
            return f"{self.attribute} = {self.value}"
        return ", ".join(self.keys) or "no match"


class GoldenQuery(Label):
    """A labelled query of a golden set, identified by the sha256 (hex) of its image."""

    sha256: str
    name: str = ""
    added_at: str


class GoldenOutcome(BaseModel, frozen=True):
    """The result of one query.

    `right` is the number of right items in the gallery. `rank` is the rank of the first of them,
    from 1, or null if it is not in the examined hits. `precision` is the average precision at R.
    `best_*` describe the best hit. `problem` shows why the query was skipped.
    """

    query: GoldenQuery
    right: int = 0
    rank: int | None = None
    precision: float = 0.0
    best_key: str | None = None
    best_id: int | None = None
    best_score: float = -1.0
    problem: str = ""

    def quality(self, threshold: float | None) -> float:
        """The quality in [0, 1]: the precision; for `no_match`, 1 if no hit passes `threshold`."""
        if self.query.no_match:
            return float(threshold is None or self.best_score < threshold)
        return self.precision


class GoldenRun(BaseModel, frozen=True):
    """The report of a gallery on its golden set. Rates are fractions in [0, 1], null without data.

    `judged` queries have a right item in the gallery; `no_match` queries are labelled as having
    none. `left_out` queries were skipped: their items were removed or their image cannot be
    embedded. Recall and MAP@R are defined as in training: ties count as errors
    (docs/decisions/0004). `no_match_precision` is the fraction of `no_match` queries without a hit
    at or above `threshold`. `found` is the fraction of judged queries whose best hit is right and
    at or above it. `own_pictures` counts queries that use an item's own image.
    """

    at: str
    bundle_id: str
    generation: str
    version: str
    items: int
    queries: int
    judged: int
    no_match: int
    left_out: int
    own_pictures: int
    recall_at_1: float | None
    recall_at_1_interval: Interval | None
    recall_at_5: float | None
    recall_at_10: float | None
    map_at_r: float | None
    threshold: float | None
    no_match_precision: float | None
    found: float | None
    worst: tuple[GoldenOutcome, ...]


class GoldenQueries(BaseModel):
    """The queries of a golden set, oldest first."""

    queries: list[GoldenQuery]


class GoldenRuns(BaseModel):
    """Reports of runs of a golden set, newest first."""

    runs: list[GoldenRun]
