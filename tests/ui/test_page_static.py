"""The scripts of both pages, read without a browser: what they load and write."""

import re
from pathlib import Path

import pytest

from tests.support.servers import StartService

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
    assert re.findall(forbidden, text) == []
    for line in re.findall(r"^import.*$", text, re.MULTILINE):
        assert re.fullmatch(rf'import .+ from "/ui/({path.parent.name}|shared)/.+";', line), line


@pytest.mark.parametrize("is_on", [False, True])
def test_the_admin_link_is_hidden_by_default(is_on: bool, start_service: StartService) -> None:
    service = start_service(admin_link=is_on)
    found = re.search(r'<a [^>]*id="admin-link"[^>]*>', service.client.get("/").text)
    assert found is not None
    assert (" hidden" in found[0]) is not is_on
    assert service.client.get("/admin").status_code == 200
