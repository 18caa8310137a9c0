"""kinlens-index: build galleries, change them, search them, keep them."""

from typing import Annotated

import typer

from embedder.machine import print_version, require_faiss

require_faiss()

from indexer.commands import (  # noqa: E402 (they import FAISS)
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
