"""kinlens-train: new, fit, evaluate, compare, report, export, crossval, search, ..., data."""

import typer

from embedder.errors import KinlensError
from training.commands.data import app as data_app
from training.commands.evaluate import compare, evaluate, report
from training.commands.export import export
from training.commands.fit import fit, new
from training.commands.studies import crossval, search, tournament
from training.report.log import console

app = typer.Typer(
    help="Train an embedding, compare methods, and export a model bundle.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (new, fit, evaluate, compare, report, export, crossval, search, tournament):
    app.command()(command)
app.add_typer(data_app, name="data")


def main() -> None:
    """Run the command line; an error of ours is one clear line and exit code 1."""
    try:
        app()
    except KinlensError as error:
        console.print(f"error: {error}", style="red", soft_wrap=True, markup=False)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
