"""The admin page's files, read without a browser: content security, hooks, length."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import service

UI = Path(service.__file__).parent / "ui"
SCRIPTS = sorted(UI.glob("admin*.js"))
STYLES = sorted(UI.glob("admin*.css"))
MAX_LINES = 300


class Markup(HTMLParser):
    """Collects every start tag with its attributes, and the text inside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self.feed((UI / "admin.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if data.strip() and self.tags and self.tags[-1][0] in ("script", "style"):
            self.inline.append(data)

    def values(self, attribute: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(attribute)) is not None]


@pytest.fixture(scope="module")
def markup() -> Markup:
    return Markup()


def test_the_admin_page_has_no_inline_script_or_style(markup: Markup) -> None:
    names = {name for _, attrs in markup.tags for name in attrs}
    assert markup.inline == []
    assert "style" not in names
    assert not {name for name in names if name.startswith("on")}


def test_every_resource_is_a_local_file_that_exists(markup: Markup) -> None:
    links = set(markup.values("src") + markup.values("href"))
    files = {link for link in links if link.startswith("/ui/")}
    assert files
    assert all((UI / link.removeprefix("/ui/")).is_file() for link in files)
    assert all(link.startswith("#") or link in ("/", "/admin", "/docs") for link in links - files)


def test_every_imported_module_and_name_exists() -> None:
    imports = [
        found
        for path in SCRIPTS
        for found in re.findall(
            r'import (?:\{(.+?)\}|\* as \w+) from "/ui/(.+?)"', path.read_text()
        )
    ]
    assert imports
    for names, file in imports:
        source = (UI / file).read_text(encoding="utf-8")
        exported = set(re.findall(r"export (?:async )?(?:const|let|function|class) (\w+)", source))
        assert {name.strip() for name in names.split(",") if name.strip()} <= exported, file


def test_ids_are_unique_and_every_id_that_a_script_uses_exists(markup: Markup) -> None:
    ids = markup.values("id")
    names = [*SCRIPTS, *(UI / name for name in ("alerts.js", "dom.js"))]
    source = "".join(path.read_text(encoding="utf-8") for path in names)
    used = {a or b for a, b in re.findall(r'\bui(?:\.(\w+)|\["([\w-]+)"\])', source)}
    assert len(ids) == len(set(ids))
    assert used
    assert used <= set(ids)


def test_every_field_has_a_label(markup: Markup) -> None:
    fields = [attrs for tag, attrs in markup.tags if tag in ("select", "input", "textarea")]
    seen = [attrs for attrs in fields if attrs.get("type") != "file"]
    unnamed = {attrs["id"] for attrs in seen if "aria-label" not in attrs}
    assert unnamed
    assert unnamed <= set(markup.values("for"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_writes_markup_or_evaluates_text(path: Path) -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?:"
    )
    assert re.findall(forbidden, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", STYLES, ids=lambda path: path.name)
def test_no_style_loads_anything_or_has_a_colour_of_its_own(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"url\(|@import|https?:|#[0-9a-f]{6}", text) == []


@pytest.mark.parametrize("path", [*SCRIPTS, *STYLES, UI / "admin.html"], ids=lambda path: path.name)
def test_files_of_the_admin_page_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
