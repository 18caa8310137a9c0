"""The command line: what it prints, how it ends, and that it needs no torch."""

import functools
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner, Result

import indexer.__main__ as main
from embedder.bundle import Bundle
from embedder.errors import ProviderError
from embedder.session import OnnxEmbedder, SessionSettings
from embedder.types import Images
from tests.indexer.conftest import CountingEmbedder
from tests.tiny import encoded, picture

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, embedder: CountingEmbedder) -> Run:
    """Run the command line with a fake model."""
    monkeypatch.setattr(main, "open_embedder", lambda *arguments: embedder)
    return lambda *arguments: CliRunner().invoke(main.app, [str(a) for a in arguments])


def test_build_says_the_cost_before_and_the_result_after(run: Run, shop: Path, out: Path) -> None:
    result = run("build", shop, "--bundle", "b", "--out", out, "--name", "shoes")
    assert result.exit_code == 0
    assert "Found 6 images in the folder" in result.stdout
    assert "Dimension 32, index about 0.0 MB, model on FakeExecutionProvider" in result.stdout
    assert "6 items (6 embedded, 0 from an earlier run, 0 copies)" in result.stdout
    assert re.search(r"6 of 6 +(?!0\.0 )[\d.]+ images/s +\d:\d\d:\d\d", result.stderr)
    assert json.loads(run("stats", out, "--json").stdout)["name"] == "shoes"


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    ("batches", "between_s", "shown"),
    [
        ([20], 4, "20 of 100 5.0 images/s -:--:--"),
        ([10, 10, 10], 1, "30 of 100 10.0 images/s 0:00:07"),
        ([32, 32], 100, "64 of 100 0.3 images/s 0:01:53"),
    ],
    ids=["first batch", "fast", "a slow machine"],
)
def test_progress_shows_images_per_second_and_the_remaining_time(
    monkeypatch: pytest.MonkeyPatch,
    batches: list[int],
    between_s: int,
    shown: str,
    terminal: bool,
) -> None:
    now_s = 0.0
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, no_color=True)
    monkeypatch.setattr(main, "_err", console)
    monkeypatch.setattr(main, "Progress", functools.partial(Progress, get_time=lambda: now_s))
    with main._progress(100, "Embedding") as advance:
        for count in batches:
            now_s += between_s
            advance(count)
    plain = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", console.file.getvalue())
    assert shown in " ".join(plain.splitlines()[-1].split())


def test_unreadable_images_are_the_last_lines_and_no_failure(
    run: Run, shop: Path, out: Path
) -> None:
    for number in range(12):
        (shop / f"bad[{number:02d}].jpg").write_text("not an image")
    result = run("build", shop, "--bundle", "b", "--out", out)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()[-12:]
    assert lines[0] == "Left out 12 of 18 images:"
    assert lines[1].startswith("  bad[00].jpg: The content is not an image")
    assert re.fullmatch(r"  \.\.\. and 2 more in .*report\.json", lines[11])
    path = Path(lines[11].partition(" in ")[2])
    assert len(json.loads(path.read_text())["failures"]) == 12


@pytest.mark.parametrize("as_root", [False, True], ids=["IMAGES", "--root"])
@pytest.mark.parametrize(
    ("option", "content", "expected"),
    [
        ("--csv", "key,path,colour\nA,f.gif,red\nB,cup/a.png,blue\n", {"colour": 2}),
        ("--split", "f.gif, 3, 1\ncup/a.png, 3, 2\n", {"class": 1, "class_2": 2}),
    ],
)
def test_lists_are_indexed(
    run: Run,
    shop: Path,
    out: Path,
    tmp_path: Path,
    option: str,
    content: str,
    expected: dict[str, int],
    as_root: bool,
) -> None:
    (tmp_path / "list").write_text(content)
    root = ["--root", shop] if as_root else [shop]
    result = run("build", *root, option, tmp_path / "list", "--bundle", "b", "--out", out)
    assert result.exit_code == 0
    stats = json.loads(run("stats", out, "--json").stdout)
    assert (stats["size"], stats["attributes"]) == (2, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--csv", "a", "--split", "b"], "Give --csv or --split, not both"),
        ([], "Give the folder IMAGES, or a list"),
        (["images", "--root", "other"], "IMAGES or --root, not both"),
        (["images", "--batch-size", "0"], "--batch-size"),
        (["images", "--device", "tpu"], "tpu"),
    ],
)
def test_wrong_usage_ends_with_two(run: Run, arguments: list[str], message: str) -> None:
    result = run("build", *arguments, "--bundle", "b", "--out", "o")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_an_error_is_one_line_without_a_traceback(run: Run, out: Path, tmp_path: Path) -> None:
    for arguments in (
        ("build", tmp_path / "gone", "--bundle", "b", "--out", out),
        ("verify", tmp_path / "gone"),
        ("stats", tmp_path / "gone"),
    ):
        result = run(*arguments)
        assert result.exit_code == 1
        [line] = result.stderr.splitlines()
        assert line.startswith("Error: ")
        assert str(tmp_path / "gone") in line


