"""The command line: what it prints, how it ends, and that it needs no torch."""

import functools
import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner, Result

from embedder.bundle import Bundle
from embedder.errors import ProviderError
from embedder.manifest import AskedPrecision
from embedder.session import OnnxEmbedder, SessionSettings
from embedder.types import Images
from indexer.__main__ import app
from indexer.commands import console
from tests.indexer.conftest import CountingEmbedder
from tests.support.seams import options

Run = Callable[..., Result]

COMMANDS = [
    *("build", "add", "update", "remove", "search", "show", "verify", "compact", "plan", "stats"),
    *("export", "import", "backup", "restore"),
]


@pytest.mark.parametrize("precision", ["fp32", "auto"])
def test_the_bundle_opens_in_the_precision_asked_for(
    tiny_bundle: Bundle, precision: AskedPrecision
) -> None:
    embedder = options.open_embedder(tiny_bundle.path, "cpu", False, precision)
    reason = {"fp32": "asked for", "auto": "the bundle has no int8"}[precision]
    assert (embedder.precision, embedder.precision_reason) == ("fp32", reason)


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
    shown_on = Console(file=io.StringIO(), force_terminal=terminal, width=120, no_color=True)
    monkeypatch.setattr(console, "err", shown_on)
    monkeypatch.setattr(console, "Progress", functools.partial(Progress, get_time=lambda: now_s))
    with console.progress(100, "Embedding", "images") as advance:
        for count in batches:
            now_s += between_s
            advance(count)
    plain = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", shown_on.file.getvalue())
    assert shown in " ".join(plain.splitlines()[-1].split())


def test_an_error_is_one_line_without_a_traceback(run: Run, out: Path, tmp_path: Path) -> None:
    for arguments in (
        ("build", tmp_path / "gone", "--bundle", "b", "--out", out),
        ("add", tmp_path / "gone", tmp_path, "--bundle", "b"),
        ("update", tmp_path / "gone", "key", "--unset", "name"),
        ("remove", tmp_path / "gone", "key"),
        ("search", tmp_path / "gone", "--like", "key"),
        ("show", tmp_path / "gone", "key"),
        ("verify", tmp_path / "gone"),
        ("compact", tmp_path / "gone"),
        ("stats", tmp_path / "gone"),
        ("export", tmp_path / "gone", "--out", out),
        ("import", tmp_path / "gone", "--out", out),
        ("backup", tmp_path / "gone", "--out", out),
        ("restore", tmp_path / "gone", "--out", out),
    ):
        result = run(*arguments)
        assert result.exit_code == 1
        [line] = result.stderr.splitlines()
        assert line.startswith("Error: ")
        assert str(tmp_path / "gone") in line


def test_a_device_that_is_not_there_is_an_error(
    run: Run, shop: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(bundle: Path, device: str, allow_cpu_fallback: bool, precision: str) -> None:
        raise ProviderError(f"{bundle} {device} {allow_cpu_fallback} {precision}")

    monkeypatch.setattr(options, "open_embedder", refused)
    arguments = ("build", shop, "--bundle", "b", "--out", out, "--device", "cuda")
    assert run(*arguments).stderr == "Error: b cuda False fp32\n"
    assert run(*arguments, "--allow-cpu-fallback").stderr == "Error: b cuda True fp32\n"
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
    monkeypatch.setattr(options, "open_embedder", lambda *arguments: model)

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    build = ("build", shop, "--bundle", "b", "--out", out)
    arguments = build if command == "build" else ("verify", out, "--bundle", "b")
    if command == "verify":
        assert invoke(*build).exit_code == 0
    monkeypatch.setattr("embedder.session.run_plain", device_is_full)
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.splitlines()[-1].startswith("Error: The model ")
    assert "Failed to allocate memory" in result.stderr


def device_is_full(*_: object) -> None:
    raise RuntimeException("Failed to allocate memory for requested buffer of size 42")


def test_too_little_memory_is_one_line_without_a_traceback(
    run: Run, shop: Path, out: Path, embedder: CountingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(images: Images) -> None:
        raise MemoryError

    monkeypatch.setattr(embedder, "embed", failing)
    result = run("build", shop, "--bundle", "b", "--out", out)
    assert result.exit_code == 1
    assert "Error: Not enough memory. Take a lower --batch-size" in result.stderr


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


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_an_example(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: kinlens-index {command} " in " ".join(result.stdout.split())


def test_a_real_bundle_builds_and_verifies_a_gallery(
    shop: Path, out: Path, tiny_bundle: Bundle, make_tiny_bundle: Callable[..., Bundle]
) -> None:
    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

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
    code = "import sys, indexer.__main__; sys.exit('torch' in sys.modules)"
    root = Path(console.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
