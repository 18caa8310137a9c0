"""What a person sees of a run: progress bars and a line per epoch."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console(stderr=True)


def progress_bar(*more: ProgressColumn) -> Progress:
    """Columns: text, bar, n of m, elapsed, remaining, and `more`."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        *more,
        console=console,
    )


_UNTIMED, _TIMED = 2, 8
"""Steps that a machine takes to warm up, and those that an estimate is made of."""


class ConsoleListener:
    """Draws the epochs of a run; use as a context manager around `fit`.

    With the size of a batch it says after the first steps how long the run will take.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        self._batch_size = batch_size
        self._epochs_left, self._steps, self._taken, self._started = 0, 0, 0, 0.0
        self._progress = progress_bar(TextColumn("{task.fields[loss]}"))
        self._task = self._progress.add_task("epoch", total=None, loss="")

    def __enter__(self) -> "ConsoleListener":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def said(self, sentence: str) -> None:
        """Print what a person should know."""
        console.print(sentence, highlight=False, markup=False)

    def epoch_started(self, epoch: int, epochs: int, steps: int) -> None:
        """A bar for the steps of one epoch; `epoch` counts from 0."""
        self._epochs_left, self._steps = epochs - epoch, steps
        self._progress.reset(self._task, total=steps, description=f"epoch {epoch + 1}/{epochs}")

    def step_done(self, parts: dict[str, float]) -> None:
        """Move the bar by one step and show its loss."""
        self._progress.update(self._task, advance=1, loss=f"loss {parts['loss']:.3f}")
        self._taken += 1
        if self._taken == _UNTIMED:
            self._started = time.perf_counter()
        if self._taken == _UNTIMED + _TIMED and self._batch_size is not None:
            self._estimate((time.perf_counter() - self._started) / _TIMED, self._batch_size)

    def _estimate(self, seconds: float, batch_size: int) -> None:
        minutes = seconds * self._steps * self._epochs_left / 60
        size = f"{minutes:.0f} minutes" if minutes >= 1.5 else f"{60 * minutes:.0f} seconds"
        console.print(
            f"about {size}: {self._epochs_left} epochs of {self._steps} steps at "
            f"{batch_size / seconds:.0f} images/s; evaluation comes on top",
            highlight=False,
        )

    def epoch_done(self, row: dict[str, float]) -> None:
        """Print the figures of a finished epoch."""
        recalls = "  ".join(f"{k} {v:.1f}" for k, v in row.items() if "R@" in k)
        console.print(
            f"epoch {row['epoch']:.0f}  loss {row['loss']:.3f}  {recalls}  "
            f"{row['images_per_s']:.0f} images/s"
        )
