"""The report of a tournament: one HTML page that needs nothing else, and the same in Markdown."""

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from embedder.errors import EvaluationError
from training.folder import replace_text
from training.report.markdown import plain, table
from training.studies.runs import Run
from training.studies.standings import SECONDS, figures_of, rank, recall_at_1

_NONE = "–"
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
table { display: block; overflow-x: auto; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); text-align: left; }
tbody tr:nth-child(even) { background: var(--soft); }
img { max-width: 100%; height: auto; margin: .5rem 0; background: white; }
"""
_CHOSEN_BY = {
    "last": "the model of a run is that of its last epoch; nothing was chosen by test recall",
    "validation": "the epoch of a run is that with the best R@1 on validation classes; "
    "nothing was chosen by test recall",
    "test": "CHOSEN BY TEST: the epoch of a run is that with the best R@1 on the test classes, so "
    "these figures are too high",
}
_RANKED = (
    "competitors are ranked by mean R@1 over their seeds within each experiment; ties share the "
    "average of their ranks; the deviation is the sample standard deviation of the ranks"
)


def write_report(folder: Path, title: str, runs: Sequence[Run], missing_last: bool = False) -> Path:
    """Write `report.html`, `report.md` and `charts/`; returns the HTML page."""
    (folder / "charts").mkdir(parents=True, exist_ok=True)
    figures, failed = figures_of(runs), [run for run in runs if run.attempts]
    done = sum(run.result is not None for run in runs)
    lines = [f"# {plain(title)}", "", "## Protocol", ""]
    lines += [f"- {done} of {len(runs)} runs finished, {len(failed)} failed", *_protocol(runs)]
    if done:
        lines += ["", "## Tournament", "", *_ranking(folder, figures, missing_last)]
    for backbone, of_backbone in figures.groupby("backbone", sort=False):
        lines += ["", f"## {plain(backbone)}"]
        for experiment, part in of_backbone.groupby("experiment", sort=False):
            lines += _experiment(folder, experiment, part)
    if failed:
        rows = [(plain(r.combination.job.name), plain(r.reason), str(r.attempts)) for r in failed]
        lines += ["", "## Failed runs", ""]
        lines += ["They are tried again when the tournament is called again.", ""]
        lines += table(["run", "reason", "attempts"], rows)
    text = "\n".join(lines) + "\n"
    replace_text(folder / "report.md", text)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = re.sub('src="(charts/[^"]*)"', lambda chart: _inlined(folder / chart[1]), body)
    head = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    replace_text(
        folder / "report.html",
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{head}'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>{body}</body></html>\n",
    )
    return folder / "report.html"


def _protocol(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before believing a table: who chose, which classes and seeds."""
    finished = [(run.combination.job, run.result) for run in runs if run.result is not None]
    if not finished:
        return []
    jobs = [job for job, _ in finished]
    chosen = dict.fromkeys(result.chosen_by for _, result in finished)
    said = [_CHOSEN_BY[who] for who in chosen]
    if len(chosen) > 1:
        said.append("MIXED: not all runs were chosen in the same way, so ranks compare unlike runs")
    held_out = dict.fromkeys(job.protocol.validation_fraction for job in jobs)
    said += [f"{p:.0%} of the train classes were held out for validation" for p in held_out if p]
    said.append("data: " + _all(f"{job.data.kind} ({Path(job.data.root).name})" for job in jobs))
    epochs = _all(job.optimizer.epochs for job in jobs)
    batch = _all(job.optimizer.batch_size for job in jobs)
    said.append(f"seeds {_all(job.seed for job in jobs)}; epochs {epochs}; batch {batch}")
    said.append("figures are means over seeds ± sample standard deviation; R@K in percent")
    return [f"- {plain(sentence)}" for sentence in said]


def _all(values: Iterable[int | str]) -> str:
    return ", ".join(map(str, sorted(set(values))))


