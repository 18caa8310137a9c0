"""kinlens-train compare."""

from pathlib import Path
from typing import Annotated

import typer


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; the first is the baseline.")],
) -> None:
    """Finished runs side by side, as Markdown: figures with intervals, and differing settings.

    Example: kinlens-train compare runs/cars196-half-proxy-anchor runs/cars196-half-determinant
    """
    from training.report import comparison

    found = [comparison.read_run(folder) for folder in runs]
    typer.echo("\n".join(comparison.compare(found)).rstrip())
