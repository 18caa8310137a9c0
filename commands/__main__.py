"""The command kinlens-index: build, change, search and maintain galleries."""

from typing import Annotated, Any

from kinlens.embedder.machine import print_version, require_faiss
from kinlens.environment import isolate
from kinlens.installs import missing_package

require_faiss("kinlens-index")

try:
    import typer

    from kinlens.commands import (
        build,
        change,
        duplicates,
        embed,
        golden,
        search,
        sync,
        transfer,
        upkeep,
    )
    from kinlens.commands.console import errors_shown
    from kinlens.embedder.programs.console import Commands
except ModuleNotFoundError as missing:
    raise SystemExit(missing_package("kinlens-index", missing, "cpu", "gpu")) from None


class IndexCommands(Commands):
    """Commands whose errors are one line, too."""

    def invoke(self, ctx: Any) -> Any:
        with errors_shown():
            return super().invoke(ctx)


app = typer.Typer(
    cls=IndexCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for commands in (build, embed, sync, change, search, duplicates, upkeep, transfer):
    app.add_typer(commands.app)
app.add_typer(golden.app, name="golden", help="Measure a gallery with labelled queries.")


@app.callback()
def start(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Build, change, search and check image galleries."""


def main() -> None:
    """Run the command line."""
    isolate()
    app()


if __name__ == "__main__":
    main()
