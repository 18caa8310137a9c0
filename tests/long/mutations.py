"""The product, broken on purpose: each break must be noticed by a test that is named for it.

python -m tests.long.mutations [NAME...]

A break replaces one text of one file in a copy of the repository. Its tests must pass in a copy as
it is, and fail in the broken one.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """In `file`, `old` (there exactly once) becomes `new`; one of `tests` must fail."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = {
    "checksum": Mutation(
        "indexer/catalog/schema.py",
        "zlib.crc32(sha256)",
        "zlib.crc32(sha256, 1)",
        ("tests/test_golden_galleries.py",),
    ),
    "redis": Mutation(
        "service/settings.py",
        "redis_timeout_ms: ClassVar[int] = 50 ",
        "redis_timeout_ms: ClassVar[int] = 500 ",
        ("tests/http/load/test_redis.py", "-k", "default"),
    ),
    "fsync": Mutation(
        "embedder/durable.py",
        "        os.fsync(descriptor)\n",
        "        pass\n",
        ("tests/test_power_loss.py",),
    ),
    "parity": Mutation(
        "training/bundles/bundle.py",
        "MAX_DIFFERENCE = 1e-4\n",
        "MAX_DIFFERENCE = 1.9e-4\n",
        ("tests/training/test_export.py", "-k", "may_differ or may_not_differ"),
    ),
    "recall": Mutation(
        "training/bundles/bundle.py",
        "MAX_RECALL_DIFFERENCE = 0.1\n",
        "MAX_RECALL_DIFFERENCE = 0.19\n",
        ("tests/training/test_export.py", "-k", "may_differ or may_not_differ"),
    ),
    "precision": Mutation(
        "training/bundles/precisions.py",
        "MAX_RECALL_LOSS = 0.5\n",
        "MAX_RECALL_LOSS = 0.95\n",
        ("tests/training/test_precisions.py", "-k", "half_a_point"),
    ),
    "readme": Mutation(
        "CONTRIBUTING.md",
        "| `make demo-sop` | Stanford Online Products as a shop: "
        "`ROOT=/data/Stanford_Online_Products` |\n",
        "",
        ("tests/test_packaging.py", "-k", "make_target"),
    ),
    "claims": Mutation(
        "embedder/preprocess.py",
        '        raise ImageTooLargeError(\n            f"The image has too many pixels',
        '        bytearray(b"x" * (150 << 20))\n'
        '        raise ImageTooLargeError(\n            f"The image has too many pixels',
        ("tests/http/search/test_odd_images.py", "-k", "costs_no_memory"),
    ),
}


def copy(folder: Path) -> None:
    """Every tracked file and link, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():  # the links of kinlens/ lead to folders
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)


def apply(mutation: Mutation, folder: Path) -> None:
    """Raises: ValueError unless the text is there exactly once."""
    file = folder / mutation.file
    text = file.read_text("utf-8") if file.is_file() else ""
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.file} has {text.count(mutation.old)} times, not once, the text "
            f"{mutation.old!r}. It was moved or changed: fix the table in {__file__}."
        )
    file.write_text(text.replace(mutation.old, mutation.new), "utf-8")


def run(tests: tuple[str, ...], mutation: Mutation | None = None) -> tuple[str, str]:
    """What became of these tests (green, red, broken), and their last line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy(folder)
        if mutation is not None:
            apply(mutation, folder)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-q", *tests],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": name, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
    is_green = done.returncode == 0 and " passed" in last  # one that skips has seen nothing
    return "green" if is_green else {0: "skipped", 1: "red"}.get(done.returncode, "broken"), last


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Default: all.")] = None,
) -> None:
    """Break the product in each of these ways; exits with status 1 if a break is not noticed."""
    if unknown := set(names or ()) - MUTATIONS.keys():
        raise typer.BadParameter(f"{sorted(unknown)} is none of {list(MUTATIONS)}")
    chosen = {name: MUTATIONS[name] for name in names or MUTATIONS}
    whole = {tests: run(tests) for tests in {m.tests: None for m in chosen.values()}}
    is_noticed = True
    for name, mutation in chosen.items():
        result, last = whole[mutation.tests]
        if result == "green":
            result, last = run(mutation.tests, mutation)
            fault = "" if result == "red" else "NOT NOTICED"
        else:
            fault = "ITS TESTS FAIL WITHOUT IT"
        is_noticed &= not fault
        typer.echo(f"{name:10} {' '.join(mutation.tests):62} {fault or 'noticed'}: {last}")
    raise typer.Exit(not is_noticed)


if __name__ == "__main__":
    typer.run(main)
