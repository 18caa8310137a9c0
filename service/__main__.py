"""kinlens-serve: serve galleries over HTTP; check a setup; manage keys, jobs, audit, backups."""

import gc
import os
import sys

from kinlens.environment import ENGINES, isolate, missing_package
from kinlens.service.encoding import spawn

_LIGHT = frozenset(["audit", "keys", "mcp", "settings"])
"""Commands that need no part of the service, so they are quick."""

_WITHOUT_MODEL = _LIGHT | {
    *("work", "backup", "restore", "feedback"),
    *("--help", "--version", "--install-completion", "--show-completion"),
}
_COMPLETE = "_KINLENS_SERVE_COMPLETE"  # set by a shell that completes a line


def main() -> None:
    """Run the command line."""
    isolate()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")  # it looks through all packages for them
    if not _WITHOUT_MODEL & {*sys.argv[1:]} and _COMPLETE not in os.environ:
        spawn.prepare()  # it imports the libraries of models while this process imports
    gc.disable()  # imported objects stay, so a search for garbage finds none
    try:
        from kinlens.service.commands import keys, options  # noqa: F401  they add their commands
    except ModuleNotFoundError as missing:
        raise SystemExit(missing_package("kinlens-serve", missing, *ENGINES)) from None
    if not _LIGHT & {*sys.argv[1:2]}:
        from kinlens.service.commands import program  # noqa: F401  it adds the other commands
    gc.freeze()  # nor does any later search look at them
    gc.enable()
    options.app()


if __name__ == "__main__":
    main()
