"""The gate of a new model: whether its gallery may replace the old one, judged by items that favour
neither model.
"""

import contextlib
import math
from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import BundleError
from kinlens.embedder.seen import Seen
from kinlens.golden import Interval
from kinlens.indexer.entries import Item
from kinlens.indexer.gallery import Gallery
from kinlens.quality.compare import Comparison, compare
from kinlens.values import Scalar, single

ENOUGH = 50
"""Number of queries to judge two models by, unless the gate has another one."""
MIN_CLASSES = 6
"""Number of classes that these must be of. If all of six get worse, this is chance in 1 of 32 cases
(a sign test in both directions); of five it would be in 1 of 16."""

Part = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
LOSS_TEXT = "Largest accepted fall of recall@1."

_BY_HAND = "The new model is kept: look at the figures, then swap it in by hand or leave it."


class Gate(BaseModel):
    """The conditions for a new gallery to replace the old one; recalls are in [0, 1].

    `min_queries`: with fewer images of classes that neither model was trained on, nothing is judged
    and a person decides. 50 must be of at least 6 classes, fewer of proportionally fewer.
    """

    model_config = ConfigDict(extra="forbid")

    max_recall_loss: Part = Field(0.0, description=LOSS_TEXT)
    min_recall_at_1: Part | None = Field(None, description="Least accepted recall@1; null: any.")
    min_queries: int = Field(ENOUGH, ge=0, le=1000)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a new gallery is good enough to replace the old one, and why.

    `passed` is None if that cannot be judged, so that a person decides. `by` is the data that
    decided: the items or the golden set. `note` describes the other data.
    """

    passed: bool | None
    reason: str
    by: Literal["items", "golden"] = "items"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Questions:
    """The items that serve as queries to compare two models.

    keys: of these items; None for all items.
    clause: describes these items in the verdict.
    unfair: why no item is a fair query, or "".
    seen: the record of both models, as far as it is known; None if the new model has none.
    """

    keys: Set[str] | None = None
    clause: str = ""
    unfair: str = ""
    seen: Seen | None = field(default_factory=Seen.of)


def seen_by_bundle(folder: Path | None) -> Seen | None:
    """What the model in `folder` was trained on; None if that is not recorded or cannot be read."""
    with contextlib.suppress(BundleError):
        return None if folder is None else Bundle.open(folder).seen()
    return None


def fair_questions(
    gallery: Gallery, class_attribute: str, old: Seen | None, new: Seen | None
) -> Questions:
    """The items of classes that neither model was trained on, nor a model that it continued.

    A model was trained on a class if it was trained on a class of that name or on one of its
    images: classes are renamed, and images move from class to class.
    """
    if new is None:
        text = "the new model does not record the classes that it was trained on"
        return Questions(frozenset(), unfair=text, seen=None)
    if old is None:
        text = (
            "the model in service does not record the classes that it was trained on, as it comes "
            "from an earlier version or its bundle is not here"
        )
        return Questions(frozenset(), unfair=text, seen=new)
    seen = old | new
    if not len(seen.hashes):
        return Questions()

    is_trained: dict[Scalar, bool] = {}
    for item in gallery.items():
        value = single(item.attributes.get(class_attribute))
        if value is None:
            continue
        if value not in is_trained:
            is_trained[value] = seen.has_class(class_name(value))
        is_trained[value] |= seen.has_image(item.sha256)

    def is_fair(item: Item) -> bool:
        value = single(item.attributes.get(class_attribute))
        return value is not None and not is_trained.get(value, True)  # added since: not compared

    keys = {item.key for item in gallery.items() if is_fair(item)}
    return Questions(keys, ", classes that neither model was trained on", seen=seen)


def class_name(value: Scalar) -> str:
    """The value of an attribute as the name of a class, as in the CSV or the folder it is from."""
    if isinstance(value, bool):
        return str(value).lower()
    is_whole = isinstance(value, float) and value.is_integer()
    return f"{value:.0f}" if is_whole else str(value)


def judge_items(
    old: Gallery,
    new: Gallery,
    class_attribute: str,
    gate: Gate,
    questions: Questions,
    *,
    anyhow: bool,
) -> tuple[Comparison, Verdict]:
    """Compare both galleries with these queries and judge the new one; if that is not possible and
    `anyhow` is true, with all items, however few.
    """
    found = compare(old, new, class_attribute, asked=questions.keys)
    verdict = judge(found, gate, questions)
    if verdict.passed is not None or not anyhow:
        return found, verdict
    found = compare(old, new, class_attribute)
    note = "" if questions.keys is None else f"All items were compared. {verdict.reason}"
    lenient = gate.model_copy(update={"min_queries": 0})
    return found, replace(judge(found, lenient, Questions()), note=note)


def judge(found: Comparison, gate: Gate, questions: Questions) -> Verdict:
    """Check the recalls of both galleries against the gate.

    Nothing is judged with fewer than `gate.min_queries` queries or the classes that go with them.
    """
    old, new = found.old.recall_at_1, found.new.recall_at_1
    asked = f"{found.judged:,} images of {found.classes:,} classes{questions.clause}"
    least = gate.min_queries or bool(questions.clause)
    fewest = math.ceil(MIN_CLASSES * min(least / ENOUGH, 1))
    if not found.old.items:
        return Verdict(True, "The gallery has no items to compare.")
    if questions.unfair:
        return Verdict(None, f"This cannot be judged: {questions.unfair}. {_BY_HAND}")
    if found.judged < least or found.classes < fewest:
        return Verdict(
            None,
            f"This cannot be judged: there are {asked}, and {least:d} images of {fewest} "
            f"classes are needed. Fewer can be better or worse by chance. {_BY_HAND} Or start "
            "again with a lower gate.min_queries, or with more products.",
        )
    if old is None or new is None:
        return Verdict(
            False,
            f"Nothing can be judged: no two items have the same {found.class_attribute!r}. Choose "
            "another class_attribute, or check the overlap and swap by hand.",
        )
    figures = (
        f"recall@1 {new:.4f}{_between(found.new.recall_at_1_interval)}, before {old:.4f}"
        f"{_between(found.old.recall_at_1_interval)}, a change of {new - old:+.4f}"
        f"{_between(found.change_interval)}, on {asked}"
    )
    if old - new > gate.max_recall_loss + 1e-9:
        return Verdict(
            False,
            f"{figures}: the loss is {old - new:.4f}, the gate allows {gate.max_recall_loss:.4f}.",
        )
    if gate.min_recall_at_1 is not None and new < gate.min_recall_at_1:
        return Verdict(False, f"{figures}: the gate requires {gate.min_recall_at_1:.4f}.")
    return Verdict(True, f"{figures}.")


def _between(interval: Interval | None) -> str:
    return "" if interval is None else f" ({interval[0]:.4f} to {interval[1]:.4f})"
