"""`kinlens-train tournament`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from training.commands.jobs import AllowPartial, ChooseByTest, Overrides, settings_of
from training.report.console import console

if TYPE_CHECKING:
    from training.studies.runs import Run


def tournament(
    grid: Annotated[Path, typer.Argument(help="TOML file: a base job and the lists to combine.")],
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/NAME of the grid.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the runs and stop.")] = False,
    missing: Annotated[
        Literal["leave-out", "last"],
        typer.Option(help="Experiments that lack a competitor: left out, or it is ranked last."),
    ] = "leave-out",
    choose_by_test: ChooseByTest = False,
    overrides: Overrides = None,
    allow_partial: AllowPartial = False,
) -> None:
    """Train every combination of a grid and rank them; finished runs are not trained again.

    Each run is a process of its own; one that fails is reported, and tried again on the next call.

    Example: kinlens-train tournament grid.toml --out runs/tournament
    """
    from training.distributed import require_alone
    from training.studies.grid import load_grid
    from training.studies.page import write_report
    from training.studies.runs import play, read_runs

    require_alone()
    combinations = load_grid(grid, settings_of(overrides, allow_partial))
    for combination in combinations:
        combination.job.protocol.require_flag(choose_by_test)
    folder = out or Path("runs") / grid.stem
    if plan:
        runs = read_runs(combinations, folder)
        for run in runs:
            typer.echo(f"{'finished' if run.result else 'to do':9} {run.combination.job.name}")
        typer.echo(f"{len(runs)} runs, {sum(run.result is not None for run in runs)} finished")
        return

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    def report(runs: "list[Run]") -> None:
        write_report(folder, grid.stem, runs, missing_last=missing == "last")

    try:
        runs = play(combinations, folder, say, report=report)
    except KeyboardInterrupt:
        console.print("Stopped. Call again with the same --out to go on.")
        raise typer.Exit(130) from None
    console.print(f"Report: {folder / 'report.html'}")
    if any(run.result is None for run in runs):
        raise typer.Exit(1)
