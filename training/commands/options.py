"""Options that several commands share, and what a command does with Ctrl-C and a wrong value.

The modules of the commands import neither torch, numpy nor pydantic: all of them are loaded for
each help text and each typing error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from kinlens.embedder.errors import InvalidParameterError, JobError
from kinlens.training.config.layers import known_jobs
from kinlens.training.report.log import note

if TYPE_CHECKING:
    from kinlens.embedder.manifest import OtherPrecision

JobName = Annotated[str, typer.Argument(help=f"TOML file, or {known_jobs()}.")]
Data = Annotated[
    Path, typer.Option(help="Your images: a folder for each product, or an images.csv.")
]
Out = Annotated[Path, typer.Option(help="Bundle folder to write.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting of the job: table.key=value. Repeatable."),
]
AllowPartial = Annotated[
    bool, typer.Option("--allow-partial", help="Accept a subset of an official data set.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Also print the remarks and figures of the report.")
]
ChooseByTest = Annotated[
    bool,
    typer.Option(
        "--choose-by-test", help="Let test classes choose the epoch; the report will show it."
    ),
]
Precisions = Annotated[
    list[str] | None,
    typer.Option(help="Also in this precision: int8 or bf16 (CPU), fp16 (GPU). Repeatable."),
]
WithMap = Annotated[
    bool,
    typer.Option("--map", help="Also a map that shows where images match, as large as the model."),
]


def settings_of(overrides: Sequence[str] | None, allow_partial: bool) -> list[str]:
    return [*(overrides or ()), *(["data.allow_partial=true"] if allow_partial else [])]


def precisions_of(given: list[str] | None) -> "list[OtherPrecision]":
    from kinlens.embedder.manifest import OtherPrecision

    known = get_args(OtherPrecision)
    if unknown := set(given or ()) - {*known}:
        raise typer.BadParameter(f"--precision {min(unknown)} is not one of {', '.join(known)}")
    return cast("list[OtherPrecision]", given or [])


@contextmanager
def usage_errors() -> Iterator[None]:
    """A wrong argument of a function is a wrong option of the command."""
    try:
        yield
    except InvalidParameterError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def stoppable(how_to_resume: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        note(f"Stopped. {how_to_resume}")
        raise typer.Exit(130) from None


def section(kind: type[Any], /, **values: Any) -> Any:
    """A table of a job from command line options. Raises: JobError."""
    from pydantic import ValidationError

    from kinlens.training.config.job import explain

    try:
        return kind(**values)
    except ValidationError as error:
        given = {name: f"--{name.replace('_', '-')} {value}" for name, value in values.items()}
        raise JobError(" ".join(explain(fault, given) for fault in error.errors())) from error
