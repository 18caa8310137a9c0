"""kinlens-index: build galleries, change them, search them, keep them."""

import typer

from indexer.commands import (
    build,
    change,
    duplicates,
    golden,
    search,
    transfer,
    upkeep,
    verify,
)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Build image galleries, change, search and check them.",
)
for commands in (build, change, search, verify, duplicates, upkeep, transfer):
    app.add_typer(commands.app)
app.add_typer(golden.app, name="golden", help="Labelled queries, and how many are answered right.")


if __name__ == "__main__":
    app()
