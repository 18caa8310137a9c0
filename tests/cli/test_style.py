"""One style of the command lines: names of options, examples, groups, completion, one prefix."""

import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import pytest
from typer import Option
from typer.main import get_command
from typer.testing import CliRunner

from kinlens.commands import __main__ as index
from kinlens.commands import programs
from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.programs import console
from kinlens.service.commands import program as serve
from kinlens.training import __main__ as train

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
SCRIPTS = PYPROJECT["project"]["scripts"]
APPS = {"kinlens-train": train.app, "kinlens-index": index.app, "kinlens-serve": serve.app}


class Called(NamedTuple):
    status: int
    stdout: str
    stderr: str


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    members = getattr(command, "commands", {})
    if not members:
        yield name, command
    for word, member in members.items():
        yield from commands(f"{name} {word}", member)


COMMANDS = {
    name: command
    for start, app in APPS.items()
    for name, command in commands(start, get_command(app))
}


Call = Callable[..., Called]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs a program of the package as its installed script does, but in this process, without the
    other one that a service starts at once.
    """
    monkeypatch.setattr("kinlens.service.encoding.spawn.prepare", lambda: None)

    def call(script: str, *words: str, **environment: str) -> Called:
        module, function = SCRIPTS[script].split(":")
        with monkeypatch.context() as patch, mock.patch.dict(os.environ, environment):
            patch.setattr("sys.argv", [script, *words])
            patch.setattr("sys.path", [*sys.path])
            with pytest.raises(SystemExit) as ended:
                getattr(import_module(module), function)()
        return Called(ended.value.code, *capfd.readouterr())

    return call


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_has_an_example_of_it(name: str) -> None:
    command = COMMANDS[name]
    text = " ".join(f"{command.help} {command.epilog}".split())
    assert f"{name} " in text[text.index("Example") :]
    assert command.help.split("\n")[0].rstrip().endswith((".", "..."))


def test_options_have_one_form_and_the_common_ones_one_meaning_in_all_programs() -> None:
    texts = defaultdict(set)
    for name, command in COMMANDS.items():
        for option in command.params:
            if option.param_type_name != "option":
                continue
            for word in (*option.opts, *option.secondary_opts):
                assert re.fullmatch(r"-k|--[a-z]+(-[a-z0-9]+)*", word), f"{name} {word}"
                texts[word].add((option.is_flag, option.help))
            if option.name != "help":
                assert option.help, f"{name} {option.opts[0]}"
                assert option.help.endswith((".", ", ...")), f"{name} {option.opts[0]}"
    for word in ("--state", "--verbose", "--log-level"):
        assert len(texts[word]) <= 1, f"{word}: {texts[word]}"
    assert len(texts["--json"]) == 2  # `audit` prints an object on each line
    for name, command in COMMANDS.items():
        if name.startswith("kinlens-index "):
            assert "json" in {option.name for option in command.params}, name
    assert {is_flag for is_flag, _ in texts["--out"]} == {False}


def test_the_commands_are_listed_in_groups_with_one_column_of_descriptions(call: Call) -> None:
    text = call("kinlens-index", "--help").stdout
    titles = re.findall(r"^([A-Z].*):$", text, re.MULTILINE)
    assert titles == ["Options", "Build and change", "Search", "Maintain and measure", "Copy"]
    listed = re.findall(r"^  ([a-z]+)(?= )", text, re.MULTILINE)
    assert {f"kinlens-index {word}" for word in listed} <= {
        " ".join(name.split()[:2]) for name in COMMANDS
    }
    starts = {len(match[0]) for match in re.finditer(r"^  [a-z]+ +(?=[A-Z])", text, re.MULTILINE)}
    assert len(starts) == 1


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("`by` needs `bundle`", "--by needs --bundle"),
        ("min_score needs a query.", "--min-score needs a query."),
        ("Use exact = true, or sale = true.", "Use --exact, or sale = true."),
        ("k = 0 must be at least 1.", "-k = 0 must be at least 1."),
        ("`group` and bundle_id = 'min_score'", "`group` and bundle_id = 'min_score'"),
        ("the file of by and model.min_score", "the file of by and model.min_score"),
    ],
)
def test_errors_of_the_library_name_options_of_the_command(message: str, shown: str) -> None:
    app = console.new_program()

    @console.command(app)
    def asked(
        by: str = "",
        bundle: str = "",
        min_score: float = 0,
        k: Annotated[int, Option("-k")] = 1,
        exact: bool = False,
    ) -> None:
        raise InvalidParameterError(message)

    error = CliRunner().invoke(app, []).exception
    assert isinstance(error, InvalidParameterError)
    assert str(error) == shown


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_program_installs_its_completion(call: Call, script: str, tmp_path: Path) -> None:
    chosen = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    shown = call(script, "--show-completion", "bash", **chosen)
    assert f"complete -o default -F _{script.replace('-', '_')}_completion {script}" in shown.stdout
    done = call(script, "--install-completion", "bash", **chosen)
    assert "bash completion installed" in done.stdout
    [file] = (tmp_path / ".bash_completions").iterdir()
    assert file.read_text().strip() == shown.stdout.strip()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kinlens-index du", "duplicates"),
        ("kinlens-serve keys r", "revoke\nrotate"),
        ("kinlens s", "serve"),
        ("kinlens index plan --me", "--memory-mb"),
        ("kinlens serve feedback e", "export"),
        ("kinlens train data do", "download\ndoctor"),
    ],
)
def test_a_line_is_completed(call: Call, line: str, words: str) -> None:
    script = line.split()[0]
    variable = f"_{script.replace('-', '_').upper()}_COMPLETE"
    position = str(len(line.split()) - 1)
    done = call(script, **{variable: "complete_bash", "COMP_WORDS": line, "COMP_CWORD": position})
    assert done.stdout.strip() == words


def test_the_three_programs_have_one_prefix(call: Call) -> None:
    plan = ("plan", "1000", "8", "--json")
    assert call("kinlens", "index", *plan).stdout == call("kinlens-index", *plan).stdout
    assert "Usage: kinlens index plan " in call("kinlens", "index", "plan", "--help").stdout
    assert "Usage: kinlens serve keys " in call("kinlens", "serve", "keys", "--help").stdout
    for words, line in (
        (("idx",), "error: No such command 'idx'. Did you mean 'index'? See kinlens --help."),
        (
            ("train", "adpt"),
            "error: No such command 'adpt'. Did you mean 'adapt'? See kinlens train --help.",
        ),
        (("serve", "--port", "no", "--bundle", "b"), "error: port = "),
    ):
        done = call("kinlens", *words)
        assert done.status in (1, 2)
        assert done.stderr.startswith(line)
    assert [*get_command(programs.app).commands] == ["train", "index", "serve"]


def test_the_prefix_loads_no_program_until_it_is_named() -> None:
    code = (
        "import sys; from kinlens.commands.programs import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'faiss', 'fastapi', 'pydantic')"
        " if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
