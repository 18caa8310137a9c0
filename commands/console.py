"""Output of the commands: results on stdout, progress and errors on stderr."""

import contextlib
from collections.abc import Iterator

import typer
from pydantic import TypeAdapter
from rich.console import Console

from kinlens.embedder.errors import KinlensError, disk_fault
from kinlens.embedder.programs.console import print_error
from kinlens.embedder.programs.progress import console
from kinlens.indexer.ingest.embed import Failure
from kinlens.reports import Report

SHOWN = 10
"""Number of failures or problems that are printed; a JSON report has all of them."""

SKIPPED = 3
"""Exit status if the work is done, but some images were skipped."""

err = console
out = Console(soft_wrap=True, markup=False, highlight=False, emoji=False)


@contextlib.contextmanager
def errors_shown() -> Iterator[None]:
    """Turn errors into one line on stderr and exit status 1, without a traceback."""
    try:
        yield
    except KinlensError as error:
        print_error(str(error))
        raise typer.Exit(1) from error
    except OSError as error:
        print_error(disk_fault(error))
        raise typer.Exit(1) from error
    except MemoryError as error:
        print_error(
            "Not enough memory. Reduce --batch-size or --workers, or limit the index with "
            "--memory-mb."
        )
        raise typer.Exit(1) from error
    except KeyboardInterrupt as interrupt:
        err.print("Interrupted. Finished work is kept; run the same command again to resume.")
        raise typer.Exit(1) from interrupt


def print_report(report: object, json: bool, *lines: str) -> None:
    """Print a model or dataclass as JSON, or `lines` for people, on stdout; by default those of
    the report.
    """
    if json:
        lines = (TypeAdapter(type(report)).dump_json(report, indent=2).decode(),)
    elif not lines and isinstance(report, Report):
        lines = tuple(report.lines())
    for line in lines:
        out.print(line)


def failure_lines(failures: tuple[Failure, ...], found: int, where: str) -> Iterator[str]:
    """The first failures on one line each; `where` describes the location of the full list."""
    if not failures:
        return
    yield f"Skipped {len(failures):,} of {found:,} images:"
    for failure in failures[:SHOWN]:
        yield f"  {failure.key}: {failure.reason}"
    if len(failures) > SHOWN:
        yield f"  ... and {len(failures) - SHOWN:,} more {where}"


def carried_text(count: int) -> str:
    """A sentence about changes that were made while a gallery was built; empty for none."""
    return f" {count:,} changes made meanwhile were carried over." if count else ""


def exit_with_skipped(failures: tuple[Failure, ...]) -> None:
    """Exit with status 3 if images were skipped, so that a script can notice it."""
    if failures:
        raise typer.Exit(SKIPPED)


def exit_if_empty(is_empty: bool, message: str) -> None:
    """Say on stderr that nothing was found, and exit with status 1, as grep does."""
    if is_empty:
        print_error(message)
        raise typer.Exit(1)
