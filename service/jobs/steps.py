"""How far a job is: steps that share the whole, told to the store now and then."""

import time

from indexer.types import Progress
from service.jobs.record import TOTAL
from service.jobs.store import JobStore

_EVERY_S = 0.2


class JobCancelledError(Exception):
    """Somebody asked the job to end before it changed anything."""


class Steps:
    """Tells the store how far job `job_id` is; `done` goes from 0 to 1000 over all steps."""

    def __init__(self, store: JobStore, job_id: str) -> None:
        self._store = store
        self._job_id = job_id
        self._told_at = 0.0

    def enter(self, text: str, start: float, end: float, units: int = 0) -> Progress:
        """Begin a step that takes the job from the part `start` to the part `end` of all its work.

        The returned function is told how many of the `units` are done since its last call.
        """
        done = 0
        self._tell(text, start)

        def more(count: int) -> None:
            nonlocal done
            done += count
            part = min(1.0, done / units) if units else 0.0
            is_due = time.monotonic() - self._told_at >= _EVERY_S
            if is_due or (units and done >= units):
                of = f" {min(done, units):,} of {units:,}" if units else ""
                self._tell(f"{text}{of}", start + part * (end - start))

        return more

    def set(self, text: str, part: float) -> None:
        """The job is at `part` of all its work."""
        self._tell(text, part)

    def commit(self) -> None:
        """From now on the job changes its gallery and cannot be cancelled.

        Raises: JobCancelledError if somebody has cancelled it.
        """
        if not self._store.commit(self._job_id):
            raise JobCancelledError("The job was cancelled; nothing was changed.")

    def _tell(self, text: str, part: float) -> None:
        self._told_at = time.monotonic()
        self._store.progress(self._job_id, text, int(TOTAL * part))