def test_a_device_that_is_not_there_is_an_error(
    run: Run, shop: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(bundle: Path, device: str, allow_cpu_fallback: bool) -> None:
        raise ProviderError(f"{bundle} {device} {allow_cpu_fallback}")

    monkeypatch.setattr(main, "open_embedder", refused)
    arguments = ("build", shop, "--bundle", "b", "--out", out, "--device", "cuda")
    assert run(*arguments).stderr == "Error: b cuda False\n"
    assert run(*arguments, "--allow-cpu-fallback").stderr == "Error: b cuda True\n"
    assert not out.exists()


@pytest.mark.parametrize("command", ["build", "verify"])
def test_a_failure_inside_the_engine_is_one_line_without_a_traceback(
    shop: Path,
    out: Path,
    tiny_bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    model = OnnxEmbedder.open(tiny_bundle, SessionSettings())
    monkeypatch.setattr(main, "open_embedder", lambda *arguments: model)

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(main.app, [str(argument) for argument in arguments])

    build = ("build", shop, "--bundle", "b", "--out", out)
    arguments = build if command == "build" else ("verify", out, "--bundle", "b")
    if command == "verify":
        assert invoke(*build).exit_code == 0
    monkeypatch.setattr(model, "_session", OutOfMemory())
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.splitlines()[-1].startswith("Error: The model ")
    assert "Failed to allocate memory" in result.stderr


class OutOfMemory:
    """A session whose device is full."""

    def run(self, *arguments: object) -> list[np.ndarray]:
        raise RuntimeException("Failed to allocate memory for requested buffer of size 42")

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]


def test_too_little_memory_is_one_line_without_a_traceback(
    run: Run, shop: Path, out: Path, embedder: CountingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(images: Images) -> None:
        raise MemoryError

    monkeypatch.setattr(embedder, "embed", failing)
    result = run("build", shop, "--bundle", "b", "--out", out)
    assert result.exit_code == 1
    assert "Error: Not enough memory. Build with a lower --batch-size" in result.stderr


def test_an_interrupted_build_says_how_to_continue(
    run: Run, shop: Path, out: Path, embedder: CountingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(images: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(embedder, "embed", interrupted)
    result = run("build", shop, "--bundle", "b", "--out", out)
    assert result.exit_code == 1
    assert "run the same command again" in result.stderr
    assert "was interrupted" in run("stats", out).stderr


def test_verify_ends_with_zero_or_one(run: Run, built: Path, shop: Path) -> None:
    good = run("verify", built, "--bundle", "b")
    assert good.exit_code == 0
    assert "6 of 6 checked items (6 in all) find themselves" in good.stdout
    (shop / "f.gif").write_bytes(encoded(picture(50), "GIF"))
    bad = run("verify", built, "--bundle", "b")
    assert bad.exit_code == 1
    assert "f.gif: Its image cannot be used" in bad.stdout
    assert "5 of 6 checked items" in bad.stdout
    assert run("verify", built).exit_code == 0
    assert "2 of 2 checked items" in run("verify", built, "--sample", "2").stdout


def test_stats_print_a_table_for_people(run: Run, built: Path) -> None:
    result = run("stats", built)
    assert result.exit_code == 0
    assert re.search(r"^size +6$", result.stdout, re.MULTILINE)
    assert re.search(r"^formats +BMP 1, GIF 1, JPEG 1", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("command", ["build", "verify", "stats"])
def test_each_command_has_help_with_an_example(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: kinlens-index {command} " in " ".join(result.stdout.split())


def test_a_real_bundle_builds_and_verifies_a_gallery(
    shop: Path, out: Path, tiny_bundle: Bundle, make_tiny_bundle: Callable[..., Bundle]
) -> None:
    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(main.app, [str(argument) for argument in arguments])

    built = invoke("build", shop, "--bundle", tiny_bundle.path, "--out", out, "--workers", 2)
    assert built.exit_code == 0, built.output
    assert "Dimension 8" in built.stdout
    checked = invoke("verify", out, "--bundle", tiny_bundle.path)
    assert checked.exit_code == 0, checked.output
    other = make_tiny_bundle(seed=1)
    refused = invoke("verify", out, "--bundle", other.path)
    assert refused.exit_code == 1
    assert tiny_bundle.bundle_id[:12] in refused.stderr
    assert other.bundle_id[:12] in refused.stderr


def test_the_indexer_loads_no_torch() -> None:
    code = "import sys, indexer.__main__, indexer.verify; sys.exit('torch' in sys.modules)"
    root = Path(main.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
