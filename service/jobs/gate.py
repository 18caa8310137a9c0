"""Whether a new gallery is good enough to replace the old one."""

from dataclasses import dataclass

from indexer.checks.compare import Comparison, Interval
from service.jobs.params import Gate


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision, and why."""

    passed: bool
    reason: str


def judge(found: Comparison, gate: Gate, asked: str = "") -> Verdict:
    """Compare the recalls of both galleries with what the gate allows.

    A loss counts only beyond what is allowed, and only on `gate.min_queries` queries or more.
    `asked` says what the queries have in common, as a clause.
    """
    old, new = found.old.recall_at_1, found.new.recall_at_1
    if not found.old.items:
        return Verdict(True, "The gallery has no items to compare.")
    if found.judged < gate.min_queries:
        return Verdict(
            False,
            f"Too few to judge by: {_number(found)}{asked}, the gate asks for {gate.min_queries}. "
            "Look at the figures and swap by hand, set gate.min_queries, or hold out more with "
            "data.train_fraction.",
        )
    if old is None or new is None:
        return Verdict(
            False,
            f"Nothing can be judged: no two items have the same {found.class_attribute!r}. Name "
            "another class_attribute, or look at the overlap and swap by hand.",
        )
    figures = (
        f"recall@1 {new:.4f}{_between(found.new.recall_at_1_interval)} after {old:.4f}"
        f"{_between(found.old.recall_at_1_interval)}, a change of {new - old:+.4f}"
        f"{_between(found.change_interval)}, on {_number(found)}{asked}"
    )
    if old - new > gate.max_recall_loss + 1e-9:
        return Verdict(
            False,
            f"{figures}: {old - new:.4f} is lost, the gate allows {gate.max_recall_loss:.4f}.",
        )
    if gate.min_recall_at_1 is not None and new < gate.min_recall_at_1:
        return Verdict(False, f"{figures}: the gate asks for {gate.min_recall_at_1:.4f}.")
    return Verdict(True, f"{figures}.")


def _number(found: Comparison) -> str:
    return f"{found.judged:,} photographs of {found.classes:,} classes"


def _between(interval: Interval | None) -> str:
    return "" if interval is None else f" ({interval[0]:.4f} to {interval[1]:.4f})"
