"""kinlens-train new, fit, crossval, search, tournament and report: one training, or several."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from kinlens.embedder.errors import JobError
from kinlens.training.commands.options import (
    ChooseByTest,
    Data,
    JobName,
    JobOptions,
    Verbose,
    stoppable,
)
from kinlens.training.library import api
from kinlens.training.library.sources import job_of
from kinlens.training.report.log import note

_RESUME = "Call again with the same --out to resume."


def fit(
    job: JobName,
    changes: JobOptions,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue from the run's last checkpoint.")] = False,
    choose_by_test: ChooseByTest = False,
    verbose: Verbose = False,
    track: Annotated[
        list[str] | None,
        typer.Option(help="Report figures to mlflow or wandb, if installed. Repeatable."),
    ] = None,
) -> None:
    """Train a job; write checkpoint, log, curves, result and report to a run folder.

    Under torchrun, several processes train one model, with the result of a single process.

    Examples:

    kinlens-train fit cars196-half-detreg --out runs/cars --set optimizer.epochs=8

    torchrun --nproc-per-node=4 --no-python kinlens-train fit cub-proxy-anchor
    """
    settings = job_of(job, changes.settings)
    settings.protocol.require_flag(choose_by_test)
    # Imported after the job is read, as torch takes seconds.
    from kinlens.training.distributed import is_main
    from kinlens.training.report.log import TRACKERS

    if unknown := set(track or ()) - TRACKERS.keys():
        raise JobError(f"--track {min(unknown)} is unknown; use {' or '.join(TRACKERS)}.")
    trackers = [TRACKERS[name]() for name in track or () if is_main()]
    folder = out or Path("runs") / settings.name
    with stoppable(f"Finished epochs are kept. Resume: --out {folder} --resume."):
        api.fit(settings, out=folder, callbacks=trackers, resume=resume, verbose=verbose)
    note(f"Report: {folder / 'report.md'}")


def new(
    data: Data,
    out: Annotated[Path, typer.Option(help="Job file to write.")] = Path("job.toml"),
    weights: Annotated[
        str, typer.Option(help='"imagenet", the path of a weight file, or a bundle to continue.')
    ] = "imagenet",
) -> None:
    """Write a commented job for your own images, with the recommended recipe.

    Example: kinlens-train new --data /my/shop --out shop.toml && kinlens-train fit shop.toml
    """
    job = api.new(data, out, weights=weights)
    command = shlex.join(["kinlens-train", "fit", str(out), "--out", f"runs/{job.name}"])
    note(f"Train it: {command}")
    if weights == "imagenet":
        note(
            f"Without internet access, add --set model.weights=FILE: the ImageNet weights of "
            f"{job.model.backbone} as a file."
        )


def crossval(
    job: JobName,
    changes: JobOptions,
    folds: Annotated[int, typer.Option(min=2, help="Number of folds.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/NAME-crossval.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the folds.")] = 0,
) -> None:
    """Cross validate a job over its train classes; finished folds are not trained again.

    Example: kinlens-train crossval cars196-half --folds 10 --out runs/cars-crossval
    """
    with stoppable(_RESUME):
        found = api.crossval(job, folds=folds, out=out, seed=seed, settings=changes.settings)
    for name, score in found.items():
        typer.echo(f"{name} {score['mean']:.2f} ± {score['std']:.2f}")


def search(
    job: JobName,
    space: Annotated[Path, typer.Option(help="TOML file: a range or values for each setting.")],
    changes: JobOptions,
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
) -> None:
    """Search for the settings that find most on validation classes, without test classes.

    Example: kinlens-train search cars196-half --space space.toml --trials 50 --epochs 10
    """
    with stoppable(_RESUME):
        best = api.search(
            job,
            space,
            trials=trials,
            out=out,
            validation=validation,
            epochs=epochs,
            sampler=sampler,
            seed=seed,
            settings=changes.settings,
        )
    typer.echo(f"best: trial {best.number}, R@1 {best.score:.2f} on validation classes")
    for name, value in best.values.items():
        typer.echo(f"{name} = {value}")


def tournament(
    grid: Annotated[Path, typer.Argument(help="TOML file: a base job and the lists to combine.")],
    changes: JobOptions,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/GRID.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the runs and stop.")] = False,
    choose_by_test: ChooseByTest = False,
) -> None:
    """Train every combination of a grid and rank them; finished runs are not trained again.

    Each run is a separate process. A failed run is reported, and tried again on the next call.

    Example: kinlens-train tournament grid.toml --out runs/tournament
    """
    with stoppable(_RESUME):
        found = api.tournament(
            grid, out=out, plan=plan, choose_by_test=choose_by_test, settings=changes.settings
        )
    if plan:
        for run in found:
            typer.echo(f"{'finished' if run.result else 'to do':9} {run.job.name}")
        typer.echo(f"{len(found)} runs, {sum(run.result is not None for run in found)} finished")
    elif any(run.result is None for run in found):
        raise typer.Exit(1)


def report(
    study: Annotated[Path, typer.Argument(help="JSON file of the study; created if missing.")],
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Finished run folders to add, or JSON files of peers."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Method that others are compared with, seed by seed; METHOD=OTHER for a single "
            "method. Repeatable, stored in the study."
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(help="Setting that names the method, e.g. loss.name; default: folder.")
    ] = "",
    page: Annotated[
        Path | None,
        typer.Option(help="Page whose block `<!-- NAME OF THE STUDY -->` gets the table."),
    ] = None,
) -> None:
    """Compare methods over seeds: store the figures of runs, print or write their table.

    Examples:

    kinlens-train report docs/results/cars.json runs/cars/*/seed-* --against recipe

    kinlens-train report docs/results/cars.json --page docs/results.md

    kinlens-train report losses.json runs/losses/runs/*/*/*/seed-* --by loss.name
    """
    table = api.compare(study, runs or (), against=against or (), by=by, page=page)
    if page is None:
        typer.echo(table)
