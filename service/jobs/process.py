"""What the work in the process of a job is given, and how it runs the training command."""

import json
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedder.errors import JobConflictError, StateError
from indexer.gallery import current_manifest
from indexer.ingest.rebuild import ReadImage
from indexer.ingest.sources import ANY_SIZE, Record, read_image
from indexer.types import Item, Progress
from service.galleries.pictures import PictureFolder
from service.jobs.params import Params, Plan
from service.jobs.store import TOTAL, Job, JobFolders, JobStore

LOG_BYTES = 4 * 2**20
"""Of the output of a command, that many characters go into the log."""

_TELL_EVERY_S = 0.2
_SHOWN = 3  # lines of output in the error


@dataclass(frozen=True, slots=True)
class Context:
    """A job, what it was told, where it keeps its files, and how it tells what it does."""

    job: Job
    params: Params
    plan: Plan
    folders: JobFolders
    store: JobStore

    def at(self, step: str, part: float) -> None:
        """The job is at `part` (0 to 1) of all its work, and begins this step."""
        self.store.progress(self.job.id, step, int(TOTAL * part))

    def progress(self, step: str, start: float, end: float, units: int) -> Progress:
        """How to tell that a step goes on, which takes the job from the part `start` to `end`.

        The returned function is told how many of the `units` are done since its last call.
        """
        done, told_at = 0, 0.0

        def more(count: int) -> None:
            nonlocal done, told_at
            done = min(done + count, units)
            if done == units or time.monotonic() - told_at >= _TELL_EVERY_S:
                told_at = time.monotonic()
                part = done / units if units else 1.0
                self.at(f"{step} {done:,} of {units:,}", start + part * (end - start))

        return more

    def commit(self) -> None:
        """From now on the job changes its gallery and cannot be cancelled.

        Raises: JobConflictError if somebody has cancelled it.
        """
        if not self.store.commit(self.job.id):
            raise JobConflictError("The job was cancelled; nothing was changed.")

    def tell(self, **found: Any) -> None:
        """Add to the report of the job, in the store and in its folder."""
        report = (self.store.get(self.job.id).report or {}) | found
        self.store.report(self.job.id, report)
        self.folders.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    def read_image(self) -> ReadImage:
        """How to read the picture of an item: from the image root, or as it was uploaded."""
        root = self.plan.image_root or Path(current_manifest(self.plan.gallery).source_root)
        pictures = PictureFolder(self.plan.gallery)

        def read(item: Item | Record) -> bytes:
            if item.path:
                return read_image(root, item.path, ANY_SIZE.max_bytes)
            return pictures.read(item.sha256)

        return read


def run_command(words: Sequence[str], on_line: Callable[[], None] | None = None) -> None:
    """Run a command to its end, its output into the log of the job; `on_line` hears each line.

    Raises: OSError if it cannot be started; StateError, with its last lines, if it fails.
    """
    print(f"$ {' '.join(words)}", flush=True)  # noqa: T201
    last: deque[str] = deque(maxlen=_SHOWN)
    left = LOG_BYTES
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if text := line.rstrip():
                last.append(text[-500:])
            if left > 0:
                print(text[:left], flush=True)  # noqa: T201
                left -= len(line)
                if left <= 0:
                    print("(the log is full; what follows is left out)", flush=True)  # noqa: T201
            if on_line is not None:
                on_line()
    if process.returncode:
        raise StateError(
            f"{words[0].rsplit('/', 1)[-1]} {words[1]} ended with {process.returncode}: "
            f"{' '.join(last)[-1500:] or 'it said nothing'}"
        )
