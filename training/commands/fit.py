"""kinlens-train fit."""

from pathlib import Path
from typing import Annotated

import typer

from training.commands.jobs import (
    AllowPartial,
    ChooseByTest,
    JobName,
    Overrides,
    load_images,
    settings_of,
    summary,
)
from training.config.job import load_job
from training.report.console import ConsoleListener, console


def fit(
    job: JobName,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME.")] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option(help="Go on from the run's last checkpoint.")] = False,
    choose_by_test: ChooseByTest = False,
    allow_partial: AllowPartial = False,
) -> None:
    """Train a job; keep checkpoint, log, curves, result and report in a run folder.

    Under torchrun, several processes train one model and learn what one process would.

    Examples:

    kinlens-train fit cars196-half-detreg --out runs/cars --set optimizer.epochs=8

    torchrun --nproc-per-node=4 -m training fit cub-proxy-anchor --set data.root=/data/cub
    """
    from training.distributed import is_main, main_first, process_group
    from training.runner import require_fresh_or_resumable, run_job

    settings = load_job(job, settings_of(overrides, allow_partial))
    settings.protocol.require_flag(choose_by_test)
    folder = out or Path("runs") / settings.name
    require_fresh_or_resumable(folder, resume)
    with process_group(settings.runtime.device):
        console.quiet = not is_main()
        with main_first():
            split = load_images(settings)
        console.print(f"{settings.name}: {summary(split)}")
        try:
            with ConsoleListener(settings.optimizer.batch_size) as listener:
                run_job(settings, split, folder, listener)
        except KeyboardInterrupt:
            console.print(f"Stopped. Finished epochs are kept; go on with --out {folder} --resume.")
            raise typer.Exit(130) from None
        console.print(f"Report: {folder / 'report.md'}")
