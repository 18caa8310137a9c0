import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kinlens.embedder.errors import KinlensError
from kinlens.training.__main__ import app, main
from kinlens.training.config.job import load_job, parse_job
from tests.training.jobs import TINY_CHANNELS, calibrated_weights, small_job, write_job
from tests.training.official_layouts import write_layout

runner = CliRunner()


def job_file(folder: Path, **tables: Any) -> Path:
    """A small job on calibrated weights, with the tables of another one in place of its own."""
    weights = calibrated_weights(folder / "weights.pth")
    content = small_job(folder / "products", regularized=False, weights=weights).as_dict() | tables
    return write_job(folder / "job.toml", parse_job(content))


def test_fit_evaluate_and_export_walk_the_road(tmp_path: Path) -> None:
    job, out, bundle = job_file(tmp_path), tmp_path / "run", tmp_path / "bundle"
    done = runner.invoke(app, ["fit", str(job), "--out", str(out), "--set", "optimizer.epochs=2"])
    assert done.exit_code == 0, done.output
    written = ("job.json", "log.jsonl", "checkpoint.pt", "curves.png", "report.md", "result.json")
    assert {path.name for path in out.iterdir()} >= {*written, "test.csv"}
    done = runner.invoke(app, ["export", str(out), "--out", str(bundle)])
    assert done.exit_code == 0, done.output
    assert re.search(r"16-d  R@1 \d+\.\d\d", done.output)
    assert re.search(r"R@1 .* on 12 test queries; the untrained trunk \d+\.\d \(", done.output)
    trunk = tmp_path / "trunk"
    done = runner.invoke(app, ["export", str(out), "--trunk", "--out", str(trunk)])
    assert done.exit_code == 0, done.output
    before = json.loads((out / "result.json").read_text())["trunk"]
    recall = {name: before[name] for name in ("R@1", "R@2")}
    manifests = [json.loads((b / "manifest.json").read_text()) for b in (bundle, trunk)]
    baseline = manifests[0]["baseline"]
    assert baseline == {"model": "the untrained trunk", "queries": 12, "recall": recall}
    assert manifests[1]["recall"] == recall
    assert (manifests[0]["dim"], manifests[1]["dim"]) == (16, TINY_CHANNELS)
    of_run = runner.invoke(app, ["evaluate", str(out)]).output
    of_bundle = runner.invoke(app, ["evaluate", str(bundle)]).output
    figure = re.compile(r"R@1 \d+\.\d+")
    assert figure.search(of_run)[0] == figure.search(of_bundle)[0]
    figures = json.loads(runner.invoke(app, ["evaluate", str(bundle), "--full", "--json"]).stdout)
    assert figures.keys() >= {"R@1", "MAP@R", "NMI", "F1", "uniformity", "spectral_decay"}

    for change in ("input.size_px=24", "optimizer.epochs=9"):
        with pytest.raises(KinlensError, match="a trained model keeps its settings"):
            runner.invoke(app, ["export", str(out), "--set", change], catch_exceptions=False)
    for source in (out, bundle):
        arguments = ["evaluate", str(source), "--set", "data.split_seed=5"]
        with pytest.raises(KinlensError, match="may have been trained on"):
            runner.invoke(app, arguments, catch_exceptions=False)


def test_new_writes_a_commented_job_that_trains_the_users_folder(tmp_path: Path) -> None:
    shop, job = tmp_path / "my shop", tmp_path / "jobs" / "shop.toml"
    runner.invoke(app, ["data", "render", str(shop), "--products", "6", "--views", "3"])
    words = ["new", "--data", str(shop), "--out", str(job), "--weights", "none"]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    text = job.read_text()
    assert text.count("#") > 10
    found = load_job(job)
    assert (found.name, found.data.root, found.model.weights) == ("my-shop", str(shop), "none")
    template = load_job("shop")
    for table in ("start", "loss", "regularizers", "optimizer", "sampling"):
        assert getattr(found, table) == getattr(template, table)
    with pytest.raises(KinlensError, match="exists already"):
        runner.invoke(app, words, catch_exceptions=False)
    assert "model.weights" not in done.output
    named = ["new", "--data", str(shop), "--out", str(tmp_path / "other.toml")]
    assert "Without internet access, add --set model.weights" in runner.invoke(app, named).output


def test_new_leaves_no_job_for_a_folder_that_cannot_be_trained_on(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    (tmp_path / "empty").mkdir()
    with pytest.raises(KinlensError, match="has no images"):
        runner.invoke(
            app,
            ["new", "--data", str(tmp_path / "empty"), "--out", str(job)],
            catch_exceptions=False,
        )
    assert not job.exists()
    with pytest.raises(KinlensError, match="--data nowhere: there is no such folder"):
        runner.invoke(app, ["new", "--data", "nowhere"], catch_exceptions=False)
    odd = tmp_path / "sh$op"
    odd.mkdir()
    with pytest.raises(KinlensError, match="Rename the folder"):
        runner.invoke(app, ["new", "--data", str(odd), "--out", str(job)], catch_exceptions=False)


def test_a_run_is_never_overwritten_in_silence(tmp_path: Path) -> None:
    job, out = str(job_file(tmp_path)), str(tmp_path / "run")
    with pytest.raises(KinlensError, match="no checkpoint to resume from"):
        runner.invoke(app, ["fit", job, "--out", out, "--resume"], catch_exceptions=False)
    assert runner.invoke(app, ["fit", job, "--out", out]).exit_code == 0
    with pytest.raises(KinlensError, match="--resume"):
        runner.invoke(app, ["fit", job, "--out", out], catch_exceptions=False)


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


def test_export_wants_a_run_or_a_backbone() -> None:
    assert runner.invoke(app, ["export"]).exit_code == 2
    with pytest.raises(KinlensError, match="backbone = 'vgg'"):
        runner.invoke(app, ["export", "--backbone", "vgg"], catch_exceptions=False)


def test_render_draws_a_catalogue(tmp_path: Path) -> None:
    words = ["data", "render", str(tmp_path / "new"), "--products", "2", "--views", "2"]
    done = runner.invoke(app, [*words, "--size-px", "32"])
    assert done.exit_code == 0
    assert "4 images in" in done.output
    assert len(list((tmp_path / "new").rglob("*.jpg"))) == 4


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
    job = job_file(tmp_path)
    change = ["--set", "protocol.choose_by=test", "--set", "recall_at=[1]"]
    arguments = ["fit", str(job), "--out", str(tmp_path / "run"), *change]
    with pytest.raises(KinlensError, match="--choose-by-test"):
        runner.invoke(app, arguments, catch_exceptions=False)
    assert runner.invoke(app, [*arguments, "--choose-by-test"]).exit_code == 0
    assert "CHOSEN BY TEST" in (tmp_path / "run" / "report.md").read_text()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["chosen_by"] == "test"


def test_a_part_of_an_official_data_set_needs_the_flag(tmp_path: Path) -> None:
    root = write_layout("cub", tmp_path / "cub")
    path = job_file(tmp_path, data={"kind": "cub", "root": str(root)})
    arguments = ["fit", str(path), "--out", str(tmp_path / "run")]
    with pytest.raises(KinlensError, match="--allow-partial"):
        runner.invoke(app, arguments, catch_exceptions=False)
    done = runner.invoke(app, [*arguments, "--allow-partial"])
    assert done.exit_code == 0, done.output
    assert "the official counts are not checked" in done.output
