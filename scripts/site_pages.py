"""An mkdocs hook (mkdocs.yml): reference pages from the code, links, formulas, pages as Markdown.

The pages are generated in each build, so they cannot be out of date: HTTP routes from the OpenAPI
document, command lines from the Typer apps, the Python package from its docstrings, the settings of
a job from its tables, the list of decisions from the titles of their pages, the tables of results
from their records.

Programs that read the site find each page as Markdown next to its HTML, and the list of pages with
a sentence about each in `llms.txt` (https://llmstxt.org).
"""

import csv
import inspect
import io
import json
import posixpath
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from html import unescape
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # import the code of this checkout
ICON = ROOT / "service/ui/shared/icon.svg"
COMMANDS = {
    "kinlens-train": "training.__main__",
    "kinlens-index": "commands.__main__",
    "kinlens-serve": "service.commands.program",
}
PYTHON = {
    "kinlens": ("load_bundle", "open_gallery", "create_gallery", "build", "Gallery"),
    "kinlens.client": ("Client", "AsyncClient"),
    "kinlens.calls": ("NewItem", "Query", "SearchOptions", "ImageSearchOptions"),
    "kinlens.errors": (),
    "kinlens.langchain": ("KinlensRetriever",),
    "kinlens.library.bundles": ("LoadedBundle",),
    "kinlens.library.plots": (),
    "kinlens.models": (),
}
TIDY = {
    r"^\x08\n": "",  # keeps the line breaks of a paragraph in a terminal
    r"^\*\*Commands\*\*:\n\n(\* .*\n)+": "",  # truncated here, complete in the headings below
    r"^\* `--(install-completion|show-completion|help)`: .*\n": "",
    r"^\*\*Options\*\*:\n\n(?!\*)": "",
    r"^(?:(Examples?:) )?(kinlens-.+)$": r"\1\n\n    \2\n",  # a command in a help text
    r"^(    kinlens-.+)\n+(?=    kinlens-)": r"\1\n",
    r" {2,}(?=--)": " ",
}
"""Replacements in the output of Typer's generator."""
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
NUMBERED = re.compile(r"\[(\d+)\](?= \[)")
FORMULA = re.compile(r'<(div|span) class="arithmatex">\s*\\[\[(](.*?)\\[\])]\s*</\1>', re.DOTALL)


SECTIONS: dict[str, list[Any]] = {}
"""The pages of each section of the navigation, by its title."""
MARKDOWN: dict[str, str] = {}
"""The pages of the current build as Markdown, by their path; without those that plugins fill."""


