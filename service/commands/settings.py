"""`kinlens-serve settings`: each variable with its default, limits and meaning."""

import difflib
import os
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from kinlens.service.commands import options
from kinlens.service.observe.logs import masked
from kinlens.service.settings import GROUPS, Settings

EXAMPLE = "Example: kinlens-serve settings redis"
PREFIX = "KINLENS_"
_OTHERS = frozenset({"JOB_ID", "SHARED", "LONG_TESTS", "CHROMIUM"})
"""Variables of jobs and tests, without the prefix."""
_REMOVED = {
    "WORKERS": "To use more cores, run several services behind a proxy, as docs/production.md "
    "shows. ",
}
"""What to do instead of a setting that was removed."""
_MOST_COLUMNS = 100
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


@dataclass(frozen=True, slots=True)
class Variable:
    """One setting, in texts; `limits` is empty if any value is allowed."""

    name: str
    group: str
    default: str
    limits: str
    meaning: str
    is_secret: bool


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
    group = ""
    wanted = text.casefold()
    found = [x for x in variables() if wanted in f"{x.name} {x.meaning}".casefold()]
    if not found:
        options.refuse(f"No setting contains {text!r}. List all: kinlens-serve settings.")
    for variable in found:
        if variable.group != group:
            group = variable.group
            typer.secho(group, bold=True)
        limits = f"; {variable.limits}" if variable.limits else ""
        typer.echo(f"  {variable.name}  default: {variable.default}{limits}")
        if (value := given.get(variable.name)) is not None:
            typer.echo(f"{indent}set to: {'***' if variable.is_secret else masked(value)}")
        plain = variable.meaning.replace("`", "")
        typer.echo(textwrap.fill(plain, width, initial_indent=indent, subsequent_indent=indent))


def variables() -> Iterator[Variable]:
    """All settings in their order, as the command and the documentation show them."""
    group = ""
    for name, field in Settings.model_fields.items():
        group = GROUPS.get(name, group)
        yield Variable(
            name=PREFIX + name.upper(),
            group=group,
            default=_default(name, field),
            limits=_limits(field),
            meaning=" ".join((field.description or "").split()),
            is_secret=SecretStr in _types(field),
        )


def unknown_variables() -> list[str]:
    """A warning for each KINLENS_ variable of the environment that nothing reads."""
    # Names are compared without the prefix, which would make all of them similar.
    known = [name.upper() for name in Settings.model_fields]
    given = {
        name.upper().removeprefix(PREFIX): name
        for name in os.environ
        if name.upper().startswith(PREFIX)
    }
    found = []
    for name in sorted(given.keys() - {*known, *_OTHERS}):
        near = difflib.get_close_matches(name, known, n=1)
        cure = f"Did you mean {PREFIX}{near[0]}? " if near else ""
        cure = _REMOVED.get(name, cure)
        found.append(
            f"{given[name]} is no setting and is ignored. {cure}kinlens-serve settings lists all."
        )
    return found


def _default(name: str, field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "cores + 2"  # search_threads
    value = field.default
    if value in (None, (), ""):
        return "none"
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value} ({value / 2**20:g} MiB)" if name.endswith("_bytes") else str(value)


def _limits(field: FieldInfo) -> str:
    """The allowed values or the range, such as "at least 0, below 1"."""
    choices = [
        str(value)
        for kind in _types(field)
        if get_origin(kind) is Literal
        for value in get_args(kind)
    ]
    if field.annotation is bool:
        choices = ["true", "false"]
    if choices:
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    return ", ".join(
        f"{word} {getattr(bound, name):,}"
        for bound in field.metadata
        for name, word in _BOUNDS.items()
        if hasattr(bound, name)
    )


def _types(field: FieldInfo) -> list[Any]:
    """The type of a setting and all types inside it."""
    found, queue = [], [field.annotation]
    while queue:
        kind: Any = queue.pop(0)
        found.append(kind)
        if get_origin(kind) is not Literal:
            queue += get_args(kind)
    return found
