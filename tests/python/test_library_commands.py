"""Everything of the command lines can be done from Python: each command has a name there."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

import kinlens
import kinlens.training
from kinlens.commands.__main__ import app as index
from kinlens.training.__main__ import app as train

NAMES = {
    "kinlens-index update": "kinlens.Gallery.patch",
    "kinlens-index unremove": "kinlens.Gallery.restore",
    "kinlens-index show": "kinlens.Gallery.item",
    "kinlens-index attributes": "kinlens.Gallery.schema",
    "kinlens-index import": "kinlens.import_gallery",
    "kinlens-index restore": "kinlens.restore_gallery",
    "kinlens-index golden add": "kinlens.Gallery.add_golden",
    "kinlens-index golden list": "kinlens.Gallery.golden",
    "kinlens-index golden remove": "kinlens.Gallery.remove_golden",
    "kinlens-index golden run": "kinlens.Gallery.evaluate",
    "kinlens-index golden runs": "kinlens.Gallery.golden_runs",
    "kinlens-train import": "kinlens.import_model",
    "kinlens-train report": "kinlens.training.compare",
}
"""The commands that have another name in Python."""

EXCEPTIONS = {
    "kinlens-index embed": "writes the shards of one part of a list, as a job of a cluster; in "
    "Python `bundle.embed_files` returns the vectors",
    "kinlens-index explain": "draws an image file; its numbers come from the service",
}
"""The commands without a name in Python, and why. All of kinlens-serve is an exception, because it
runs and administers a service: `kinlens.Client` is its Python."""


def commands(name: str, command: Any) -> Iterator[str]:
    members = getattr(command, "commands", {})
    if not members:
        yield name
    for word, member in members.items():
        yield from commands(f"{name} {word}", member)


COMMANDS = [
    *commands("kinlens-index", get_command(index)),
    *commands("kinlens-train", get_command(train)),
]


def named(path: str) -> Any:
    found: Any = kinlens
    for name in path.split(".")[1:]:
        found = getattr(found, name, None)
    return found


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in EXCEPTIONS])
def test_a_command_has_a_documented_function_or_method(command: str) -> None:
    word = command.split()[-1].replace("-", "_")
    program = command.split()[0]
    places = {
        "kinlens-index": ("kinlens", "kinlens.Gallery"),
        "kinlens-train": ("kinlens", "kinlens.training"),
    }[program]
    paths = [NAMES[command]] if command in NAMES else [f"{place}.{word}" for place in places]
    found = [one for one in map(named, paths) if callable(one)]
    assert found, f"{command}: write {' or '.join(paths)}, or name it in this test"
    assert found[0].__doc__


def test_the_tables_name_commands_that_exist_and_differ() -> None:
    assert {*NAMES, *EXCEPTIONS} <= {*COMMANDS}
    assert not NAMES.keys() & EXCEPTIONS.keys()
    for command, path in NAMES.items():
        assert path.split(".")[-1] != command.split()[-1].replace("-", "_")
