"""What a person sees of a run: progress bars and a line per epoch."""

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


class ConsoleListener:
    """Draws the epochs of a run; use as a context manager around `fit`."""

    def __init__(self) -> None:
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
        self._progress.reset(self._task, total=steps, description=f"epoch {epoch + 1}/{epochs}")

    def step_done(self, parts: dict[str, float]) -> None:
        """Move the bar by one step and show its loss."""
        self._progress.update(self._task, advance=1, loss=f"loss {parts['loss']:.3f}")

    def epoch_done(self, row: dict[str, float]) -> None:
        """Print the figures of a finished epoch."""
        recalls = "  ".join(f"{k} {v:.1f}" for k, v in row.items() if "R@" in k)
        console.print(
            f"epoch {row['epoch']:.0f}  loss {row['loss']:.3f}  {recalls}  "
            f"{row['images_per_s']:.0f} images/s"
        )
