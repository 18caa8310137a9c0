"""The documentation site builds without a warning, and its pages load nothing from another host."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kinlens.service.observe.metrics import Metrics
from kinlens.service.settings import Settings
from tests.support.own_process import ROOT

NEEDS = ("latex2mathml", "material", "mkdocs", "mkdocstrings")
MISSING = [name for name in NEEDS if find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)}: `make docs` installs them"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does: a broken link, or a page that no part of the site has, fails."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def text_of(site: Path, page: str) -> str:
    return (site / page).read_text("utf-8")


def test_the_reference_has_every_route_command_setting_and_method(site: Path) -> None:
    routes = text_of(site, "reference/http.html")
    for words in ('id="post-search"', "min_probability", "unknown-gallery"):
        assert words in routes, words
    commands = text_of(site, "reference/commands.html")
    for words in ("kinlens-train adapt", "kinlens-index golden run", "kinlens-serve keys create"):
        assert f"<code>{words}</code>" in commands, words
    settings = text_of(site, "reference/job-settings.html")
    for words in ("[regularizers.determinant.flow]", "lr_trunk", "min_crop_area", "soft_triple"):
        assert words in settings, words
    python = text_of(site, "reference/python.html")
    for name in ("kinlens.load_bundle", "kinlens.client.AsyncClient.put_many"):
        assert f'id="{name}"' in python, name


def test_the_reference_has_every_setting_and_metric_of_the_service(site: Path) -> None:
    settings = text_of(site, "reference/settings.html")
    for name in Settings.model_fields:
        assert f"<code>KINLENS_{name.upper()}</code>" in settings, name
    metrics = text_of(site, "reference/metrics.html")
    for name, *_ in [*Metrics().described, ("kinlens_gallery_items",), ("kinlens_redis_up",)]:
        assert f"<code>{name}</code>" in metrics, name
    assert 'href="reference/settings.html"' in text_of(site, "operations.html")


def test_every_row_of_the_records_of_results_is_shown(site: Path) -> None:
    tables = text_of(site, "results/tables.html")
    for words in (
        "graph_consistency-0.05",
        "soft_triple",
        "40 % wrong labels",
        "KoLeo 0.2",
        "zvec",
    ):
        assert words in tables, words


def test_programs_can_read_every_page_as_markdown(site: Path) -> None:
    listed = text_of(site, "llms.txt")
    assert listed.startswith("# Kinlens\n\n> ")
    entries = re.findall(
        r"^- \[.+\]\(https://kinlens\.github\.io/kinlens/(.+\.md)\): .{20}", listed, re.M
    )
    assert {"tutorial.md", "research.md", "run.md", "reference/http.md"} <= set(entries)
    assert len(entries) == len(re.findall("^- ", listed, re.M)) > 40
    for path in entries:
        text = text_of(site, path)
        assert text.startswith("# "), path
        assert (site / path).with_suffix(".html").is_file(), path
        for link in re.findall(r"\]\(([^)#:\s]+\.md)", text):
            target = (site / path).parent / link
            assert target.is_file() or target.with_suffix(".html").is_file(), f"{path}: {link}"
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs")).is_file(), page


def test_the_types_of_the_api_are_published_with_their_meaning(site: Path) -> None:
    types = text_of(site, "kinlens.d.ts")
    assert "export type SearchAnswer = {" in types
    assert "  /** " in types
    assert 'href="kinlens.d.ts"' in text_of(site, "api.html")


def test_formulas_are_shown_without_a_script(site: Path) -> None:
    pages = ("methods.html", "methods/regularizers.html", "methods/evaluation.html")
    methods = "".join(text_of(site, page) for page in pages)
    assert methods.count("<math ") > 30
    assert "arithmatex" not in methods


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        text = page.read_text("utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="?([^"\s>]+)', text)
        loaded += re.findall(r'<link[^>]* href="?([^"\s>]+)"? rel="?(?:stylesheet|icon)', text)
        loaded += re.findall(r'<link[^>]* rel="?(?:stylesheet|icon)"? href="?([^"\s>]+)', text)
        assert loaded
        assert [address for address in loaded if "//" in address] == [], page
