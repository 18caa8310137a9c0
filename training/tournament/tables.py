"""Tables of a tournament, as the paper prints them, in Markdown and HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from training.tournament.ranking import Ranking
from training.tournament.standings import SECONDS, Cell, Score, Standings

_DASH = "–"


@dataclass(frozen=True)
class Table:
    """Rows of text; `bold` holds (row, column) of the best values."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: frozenset[tuple[int, int]] = frozenset()

    def markdown(self) -> str:
        """A pipe table below its title."""
        lines = [
            f"### {_plain(self.title)}",
            "",
            _pipes(self.header),
            "|" + "---|" * len(self.header),
        ]
        for r, row in enumerate(self.rows):
            cells = [
                f"**{_plain(text)}**" if (r, c) in self.bold else _plain(text)
                for c, text in enumerate(row)
            ]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        """A `<table>` with its title as caption; every text is escaped."""
        head = "".join(f'<th scope="col">{escape(text)}</th>' for text in self.header)
        body = "".join(f"<tr>{self._html_row(r, row)}</tr>\n" for r, row in enumerate(self.rows))
        return (
            f"<table><caption>{escape(self.title)}</caption>\n"
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>\n"
        )

    def _html_row(self, r: int, row: Sequence[str]) -> str:
        cells = [f'<th scope="row">{escape(row[0])}</th>']
        for c, text in enumerate(row[1:], 1):
            inner = f"<b>{escape(text)}</b>" if (r, c) in self.bold else escape(text)
            cells.append(f"<td>{inner}</td>")
        return "".join(cells)


def recall_table(standings: Standings, experiment: str) -> Table:
    """Rows = competitors, columns = R@K in percent, and how many seeds of how many."""
    names = [name for name in standings.figures(experiment) if name.startswith("R@")]
    return _figures(standings, experiment, names or ["R@1"], experiment, best=True)


def other_table(standings: Standings, experiment: str) -> Table | None:
    """What else was measured, and the seconds of an epoch; None before the first run."""
    names = [name for name in standings.figures(experiment) if not name.startswith("R@")]
    if not names:
        return None
    names = [*(name for name in names if name != SECONDS), SECONDS]
    return _figures(standings, experiment, names, f"{experiment}: other figures", best=False)


def rank_table(ranking: Ranking) -> Table:
    """Ranks in each experiment, their sum, average and standard deviation."""
    rows = [
        (
            place.competitor,
            *(f"{value:g}" for value in place.ranks),
            f"{place.total:g}",
            f"{place.average:.2f}",
            _DASH if place.deviation is None else f"{place.deviation:.2f}",
        )
        for place in ranking.places
    ]
    header = ("", *ranking.experiments, "total", "average rank", "standard deviation")
    return Table("Ranks by R@1", header, tuple(rows))


def _figures(
    standings: Standings, experiment: str, names: Sequence[str], title: str, best: bool
) -> Table:
    row = standings.cells[experiment]
    rows = [
        (name, *(_score(cell.scores.get(figure)) for figure in names), _seeds(cell))
        for name, cell in row.items()
    ]
    cells = list(row.values())
    bold = {found for c, n in enumerate(names, 1) for found in _best(cells, n, c)} if best else ()
    return Table(title, ("", *names, "seeds"), tuple(rows), frozenset(bold))


def _best(cells: Sequence[Cell], figure: str, column: int) -> list[tuple[int, int]]:
    means = {r: cell.scores[figure].mean for r, cell in enumerate(cells) if figure in cell.scores}
    return [(r, column) for r, mean in means.items() if mean == max(means.values())]


def _score(score: Score | None) -> str:
    if score is None:
        return _DASH
    spread = "" if score.deviation is None else f" ± {_number(score.deviation)}"
    return _number(score.mean) + spread


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.4f}"


def _seeds(cell: Cell) -> str:
    return str(cell.seeds) if cell.seeds == cell.planned else f"{cell.seeds} of {cell.planned}"


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_plain, cells)) + " |"


def _plain(text: str) -> str:
    """One line that Markdown does not read as a table, a tag or an emphasis."""
    line = escape(" ".join(text.split()), quote=False)
    for sign in "\\`*_[]|":
        line = line.replace(sign, "\\" + sign)
    return line
