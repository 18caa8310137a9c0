"""The scripts of both pages, read without a browser: what they load and write."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.servers import StartService


def luminance(colour: str) -> float:
    channels = [int(colour[a:b], 16) / 255 for a, b in pairwise((1, 3, 5, 7))]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


CONTROL_PAIRS = [
    ("control-line", "ground"),
    ("control-line", "surface"),
    ("accent", "ground"),
    ("error-line", "surface"),
]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def schemes() -> dict[str, dict[str, str]]:
    css = (UI / "shared" / "base.css").read_text(encoding="utf-8")
    light_block, dark_block = re.findall(r"^:root[^{]*\{(.*?)\}", css, re.DOTALL | re.MULTILINE)
    light = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light_block))
    dark = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", dark_block))
    assert light
    assert light.keys() == dark.keys()
    return {"light": light, "dark": dark}


UI = Path(__file__).parents[2] / "service" / "ui"
SCRIPTS = sorted(UI.rglob("*.js"))
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


def short(path: Path) -> str:
    return path.relative_to(UI).as_posix()


@pytest.mark.parametrize("path", SCRIPTS, ids=short)
def test_a_script_loads_from_its_folder_and_the_shared_one_and_writes_no_markup(path: Path) -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?:"
    )
    text = path.read_text(encoding="utf-8").replace(SVG_NAMESPACE, "")
    text = text.replace("https://search.example/", "")  # the example in a comment
    assert re.findall(forbidden, text) == []
    for line in re.findall(r"^import.*$", text, re.MULTILINE):
        assert re.fullmatch(r'import .+ from "(\.|\.\./shared)/[a-z_]+\.js";', line), line


@pytest.mark.parametrize("is_on", [False, True])
def test_the_admin_link_is_hidden_by_default(is_on: bool, start_service: StartService) -> None:
    service = start_service(admin_link=is_on)
    found = re.search(r'<a [^>]*id="admin-link"[^>]*>', service.client.get("/").text)
    assert found is not None
    assert (" hidden" in found[0]) is not is_on
    assert service.client.get("/admin").status_code == 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_stand_out_as_wcag_aa_wants_since_axe_checks_only_text(scheme: str) -> None:
    colours = schemes()[scheme]
    ratios = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in CONTROL_PAIRS}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 3.0} == {}
