"""The command line that all three programs share: one form of errors, help that keeps lines, and
`--version`.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kinlens import __version__

USAGE, FAILURE = 2, 1
"""Exit statuses: the command line is wrong, or what it asked for failed."""


def _print_version(asked: bool) -> None:
    """Print the version and exit before any other work."""
    if asked:
        typer.echo(f"kinlens {__version__}")
        raise SystemExit(0)


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def print_error(message: str) -> None:
    """Print a message on one line of stderr, as all our programs do."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)


class Commands(TyperGroup):
    """A group of commands whose usage errors are one line, `error: ...`, and exit with 2.

    Help texts keep the examples of all commands on one line, to be copied. Commands are listed
    under the titles that `add_group` gave them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _keep_examples(self)

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **more: Any
    ) -> Any:
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **more)
        try:
            status = super().main(args, standalone_mode=False, **more)
        except typer.Abort:
            print_error("Stopped before completion.")
            sys.exit(FAILURE)
        except Exception as error:
            # Typer has its own copy of click, whose errors it does not export.
            if not hasattr(error, "format_message"):
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                typer.echo(error.format_message(), err=True)
            else:
                path = getattr(getattr(error, "ctx", None), "command_path", "")
                message = error.format_message().replace("Value error, ", "").rstrip(".")
                end = "" if message.endswith("?") else "."
                print_error(f"{message}{end}{path and f' See {path} --help.'}")
            sys.exit(getattr(error, "exit_code", USAGE))
        sys.exit(status if isinstance(status, int) else 0)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = self.list_commands(ctx)
        titles = {
            name: str(getattr(self.commands[name], "rich_help_panel", "") or "Commands")
            for name in names
        }
        width = max(map(len, names), default=0)
        for title in dict.fromkeys(titles.values()):
            with formatter.section(title):
                formatter.write_dl(
                    (
                        f"{name:{width}}",  # one column of descriptions in all groups
                        self.commands[name].get_short_help_str(formatter.width - 6 - width),
                    )
                    for name in names
                    if titles[name] == title
                )


def new_program(commands: type[Commands] = Commands, **options: Any) -> typer.Typer:
    """A program, to which its commands are added."""
    return typer.Typer(
        cls=commands, rich_markup_mode=None, pretty_exceptions_enable=False, **options
    )


def add_group(program: typer.Typer, title: str, *members: typer.Typer) -> None:
    """Add the commands of `members` to a program; its help lists them under `title`."""
    for member in members:
        for command in member.registered_commands:
            command.rich_help_panel = title
        program.add_typer(member)


def _keep_examples(command: Any) -> None:
    if command.epilog:
        command.epilog = f"\b\n{command.epilog}"
    for each in getattr(command, "commands", {}).values():
        _keep_examples(each)
