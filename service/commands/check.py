"""`kinlens-serve check`: would it start, and if not, what to do."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.commands import options
from service.commands.findings import Finding, look

_COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@options.with_shared
def check(as_json: AsJson = False, **given: Any) -> None:
    """Try everything that a start would, print what was found, and exit: 0 if it would start."""
    try:
        findings = list(look(options.read_settings(**given)))
    except ValidationError as error:
        findings = [Finding("settings", "fault", options.faults(error))]
    else:
        findings.insert(0, Finding("settings", "ok", "every value is within its range"))
    starts = all(finding.verdict != "fault" for finding in findings)
    if as_json:
        shown = {"starts": starts, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(shown, indent=2))
    else:
        _print(findings)
    raise typer.Exit(0 if starts else 1)


def _print(findings: list[Finding]) -> None:
    table = Table("Part", "Verdict", "Found", "Cure", box=None, pad_edge=False)
    for finding in findings:
        verdict = Text(finding.verdict, style=_COLOURS[finding.verdict])
        table.add_row(finding.subject, verdict, Text(finding.text), Text(finding.cure))
    Console(soft_wrap=False).print(table)
