"""kinlens-train crossval, search and tournament."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kinlens.training.commands.jobs import (
    AllowPartial,
    ChooseByTest,
    JobName,
    Overrides,
    load_images,
    settings_of,
    stoppable,
)
from kinlens.training.report.log import console_listener, note

_RESUME = "Call again with the same --out to resume."


def crossval(
    job: JobName,
    folds: Annotated[int, typer.Option(min=2, help="Number of folds.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/NAME-crossval.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the folds.")] = 0,
    overrides: Overrides = None,
    allow_partial: AllowPartial = False,
) -> None:
    """Cross validate a job over its train classes; finished folds are not trained again.

    Example: kinlens-train crossval cars196-half --folds 10 --out runs/cars-crossval
    """
    from kinlens.training.config.job import load_job, with_absolute_paths
    from kinlens.training.studies.crossval import cross_validate, scores

    settings = with_absolute_paths(load_job(job, settings_of(overrides, allow_partial)))
    folder = out or Path("runs") / f"{settings.name}-crossval"
    with stoppable(_RESUME):
        split = load_images(settings, hold_out=False)
        with console_listener() as listener:
            found = cross_validate(settings, split, folder, listener, folds, seed)
    for name, score in scores(found).items():
        typer.echo(f"{name} {score['mean']:.2f} ± {score['std']:.2f}")
    note(f"Report: {folder / 'report.md'}")


def search(
    job: JobName,
    space: Annotated[Path, typer.Option(help="TOML file: a range or values for each setting.")],
    trials: Annotated[int, typer.Option(min=1, help="Trials in all, finished ones included.")] = 50,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/NAME-search.")] = None,
    validation: Annotated[
        float, typer.Option(help="Fraction of the train classes to validate on: 0.1 is 90/10.")
    ] = 0.1,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of a trial; default: the job's.")
    ] = None,
    sampler: Annotated[
        Literal["tpe", "grid"],
        typer.Option(help="tpe learns from earlier trials; grid tries every combination of steps."),
    ] = "tpe",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampler.")] = 0,
    overrides: Overrides = None,
    allow_partial: AllowPartial = False,
) -> None:
    """Search for the settings with the best R@1 on validation classes, without test classes.

    Example: kinlens-train search cars196-half --space space.toml --trials 50 --epochs 10
    """
    from kinlens.training.config.job import load_job, with_absolute_paths
    from kinlens.training.studies import search as study

    wanted = load_job(study.job_for(job, space), settings_of(overrides, allow_partial))
    settings = with_absolute_paths(wanted)
    plan = study.Plan(study.load_space(space), trials, validation, seed, epochs, sampler)
    folder = out or Path("runs") / f"{settings.name}-search"
    with stoppable(_RESUME):
        split = load_images(settings, hold_out=False)
        with console_listener() as listener:
            best = study.search(settings, split, plan, folder, listener)
    typer.echo(f"best: trial {best.number}, R@1 {best.score:.2f} on validation classes")
    for name, value in best.values.items():
        typer.echo(f"{name} = {value}")
    note(f"Test it once: kinlens-train fit {folder / 'best.toml'}")


def tournament(
    grid: Annotated[Path, typer.Argument(help="TOML file: a base job and the lists to combine.")],
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/GRID.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the runs and stop.")] = False,
    choose_by_test: ChooseByTest = False,
    overrides: Overrides = None,
    allow_partial: AllowPartial = False,
) -> None:
    """Train every combination of a grid and rank them; finished runs are not trained again.

    Each run is a separate process. A failed run is reported, and tried again on the next call.

    Example: kinlens-train tournament grid.toml --out runs/tournament
    """
    from kinlens.training.studies.tournament import load_grid, play, read_runs

    runs = load_grid(grid, settings_of(overrides, allow_partial))
    for run in runs:
        run.job.protocol.require_flag(choose_by_test)
    folder = out or Path("runs") / grid.stem
    if plan:
        found = read_runs(runs, folder)
        for run in found:
            typer.echo(f"{'finished' if run.result else 'to do':9} {run.job.name}")
        typer.echo(f"{len(found)} runs, {sum(run.result is not None for run in found)} finished")
        return

    with stoppable(_RESUME):
        found = play(runs, folder, note)
    note(f"Report: {folder / 'report.md'}")
    if any(run.result is None for run in found):
        raise typer.Exit(1)
