"""`kinlens-serve settings`: each variable with its default, limits and meaning."""

import os
import shutil
import textwrap
from itertools import groupby
from operator import attrgetter
from typing import Annotated

import typer

from kinlens.embedder.programs.console import refuse
from kinlens.service.observe.logs import masked
from kinlens.service.variables import variables

EXAMPLE = "kinlens-serve settings redis"
_MOST_COLUMNS = 100


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
