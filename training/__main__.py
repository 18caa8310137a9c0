"""kinlens-train: adapt, new, fit, evaluate, compare, report, export, search, ..., data."""

from typing import Annotated

import typer

from embedder.errors import KinlensError
from embedder.machine import print_version


def _needs(missing: ModuleNotFoundError) -> SystemExit:
    """The end of a command of the base install, which serves and indexes alone."""
    return SystemExit(
        f"kinlens-train needs the package {missing.name}, which is not installed. Install the "
        "extra training: pip install 'kinlens[training]', or make install in a clone."
    )


try:
    from training.commands.adapt import adapt
    from training.commands.data import app as data_app
    from training.commands.evaluate import compare, evaluate, report
    from training.commands.export import export
    from training.commands.fit import fit, new
    from training.commands.studies import crossval, search, tournament
    from training.report.log import console
except ModuleNotFoundError as missing:
    raise _needs(missing) from None

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
for command in (adapt, new, fit, evaluate, compare, report, export, crossval, search, tournament):
    app.command()(command)
app.add_typer(data_app, name="data")


@app.callback()
def start(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Train an embedding, compare methods, and export a model bundle."""


def main() -> None:
    """Run the command line; an error of ours is one clear line and exit code 1."""
    try:
        app()
    except KinlensError as error:
        console.print(f"error: {error}", style="red", soft_wrap=True, markup=False)
        raise SystemExit(1) from error
    except ModuleNotFoundError as missing:  # which a command loads when it begins
        if missing.name not in ("torch", "torchvision"):
            raise
        raise _needs(missing) from None


if __name__ == "__main__":
    main()
