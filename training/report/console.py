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


_UNTIMED, _TIMED = 1, 8
"""Steps between two others that a machine takes to warm up, and those that an estimate is of."""


class ConsoleListener:
    """Draws the epochs of a run; use as a context manager around `fit`.

    With the size of a batch it says after the first steps how long the run will take.
    """

    def __init__(self, batch_size: int | None = None) -> None:
        self._batch_size = batch_size
        self._epochs_left, self._steps = 0, 0
        self._last: float | None = None
        self._times: list[float] = []
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
        self._epochs_left, self._steps, self._last = epochs - epoch, steps, None
        self._progress.reset(self._task, total=steps, description=f"epoch {epoch + 1}/{epochs}")

    def step_done(self, parts: dict[str, float]) -> None:
        """Move the bar by one step and show its loss."""
        self._progress.update(self._task, advance=1, loss=f"loss {parts['loss']:.3f}")
        if self._batch_size is None or len(self._times) == _UNTIMED + _TIMED:
            return
        now = time.perf_counter()
        if self._last is not None:  # what passes between epochs is no step
            self._times.append(now - self._last)
            if len(self._times) == _UNTIMED + _TIMED:
                self._estimate(sum(self._times[_UNTIMED:]) / _TIMED, self._batch_size)
        self._last = now

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
