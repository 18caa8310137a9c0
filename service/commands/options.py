"""The program kinlens-serve, options of several of its commands, and the settings they produce.

The commands that need no part of the service are here and in `keys`; `program` adds the others.
"""

import contextlib
import inspect
import os
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from kinlens.agents import build_server
from kinlens.client import Client
from kinlens.embedder.errors import KinlensError, disk_fault, is_disk_full
from kinlens.embedder.programs.console import Commands, command, new_program, refuse
from kinlens.embedder.programs.faults import fault_text, path_of
from kinlens.environment import missing_package
from kinlens.errors import ClientError
from kinlens.service.observe.logs import masked
from kinlens.service.settings import Settings
from kinlens.service.variables import PREFIX, variables


class ServeCommands(Commands):
    """Commands whose errors are one line, too."""

    def invoke(self, ctx: Any) -> Any:
        with refusals():
            return super().invoke(ctx)


app = new_program(ServeCommands)
State = Annotated[
    Path | None,
    typer.Option(help="State folder: keys, bundles, jobs, and galleries created over HTTP."),
]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error (default info).")]

_SHARED = (
    *("bundle", "galleries", "image_roots", "pictures", "follow", "replica_folder", "host", "port"),
    *("device", "index_device", "precision", "engine", "threads"),
    *("no_match_prior", "redis_url"),
)
"""The settings that are options of several commands."""

_REPEATED = {"galleries": "gallery", "image_roots": "image_root", "pictures": "pictures"}
"""The options that are given once for each value of a setting."""

_VARIABLES = {variable.name: variable for variable in variables()}
_MOST_COLUMNS = 100
_HARMLESS = ("greater_", "less_", "int_", "float_", "bool_", "literal_")
"""Error types of numbers and choices, whose values are never secret."""


@command(app, "kinlens-serve settings redis")
def settings(
    text: Annotated[
        str, typer.Argument(help="Show only variables with this text in name or meaning.")
    ] = "",
) -> None:
    """Print each setting of the service: its variable, default, limits and meaning.

    Variables that are set in the environment are shown with their value, secrets as ***.
    Exits with 1 if no setting contains the text.
    """
    given = {name.upper(): value for name, value in os.environ.items()}
    width = min(_MOST_COLUMNS, shutil.get_terminal_size().columns)
    indent = " " * 4
    wanted = text.casefold()
    matching = [x for x in variables() if wanted in f"{x.name} {x.meaning}".casefold()]
    if not matching:
        refuse(f"No setting contains {text!r}. List all: kinlens-serve settings.")
    for group, members in groupby(matching, attrgetter("group")):
        typer.secho(group, bold=True)
        for variable in members:
            limits = f"; {variable.limits}" if variable.limits else ""
            typer.echo(f"  {variable.name}  default: {variable.default}{limits}")
            if (value := given.get(variable.name)) is not None:
                typer.echo(f"{indent}set to: {'***' if variable.is_secret else masked(value)}")
            meaning = variable.meaning.replace("`", "")
            typer.echo(
                textwrap.fill(meaning, width, initial_indent=indent, subsequent_indent=indent)
            )


@command(app, "kinlens-serve mcp --url http://127.0.0.1:8000 --images photos")
def mcp(
    url: Annotated[
        str, typer.Option(help="Address of a running service.")
    ] = "http://127.0.0.1:8000",
    key: Annotated[
        str | None,
        typer.Option(
            envvar="KINLENS_API_KEY",
            help="API key with the scope search. Other users of a machine can read options, but "
            "not the environment.",
        ),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(file_okay=False, exists=True, help="Folder of images an agent may read."),
    ] = None,
) -> None:
    """Offer the searches of a running service to agents, over the Model Context Protocol on stdio.

    An agent, which starts this command, has the tools search, similar and item, and can change
    nothing.
    """
    try:
        with Client(url, key=key) as client:
            build_server(client, images).run("stdio")
    except ModuleNotFoundError as missing:
        refuse(missing_package("kinlens-serve mcp", missing, "mcp"))


def with_shared(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the `**given` of `command` by the options of the service."""
    own = list(inspect.signature(command).parameters.values())[:-1]
    shared = {_REPEATED.get(name, name): _option(name) for name in _SHARED}
    shared |= {"state": State, "log_level": LogLevel}
    given = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in shared.items()
    ]
    command.__signature__ = inspect.Signature([*own, *given])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*own, *given)}
    return command


def _option(setting: str) -> Any:
    """The option of a setting, with its description."""
    variable = _VARIABLES[PREFIX + setting.upper()]
    text = variable.meaning.replace("`", "")
    if setting in _REPEATED:
        text = text.replace(", separated by commas", "")
        return Annotated[list[str], typer.Option(help=f"{text} Repeatable.")]
    limits = f"; {variable.limits}" if variable.limits else ""
    return Annotated[str, typer.Option(help=f"{text} Default: {variable.default}{limits}.")]


def read_settings(**options: Any) -> Settings:
    """The settings from the environment and the options; options that were not given are ignored.

    Raises: ValidationError.
    """
    settings = {option: setting for setting, option in _REPEATED.items()}
    given = {name: value for name, value in options.items() if value not in (None, [])}
    return Settings(**{settings.get(name, name): value for name, value in given.items()})


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn errors of the settings and of their files into one line and exit status 1."""
    try:
        yield
    except ValidationError as error:
        refuse(faults(error))
    except OSError as error:
        refuse(disk_fault(error) if error.filename or is_disk_full(error) else str(error))
    except (ClientError, KinlensError) as error:
        refuse(str(error))


def faults(error: ValidationError) -> str:
    """Describe each invalid setting by name; texts may contain passwords and are not shown."""
    texts = []
    for each in error.errors(include_url=False):
        hidden = {} if each["type"].startswith(_HARMLESS) else {"input"}
        visible = {name: value for name, value in each.items() if name not in hidden}
        texts.append(fault_text(visible, path_of(each["loc"]) or "settings"))
    return " ".join(texts)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
