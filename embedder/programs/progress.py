"""The progress bar of long work, in terminals and notebooks, on stderr."""

import contextlib
import math
from collections.abc import Iterator
from importlib.util import find_spec

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

_SPEED_PERIOD_S = 600.0  # covers several batches, each of which may take minutes

console = Console(stderr=True, markup=False, highlight=False, emoji=False)


class Advance:
    """Advances a progress bar, which appears at the first call."""

    def __init__(self, progress: Progress, label: str, total: int | None, unit: str) -> None:
        self._progress = progress
        self._label = label
        self._total = total
        self._unit = unit
        self._task: TaskID | None = None

    def __call__(self, count: int) -> None:
        """Report `count` more finished units."""
        self._progress.advance(self.begin(), count)

    def begin(self) -> TaskID:
        """Show the bar."""
        if self._task is None:
            self._task = self._progress.add_task(self._label, total=self._total, unit=self._unit)
        return self._task

    def then(self, label: str, total: int, unit: str = "items") -> "Advance":
        """A bar below this one, for the next stage of the work."""
        return Advance(self._progress, label, total, unit)


@contextlib.contextmanager
def progress_bar(
    total: int | None, label: str, unit: str = "items", shown: bool | None = None
) -> Iterator[Advance]:
    """A progress bar with speed and remaining time.

    shown: None shows it in a terminal and in a notebook. With True a log file gets its last line.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        *(
            [DownloadColumn()]
            if unit == "bytes"
            else [TextColumn("{task.completed:,} of {task.total:,}"), _Speed()]
        ),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    is_shown = _is_interactive() if shown is None else shown
    with Progress(
        *columns,
        console=console,
        speed_estimate_period=_SPEED_PERIOD_S,
        disable=not is_shown,
    ) as bars:
        advance = Advance(bars, label, total, unit)
        advance.begin()
        yield advance


def _is_interactive() -> bool:
    if console.is_jupyter:  # without ipywidgets, rich prints a warning in place of the bar
        return find_spec("ipywidgets") is not None
    return console.is_terminal


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        elapsed_s = task.finished_time or task.elapsed or math.inf
        return Text(f"{task.speed or task.completed / elapsed_s:.1f} {task.fields['unit']}/s")
