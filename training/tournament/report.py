"""The report of a tournament: one HTML page that needs nothing else, and one in Markdown."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from embedder.errors import EvaluationError
from training.files import replace_text
from training.tournament.chart import Bar, bar_chart
from training.tournament.ledger import Failed, Ledger
from training.tournament.protocol import protocol_lines
from training.tournament.ranking import Missing, Ranking
from training.tournament.standings import Standings, experiment_of, standings
from training.tournament.tables import Table, other_table, rank_table, recall_table

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
th[scope=row], thead th:first-child, .failed td { text-align: left; }
tbody tr:nth-child(even) { background: var(--soft); }
svg { max-width: 100%; height: auto; margin: .5rem 0; }
"""


@dataclass(frozen=True)
class Chart:
    """A chart and the name of its file."""

    name: str
    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Section:
    """A heading, then lines of text, tables and charts."""

    heading: str
    lines: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()


def write_report(folder: Path, title: str, ledger: Ledger, missing: Missing = "leave-out") -> Path:
    """Write `report.html`, `report.md` and `charts/`; returns the HTML page."""
    sections = _sections(ledger, missing)
    for section in sections:
        for chart in section.charts:
            svg = bar_chart(chart.title, chart.bars, file=True)
            replace_text(folder / "charts" / f"{chart.name}.svg", svg)
    replace_text(folder / "report.md", markdown_page(title, sections))
    page = folder / "report.html"
    replace_text(page, html_page(title, sections))
    return page


def html_page(title: str, sections: Sequence[Section]) -> str:
    """The whole page; every text from outside is escaped."""
    parts = []
    for section in sections:
        lines = "".join(f"<li>{escape(line)}</li>\n" for line in section.lines)
        tables = "".join(f'<div class="wide">{table.html()}</div>' for table in section.tables)
        charts = "".join(bar_chart(chart.title, chart.bars) for chart in section.charts)
        listed = f"<ul>\n{lines}</ul>\n" if lines else ""
        parts.append(f"<h2>{escape(section.heading)}</h2>\n{listed}{tables}{charts}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{''.join(parts)}</body></html>\n"
    )


def markdown_page(title: str, sections: Sequence[Section]) -> str:
    """The same in Markdown; charts are files beside it."""
    parts = [f"# {escape(title, quote=False)}\n"]
    for section in sections:
        parts.append(f"## {escape(section.heading, quote=False)}\n")
        if section.lines:
            parts.append("".join(f"- {escape(line, quote=False)}\n" for line in section.lines))
        parts += [table.markdown() for table in section.tables]
        parts += [f"![{c.title}](charts/{c.name}.svg)\n" for c in section.charts]
    return "\n".join(parts)


def _sections(ledger: Ledger, missing: Missing) -> list[Section]:
    found = standings(ledger.combinations, ledger.finished)
    failed = ledger.failed()
    total, done = len(ledger.combinations), len(ledger.finished)
    summary = [f"{done} of {total} runs finished, {len(failed)} failed"]
    sections = [Section("Protocol", (*summary, *protocol_lines(ledger.finished)))]
    if ledger.finished:
        sections.append(_ranking(found, missing))
    backbones = dict.fromkeys(combination.backbone for combination in ledger.combinations)
    sections += [_backbone(backbone, ledger, found) for backbone in backbones]
    if failed:
        sections.append(_failures(failed))
    return sections


def _ranking(found: Standings, missing: Missing) -> Section:
    try:
        ranking = found.ranking(missing)
    except EvaluationError as error:
        return Section("Tournament", (str(error),))
    bars = tuple(Bar(p.competitor, p.average, p.deviation) for p in ranking.places)
    chart = Chart("ranks", "Average rank over the experiments (1 is best)", bars)
    return Section("Tournament", _remarks(ranking, missing), (rank_table(ranking),), (chart,))


def _remarks(ranking: Ranking, missing: Missing) -> tuple[str, ...]:
    lines = [
        "competitors are ranked by mean R@1 over their seeds within each experiment; ties share "
        "the average of their ranks; the deviation is the sample standard deviation of the ranks"
    ]
    for experiment, gap in ranking.left_out.items():
        lines.append(f"left out of the ranking: {experiment}, which lacks {', '.join(gap)}")
    if missing == "last":
        lines.append("a competitor that an experiment lacks is ranked last in it")
    if ranking.never_finished:
        lines.append(f"not ranked, no finished run: {', '.join(ranking.never_finished)}")
    return tuple(lines)


def _backbone(backbone: str, ledger: Ledger, found: Standings) -> Section:
    experiments = dict.fromkeys(
        experiment_of(c) for c in ledger.combinations if c.backbone == backbone
    )
    tables: list[Table] = []
    charts: list[Chart] = []
    for experiment in experiments:
        others = other_table(found, experiment)
        tables += [recall_table(found, experiment), *([] if others is None else [others])]
        scores = {n: cell.scores.get("R@1") for n, cell in found.cells[experiment].items()}
        bars = tuple(Bar(n, s.mean, s.deviation) for n, s in scores.items() if s is not None)
        if bars:
            charts.append(Chart(f"r1-{_slug(experiment)}", f"R@1, {experiment}", bars))
    return Section(backbone, (), tuple(tables), tuple(charts))


def _failures(failed: Sequence[Failed]) -> Section:
    rows = tuple((one.combination.job.name, one.reason, str(one.attempts)) for one in failed)
    lines = ("they are tried again when the tournament is called again",)
    return Section(
        "Failed runs", lines, (Table("Last attempts", ("run", "reason", "attempts"), rows),)
    )


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text)
