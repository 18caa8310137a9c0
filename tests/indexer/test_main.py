"""The command line: usage, errors and help of every command, and a bundle that is real."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException
from typer.testing import CliRunner, Result

from kinlens.commands.__main__ import app
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import ProviderError
from kinlens.indexer.gallery import Gallery
from tests.embedder.bundles import write_full_bundle
from tests.indexer.conftest import failure, usage
from tests.support.seams import options

COMMANDS = {
    "build": "IMAGES --bundle b --out o",
    "add": "gone IMAGES --bundle b",
    "update": "gone key --unset name",
    "remove": "gone key",
    "attributes": "gone",
    "search": "gone --like key",
    "show": "gone key",
    "verify": "gone",
    "compact": "gone",
    "plan": "",
    "stats": "gone",
    "export": "gone --out o",
    "import": "gone --out o",
    "backup": "gone --out o",
    "restore": "gone --out o",
    "golden add": "gone --query IMAGE --no-match",
    "golden list": "gone",
    "golden remove": "gone 0f",
    "golden run": "gone --bundle b",
    "golden runs": "gone",
}


def test_each_command_has_help_with_an_example_and_errors_of_one_line(run, tmp_path) -> None:
    places = {"gone": tmp_path / "gone", "IMAGES": tmp_path / "gone", "o": tmp_path / "out"}
    for command, arguments in COMMANDS.items():
        words = command.split()
        shown = run(*words, "--help")
        assert shown.exit_code == 0
        assert f"Example: kinlens-index {command} " in " ".join(shown.stdout.split())
        if arguments:
            result = run(*words, *(places.get(word, word) for word in arguments.split()))
            assert str(tmp_path / "gone") in failure(result)
            assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("build --csv a --split b --bundle b --out o", "Pass --csv or --split, not both"),
        ("build --bundle b --out o", "Pass the folder IMAGES, or a list"),
        ("build --out g", "--bundle, or pass --vectors"),
        ("build shop --out g --vectors v", "--vectors or images, not both"),
        ("embed shop --bundle b --out v --root r", "--root is only for a CSV"),
        ("build images --batch-size 0 --bundle b --out o", "--batch-size"),
        ("update GALLERY", "Pass keys, --product or --where with --set"),
        ("update GALLERY f.gif --csv x", "not both"),
        ("remove GALLERY f.gif --where a=1", "exactly one of"),
        ("golden add GALLERY", "Pass either --query or --text with its label"),
        ("golden add GALLERY --query a", "one of --keys, --attribute and --no-match"),
        ("golden add GALLERY --csv a --keys b", "none with --csv"),
        ("update GALLERY --where b", "--set or --unset"),
        ("search GALLERY", "exactly one of: --image or --text, --vector, --like"),
        ("search GALLERY --image a", "--image and --text need --bundle"),
        ("search GALLERY --vector a --unlike b", "--unlike needs at least one --like"),
        ("plan 100 8 --memory-mb 0", "--memory-mb"),
    ],
)
def test_wrong_usage_exits_with_two(run, built, arguments: str, message: str) -> None:
    given = [built if word == "GALLERY" else word for word in arguments.split()]
    assert message in usage(run(*given))


def test_an_absent_gpu_is_an_error_whose_cure_any_program_has(shop, out, tiny_bundle) -> None:
    arguments = ["build", shop, "--bundle", tiny_bundle.path, "--out", out, "--device", "cuda"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1
    assert "check the driver, or choose --device cpu." in result.stderr


def test_a_device_that_is_not_there_is_an_error(run, shop, out, monkeypatch) -> None:
    def refused(asked: Any, bundle: Path) -> None:
        given = (bundle, asked.device, asked.allow_cpu_fallback, asked.precision, asked.engine)
        raise ProviderError(" ".join(map(str, given)))

    monkeypatch.setattr(options.ModelOptions, "open", refused)
    arguments = ("build", shop, "--bundle", "b", "--out", out, "--device", "cuda")
    assert run(*arguments).stderr == "error: b cuda False fp32 auto\n"
    assert run(*arguments, "--allow-cpu-fallback").stderr == "error: b cuda True fp32 auto\n"
    assert not out.exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "error: Not enough memory. Reduce --batch-size"),
        (KeyboardInterrupt(), "run the same command again"),
    ],
)
def test_an_interrupted_build_says_what_to_do(
    run, shop, out, embedder, monkeypatch, error: BaseException, message: str
) -> None:
    monkeypatch.setattr(embedder, "embed", Mock(side_effect=error))
    result = run("build", shop, "--bundle", "b", "--out", out)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "was interrupted or refused" in run("stats", out).stderr


def invoke(*arguments: object) -> Result:
    """Without the fake model."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_failure_inside_the_engine_is_one_line_without_a_traceback(
    shop, out, tiny_bundle, monkeypatch
) -> None:
    full = Mock(side_effect=RuntimeException("Failed to allocate memory for a buffer of size 42"))
    monkeypatch.setattr("kinlens.embedder.engines.models.run_plain", full)
    line = failure(invoke("build", shop, "--bundle", tiny_bundle.path, "--out", out))
    assert line.startswith("error: The model ")
    assert "Failed to allocate memory" in line


def test_a_gallery_names_the_precision_that_it_was_made_in_and_mixes_no_two_others(
    shop, out, tiny_bundle, tmp_path
) -> None:
    bundle = write_full_bundle(tiny_bundle, tmp_path).path
    built = invoke("build", shop, "--bundle", bundle, "--out", out, "--precision", "int8")
    assert built.exit_code == 0, built.output
    assert "model on the CPU in int8." in built.stdout
    assert invoke("export", out, "--out", tmp_path / "g.parquet").exit_code == 0
    assert invoke("import", tmp_path / "g.parquet", "--out", tmp_path / "again").exit_code == 0
    for gallery in (out, tmp_path / "again"):
        assert json.loads(invoke("stats", gallery, "--json").stdout)["precision"] == "int8"
    bundle_id = Bundle.open(bundle).bundle_id
    named = {"name": "other", "bundle_id": bundle_id, "dim": 8, "source_root": shop}
    Gallery.create(tmp_path / "other", precision="bf16", **named).close()
    for command in (("add", tmp_path / "other", shop), ("golden", "run", tmp_path / "other")):
        line = failure(invoke(*command, "--bundle", bundle, "--precision", "int8"))
        assert "'other' was built in bf16, but the model runs in int8" in line
