"""`kinlens-train tournament`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from training.commands.jobs import AllowPartial, ChooseByTest, Overrides, settings_of
from training.console import console
from training.tournament.ranking import Missing

if TYPE_CHECKING:
    from training.tournament.grid import Combination
    from training.tournament.ledger import Finished


class ConsoleObserver:
    """Prints the plan and a line for each run."""

    def planned(self, runs: int, finished: int, failed: int) -> None:
        """Say the cost before paying it."""
        console.print(
            f"{runs} runs: {finished} finished, {runs - finished} to go, "
            f"{failed} of them failed before and are tried again"
        )

    def started(self, combination: "Combination", number: int, runs: int) -> None:
        """A run begins."""
        console.print(f"run {number} of {runs}: {combination.job.name}")

    def finished(self, finished: "Finished") -> None:
        """A run has its result."""
        figures = finished.result.figures
        console.print("  " + "  ".join(f"{k} {v:.2f}" for k, v in figures.items() if k[:2] == "R@"))

    def failed(self, combination: "Combination", reason: str) -> None:
        """A run has none."""
        text = f"  failed: {reason} (output.log in {combination.folder})"
        console.print(text, style="red", highlight=False, markup=False)


def tournament(
    grid: Annotated[Path, typer.Argument(help="TOML file: a base job and the lists to combine.")],
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/NAME of the grid.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the runs and stop.")] = False,
    missing: Annotated[
        Missing,
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
    from training.tournament.grid import load_grid
    from training.tournament.ledger import Ledger
    from training.tournament.report import write_report
    from training.tournament.runs import play

    require_alone()
    combinations = load_grid(grid, settings_of(overrides, allow_partial))
    for combination in combinations:
        combination.job.protocol.require_flag(choose_by_test)
    folder = out or Path("runs") / grid.stem
    if plan:
        done = {one.combination.folder for one in Ledger(folder, combinations).finished}
        for combination in combinations:
            state = "finished" if combination.folder in done else "to do"
            typer.echo(f"{state:9} {combination.job.name}")
        typer.echo(f"{len(combinations)} runs, {len(done)} finished")
        return

    def report(ledger: Ledger) -> Path:
        return write_report(folder, grid.stem, ledger, missing)

    try:
        ledger = play(combinations, folder, ConsoleObserver(), report=report)
    except KeyboardInterrupt:
        console.print("Stopped. Call again with the same --out to go on.")
        raise typer.Exit(130) from None
    console.print(f"Report: {folder / 'report.html'}")
    if ledger.failed():
        raise typer.Exit(1)
