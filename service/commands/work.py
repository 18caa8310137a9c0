"""`kinlens-serve work`: run the jobs of a service that leaves them to others."""

import importlib
from typing import Annotated

import typer

from embedder.errors import KinlensError
from service.commands import options
from service.observe.logs import configure_logs

Once = Annotated[bool, typer.Option("--once", help="End when no job waits.")]


def work(
    state: options.State = None,
    once: Once = False,
    log_level: options.LogLevel = None,
) -> None:
    """Take the jobs of the state folder and run them until Ctrl-C.

    Of rebuilds and trainings one runs at a time; other jobs, on other galleries, run beside it.

    The service that shares the folder must run with KINLENS_JOBS=elsewhere.
    """
    settings = options.settings_or_refuse(state=state, log_level=log_level)
    configure_logs(settings.log_level)
    try:
        manager = importlib.import_module("service.jobs.manager").JobManager
        manager(settings.model_copy(update={"jobs": "here"})).work(once)
    except (KinlensError, OSError) as error:
        options.refuse(str(error))
