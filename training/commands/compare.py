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
    from training.report.comparison import differing_settings, read_run, remarks, table

    found = [read_run(folder) for folder in runs]
    lines = [*table(found), "", *(f"- {remark}" for remark in remarks(found))]
    settings = differing_settings(found)
    if settings:
        header = ["setting", *(f"`{run.name}`" for run in found)]
        lines += ["", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        for name, values in settings.items():
            cells = ["" if value is None else str(value) for value in values]
            lines.append("| " + " | ".join([f"`{name}`", *cells]) + " |")
    typer.echo("\n".join(lines).rstrip())
