"""Where a job keeps what, below the state folder, and whether its process lives."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path


class JobFolders:
    """The files of one job in the state folder `state`."""

    def __init__(self, state: Path, job_id: str) -> None:
        self.state = state
        self.job_id = job_id
        self.path = state / "jobs" / job_id
        self.log = self.path / "log.txt"
        self.plan = self.path / "plan.json"
        self.report = self.path / "report.json"
        self.missing = self.path / "missing.json"
        self.run = state / "runs" / job_id
        self.candidate = state / "candidates" / job_id
        self.bundles = state / "bundles"
        self._lock = self.path / "lock"

    def take_lock(self) -> int | None:
        """A descriptor that marks the job as alive until each copy of it is closed; None if it is.

        Raises: OSError.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def is_alive(self) -> bool:
        """Whether a process has the job."""
        with contextlib.suppress(OSError):
            descriptor = self.take_lock()
            if descriptor is None:
                return True
            os.close(descriptor)
        return False

    def drop_candidate(self) -> None:
        """Remove the gallery that was not put in place, and what only its making needed."""
        shutil.rmtree(self.candidate, ignore_errors=True)
        shutil.rmtree(self.run / "data", ignore_errors=True)
