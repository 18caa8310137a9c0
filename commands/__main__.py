"""The command kinlens-index: build, change, search and maintain galleries."""

from typing import Any

from kinlens.embedder.machine import require_faiss
from kinlens.environment import ENGINES, isolate, missing_package

require_faiss("kinlens-index")

try:
    from kinlens.commands import (
        build,
        change,
        embed,
        golden,
        search,
        transfer,
        upkeep,
    )
    from kinlens.commands.console import errors_shown
    from kinlens.embedder.programs.console import Commands, VersionOption, add_group, new_program
except ModuleNotFoundError as missing:
    raise SystemExit(missing_package("kinlens-index", missing, *ENGINES)) from None


_CARE = "Maintain and measure"


class IndexCommands(Commands):
    """Commands whose errors are one line, too."""

    def invoke(self, ctx: Any) -> Any:
        with errors_shown():
            return super().invoke(ctx)


app = new_program(IndexCommands, no_args_is_help=True)
add_group(app, "Build and change", build.app, embed.app, change.app)
add_group(app, "Search", search.app)
add_group(app, _CARE, upkeep.app, golden.guarantees)
app.add_typer(
    golden.app,
    name="golden",
    help="Measure a gallery with labelled queries.",
    rich_help_panel=_CARE,
)
add_group(app, "Copy", transfer.app)


@app.callback()
def start(
    _version: VersionOption = False,
) -> None:
    """Build, change, search and check image galleries."""


def main() -> None:
    """Run the command line."""
    isolate()
    app()


if __name__ == "__main__":
    main()
