"""The files of both pages, read without a browser: what they load, hooks, labels and contrast."""

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

import service

UI = Path(service.__file__).parent / "ui"
SCRIPTS = sorted(UI.rglob("*.js"))
STYLES = sorted(UI.rglob("*.css"))
TEXT_PAIRS = [
    ("text", "ground"),
    ("text", "surface"),
    ("text", "sunken"),
    ("muted", "ground"),
    ("muted", "surface"),
    ("on-accent", "accent"),
    ("on-accent", "accent-strong"),
    ("text", "accent-soft"),
    ("score", "surface"),
    ("like", "like-ground"),
    ("dislike", "dislike-ground"),
    ("error-text", "error-ground"),
    ("error-text", "surface"),
    ("notice-text", "notice-ground"),
]
CONTROL_PAIRS = [
    ("control-line", "ground"),
    ("control-line", "surface"),
    ("accent", "ground"),
    ("error-line", "surface"),
]
SVG_NAMESPACE = "http://www.w3.org/2000/svg"
MAX_LINES = 300


class Page(HTMLParser):
    """Collects every start tag with its attributes, and the text inside scripts and styles."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self.feed((UI / name / "index.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if data.strip() and self.tags and self.tags[-1][0] in ("script", "style"):
            self.inline.append(data)

    def values(self, attribute: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(attribute)) is not None]


@pytest.fixture(scope="module", params=["search", "admin"])
def page(request: pytest.FixtureRequest) -> Page:
    return Page(request.param)


def short(path: Path) -> str:
    return path.relative_to(UI).as_posix()


def test_a_page_has_no_inline_script_or_style(page: Page) -> None:
    names = {name for _, attrs in page.tags for name in attrs}
    assert page.inline == []
    assert "style" not in names
    assert not {name for name in names if name.startswith("on")}


def test_every_resource_is_a_local_file_that_exists(page: Page) -> None:
    links = set(page.values("src") + page.values("href"))
    files = {link for link in links if link.startswith("/ui/")}
    assert files
    assert all((UI / link.removeprefix("/ui/")).is_file() for link in files)
    assert all(link.startswith("#") or link in ("/", "/admin", "/docs") for link in links - files)


@pytest.mark.parametrize("path", SCRIPTS, ids=short)
def test_every_imported_module_and_name_exists_in_its_folder_or_the_shared_one(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.startswith("import")]
    for line in lines:
        found = re.fullmatch(r'import (?:\{(.+?)\}|\* as \w+) from "/ui/((\w+)/.+?)";', line)
        assert found, line
        names, file, folder = found.groups()
        assert folder in (path.parent.name, "shared"), line
        source = (UI / file).read_text(encoding="utf-8")
        exported = set(re.findall(r"export (?:async )?(?:const|let|function|class) (\w+)", source))
        assert {name.strip() for name in (names or "").split(",") if name.strip()} <= exported, line


def test_ids_are_unique_and_every_id_that_a_script_uses_exists(page: Page) -> None:
    ids = page.values("id")
    shared = [UI / "shared" / name for name in ("alerts.js", "dom.js")]
    paths = [*(UI / page.name).glob("*.js"), *shared]
    source = "".join(path.read_text(encoding="utf-8") for path in paths)
    used = {a or b for a, b in re.findall(r'\b(?:ui|elements)(?:\.(\w+)|\["([\w-]+)"\])', source)}
    assert len(ids) == len(set(ids))
    assert used
    assert used <= set(ids)


def test_every_field_has_a_label(page: Page) -> None:
    fields = [attrs for tag, attrs in page.tags if tag in ("select", "input", "textarea")]
    seen = [attrs for attrs in fields if attrs.get("type") != "file"]
    unnamed = {attrs["id"] for attrs in seen if "aria-label" not in attrs}
    assert unnamed
    assert unnamed <= set(page.values("for"))


@pytest.mark.parametrize("path", SCRIPTS, ids=short)
def test_no_script_writes_markup_or_evaluates_text(path: Path) -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?:"
    )
    text = path.read_text(encoding="utf-8").replace(SVG_NAMESPACE, "")
    assert re.findall(forbidden, text) == []


@pytest.mark.parametrize("path", STYLES, ids=short)
def test_no_style_loads_anything_and_those_of_admin_have_no_colour_of_their_own(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"url\(|@import|https?:", text) == []
    assert path.parent.name != "admin" or not re.findall(r"#[0-9a-f]{6}", text)


@pytest.mark.parametrize("path", [*SCRIPTS, *STYLES, *UI.rglob("*.html")], ids=short)
def test_files_of_a_page_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def schemes() -> dict[str, dict[str, str]]:
    css = (UI / "shared" / "base.css").read_text(encoding="utf-8")
    light_block, dark_block = re.findall(r"^:root[^{]*\{(.*?)\}", css, re.DOTALL | re.MULTILINE)
    light = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light_block))
    dark = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", dark_block))
    assert light
    assert light.keys() == dark.keys()
    return {"light": light, "dark": dark}


def luminance(colour: str) -> float:
    channels = [int(colour[a:b], 16) / 255 for a, b in pairwise((1, 3, 5, 7))]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_of_black_on_white_is_21() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("pairs", "least"), [(TEXT_PAIRS, 4.5), (CONTROL_PAIRS, 3.0)], ids=["text", "controls"]
)
def test_colours_keep_the_contrast_of_wcag_aa(
    scheme: str, pairs: list[tuple[str, str]], least: float
) -> None:
    colours = schemes()[scheme]
    ratios = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < least} == {}
