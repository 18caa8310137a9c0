"""What commands print: results on stdout, progress and errors on stderr."""

import contextlib
import math
from collections.abc import Iterator, Mapping

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from kinlens.embedder.errors import KinlensError
from kinlens.indexer.ingest.embed import Failure
from kinlens.values import AttributeValue

SHOWN = 10
"""Failures, problems and the like that are printed; a report has all of them."""

_SPEED_PERIOD_S = 600.0  # a batch may take minutes, and an estimate needs several of them

out = Console(soft_wrap=True, markup=False, highlight=False, emoji=False)
err = Console(stderr=True, markup=False, highlight=False, emoji=False)


@contextlib.contextmanager
def errors_shown() -> Iterator[None]:
    """End with code 1 and one line on stderr instead of a traceback."""
    try:
        yield
    except KinlensError as error:
        err.print(f"Error: {' '.join(str(error).split())}", soft_wrap=True)
        raise typer.Exit(1) from error
    except OSError as error:
        place = f" {error.filename}" if error.filename else ""
        err.print(
            f"Error: {error.strerror or error}{place}. Check it and try again.", soft_wrap=True
        )
        raise typer.Exit(1) from error
    except MemoryError as error:
        err.print(
            "Error: Not enough memory. Take a lower --batch-size or --workers, or a smaller index "
            "with --memory-mb.",
            soft_wrap=True,
        )
        raise typer.Exit(1) from error
    except KeyboardInterrupt as interrupt:
        err.print("Stopped. Finished work is kept: run the same command again to continue.")
        raise typer.Exit(1) from interrupt


class Advance:
    """Moves a progress bar by what was finished; the bar appears with the first call."""

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self._progress = progress
        self._label = label
        self._total = total
        self._task: TaskID | None = None

    def __call__(self, count: int) -> None:
        """`count` more are finished."""
        self._progress.advance(self.begin(), count)

    def begin(self) -> TaskID:
        """Show the bar."""
        if self._task is None:
            self._task = self._progress.add_task(self._label, total=self._total)
        return self._task

    def then(self, label: str, total: int) -> "Advance":
        """A bar below this one, for the work that follows."""
        return Advance(self._progress, label, total)


@contextlib.contextmanager
def progress(total: int, label: str, unit: str = "items") -> Iterator[Advance]:
    """A progress bar with speed and remaining time on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,} of {task.total:,}"),
        _Speed(unit),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=err, speed_estimate_period=_SPEED_PERIOD_S) as bars:
        advance = Advance(bars, label, total)
        advance.begin()
        yield advance


class _Speed(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        elapsed_s = task.finished_time or task.elapsed or math.inf
        return Text(f"{task.speed or task.completed / elapsed_s:.1f} {self._unit}/s")


def print_report(report: object, json: bool, *lines: str) -> None:
    """A model or a dataclass as one JSON object on stdout, or what it says to people."""
    if json:
        lines = (TypeAdapter(type(report)).dump_json(report, indent=2).decode(),)
    for line in lines:
        out.print(line)


def failure_lines(failures: tuple[Failure, ...], found: int, rest: str) -> Iterator[str]:
    """The first failures; `rest` says where all of them are."""
    if not failures:
        return
    yield f"Left out {len(failures):,} of {found:,} images:"
    for failure in failures[:SHOWN]:
        yield f"  {failure.key}: {failure.reason}"
    if len(failures) > SHOWN:
        yield f"  ... and {len(failures) - SHOWN:,} more {rest}"


def shown(attributes: Mapping[str, AttributeValue]) -> str:
    """Attributes on one line."""
    return ", ".join(f"{name}={written(value)}" for name, value in attributes.items())


def written(value: AttributeValue) -> str:
    """A value as it is typed."""
    if isinstance(value, tuple):
        return "|".join(map(written, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
