"""Markdown: tables, and texts that cannot break them."""

from collections.abc import Iterable, Sequence
from html import escape


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table of cells that are Markdown already."""
    lines = [header, *rows]
    pipes = ["| " + " | ".join(line) + " |" for line in lines]
    return [pipes[0], "|" + "---|" * len(header), *pipes[1:]]


def plain(text: object) -> str:
    """One line that Markdown does not read as a table, a tag or an emphasis."""
    line = escape(" ".join(str(text).split()), quote=False)
    for sign in "\\`*_[]|":
        line = line.replace(sign, "\\" + sign)
    return line
