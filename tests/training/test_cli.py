import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

from kinlens.embedder.errors import KinlensError
from kinlens.training.__main__ import app, main
from kinlens.training.config.job import load_job, parse_job
from tests.training.jobs import TINY_CHANNELS, calibrated_weights, called, small_job, write_job
from tests.training.official_layouts import write_layout

runner = CliRunner()


def job_file(folder: Path, **tables: Any) -> Path:
    """A small job on calibrated weights, with the tables of another one in place of its own."""
    weights = calibrated_weights(folder / "weights.pth")
    content = small_job(folder / "products", regularized=False, weights=weights).as_dict() | tables
    return write_job(folder / "job.toml", parse_job(content))


def refused(words: Sequence[object], message: str) -> None:
    with pytest.raises(KinlensError, match=message):
        called(*words)


def test_fit_evaluate_and_export_walk_the_road(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fit` gets relative paths; the other commands run in another folder, and `export` without the
    weights that the run began with.
    """
    monkeypatch.chdir(tmp_path)
    job, out, bundle = job_file(tmp_path), tmp_path / "run", tmp_path / "bundle"
    fit = ["fit", str(job), "--out", str(out)]
    refused([*fit, "--resume"], "no checkpoint to resume from")
    relative = ("--set", "data.root=products", "--set", "model.weights=./weights.pth")
    called(*fit, "--set", "optimizer.epochs=2", *relative)
    stored = json.loads((out / "job.json").read_text())
    assert stored["data"]["root"] == str(tmp_path / "products")
    assert stored["model"]["weights"] == str(tmp_path / "weights.pth")
    monkeypatch.chdir("/")
    written = ("job.json", "log.jsonl", "checkpoint.pt", "curves.png", "report.md", "result.json")
    assert {path.name for path in out.iterdir()} >= {*written, "test.csv"}
    refused(fit, "--resume")
    elsewhere = (tmp_path / "weights.pth").rename(tmp_path / "elsewhere.pth")
    output = called("export", out, "--out", bundle)
    elsewhere.rename(tmp_path / "weights.pth")
    assert re.search(r"16-d  R@1 \d+\.\d\d", output)
    assert re.search(r"R@1 .* on 12 test queries; the untrained trunk \d+\.\d \(", output)
    trunk = tmp_path / "trunk"
    called("export", out, "--trunk", "--out", trunk)
    before = json.loads((out / "result.json").read_text())["trunk"]
    recall = {name: before[name] for name in ("R@1", "R@2")}
    manifests = [json.loads((b / "manifest.json").read_text()) for b in (bundle, trunk)]
    baseline = manifests[0]["baseline"]
    assert baseline == {"model": "the untrained trunk", "queries": 12, "recall": recall}
    assert manifests[1]["recall"] == recall
    assert (manifests[0]["dim"], manifests[1]["dim"]) == (16, TINY_CHANNELS)
    figure = re.compile(r"R@1 \d+\.\d+")
    of_run, of_bundle = (figure.search(called("evaluate", source)) for source in (out, bundle))
    assert of_run[0] == of_bundle[0]
    called("evaluate", out, "--plot", tmp_path / "new" / "embeddings.png")
    with Image.open(tmp_path / "new" / "embeddings.png") as plot:
        assert len(plot.convert("RGB").getcolors(1 << 20)) > 3
    refused(["evaluate", out, "--plot", "embeddings.jpeg"], "ends in .png, .svg or .pdf")
    figures = json.loads(runner.invoke(app, ["evaluate", str(bundle), "--full", "--json"]).stdout)
    assert figures.keys() >= {"R@1", "MAP@R", "NMI", "F1", "uniformity", "spectral_decay"}
    refused(["export", out, "--set", "input.size_px=24"], "a trained model keeps its settings")
    for words in (
        ["evaluate", out],
        ["evaluate", bundle],
        ["export", out, "--out", tmp_path / "b"],
    ):
        refused([*words, "--set", "data.split_seed=7"], "may have been trained on")
    refused(["export", out, "--out", bundle], "exists already")


def test_new_writes_a_commented_job_that_trains_the_users_folder(tmp_path: Path) -> None:
    shop, job = tmp_path / "my shop", tmp_path / "jobs" / "shop.toml"
    called("data", "render", shop, "--products", "6", "--views", "3")
    words = ["new", "--data", shop, "--out", job, "--weights", "none"]
    assert "model.weights" not in called(*words)
    assert job.read_text().count("#") > 10
    found = load_job(job)
    assert (found.name, found.data.root, found.model.weights) == ("my-shop", str(shop), "none")
    template = load_job("shop")
    for table in ("start", "loss", "regularizers", "optimizer", "sampling"):
        assert getattr(found, table) == getattr(template, table)
    refused(words, "exists already")
    other = called("new", "--data", shop, "--out", tmp_path / "other.toml")
    assert "Without internet access, add --set model.weights" in other
    lines = (f"{path.relative_to(shop)},{path.parent.name}" for path in sorted(shop.glob("*/*.*")))
    (shop / "list.csv").write_text("path,label\n" + "\n".join(lines))
    called("new", "--data", shop / "list.csv", "--out", tmp_path / "csv.toml")
    assert load_job(tmp_path / "csv.toml").data.file == "list.csv"


def test_new_leaves_no_job_for_a_folder_that_cannot_be_trained_on(tmp_path: Path) -> None:
    job, odd, empty = (tmp_path / name for name in ("new.toml", "sh$op", "empty"))
    odd.mkdir()
    empty.mkdir()
    for folder, message in (
        (empty, "has no images"),
        (odd, "Rename the folder"),
        ("nowhere", "nowhere does not exist"),
    ):
        refused(["new", "--data", folder, "--out", job], message)
    assert not job.exists()
    refused(["new", "--data", empty, "--out", "/proc/job.toml"], "cannot be written")
    refused(["fit", job_file(tmp_path), "--out", "/proc/run"], "cannot be written")


def test_our_errors_are_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kinlens-train", "fit", "no-such-job"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    message = capsys.readouterr().err
    assert "error: No job 'no-such-job'" in message
    assert "Traceback" not in message


MISTAKES = (
    ("--help", 0),
    ("fit --help", 0),
    ("adpt", 2),
    ("fit --resumee", 2),
    ("fit no-such-job", 1),
    ("new --data no-such-folder", 1),
    ("adapt --data no-such-folder --out bundle", 1),
    ("evaluate no-such-run", 1),
    ("export no-such-run", 1),
)
CALLS = """
import sys
from kinlens.training.__main__ import main
heavy = "torch", "torchvision", "pandas", "sklearn", "scipy", "onnxruntime"
for words in sys.argv[1:]:
    sys.argv = ["kinlens-train", *words.split()]
    try:
        main()
    except SystemExit as end:
        print(f"{words}: {end.code}, loaded", [name for name in heavy if name in sys.modules])
"""


def test_help_and_mistakes_answer_without_loading_torch() -> None:
    words = [words for words, _ in MISTAKES]
    done = subprocess.run([sys.executable, "-c", CALLS, *words], capture_output=True, text=True)
    ends = [line for line in done.stdout.splitlines() if ", loaded " in line]
    assert ends == [f"{words}: {status}, loaded []" for words, status in MISTAKES], done.stderr


def test_export_wants_a_run_or_a_backbone() -> None:
    assert runner.invoke(app, ["export"]).exit_code == 2
    refused(["export", "--backbone", "vgg"], "--backbone vgg is unknown; use mobilenet_v2")


def commands(group: Any, before: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name


@pytest.mark.parametrize("command", list(commands(get_command(app))))
def test_every_command_has_help_with_an_example(command: str) -> None:
    shown = runner.invoke(app, [*command.split(), "--help"]).output
    assert re.search(f"Examples?: kinlens-train {command} ", " ".join(shown.split()))


def test_choosing_by_test_needs_the_flag(tmp_path: Path) -> None:
    words = ["fit", job_file(tmp_path), "--out", tmp_path / "run"]
    words += ["--set", "protocol.choose_by=test", "--set", "recall_at=[1]"]
    refused(words, "--choose-by-test")
    called(*words, "--choose-by-test")
    assert "CHOSEN BY TEST" in (tmp_path / "run" / "report.md").read_text()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["chosen_by"] == "test"


def test_a_part_of_an_official_data_set_needs_the_flag(tmp_path: Path) -> None:
    root = write_layout("cub", tmp_path / "cub")
    path = job_file(tmp_path, data={"kind": "cub", "root": str(root)})
    words = ["fit", path, "--out", tmp_path / "run"]
    refused(words, "--allow-partial")
    assert "the official counts are not checked" in called(*words, "--allow-partial")
