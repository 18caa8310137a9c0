"""kinlens-index: build galleries, change them, search them, keep them."""

import typer

from indexer.commands import build, change, search, transfer, upkeep, verify

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Build image galleries, change, search and check them.",
)
for commands in (build, change, search, verify, upkeep, transfer):
    app.add_typer(commands.app)


if __name__ == "__main__":
    app()
