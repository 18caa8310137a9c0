"""Each message that docs/troubleshooting.md quotes is one that the product prints."""

import ast
import re
import subprocess
from collections.abc import Iterator

from tests.support.own_process import ROOT

PAGE = ROOT / "docs/troubleshooting.md"
PACKAGES = ("commands", "embedder", "indexer", "kinlens", "quality", "service", "training")
LEAST = 25
"""Quoted messages, so that a table that is written in another way does not pass unread."""


def texts(tree: ast.Module) -> Iterator[str]:
    """All texts of a module; the values in one are left as `…`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_each_quoted_message_is_one_of_the_product() -> None:
    first = re.findall(r"^\| ([^|]+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    quoted = [message for cell in first for message in re.findall(r"`([^`]+ [^`]+)`", cell)]
    assert len(quoted) >= LEAST
    listed = subprocess.run(
        ["git", "ls-files", *(f"{package}/*.py" for package in PACKAGES)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    known = [
        text
        for name in listed.stdout.split()
        for text in texts(ast.parse((ROOT / name).read_text("utf-8")))
    ]
    patterns = {
        message: re.compile(".*".join(map(re.escape, re.split(r" ?… ?", message))))
        for message in quoted
    }
    assert [m for m, pattern in patterns.items() if not any(map(pattern.search, known))] == []
