"""A hook of mkdocs (mkdocs.yml): pages that are made from the code, and links that leave docs/.

    make docs    # builds build/site; a broken link is an error

Made at each build, so they cannot be out of date: the HTTP routes from the OpenAPI document, the
command lines from the Typer apps, the Python package from its docstrings, the list of decisions.
"""

import posixpath
import re
import sys
import tempfile
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
COMMANDS = {"kinlens-train": "training", "kinlens-index": "indexer", "kinlens-serve": "service"}
PYTHON = {
    "kinlens": ("load_bundle", "open_gallery"),
    "kinlens.client": ("Client", "AsyncClient"),
    "kinlens.calls": ("NewItem", "Query", "SearchOptions", "ImageSearchOptions"),
    "kinlens.errors": (),
    "kinlens.models": (),
}
TIDY = {
    r"^\*\*Commands\*\*:\n\n(\* .*\n)+": "",  # cut short there, and whole in the headings below
    r"^\* `--(install-completion|show-completion|help)`: .*\n": "",
    r"^\*\*Options\*\*:\n\n(?!\*)": "",
    r"^(?:(Examples?:) )?(kinlens-.+)$": r"\1\n\n    \2\n",  # a command in a help text
    r"^(    kinlens-.+)\n+(?=    kinlens-)": r"\1\n",
    r" {2,}(?=--)": " ",
}
"""What the generator of Typer writes, and what the page has instead."""
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
FORMULA = re.compile(
    r'<(div|span) class="arithmatex">\s*\\[\[(](.*?)\\[\])]\s*</\1>', re.DOTALL
)
NUMBERED = re.compile(r"\[(\d+)\](?= \[)")
"""The number of a source before its link, which Markdown in Python takes for one link."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code."""
    pages = {
        "reference/http.md": http_page(),
        "reference/commands.md": commands_page(),
        "reference/python.md": python_page(),
        "decisions/index.md": decisions_page(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside docs/, and to folders, lead to the repository."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        is_folder = (ROOT / target).is_dir()
        if ":" in match[2] or not (is_folder or (ROOT / target).is_file()):
            return match[0]  # an address; or a broken link, which mkdocs reports
        if target.startswith("docs/") and not is_folder:
            return match[0]
        kind = "tree" if is_folder else "blob"
        return f"{match[1]}{config.repo_url}/{kind}/main/{target}{match[3] or ''}"

    return LINK.sub(moved, NUMBERED.sub(r"\[\1\]", text))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML, which browsers show without a script."""

    def mathml(match: re.Match[str]) -> str:
        return convert(unescape(match[2]), display="block" if match[1] == "div" else "inline")

    return FORMULA.sub(mathml, html)


def http_page() -> str:
    """The sections of the service's own page at /docs, with headings for the table of contents."""
    from kinlens.embedder.fake import FakeEmbedder
    from kinlens.service.app import create_app
    from kinlens.service.http.docs_page import render_docs
    from kinlens.service.settings import Settings

    with tempfile.TemporaryDirectory() as state:
        app = create_app(Settings(state=Path(state)), FakeEmbedder(), {})
        html = render_docs(app.openapi())
    found = re.findall(r'<section id="(.+?)"><h2>(.+?)</h2>(.*?)</section>', html, re.DOTALL)
    if not found:
        raise ValueError("The page at /docs has no sections.")
    text = "# HTTP routes\n\nEvery route with its parameters and answers, as a service shows them "
    text += "at `/docs`. [HTTP API](../api.md) explains them.\n"
    for anchor, title, body in found:
        route, _, summary = title.partition("</code>")
        route = unescape(re.sub("<.+?>", "", route))
        body = re.sub(r'<div class="wide".*?>|</div>', "", body)
        text += f"\n## `{route}` {{ #{anchor} }}\n\n<p>{summary.strip()}</p>\n{body}\n"
    return text


def commands_page() -> str:
    """The help of every command."""
    import typer
    from typer.cli import get_docs_for_click

    text = "# Command lines\n\nThe help of every command, as `--help` prints it.\n"
    for name, package in COMMANDS.items():
        app = import_module(f"kinlens.{package}.__main__").app
        command = typer.main.get_command(app)
        context: Any = typer.Context(command)
        page = get_docs_for_click(obj=command, ctx=context, name=name, indent=1)
        for pattern, better in TIDY.items():
            page = re.sub(pattern, better, page, flags=re.MULTILINE)
        text += f"\n{page}"
    return text


def python_page() -> str:
    """What mkdocstrings fills from docstrings."""
    text = "# Python package\n\nFrom the docstrings. [The Python client](../client.md) explains it.\n"
    text += "`Client` has every method of `AsyncClient`, without `await`.\n"
    for module, names in PYTHON.items():
        text += f"\n## `{module}`\n"
        for name in names:
            text += f"\n::: {module}.{name}\n"
        if not names:
            text += f"\n::: {module}\n"
    return text


def decisions_page() -> str:
    """A list of the titles, since nobody reads thirty pages in their order."""
    text = "# Decisions\n\nChoices that others would make differently, one page each.\n\n"
    for path in sorted((ROOT / "docs/decisions").glob("0*.md")):
        title = path.read_text("utf-8").partition("\n")[0].lstrip("# ")
        text += f"- [{title}]({path.name})\n"
    return text