class Sections(griffe.Extension):
    """Show sections of docstrings that are written on one line, such as "Returns: a list"."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        wrapped = re.fullmatch(r"_method\(\w+, ([\w.]+)\)", str(getattr(obj, "value", "")))
        if wrapped:  # a method that is a function elsewhere, see kinlens/library/quality.py
            function = attrgetter(wrapped[1])(import_module(obj.module.path))
            signature = [*inspect.signature(function).parameters][1:]
            text = f"A method ({', '.join(signature)}).\n\n{inspect.getdoc(function)}"
            obj.docstring = griffe.Docstring(text, parent=obj)
        if obj.docstring is not None:
            text = obj.docstring.value
            text = re.sub(r"^(Returns|Raises): (?=\S)", r"**\1**: ", text, flags=re.MULTILINE)
            text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
            # Two arguments of one description, such as "csv, split: a list".
            text = re.sub(
                r"^    (\w+), (\w+): ", r"    \1: see `\2`.\n    \2: ", text, flags=re.MULTILINE
            )
            obj.docstring.value = text


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "reference/http.md": http_page(),
        "reference/settings.md": settings_page(),
        "reference/metrics.md": metrics_page(),
        "reference/commands.md": commands_page(),
        "reference/python.md": python_page(),
        "reference/job-settings.md": job_settings_page(),
        "decisions/index.md": decisions_page(),
        "results/tables.md": tables_page(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "kinlens.d.ts", content=types_of_the_api()))
    files.append(File.generated(config, "assets/icon.svg", abs_src_path=str(ICON)))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside docs/ at the repository, and links to folders at their index.

    Links to generated pages are written as addresses of the site, since the repository lacks these
    pages. Here they become relative, so that mkdocs checks them.
    """
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def moved(match: re.Match[str]) -> str:
        opening, link, anchor = match[1], match[2], match[3] or ""
        if config.site_url and link.startswith(config.site_url):
            generated = link.removeprefix(config.site_url).replace(".html", ".md")
            return (
                f"{opening}{posixpath.relpath(posixpath.join('docs', generated), folder)}{anchor}"
            )
        target = posixpath.normpath(posixpath.join(folder, link))
        is_folder = (ROOT / target).is_dir()
        if is_folder and files.get_file_from_path(f"{target.removeprefix('docs/')}/index.md"):
            return f"{opening}{link.rstrip('/')}/index.md{anchor}"
        is_page = target.startswith("docs/") and not is_folder
        if ":" in link or is_page or not (ROOT / target).exists():
            return match[0]  # mkdocs reports a broken link
        kind = "tree" if is_folder else "blob"
        return f"{opening}{config.repo_url}/{kind}/main/{target}{anchor}"

    # Python-Markdown would read "[1] [title](address)" as one link.
    text = LINK.sub(moved, NUMBERED.sub(r"\[\1\]", text))
    if "\n::: " not in text:
        MARKDOWN[page.file.src_uri] = text
    return text


def on_nav(nav: Navigation, **_: Any) -> None:
    MARKDOWN.clear()
    SECTIONS.clear()
    for item in nav:
        SECTIONS[item.title or ""] = [item] if isinstance(item, Page) else item.children or []


def on_post_build(config: MkDocsConfig) -> None:
    """Write each page as Markdown, and the list of the pages of the navigation."""
    folder = Path(config.site_dir)
    for path, text in MARKDOWN.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    listed = f"# {config.site_name}\n\n> {config.site_description}\n"
    for title, pages in SECTIONS.items():
        listed += f"\n## {title}\n\n"
        for page in pages:
            path = page.file.src_uri
            if path in MARKDOWN:
                listed += f"- [{page.title}]({config.site_url}{path}): {_about(MARKDOWN[path])}\n"
    (folder / "llms.txt").write_text(listed, encoding="utf-8")


