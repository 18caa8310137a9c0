"""Results that show themselves: as lines in a terminal, as tables in a notebook."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from html import escape
from itertools import groupby

_GAP = re.compile(r"\s{2,}")  # between the cells of a line


class Report(ABC):
    """A result with a text for people. `print` writes its lines; a notebook shows the same lines,
    those with columns as a table.
    """

    __slots__ = ()

    @abstractmethod
    def lines(self) -> Iterable[str]:
        """The text, line by line."""

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        rows = [_GAP.split(line.strip()) for line in self.lines()]
        parts = []
        for is_table, group in groupby(rows, lambda cells: len(cells) > 1):
            if is_table:
                cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in group)
                parts.append("<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>")
            else:
                parts += [f"<p>{escape(text)}</p>" for [text] in group]
        return "".join(parts)
