"""kinlens: the three programs under one name, as `kinlens train`, `kinlens index`, ..."""

import sys
from importlib import import_module
from typing import Any

from kinlens.environment import ENGINES, missing_package

try:
    from typer.core import TyperCommand
    from typer.main import get_command

    from kinlens.embedder.programs.console import Commands, VersionOption, new_program
except ModuleNotFoundError as missing:
    raise SystemExit(missing_package("kinlens", missing, *ENGINES)) from None

_PROGRAMS = {
    "train": ("kinlens.training.__main__", "Train an embedding and export a model bundle."),
    "index": ("kinlens.commands.__main__", "Build, change, search and check image galleries."),
    "serve": ("kinlens.service.__main__", "Serve galleries over HTTP, with a search page."),
}
_APPS = {"serve": "kinlens.service.commands.program"}


class Programs(Commands):
    """The programs as commands; each is imported when it is used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {
            name: TyperCommand(name, help=text) for name, (_, text) in _PROGRAMS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            place, _ = _PROGRAMS[name]
            if ctx.resilient_parsing:  # a shell completes a line
                return name, get_command(import_module(_APPS.get(name, place)).app), rest
            sys.argv[:2] = [f"kinlens {name}"]
            import_module(place).main()
        return name, command, rest


app = new_program(Programs, no_args_is_help=True)


@app.callback()
def start(_version: VersionOption = False) -> None:
    """Visual search: train a model, index images, serve searches."""


def main() -> None:
    """Run the command line."""
    app()
