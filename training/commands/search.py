"""`kinlens-train search`."""

from pathlib import Path
from typing import Annotated

import typer

from training.commands.jobs import AllowPartial, JobName, Overrides, load_images, settings_of
from training.config.job import load_job
from training.report.console import ConsoleListener, console


def search(
    job: JobName,
    space: Annotated[Path, typer.Option(help="TOML file: a range or values for each setting.")],
    trials: Annotated[int, typer.Option(min=1, help="Trials in all, finished ones included.")] = 50,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/NAME-search.")] = None,
    validation: Annotated[
        float, typer.Option(help="Part of the train classes to validate on: 0.1 is 90/10.")
    ] = 0.1,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of a trial; default those of the job.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampler.")] = 0,
    overrides: Overrides = None,
    allow_partial: AllowPartial = False,
) -> None:
    """Search the settings with the best R@1 on validation classes; test classes are not touched.

    Example: kinlens-train search cars196-half-detreg --space space.toml --trials 50 --epochs 10
    """
    from training.distributed import require_alone
    from training.studies.search import Plan, load_space
    from training.studies.search import search as run_search

    require_alone()
    settings = load_job(job, settings_of(overrides, allow_partial))
    plan = Plan(load_space(space), trials, validation, seed, epochs)
    folder = out or Path("runs") / f"{settings.name}-search"

    split = load_images(settings, hold_out=False)
    try:
        with ConsoleListener() as listener:
            best = run_search(settings, split, plan, folder, listener)
    except KeyboardInterrupt:
        console.print("Stopped. Call again with the same --out to go on.")
        raise typer.Exit(130) from None
    typer.echo(f"best: trial {best.number}, R@1 {best.score:.2f} on validation classes")
    for name, value in best.values.items():
        typer.echo(f"{name} = {value}")
    console.print(f"Test it once: kinlens-train fit {folder / 'best.toml'}")
