"""kinlens-train: adapt, new, fit, evaluate, report, export, search, ..., data."""

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any

from kinlens.embedder.errors import JobError, KinlensError
from kinlens.environment import ENGINES, TRAINING, is_of_extra, isolate, missing_package


def _needs(missing: ModuleNotFoundError) -> SystemExit:
    """The exit message of a command whose package is not installed."""
    if missing.name == "onnxruntime":
        return SystemExit(missing_package("This command", missing, *ENGINES))
    return SystemExit(missing_package("kinlens-train", missing, *TRAINING))


try:
    import typer

    from kinlens.embedder.programs.console import (
        VersionOption,
        add_group,
        command,
        new_program,
        print_error,
    )
    from kinlens.training.commands.data import app as data_app
    from kinlens.training.commands.fit import crossval, fit, new, report, search, tournament
    from kinlens.training.commands.models import evaluate, export
    from kinlens.training.commands.shop import adapt, attach, import_onnx, teach_words
except ModuleNotFoundError as missing:
    raise _needs(missing) from None

app = new_program(no_args_is_help=True)
_GROUPS: dict[str, dict[str, Callable[..., Any]]] = {
    "Your own shop": {
        "adapt": adapt, "import": import_onnx, "attach": attach, "teach-words": teach_words,
    },
    "Research": {
        "new": new, "fit": fit, "evaluate": evaluate, "report": report, "export": export,
        "crossval": crossval, "search": search, "tournament": tournament,
    },
}  # fmt: skip
for title, members in _GROUPS.items():
    group = typer.Typer()
    for name, function in members.items():
        command(group, name=name)(function)
    add_group(app, title, group)
app.add_typer(data_app, name="data", rich_help_panel="Research")


_ALONE = (
    "adapt",
    "attach",
    "crossval",
    "evaluate",
    "export",
    "import",
    "search",
    "teach-words",
    "tournament",
)
"""Commands that every process of torchrun would repeat."""


@app.callback()
def start(
    context: typer.Context,
    _version: VersionOption = False,
) -> None:
    """Train an embedding, compare methods, and export a model bundle."""
    alone = context.invoked_subcommand in _ALONE
    if alone and "RANK" in os.environ and int(os.environ.get("WORLD_SIZE") or "1") > 1:
        raise JobError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, but only `fit` shares its "
            "work. Call this command without torchrun."
        )


def main() -> None:
    """Run the command line; a Kinlens error is one line on stderr and exit code 1."""
    isolate()
    for stream in (sys.stdout, sys.stderr):  # a log file shows each line at once
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    try:
        app()
    except (KinlensError, OSError) as error:
        cure = ""
        if isinstance(error, OSError):
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            cure = ". Free disk space and run the command again."
        print_error(f"{error}{cure}")
        raise SystemExit(1) from error
    except ModuleNotFoundError as missing:  # a package that the command imports when it starts
        if not is_of_extra(missing):  # but of a module of the user
            raise
        raise _needs(missing) from None


if __name__ == "__main__":
    main()