def _about(text: str) -> str:
    """The first sentence of a page, without links and marks."""
    paragraphs = re.split(r"\n\s*\n", text)
    first = next(
        p for p in paragraphs if not p.startswith(("#", "!", "|", "<", "-", "```", "    "))
    )
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*`]", r"\1", " ".join(first.split()))
    return re.split(r"(?<=[.?])\s", plain)[0]


def on_page_content(html: str, **_: Any) -> str:
    """Write formulas as MathML, which browsers render without a script."""

    def mathml(match: re.Match[str]) -> str:
        return convert(unescape(match[2]), display="block" if match[1] == "div" else "inline")

    return FORMULA.sub(mathml, html)


@contextmanager
def service() -> Iterator[Any]:
    """A service with all routes and metrics, which is not started."""
    from kinlens.embedder.fake import FakeEmbedder
    from kinlens.service.app import create_app
    from kinlens.service.settings import Settings

    with tempfile.TemporaryDirectory() as state:
        yield create_app(Settings(state=Path(state)), FakeEmbedder(), {})


def http_page() -> str:
    """Each operation of the OpenAPI document with its fields and problems."""
    with service() as app:
        document = app.openapi()
    text = "# HTTP routes\n\nEvery route with its fields and answers. A service shows them at "
    text += "`/docs`, where requests can be tried. [HTTP API](../api.md) explains them.\n"
    for path, item in document["paths"].items():
        for method, operation in item.items():
            anchor = f"{method}{re.sub('[^a-z0-9_]+', '-', path)}"
            text += f"\n## `{method.upper()} {path}` {{ #{anchor} }}\n\n{operation['summary']}. "
            text += operation.get("description", "") + "\n"
            text += table(("Field", "In", "Meaning"), fields_of(operation, document))
            text += table(("Status", "Meaning", "Problems"), answers_of(operation))
    return text


def types_of_the_api() -> str:
    from scripts.typescript import declarations

    with service() as app:
        return declarations(app.openapi())


def table(names: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """A Markdown table; empty without rows."""
    lines = [
        " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows
    ]
    head = f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}\n"
    return head + "".join(f"| {line} |\n" for line in lines) if lines else ""


def fields_of(operation: dict[str, Any], document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Name, place and meaning of each parameter and of each field of the body."""
    for parameter in operation.get("parameters", ()):
        yield f"`{parameter['name']}`", parameter["in"], parameter.get("description", "")
    known = document["components"]["schemas"]
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = known.get(content["schema"].get("$ref", "").rpartition("/")[2], content["schema"])
        for name, field in schema.get("properties", {}).items():
            yield f"`{name}`", media_type, field.get("description", "")


def answers_of(operation: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Status, meaning and problems of each answer."""
    for status, answer in sorted(operation["responses"].items()):
        contents = answer.get("content", {}).values()
        slugs = [f"`{slug}`" for one in contents for slug in one.get("examples", ())]
        yield status, answer["description"], " ".join(slugs)


def settings_page() -> str:
    from kinlens.service.variables import variables

    text = (
        "# Settings\n\nThe environment variables of `kinlens-serve`, read once at startup; options "
    )
    text += "take precedence. `kinlens-serve settings` prints this list; "
    text += "[Operations](../operations.md) explains how they work together.\n"
    group = ""
    for each in variables():
        if each.group != group:
            group = each.group
            text += (
                f"\n## {group}\n\n| Variable | Default | Limits | Meaning |\n|---|---|---|---|\n"
            )
        text += f"| `{each.name}` | {each.default} | {each.limits} | {each.meaning} |\n"
    return text


def metrics_page() -> str:
    text = "# List of metrics\n\nThe series of `GET /metrics`, with their help texts. "
    text += "[Operations](../operations.md#metrics) explains how to use them.\n\n"
    text += "| Metric | Type | Labels | Meaning |\n|---|---|---|---|\n"
    with service() as app:
        for name, kind, labels, meaning in app.state.runtime.metrics.described:
            text += f"| `{name}` | {kind} | {', '.join(labels)} | {meaning} |\n"
    return text


def commands_page() -> str:
    import typer
    from typer.cli import get_docs_for_click

    text = "# Command lines\n\nThe help of every command, as `--help` prints it.\n"
    for name, module in COMMANDS.items():
        command = typer.main.get_command(import_module(f"kinlens.{module}").app)
        context: Any = typer.Context(command)
        page = get_docs_for_click(obj=command, ctx=context, name=name, indent=1)
        for pattern, better in TIDY.items():
            page = re.sub(pattern, better, page, flags=re.MULTILINE)
        text += f"\n{page}"
    return text


def python_page() -> str:
    text = (
        "# Python package\n\nFrom the docstrings; [the Python client](../client.md) has examples."
    )
    text += " `Client` has every method of `AsyncClient`, without `await`.\n"
    for module, names in PYTHON.items():
        text += f"\n## `{module}`\n"
        for name in [f"{module}.{name}" for name in names] or [module]:
            text += f"\n::: {name}\n"
            if name == "kinlens.Gallery":
                text += "    options:\n      inherited_members: true\n"
    return text


def decisions_page() -> str:
    text = "# Decisions\n\nChoices that others might make differently, one page each.\n\n"
    for path in sorted((ROOT / "docs/decisions").glob("0*.md")):
        title = path.read_text("utf-8").partition("\n")[0].lstrip("# ")
        text += f"- [{title}]({path.name})\n"
    return text


def tables_page() -> str:
    """Every row of the records of results, of which the pages show the ones that decide."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    additions = import_module("additions")
    regularizers = import_module("regularizers")

    from kinlens.training.studies.tables import methods, read_study

    results = ROOT / "docs/results"
    text = "# Every row\n\nGenerated from the records in [docs/results](.). "
    text += "[Results](../results.md) show the rows that decide, and explain the columns.\n"
    for path in sorted(results.glob("*.json")):
        if path.stem not in ("calibration", "guarantee"):
            text += f"\n## {path.stem}\n\n" + "\n".join(methods(read_study(path))) + "\n"
    for report, name in (
        (regularizers.report, "regularizers/cars"),
        (additions.report, "additions/heads"),
    ):
        printed = io.StringIO()
        with redirect_stdout(printed):
            report(json.loads((results / f"{name}.json").read_text("utf-8")))
        text += f"\n## {name.partition('/')[0]}\n\n{printed.getvalue()}\n"
    for path in sorted((ROOT / "docs").rglob("*.csv")):
        header, *rows = csv.reader(path.read_text("utf-8").splitlines())
        text += f"\n## {path.stem}\n" + table(tuple(header), iter(map(tuple, rows)))
    return text


def job_settings_page() -> str:
    from kinlens.training.config.job import Job

    schema = Job.model_json_schema()
    text = (
        "# Settings of a job\n\nThe keys of a job file, by table. [Training jobs](../jobs.md) "
        "explains their use, and the key [`base`](../jobs.md#a-job-with-a-base). A default "
        "of none means that the key is missing: TOML has no null.\n"
    )
    return text + _table("", schema, schema["$defs"])


def _table(name: str, table: Json, tables: Json, level: int = 1, kind: str = "") -> str:
    """A table of a job file by its JSON schema, and below it the tables that it contains.

    `kind` names a key whose value is the heading, such as that of a data set.
    """
    text = f"\n\n{table['description']}\n" if name else ""
    rows = below = ""
    for key, node in table["properties"].items():
        path = f"{name}.{key}" if name else key
        heading = f"\n\n{'#' * (level + 1)} `[{path}]`"
        links = [part["$ref"] for part in [node, *node.get("anyOf", ())] if "$ref" in part]
        if links:
            below += heading + _table(path, _of(links[0], tables), tables, level + 1)
        elif "oneOf" in node:
            choice, kinds = (node["discriminator"][of] for of in ("propertyName", "mapping"))
            below += f"{heading}\n\n{node['description']}"
            for link in dict.fromkeys(kinds.values()):
                names = ", ".join(_toml(value) for value in kinds if kinds[value] == link)
                below += f"\n\n{'#' * (level + 2)} `{choice}` = {names}"
                below += _table(path, _of(link, tables), tables, level + 2, choice)
        elif key != kind:
            required = key in table.get("required", ())
            default = "required" if required else _toml(node["default"])
            meaning = " ".join(node.get("description", "").split())
            meaning = meaning[:1].upper() + meaning[1:]
            rows += f"| `{key}` | {default} | {_values(node)} | {meaning} |\n"
    if rows:
        text += f"\n| setting | default | values | meaning |\n|---|---|---|---|\n{rows}"
    return text + below


def _of(link: str, tables: Json) -> Json:
    found: Json = tables[link.split("/")[-1]]
    return found


def _values(node: Json) -> str:
    """The type and the limits of a setting."""
    if "anyOf" in node:
        return " or ".join(_values(part) for part in node["anyOf"] if part["type"] != "null")
    if "enum" in node or "const" in node:
        return ", ".join(map(_toml, node.get("enum") or [node["const"]]))
    if node["type"] == "array":
        return f"list: {_values(node['items'])}"
    limits = [f"{sign} {node[limit]:,}" for limit, sign in LIMITS.items() if limit in node]
    return " ".join([node["type"], ", ".join(limits)]).strip()


def _toml(value: Any) -> str:
    return "none" if value is None else f"`{json.dumps(value)}`"
