"""`kinlens-train crossval`."""

from pathlib import Path
from typing import Annotated

import typer

from training.commands.jobs import AllowPartial, JobName, Overrides, load_images, settings_of
from training.config.job import load_job
from training.report.console import ConsoleListener, console


def crossval(
    job: JobName,
    folds: Annotated[int, typer.Option(min=2, help="Number of folds.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/NAME-crossval.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of the folds.")] = 0,
    overrides: Overrides = None,
    allow_partial: AllowPartial = False,
) -> None:
    """Cross validate a job over its train classes; finished folds are kept and not trained again.

    Example: kinlens-train crossval cars196-half-detreg --folds 10 --out runs/cars-crossval
    """
    from training.distributed import require_alone
    from training.studies.crossval import cross_validate

    require_alone()
    settings = load_job(job, settings_of(overrides, allow_partial))
    folder = out or Path("runs") / f"{settings.name}-crossval"

    split = load_images(settings, hold_out=False)
    try:
        with ConsoleListener() as listener:
            found = cross_validate(settings, split, folder, listener, folds, seed)
    except KeyboardInterrupt:
        console.print("Stopped. Call again with the same --out to go on.")
        raise typer.Exit(130) from None
    for name, (mean, deviation) in found.scores().items():
        typer.echo(f"{name} {mean:.2f} ± {deviation:.2f}")
    console.print(f"Report: {folder / 'report.md'}")
