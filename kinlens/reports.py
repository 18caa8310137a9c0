"""Results that show themselves: as lines in a terminal, as tables in a notebook."""

import base64
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from html import escape
from itertools import groupby

from kinlens.values import AttributeValue

_GAP = re.compile(r"\s{2,}")  # between the cells of a line
_PRINTED = 10  # lines of a list
THUMBNAIL_PX = 160
_GRID = "display:flex;flex-wrap:wrap;gap:12px;align-items:flex-start;margin-bottom:16px"
_CARD = "margin:0;width:160px;font:12px/1.4 sans-serif;overflow-wrap:anywhere"
_PHOTO = "display:block;width:160px;height:160px;object-fit:contain;background:#8882"


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


def written(value: AttributeValue) -> str:
    """A value in the syntax of command options."""
    if isinstance(value, tuple):
        return "|".join(map(written, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def photo_card(
    key: str, attributes: Mapping[str, AttributeValue], jpeg: bytes | None, head: str = ""
) -> str:
    """An image with its key and attributes, in HTML."""
    if jpeg is None:
        photo = f'<div style="{_PHOTO}"></div>'
    else:
        address = f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"
        photo = f'<img style="{_PHOTO}" alt="" src="{address}">'
    lines = "".join(f"<br>{escape(name)}: {escape(written(v))}" for name, v in attributes.items())
    return (
        f'<figure style="{_CARD}">{photo}<figcaption>{escape(head)} <b>{escape(key)}</b>{lines}'
        "</figcaption></figure>"
    )


def photo_grid(cards: Iterable[str], summary: str = "") -> str:
    """Cards next to each other, in HTML, below a summary."""
    title = f"<p>{escape(summary)}</p>" if summary else ""
    return f'{title}<div style="{_GRID}">{"".join(cards)}</div>'


def listing(summary: str, lines: Iterable[str]) -> str:
    """A summary and the first lines."""
    several = [*lines]
    more = len(several) - _PRINTED
    return "\n".join(
        [summary, *several[:_PRINTED], *([f"... and {more:,} more lines"] if more > 0 else [])]
    )
