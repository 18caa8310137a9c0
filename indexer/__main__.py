"""kinlens-index: build galleries, change them, search them, keep them."""

from typing import Annotated

from kinlens.embedder.machine import print_version, require_faiss
from kinlens.installs import missing_package

require_faiss("kinlens-index")

try:
    import typer

    from kinlens.indexer.commands import (
        build,
        change,
        duplicates,
        embed,
        golden,
        search,
        transfer,
        upkeep,
        verify,
    )
except ModuleNotFoundError as missing:
    raise SystemExit(missing_package("kinlens-index", missing, "cpu", "gpu")) from None

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
for commands in (build, embed, change, search, verify, duplicates, upkeep, transfer):
    app.add_typer(commands.app)
app.add_typer(golden.app, name="golden", help="Labelled queries, and how many are answered right.")


@app.callback()
def start(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Build image galleries, change, search and check them."""


if __name__ == "__main__":
    app()
