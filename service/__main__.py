"""kinlens-serve: serve galleries over HTTP; check a setup; manage keys, jobs, audit, backups."""

import sys

from kinlens.environment import isolate
from kinlens.service.encoding import spawn


def main() -> None:
    """Run the command line."""
    isolate()
    spawn.prepare(sys.argv[1:])  # it imports the libraries of models while this process imports
    from kinlens.service.commands.program import app

    app()


if __name__ == "__main__":
    main()
