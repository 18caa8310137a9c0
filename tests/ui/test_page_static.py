"""The files of both pages, read without a browser: what they load, hooks and contrast."""

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.servers import StartService

UI = Path(__file__).parents[2] / "service" / "ui"
SCRIPTS = sorted(UI.rglob("*.js"))
STYLES = sorted(UI.rglob("*.css"))
CONTROL_PAIRS = [
    ("control-line", "ground"),
    ("control-line", "surface"),
    ("accent", "ground"),
    ("error-line", "surface"),
]
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


class Page(HTMLParser):
    """Collects the attributes of every start tag."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.attributes: list[tuple[str, str | None]] = []
        self.feed((UI / name / "index.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def values(self, attribute: str) -> list[str]:
        return [value for name, value in self.attributes if name == attribute and value is not None]


@pytest.fixture(scope="module", params=["search", "admin"])
def page(request: pytest.FixtureRequest) -> Page:
    return Page(request.param)


def short(path: Path) -> str:
    return path.relative_to(UI).as_posix()


def test_every_resource_is_a_local_file_that_exists(page: Page) -> None:
    links = set(page.values("src") + page.values("href"))
    files = {link for link in links if link.startswith("/ui/")}
    assert files
    assert all((UI / link.removeprefix("/ui/")).is_file() for link in files)
    assert all(link.startswith("#") or link in ("/", "/admin", "/docs") for link in links - files)


@pytest.mark.parametrize("path", SCRIPTS, ids=short)
def test_a_script_imports_only_from_its_folder_and_the_shared_one(path: Path) -> None:
    for line in path.read_text().splitlines():
        if line.startswith("import"):
            found = re.fullmatch(r'import .+ from "/ui/(\w+)/.+";', line)
            assert found, line
            assert found[1] in (path.parent.name, "shared"), line


def test_ids_are_unique_and_every_id_that_a_script_uses_exists(page: Page) -> None:
    ids = page.values("id")
    shared = [UI / "shared" / name for name in ("alerts.js", "dom.js")]
    paths = [*(UI / page.name).glob("*.js"), *shared]
    source = "".join(path.read_text(encoding="utf-8") for path in paths)
    used = {a or b for a, b in re.findall(r'\b(?:ui|elements)(?:\.(\w+)|\["([\w-]+)"\])', source)}
    assert len(ids) == len(set(ids))
    assert used
    assert used <= set(ids)


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_stand_out_as_wcag_aa_wants_since_axe_checks_only_text(scheme: str) -> None:
    colours = schemes()[scheme]
    ratios = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in CONTROL_PAIRS}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 3.0} == {}


@pytest.mark.parametrize("is_on", [False, True])
def test_the_admin_link_is_hidden_by_default(is_on: bool, start_service: StartService) -> None:
    service = start_service(admin_link=is_on)
    found = re.search(r'<a [^>]*id="admin-link"[^>]*>', service.client.get("/").text)
    assert found is not None
    assert (" hidden" in found[0]) is not is_on
    assert service.client.get("/admin").status_code == 200
