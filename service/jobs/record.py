"""What is known of a job."""

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["compact", "swap", "rebuild", "train", "delete_where"]
State = Literal["queued", "running", "succeeded", "failed", "cancelled"]

ENDED: tuple[State, ...] = ("succeeded", "failed", "cancelled")
ACTIVE: tuple[State, ...] = ("queued", "running")
HEAVY: tuple[Kind, ...] = ("rebuild", "train")
"""Kinds that take a whole machine; one of them runs at a time."""

TOTAL = 1000
"""What `done` counts to, whatever the job does: per mille of it."""


@dataclass(frozen=True, slots=True)
class Job:
    """One piece of long work on one gallery; times are ISO 8601 in UTC."""

    id: str
    kind: Kind
    gallery: str
    state: State
    step: str
    done: int
    total: int | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    by: str
    params: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    report: dict[str, Any] | None = None
    cancel_requested: bool = False
    committed: bool = False
    pid: int | None = None

    @property
    def is_active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ACTIVE
