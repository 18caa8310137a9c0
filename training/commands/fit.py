"""kinlens-train new, fit, crossval, search, tournament and report: one training, or several."""

import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from kinlens.embedder.errors import JobError
from kinlens.training.commands.jobs import (
    AllowPartial,
    ChooseByTest,
    Data,
    JobName,
    Overrides,
    Verbose,
    job_of,
    load_images,
    settings_of,
    shop_of,
    stoppable,
    summary,
)
from kinlens.training.config.layers import JOBS
from kinlens.training.report.log import console, console_listener, note

_RESUME = "Call again with the same --out to resume."


def fit(
    job: JobName,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME.")] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Continue from the run's last checkpoint.")] = False,
    choose_by_test: ChooseByTest = False,
    allow_partial: AllowPartial = False,
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
    settings = job_of(job, settings_of(overrides, allow_partial))
    settings.protocol.require_flag(choose_by_test)
    # Imported after the job is read, as torch takes seconds.
    from kinlens.training.checkpoint import FILE, load_checkpoint
    from kinlens.training.distributed import is_main, main_first, process_group
    from kinlens.training.report.log import TRACKERS, Callbacks
    from kinlens.training.runner import require_fresh_or_resumable, run_job

    if unknown := set(track or ()) - TRACKERS.keys():
        raise JobError(f"--track {min(unknown)} is unknown; use {' or '.join(TRACKERS)}.")
    trackers = [TRACKERS[name]() for name in track or () if is_main()]
    folder = out or Path("runs") / settings.name
    require_fresh_or_resumable(folder, resume)
    with process_group(settings.runtime.device):
        console.quiet = not is_main()
        with main_first():
            begun = load_checkpoint(folder).split_sha256 if (folder / FILE).exists() else ""
            split = load_images(settings, expected=begun)
        note(f"{settings.name}: {summary(split)}")
        resume_it = f"Finished epochs are kept. Resume: --out {folder} --resume."
        with stoppable(resume_it), console_listener(verbose) as listener:
            followers = Callbacks([listener, *trackers])
            followers.started(settings)
            followers.finished(run_job(settings, split, folder, followers))
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
    if out.exists():
        raise JobError(f"{out} exists already. Delete it, or give another --out.")
    root, name, table = shop_of(data)
    from kinlens.training.config.job import load_job
    from kinlens.training.data.samplers import BatchSampler
    from kinlens.training.folder import replace_text

    weights = str(Path(weights).resolve()) if Path(weights).exists() else weights
    text = (JOBS / "shop.toml").read_text(encoding="utf-8")
    for key, value in {"name": name, "root": str(root), "weights": weights}.items():
        text = _with_value(text, key, value)
    if table:
        text = text.replace('kind = "folder"', f'kind = "csv"\nfile = {json.dumps(table)}', 1)
    replace_text(out, text)
    try:
        job = load_job(out)
        split = load_images(job)
        steps = len(BatchSampler(job, split.train.labels, 0, 1))
    except BaseException:
        out.unlink()
        raise
    epochs = job.optimizer.enough_epochs(steps).epochs
    note(f"{summary(split)}; {epochs} epochs of {steps} steps")
    command = shlex.join(["kinlens-train", "fit", str(out), "--out", f"runs/{name}"])
    note(f"Train it: {command}")
    if weights == "imagenet":
        note(
            f"Without internet access, add --set model.weights=FILE: the ImageNet weights of "
            f"{job.model.backbone} as a file."
        )


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
    from kinlens.training.studies.validation import cross_validate, scores

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
    from kinlens.training.studies import validation as study

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
    from dataclasses import asdict

    from kinlens.training.folder import replace_json
    from kinlens.training.studies import tables

    known = tables.read_study(study)
    pairs = (text.rpartition("=") for text in against or ())
    others = {method: other for method, _, other in pairs}
    if runs or others:
        known = known.merged(tables.records_of(runs or (), by), others)
        replace_json(study, asdict(known))
    if not known.records:
        raise JobError(f"{study} has no runs. Pass finished run folders to add.")
    lines = tables.methods(known)
    if page is None:
        typer.echo("\n".join(lines))
    else:
        tables.replace_block(page, study.stem, lines)


def _with_value(text: str, key: str, value: str) -> str:
    """The job file `text` with `value` for the first `key`; comments stay."""
    # A function, as a replacement string would interpret the backslashes of a path.
    line = re.compile(rf'^({key} = )"[^"]*"', flags=re.MULTILINE)
    return line.sub(lambda found: found[1] + json.dumps(value, ensure_ascii=False), text, count=1)
