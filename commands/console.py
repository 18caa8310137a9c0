"""How the commands end: errors on stderr, and exit statuses."""

import contextlib
from collections.abc import Iterator, Sequence

import typer

from kinlens.embedder.errors import KinlensError, disk_fault
from kinlens.embedder.programs.console import refuse
from kinlens.embedder.programs.progress import console
from kinlens.indexer.ingest.embed import Failure

SKIPPED = 3
"""Exit status if the work is done, but some images were skipped."""


@contextlib.contextmanager
def errors_shown() -> Iterator[None]:
    """Turn errors into one line on stderr and exit status 1, without a traceback."""
    try:
        yield
    except KinlensError as error:
        refuse(str(error))
    except OSError as error:
        refuse(disk_fault(error))
    except MemoryError:
        refuse(
            "Not enough memory. Reduce --batch-size or --workers, or limit the index with "
            "--memory-mb."
        )
    except KeyboardInterrupt as interrupt:
        console.print("Interrupted. Finished work is kept; run the same command again to resume.")
        raise typer.Exit(1) from interrupt


def exit_with_skipped(failures: Sequence[Failure]) -> None:
    """Exit with status 3 if images were skipped, so that a script can notice it."""
    if failures:
        raise typer.Exit(SKIPPED)
