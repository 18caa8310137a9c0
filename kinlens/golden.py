"""Golden sets: labelled queries and reports of runs, as the service and the library return them."""

from collections.abc import Iterator
from math import sqrt
from operator import not_
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from kinlens.reports import Report
from kinlens.values import Scalar

Interval = tuple[float, float]
"""Lower and upper bound of a 95 % confidence interval."""

Crop = tuple[float, float, float, float] | Literal["auto"]
"""A part of an image as left, top, width and height in fractions of it; auto for several parts."""

_SHORT = 12  # characters of an id that are shown
_Z = 1.96  # standard deviations around the mean that cover 95 % of a normal distribution


def wilson(right: int, queries: int) -> Interval:
    """Wilson interval of the share of `right` among `queries` independent queries, at least one.

    References: Wilson, Probable Inference, the Law of Succession, and Statistical Inference (1927).
    """
    part, z2 = right / queries, _Z**2 / queries
    middle = (part + z2 / 2) / (1 + z2)
    half = _Z * sqrt(part * (1 - part) / queries + z2 / (4 * queries)) / (1 + z2)
    return round(max(middle - half, 0.0), 6), round(min(middle + half, 1.0), 6)


def with_interval(recall: float, queries: int) -> str:
    """A recall in percent with Wilson's 95 % interval, "58.0 (50.0 to 65.6)".

    It takes queries as independent. Images of one class are alike, so the true interval is wider.
    """
    low, high = wilson(round(recall / 100 * queries), queries)
    return f"{recall:.1f} ({100 * low:.1f} to {100 * high:.1f})"


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


class Words(BaseModel, frozen=True, extra="forbid"):
    """Words of a query, as in a search."""

    text: Annotated[str, Field(min_length=1, max_length=1_000)]
    weight: float = 1.0


class GoldenQuery(Label):
    """A labelled query of a golden set: an image or a part of it, words, or an image with words.

    `sha256` (hex) identifies it. It is that of the image, which is `image_sha256` if the query also
    has a crop or words; words alone have no image.
    """

    sha256: str
    name: str = ""
    added_at: str
    crop: Crop | None = Field(default=None, exclude_if=not_)
    texts: tuple[Words, ...] = Field(default=(), exclude_if=not_)
    image_sha256: str | None = Field(default=None, exclude_if=not_)

    @property
    def image(self) -> str | None:
        """The sha256 (hex) of its image, None for words alone."""
        return self.image_sha256 if self.crop or self.texts else self.sha256

    @property
    def title(self) -> str:
        """Its name with its words and crop, for people."""
        asked = [words.text for words in self.texts]
        asked += [] if self.crop is None else [f"crop {self.crop}"]
        return " ".join(filter(None, (self.name, f"({', '.join(asked)})" if asked else "")))


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

    def __str__(self) -> str:
        return f"{self.query.sha256[:_SHORT]}  {self.query.title}  {self._text}"

    @property
    def _text(self) -> str:
        if self.problem:
            return self.problem
        first = "nothing" if self.best_key is None else f"{self.best_key} ({self.best_score:.4f})"
        rank = "" if self.rank is None else f", right item at rank {self.rank}"
        return f"wanted {self.query.wanted}, found {first}{rank}"


class GoldenRun(Report, BaseModel, frozen=True):
    """The report of a gallery on its golden set. Rates are fractions in [0, 1], null without data.

    `judged` queries have a right item in the gallery; `no_match` queries are labelled as having
    none. `left_out` queries were skipped: their items were removed or their image cannot be
    embedded. Recall and MAP@R are defined as in training: ties count as errors
    (docs/decisions/0001). `no_match_precision` is the fraction of `no_match` queries without a hit
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

    def lines(self) -> Iterator[str]:
        """The figures, then the worst queries."""
        interval = self.recall_at_1_interval
        between = "" if interval is None else f" ({interval[0]:.4f} to {interval[1]:.4f})"
        yield (
            f"{self.judged:,} of {self.queries:,} queries have a right item among "
            f"{self.items:,}; {self.no_match:,} have none, {self.left_out:,} were skipped."
        )
        yield f"recall@1   {_part(self.recall_at_1)}{between}"
        yield f"recall@5   {_part(self.recall_at_5)}"
        yield f"recall@10  {_part(self.recall_at_10)}"
        yield f"MAP@R      {_part(self.map_at_r)}"
        if self.threshold is None:
            yield "no match   not measured: the model has no calibration; pass --min-score."
        else:
            yield (
                f"no match   {_part(self.no_match_precision)} have no hit with a score of at least "
                f"{self.threshold:.4f}, at which {_part(self.found)} of the others are found."
            )
        if self.own_pictures:
            yield (
                f"{self.own_pictures:,} queries are the image of an item, which finds itself. "
                "Label photos of customers instead."
            )
        for outcome in self.worst:
            yield f"  {outcome}"


class GoldenQueries(Report, BaseModel):
    """The queries of a golden set, oldest first."""

    queries: list[GoldenQuery]

    def lines(self) -> Iterator[str]:
        """The id, the name and the label of each query."""
        for query in self.queries:
            yield f"{query.sha256[:_SHORT]}  {query.title}  {query.wanted}"


class UnlabelledQuery(BaseModel):
    """A query to label, if there is one: the photo with this sha256, or the words of `text`.

    `left` is the number of queries to label, with this one. A label by the attribute `product`
    counts for probabilities and guarantees; null without one.
    """

    left: int
    sha256: str | None
    text: str | None
    product: str | None


class GoldenRuns(Report, BaseModel):
    """Reports of runs of a golden set, newest first."""

    runs: list[GoldenRun]

    def lines(self) -> Iterator[str]:
        """A table of the runs, if there are any."""
        names = ("recall@1", "recall@10", "MAP@R")
        if self.runs:
            yield f"{'at':25}  {'bundle':12}  {'version':12}  {'  '.join(names)}  judged"
        for run in self.runs:
            figures = (run.recall_at_1, run.recall_at_10, run.map_at_r)
            texts = [
                f"{_part(value):>{len(name)}}" for name, value in zip(names, figures, strict=True)
            ]
            ids = f"{run.bundle_id[:_SHORT]:12}  {run.version[:_SHORT]:12}"
            yield f"{run.at:25}  {ids}  {'  '.join(texts)}  {run.judged:,}"


def _part(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.4f}"
