"""Markdown of reports."""

import re
from collections.abc import Iterable, Sequence
from html import escape


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the cells are Markdown already."""
    head, *body = ["| " + " | ".join(line) + " |" for line in [header, *rows]]
    return [head, "|" + "---|" * len(header), *body]


def plain(text: object) -> str:
    """`text` on one line, escaped so that Markdown sees no table, tag or emphasis."""
    line = escape(" ".join(str(text).split()), quote=False)
    return re.sub(r"[\\`*_\[\]|]", r"\\\g<0>", line)
