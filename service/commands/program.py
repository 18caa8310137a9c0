"""The commands of kinlens-serve: serve, check a setup, manage keys, jobs, audit and backups.

Without a command it serves a bundle and its galleries.
"""

from kinlens.embedder.machine import require_faiss
from kinlens.environment import ENGINES, missing_package

require_faiss("kinlens-serve")

try:
    import sys
    from typing import Annotated, Any

    import structlog
    import typer
    from pydantic import ValidationError

    from kinlens.embedder.programs.console import (
        JsonOption,
        VersionOption,
        command,
        print_report,
        refuse,
    )
    from kinlens.service.app import create_app
    from kinlens.service.checks import Finding, exposures, findings_of, make_state
    from kinlens.service.commands import backup, feedback, options  # noqa: F401
    from kinlens.service.commands.options import app, faults
    from kinlens.service.http.server import listen, serve_on, url_of
    from kinlens.service.jobs.manager import JobManager
    from kinlens.service.observe.logs import configure_logs
    from kinlens.service.runtime import missing_image_roots
    from kinlens.service.variables import unknown_variables
except ModuleNotFoundError as missing:
    raise SystemExit(missing_package("kinlens-serve", missing, *ENGINES)) from None

_COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}
_EXAMPLE = "Example: kinlens-serve --bundle bundles/shop --gallery shop=galleries/shop"


@app.callback(invoke_without_command=True, epilog=_EXAMPLE)
@options.with_shared
def serve(
    context: typer.Context,
    _version: VersionOption = False,
    **given: Any,
) -> None:
    """Serve a model bundle and its galleries over HTTP, with a search page.

    Every setting can also be set in the environment as KINLENS_NAME; options take precedence.
    kinlens-serve settings lists all.
    """
    command = context.invoked_subcommand
    if command is not None:
        if any(value not in (None, []) for value in given.values()):
            refuse(f"Write the options after the command: kinlens-serve {command} ...")
        return
    settings = options.read_settings(**given)
    configure_logs(settings.log_level)
    make_state(settings.state)
    _warn(unknown_variables())
    service = create_app(settings)
    listener = listen(settings.host, settings.port)

    def announce() -> None:
        typer.echo(f"Kinlens is at {url_of(listener)} (Ctrl-C ends it)")
        runtime = service.state.runtime
        _warn([*missing_image_roots(runtime.galleries), *runtime.hidden.values()])
        _warn(exposures(settings))

    serve_on(service, listener, settings, announce)


def _warn(texts: list[str]) -> None:
    for text in texts:
        typer.echo(f"Warning: {text}")


@command(app, "kinlens-serve check --bundle bundles/shop --gallery shop=galleries/shop")
@options.with_shared
def check(
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Check whether the service would start, without serving. Exits with 0 if it would, else 1."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        settings = options.read_settings(**given)
    except ValidationError as error:
        findings = [Finding("settings", "fault", faults(error))]
    else:
        findings = [Finding("settings", "ok", "all values are valid"), *findings_of(settings)]
    findings += [Finding("environment", "warning", text) for text in unknown_variables()]
    starts = all(finding.verdict != "fault" for finding in findings)
    if as_json:
        print_report({"starts": starts, "findings": [one._asdict() for one in findings]}, True)
    else:
        for subject, verdict, text in findings:
            typer.secho(f"{verdict:8} ", fg=_COLOURS[verdict], nl=False)
            typer.echo(f"{subject}: {text}")
    raise typer.Exit(0 if starts else 1)


@command(app, "kinlens-serve work --state /var/lib/kinlens")
def work(
    state: options.State = None,
    once: Annotated[bool, typer.Option("--once", help="Exit when no job is queued.")] = False,
    log_level: options.LogLevel = None,
) -> None:
    """Run the queued jobs of the state folder until Ctrl-C.

    Only one rebuild or training job runs at a time; jobs of other kinds on other galleries run in
    parallel.

    The service that shares the folder must run with KINLENS_JOBS=elsewhere.
    """
    settings = options.read_settings(state=state, log_level=log_level)
    configure_logs(settings.log_level)
    make_state(settings.state)
    JobManager(settings.model_copy(update={"jobs": "here"})).work(once)


app.add_typer(feedback.app, name="feedback")
