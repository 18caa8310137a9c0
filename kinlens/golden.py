"""Golden sets as the service answers them: labelled queries, and reports of runs."""

from pydantic import BaseModel

from kinlens.values import Scalar

Interval = tuple[float, float]
"""The lower and the upper end of a 95 % interval."""


class Label(BaseModel, frozen=True, extra="forbid"):
    """What is right for a query: items with these `keys`, those whose `attribute` has this `value`,
    or nothing at all (`no_match`); one of the three.
    """

    keys: tuple[str, ...] = ()
    attribute: str | None = None
    value: Scalar | None = None
    no_match: bool = False

    @property
    def wanted(self) -> str:
        """The label as people read it."""
        if self.attribute is not None:
            return f"{self.attribute} = {self.value}"
        return ", ".join(self.keys) or "no match"


class GoldenQuery(Label):
    """A query of a golden set, known by the sha256 (hex) of its picture."""

    sha256: str
    name: str = ""
    added_at: str


class GoldenOutcome(BaseModel, frozen=True):
    """What became of a query: of its `right` items the `rank` of the first, from 1, None if it is
    not among those looked at; its average `precision` at R; and what came first. `problem` says why
    it was left out.
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
        """How good the answer is, 0 to 1: the precision, or whether nothing is said to match."""
        if self.query.no_match:
            return float(threshold is None or self.best_score < threshold)
        return self.precision


class GoldenRun(BaseModel, frozen=True):
    """How a gallery did on its golden set; all figures are parts in [0, 1], None of no query.

    `judged` queries have a right item in the gallery, `no_match` are labelled as having none;
    `left_out` have lost their items or cannot be embedded. Recall and MAP@R are those of training:
    ties count against us (docs/decisions/0004). `no_match_precision` is the part of the `no_match`
    that nothing answers with `threshold` or more, `found` the part of the judged whose first answer
    is right and reaches it. `own_pictures` are queries that are an item's own picture.
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
    """Queries of a golden set, in the order in which they came."""

    queries: list[GoldenQuery]


class GoldenRuns(BaseModel):
    """The reports of a golden set, newest first."""

    runs: list[GoldenRun]
