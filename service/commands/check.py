"""`kinlens-serve check`: try each part of a service separately, and show what to do for faults."""

import sys
from typing import Any

import structlog
import typer
from pydantic import ValidationError

from kinlens.embedder.programs.console import JsonOption, command, print_report
from kinlens.service.checks import Finding, findings_of
from kinlens.service.commands import options
from kinlens.service.variables import unknown_variables

_COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}


@command(options.app, "kinlens-serve check --bundle bundles/shop --gallery shop=galleries/shop")
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
        findings = [Finding("settings", "fault", options.faults(error))]
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