def _ranking(folder: Path, figures: pd.DataFrame, missing_last: bool) -> list[str]:
    try:
        found = rank(recall_at_1(figures), missing_last)
    except EvaluationError as error:
        return [plain(error)]
    lines = [f"- {_RANKED}"]
    for experiment, gap in found.left_out.items():
        names = ", ".join(gap)
        lines.append(plain(f"- left out of the ranking: {experiment}, which lacks {names}"))
    if missing_last:
        lines.append("- a competitor that an experiment lacks is ranked last in it")
    if found.never_finished:
        lines.append(plain(f"- not ranked, no finished run: {', '.join(found.never_finished)}"))
    *others, average, deviation = found.ranks.columns
    rows = []
    for name, row in found.ranks.iterrows():
        spread = _NONE if pd.isna(row[deviation]) else f"{row[deviation]:.2f}"
        rows.append([plain(name), *(f"{row[c]:g}" for c in others), f"{row[average]:.2f}", spread])
    lines += ["", "### Ranks by R@1", "", *table(["", *map(plain, found.ranks.columns)], rows)]
    title = "Average rank over the experiments (1 is best)"
    return [
        *lines,
        "",
        _chart(folder, "ranks", title, found.ranks[average], found.ranks[deviation]),
    ]


def _experiment(folder: Path, experiment: str, part: pd.DataFrame) -> list[str]:
    """A table of all figures by competitor, the best recalls bold, and a chart of R@1."""
    measured = [name for name in part.columns[3:] if part[name].notna().any()]
    figures = part.reindex(columns=["competitor", *(measured or ["R@1", SECONDS])])
    by_competitor = figures.groupby("competitor", sort=False)
    mean, spread = by_competitor.mean(), by_competitor.std()
    seeds = zip(by_competitor[SECONDS].count(), by_competitor.size(), strict=True)
    columns = [_cells(mean[name], spread[name], name.startswith("R@")) for name in mean]
    columns.append([f"{n}" if n == planned else f"{n} of {planned}" for n, planned in seeds])
    rows = zip(map(plain, mean.index), *columns, strict=True)
    lines = ["", f"### {plain(experiment)}", ""]
    lines += table(["", *map(plain, mean.columns), "seeds"], rows)
    if not measured:
        return lines
    file = "r1-" + re.sub(r"[^A-Za-z0-9._]+", "-", experiment)
    chart = _chart(folder, file, f"R@1, {experiment}", mean["R@1"].dropna(), spread["R@1"])
    return [*lines, "", chart]


def _cells(mean: pd.Series, spread: pd.Series, bold: bool) -> list[str]:
    """Mean ± deviation with as many digits; the best mean may be bold."""
    cells = []
    for value, deviation in zip(mean, spread, strict=True):
        digits = 2 if abs(value) >= 1 or value == 0 else 4
        text = _NONE if pd.isna(value) else f"{value:.{digits}f}"
        text += "" if pd.isna(deviation) else f" ± {deviation:.{digits}f}"
        cells.append(f"**{text}**" if bold and value == mean.max() else text)
    return cells


def _chart(folder: Path, name: str, title: str, values: pd.Series, spread: pd.Series) -> str:
    """Horizontal bars from 0, each with its value and the whisker of its deviation."""
    spread = spread[values.index]
    figure = Figure(figsize=(8, 1 + 0.3 * len(values)), layout="constrained")
    axis = figure.subplots()
    bars = axis.barh(list(values.index), values, xerr=spread.fillna(0), ecolor="#d98324")
    axis.bar_label(bars, _cells(values, spread, bold=False), padding=4)
    axis.invert_yaxis()
    axis.margins(x=0.3)
    axis.set_title(title)
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(folder / "charts" / f"{name}.svg", metadata={"Date": None})
    return f"![{plain(title)}](charts/{name}.svg)"


def _inlined(chart: Path) -> str:
    return f'src="data:image/svg+xml;base64,{base64.b64encode(chart.read_bytes()).decode()}"'
