"""`kinlens-serve` itself: open a bundle and its galleries and answer over HTTP; or run its jobs."""

import contextlib
from typing import Annotated, Any

import typer

from kinlens.embedder.machine import print_version
from kinlens.service.app import create_app
from kinlens.service.commands import options
from kinlens.service.commands.check import exposures
from kinlens.service.commands.processes import serve_processes
from kinlens.service.http.server import address_of, listen, reserve, serve_on
from kinlens.service.jobs.manager import JobManager
from kinlens.service.observe.logs import configure_logs
from kinlens.service.runtime import missing_image_roots


@options.refusals()
@options.with_shared
def serve(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
    **given: Any,
) -> None:
    """Serve a model bundle and its galleries: POST /search and a page to try it.

    Every setting can also come from the environment as KINLENS_NAME; options win.
    """
    command = context.invoked_subcommand
    if command is not None:
        if any(value not in (None, []) for value in given.values()):
            options.refuse(f"Write the options after the command: kinlens-serve {command} ...")
        return
    settings = options.read_settings(**given)
    configure_logs(settings.log_level)
    options.make_state(settings.state)
    if settings.workers > 1:
        reserved = reserve(settings.host, settings.port)
        _warn(exposures(settings))
        serve_processes(settings, reserved, settings.workers)
        return
    service = create_app(settings)
    listener = listen(settings.host, settings.port)

    def say() -> None:
        typer.echo(f"Kinlens is at {address_of(listener)} (Ctrl-C ends it)")
        _warn([*missing_image_roots(service.state.runtime.galleries), *exposures(settings)])

    with contextlib.suppress(KeyboardInterrupt):
        serve_on(service, listener, settings, say)


def _warn(texts: list[str]) -> None:
    for text in texts:
        typer.echo(f"Warning: {text}")


@options.refusals()
def work(
    state: options.State = None,
    once: Annotated[bool, typer.Option("--once", help="End when no job waits.")] = False,
    log_level: options.LogLevel = None,
) -> None:
    """Take the jobs of the state folder and run them until Ctrl-C.

    Of rebuilds and trainings one runs at a time; other jobs, on other galleries, run beside it.

    The service that shares the folder must run with KINLENS_JOBS=elsewhere.
    """
    settings = options.read_settings(state=state, log_level=log_level)
    configure_logs(settings.log_level)
    options.make_state(settings.state)
    JobManager(settings.model_copy(update={"jobs": "here"})).work(once)
