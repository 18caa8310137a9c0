"""`kinlens-serve` itself: open a bundle and its galleries and answer over HTTP."""

import contextlib
from typing import Any

import typer

from embedder.errors import KinlensError
from service.app import create_app
from service.commands import options
from service.http.exposure import exposures
from service.http.processes import address_of, serve_processes
from service.http.server import listen, serve_on
from service.observe.logs import configure_logs
from service.runtime import missing_image_roots
from service.settings import Settings


@options.with_shared
def serve(context: typer.Context, **given: Any) -> None:
    """Serve a model bundle and its galleries: POST /search and a page to try it.

    Every setting can also come from the environment as KINLENS_NAME; options win.
    """
    command = context.invoked_subcommand
    if command is not None:
        if any(value not in (None, []) for value in given.values()):
            options.refuse(f"Write the options after the command: kinlens-serve {command} ...")
        return
    settings = options.settings_or_refuse(**given)
    try:
        configure_logs(settings.log_level)
        _start(settings)
    except (KinlensError, OSError) as error:
        options.refuse(str(error))


def _start(settings: Settings) -> None:
    if settings.workers > 1:
        listener = listen(settings.host, settings.port)
        _warn(exposures(settings))
        serve_processes(settings, listener, settings.workers)
        return
    service = create_app(settings)
    listener = listen(settings.host, settings.port)
    typer.echo(f"Kinlens is at {address_of(listener)} (Ctrl-C ends it)")
    _warn([*missing_image_roots(service.state.runtime.galleries), *exposures(settings)])
    with contextlib.suppress(KeyboardInterrupt):
        serve_on(service, listener, settings)


def _warn(texts: list[str]) -> None:
    for text in texts:
        typer.echo(f"Warning: {text}")
