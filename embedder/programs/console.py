"""The command line that all three programs share: one form of commands and errors, help that keeps
lines, and `--version`.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, isgeneratorfunction, signature
from typing import Annotated, Any, NoReturn, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from kinlens import __version__
from kinlens.embedder.errors import KinlensError
from kinlens.reports import Report

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

Printed = Iterator[Any]
"""What a command yields, see `command`."""

_ARGUMENTS = re.compile(
    r"""`(\w+)`|(?<![\w.'"/-])([a-z]+(?:_[a-z]+)+)(?![\w'"/-]|\.\w)"""
    r"""|(?<![\w.'"/-])(\w+) = true\b|^(\w+)(?= = )"""
)
"""Arguments in a message of the library: in backticks, with an underscore, true, or first with a
value.
"""


def print_error(message: str) -> None:
    """Print a message on one line of stderr, as all our programs do."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)


def refuse(message: str) -> NoReturn:
    """Print one line on stderr, and exit with status 1."""
    print_error(message)
    raise typer.Exit(FAILURE)


def print_lines(*lines: str) -> None:
    """Print lines on stdout, as long as they are and without colours."""
    out = Console(soft_wrap=True, markup=False, highlight=False, emoji=False)
    for line in lines:
        out.print(line)


def print_report(report: object, json: bool, *lines: str) -> None:
    """Print a report as JSON, or `lines` for people; by default those of the report."""
    if json:
        from pydantic import TypeAdapter  # which the programs do not load for a help text

        lines = (TypeAdapter(type(report)).dump_json(report, indent=2).decode(),)
    elif not lines and isinstance(report, Report):
        lines = tuple(report.lines())
    print_lines(*lines)


class Command(TyperCommand):
    """A command whose errors name its options where the library names arguments, as `min_score`."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KinlensError as error:
            error.args = (self._with_options(str(error)), *error.args[1:])
            raise

    def _with_options(self, message: str) -> str:
        options = {one.name: max(one.opts, key=len) for one in self.params if one.opts[0][0] == "-"}

        def option(argument: re.Match[str]) -> str:
            return options.get(next(filter(None, argument.groups())), argument[0])

        return _ARGUMENTS.sub(option, message)


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


def command(
    program: typer.Typer, example: str = "", *, name: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to a program as a command, with an example below its help.

    A parameter that is a dataclass gives its fields, each of which is an option. A generator yields
    what the command prints, and gets the option --json: a report; a report and lines for people in
    place of its own; or None and lines that are for people alone.
    """

    def added(function: Callable[..., Any]) -> Callable[..., Any]:
        epilog = f"Example: {example}" if example else None
        program.command(name, cls=Command, epilog=epilog)(_as_command(function))
        return function

    return added


def _as_command(function: Callable[..., Any]) -> Callable[..., None]:
    """The function with the fields of its dataclasses as options; what it yields is printed."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    prints = isgeneratorfunction(function)
    parameters: list[Parameter] = []
    for name, parameter in signature(function).parameters.items():
        kind = groups.get(name)
        parameters += [parameter] if kind is None else signature(kind).parameters.values()
    if prints:
        parameters.append(
            Parameter("json", Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption)
        )

    @wraps(function)
    def run(**given: Any) -> None:
        as_json = given.pop("json") if prints else False
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        for printed in function(**given) or ():
            report, *lines = printed if isinstance(printed, tuple) else (printed,)
            if report is not None or not as_json:
                print_report(report, as_json, *lines)

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


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
