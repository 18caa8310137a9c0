"""What a newcomer relies on: the commands and files that the documents name, and the installs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kinlens.indexer.__main__
import kinlens.service.__main__
import kinlens.training.__main__

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
APPS = {
    "kinlens-train": kinlens.training.__main__.app,
    "kinlens-index": kinlens.indexer.__main__.app,
    "kinlens-serve": kinlens.service.__main__.app,
}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=; ]", requirement)[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_and_link_of_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)|^    make ([a-z-]+)", text)) <= {
        pair for target in targets for pair in ((target, ""), ("", target))
    }
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_make_target_is_on_the_page_of_those_who_need_it() -> None:
    """What `make help` lists is in the README, or in CONTRIBUTING for those who change the code."""
    makefile, readme, contributing = (
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("Makefile", "README.md", "CONTRIBUTING.md")
    )
    targets = re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)
    missing = {
        target
        for target in targets
        if not re.search(rf"(`|^    )make {target}[` ]", readme, re.MULTILINE)
        and not re.search(rf"^\| `make {target}` \|", contributing, re.MULTILINE)
    }
    assert not missing
    assert len(targets) > 10


INTERNALS_USED = ("fastapi", "httptools", "prometheus-client", "starlette", "uvicorn")


def test_packages_whose_internals_are_used_are_pinned_to_the_minor_version() -> None:
    known = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    asked = {name_of(requirement): requirement for requirement in EXTRAS["core"]}
    for name in INTERNALS_USED:
        major, minor = known[name].split(".")[:2]
        assert asked[name] == f"{name}>={major}.{minor},<{major}.{int(minor) + 1}"


COMMANDS = sorted(
    {
        line.split("#")[0].strip()
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.match(r"    kinlens-(train|index|serve) ", line) and not line.endswith("\\")
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_a_page_has_the_options_it_uses(command: str) -> None:
    name, *words = command.split()
    path = []
    for word in words:
        if word.startswith("-") or not word.islower() or "/" in word or len(path) == 2:
            break
        path.append(word)
    runner = CliRunner(env={"COLUMNS": "200"})
    for depth in range(len(path), -1, -1):  # the words before the options may be arguments
        shown = runner.invoke(APPS[name], [*path[:depth], "--help"])
        if shown.exit_code == 0 and "No such command" not in shown.output:
            break
    for option in re.findall(r"(--[a-z-]+)", command):
        assert option in shown.output, f"{option} of `{command}`"


@pytest.mark.parametrize("name", APPS)
def test_every_command_prints_the_version_of_the_package(name: str) -> None:
    answer = CliRunner().invoke(APPS[name], ["--version"])
    assert (answer.exit_code, answer.output) == (0, f"kinlens {kinlens.__version__}\n")
    assert "--version" in CliRunner(env={"COLUMNS": "200"}).invoke(APPS[name], ["--help"]).output


def test_the_base_install_is_the_client_and_no_extra_mixes_cpu_and_gpu() -> None:
    assert {name_of(requirement) for requirement in PROJECT["dependencies"]} == {
        "httpx",
        "pydantic",
    }
    named = {
        extra: {name_of(requirement) for requirement in requirements}
        for extra, requirements in EXTRAS.items()
    }
    assert named["cpu"] == {"kinlens", "faiss-cpu", "onnxruntime"}
    assert named["gpu"] == {"kinlens", "faiss-gpu-cuvs", "onnxruntime-gpu"}
    for extra in named.keys() - {"cpu"}:
        assert not named[extra] & {"faiss-cpu", "onnxruntime"}, extra
    for extra in named.keys() - {"training"}:
        assert "torch" not in named[extra], extra


def test_every_dependency_is_pinned_and_no_index_is_named() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^\s/]+( ;.*)?", line) for line in lines if line)
    pinned = {line.split("==")[0] for line in lines}
    wanted = [*PROJECT["dependencies"]]
    for extra in ("core", "cpu", "training"):
        wanted += [one for one in EXTRAS[extra] if name_of(one) != "kinlens"]
    for group in PYPROJECT["dependency-groups"].values():
        wanted += [one for one in group if isinstance(one, str)]
    assert {name_of(requirement).lower() for requirement in wanted} <= pinned


@pytest.mark.parametrize("package", ["tomli_w", "torch"])  # loaded at the start, and by a command
def test_the_base_install_says_what_a_training_needs(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; "
        "from kinlens.training.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "fit", "demo"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1
    assert f"kinlens-train needs the package {package}" in done.stderr
    assert "Traceback" not in done.stderr


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
    ],
)
def test_files_of_the_repository_follow_their_schema(schema: str, files: list[Path]) -> None:
    command = [BIN / "check-jsonschema", "--builtin-schema", schema, *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert files
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_version_is_the_same_wherever_it_is_written() -> None:
    newest = re.search(r"^## (\d\S*) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert newest is not None
    assert cited is not None
    assert newest[1] == cited[1] == kinlens.__version__


def test_every_action_of_a_workflow_names_its_version_and_no_registry_is_named() -> None:
    for path in WORKFLOWS:
        text = path.read_text()
        for action in re.findall(r"uses: (\S+)", text):
            known = re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)|\./\.github/.*", action)
            assert known, action
        assert not re.search(r"ghcr\.io|docker\.io|pypi\.org", text)


def test_pre_commit_runs_make_check() -> None:
    assert re.search(r"^ +entry: make check$", (ROOT / ".pre-commit-config.yaml").read_text(), re.M)


@pytest.mark.parametrize(
    "target", re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
)
def test_every_make_target_ends_in_commands_without_a_circle(target: str) -> None:
    command = ["make", "--dry-run", "ROOT=/data", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "overriding" not in done.stderr
