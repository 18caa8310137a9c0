"""Whether a new gallery is good enough to replace the old one."""

from dataclasses import dataclass

from indexer.compare import Comparison
from service.jobs.params import Gate


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision, and why."""

    passed: bool
    reason: str


def judge(found: Comparison, gate: Gate) -> Verdict:
    """Compare the recalls of both galleries with what the gate allows."""
    old, new = found.old.recall_at_1, found.new.recall_at_1
    if not found.queries and not found.old.items:
        return Verdict(True, "The gallery has no items to compare.")
    if old is None or new is None:
        return Verdict(
            False,
            f"Nothing can be judged: no two items have the same {found.class_attribute!r}. Name "
            "another class_attribute, or look at the overlap and swap by hand.",
        )
    figures = f"recall@1 {new:.4f} after {old:.4f}, on {found.judged:,} queries"
    if old - new > gate.max_recall_loss + 1e-9:
        return Verdict(
            False,
            f"{figures}: {old - new:.4f} is lost, the gate allows {gate.max_recall_loss:.4f}.",
        )
    if gate.min_recall_at_1 is not None and new < gate.min_recall_at_1:
        return Verdict(False, f"{figures}: the gate asks for {gate.min_recall_at_1:.4f}.")
    return Verdict(True, f"{figures}.")
