"""What a newcomer relies on: the commands and files that the documents name, and the installs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import kinlens.commands.__main__
import kinlens.commands.programs
import kinlens.service.commands.program
import kinlens.training.__main__

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
APPS = {
    "kinlens": kinlens.commands.programs.app,
    "kinlens-train": kinlens.training.__main__.app,
    "kinlens-index": kinlens.commands.__main__.app,
    "kinlens-serve": kinlens.service.commands.program.app,
}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = ROOT / ".github/ISSUE_TEMPLATE"


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=; ]", requirement)[0]


def test_every_make_target_and_link_of_a_page_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"(?:`|^    )make ([a-z-]+)", text)) <= targets, page
        for link in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


IN_PAGES = re.compile(r"^    kinlens-(?:train|index|serve) .*[^\\\n]$", re.MULTILINE)
IN_FILES = re.compile(r"kinlens-(?:serve|index)(?: +(?!kinlens)[^\s'\"`#$&|;:()\]]+(?::\S+)?)+")
DEPLOYED = [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
COMMANDS = sorted(
    {
        command.split("#")[0].strip()
        for paths, pattern in ((PAGES, IN_PAGES), (DEPLOYED, IN_FILES))
        for path in paths
        # Lists of YAML are words too.
        for command in pattern.findall(path.read_text("utf-8").replace(", ", " "))
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_a_page_and_of_deploy_has_the_options_it_uses(command: str) -> None:
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
    for name in ("fastapi", "prometheus-client", "uvicorn"):  # next to others in one environment
        [wanted] = [one for one in EXTRAS["core"] if name_of(one) == name]
        assert "<" not in wanted, wanted


def test_the_version_is_the_same_everywhere_and_files_follow_their_schema() -> None:
    newest = re.search(r"^## (\d\S*) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert newest is not None
    assert cited is not None
    assert newest[1] == cited[1] == kinlens.__version__
    for schema, files in (
        ("vendor.github-workflows", WORKFLOWS),
        ("vendor.dependabot", [ROOT / ".github/dependabot.yml"]),
        ("vendor.github-issue-config", [FORMS / "config.yml"]),
        ("vendor.github-issue-forms", [FORMS / "bug.yml", FORMS / "question.yml"]),
        ("vendor.citation-file-format", [ROOT / "CITATION.cff"]),
    ):
        command = [BIN / "check-jsonschema", "--builtin-schema", schema, *files]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_actions_are_pinned_by_hash_with_their_version() -> None:
    """A tag can be moved to other code; dependabot updates the hash and the comment."""
    pins: dict[str, set[str]] = {}
    for workflow in WORKFLOWS:
        for action, pin in re.findall(r"uses: ([\w./-]+)(.*)", workflow.read_text("utf-8")):
            if not action.startswith("./"):
                assert re.fullmatch(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+", pin), (workflow.name, action)
                pins.setdefault(action, set()).add(pin)
    assert len(pins) > 10
    assert {action: found for action, found in pins.items() if len(found) > 1} == {}


def test_ci_runs_each_python_that_the_package_names() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text("utf-8"))
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert matrix["jobs"]["test"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_every_make_target_ends_in_commands() -> None:
    listed = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = ["make", "--dry-run", "ROOT=/data", *listed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "overriding" not in done.stderr


def test_the_guide_for_agents_is_short_and_names_what_exists() -> None:
    guide = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert len(guide.splitlines()) <= 80
    named = re.findall(r"`([a-z_]+/[a-z_/.]*)`", guide)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


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


@pytest.mark.parametrize(
    "target", re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
)
def test_every_make_target_ends_in_commands_without_a_circle(target: str) -> None:
    command = ["make", "--dry-run", "ROOT=/data", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "overriding" not in done.stderr
