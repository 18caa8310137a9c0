"""What a person sees of a data set's report."""

from collections.abc import Callable

from training.data.doctor import Report

_SIGNS = {True: "PROBLEM", False: "note"}


def print_report(report: Report, say: Callable[[str], object]) -> None:
    """Print layout, sizes, findings and verdict, a line each."""
    say(f"{report.root}: layout {report.kind or 'unknown'}")
    for part, size in report.parts.items():
        line = f"  {part}: {size.images:,} images of {size.classes:,} classes"
        expected = report.expected.get(part)
        if expected is not None and expected != size:
            line += f" (expected {expected.images:,} of {expected.classes:,})"
        say(line)
    for finding in sorted(report.findings, key=lambda finding: not finding.is_problem):
        say(f"{_SIGNS[finding.is_problem]} [{finding.code}] {finding.message}")
        for example in finding.examples:
            say(f"    {example}")
        if finding.count > len(finding.examples) > 0:
            say(f"    ... and {finding.count - len(finding.examples):,} more")
    say(_verdict(report))


def _verdict(report: Report) -> str:
    problems = sum(finding.is_problem for finding in report.findings)
    if problems:
        return f"{problems} kind(s) of problems must be mended."
    return "Healthy." if not report.quick else "Healthy, as far as headers show."
