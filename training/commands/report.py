"""kinlens-train report."""

from pathlib import Path
from typing import Annotated

import typer

from embedder.errors import JobError


def report(
    study: Annotated[Path, typer.Argument(help="JSON file of the study; made if it is missing.")],
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Finished run folders to add, or JSON files of peers."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Method that others are compared with, seed by seed; METHOD=OTHER for one of "
            "them. Repeatable, kept in the study."
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Page whose block `<!-- NAME OF THE STUDY -->` gets the table."),
    ] = None,
) -> None:
    """Compare methods over seeds: keep the figures of runs, print or write their table.

    Examples:

    kinlens-train report docs/results/cars.json runs/cars/*/seed-* --against recipe

    kinlens-train report docs/results/cars.json --page docs/results.md
    """
    from training.report.results import read_study, record_of, replace_block, table, write_study

    known = read_study(study)
    others = dict(_pair(text) for text in against or ())
    if runs or others:
        known = known.merged([record_of(run) for run in runs or ()], others)
        write_study(study, known)
    if not known.records:
        raise JobError(f"{study} has no runs. Name finished run folders to add.")
    lines = table(known)
    if page is None:
        typer.echo("\n".join(lines))
    else:
        replace_block(page, study.stem, lines)


def _pair(text: str) -> tuple[str, str]:
    method, separator, other = text.partition("=")
    return (method, other) if separator else ("", method)
