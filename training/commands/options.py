"""Options that several commands share, and what a command does with Ctrl-C and a wrong value.

The modules of the commands import neither torch, numpy nor pydantic: all of them are loaded for
each help text and each typing error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from kinlens.embedder.errors import InvalidParameterError
from kinlens.training.config.layers import known_jobs
from kinlens.training.report.log import note

JobName = Annotated[str, typer.Argument(help=f"TOML file, or {known_jobs()}.")]
Data = Annotated[
    Path, typer.Option(help="Your images: a folder for each product, or an images.csv.")
]
Out = Annotated[Path, typer.Option(help="Bundle folder to write.")]
NONE: Any = ()
"""The default of an option that is repeated."""

Overrides = Annotated[
    list[str],
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


def _precision(text: str) -> str:
    from kinlens.embedder.manifest import OtherPrecision

    known = get_args(OtherPrecision)
    if text not in known:
        raise typer.BadParameter(f"{text} is not one of {', '.join(known)}")
    return text


Precisions = Annotated[
    list[Any],
    typer.Option(
        "--precision",
        parser=_precision,
        metavar="<list[str]>",
        help="Also in this precision: int8 or bf16 (CPU), fp16 (GPU). Repeatable.",
    ),
]
WithMap = Annotated[
    bool,
    typer.Option("--map", help="Also a map that shows where images match, as large as the model."),
]


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Changes to a job."""

    overrides: Overrides = NONE
    allow_partial: AllowPartial = False

    @property
    def settings(self) -> list[str]:
        """The changes as the library takes them."""
        partial = ["data.allow_partial=true"] if self.allow_partial else []
        return [*self.overrides, *partial]


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
