"""Finished runs side by side, and a bundle on other images."""

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kinlens.embedder.errors import KinlensError
from kinlens.training.__main__ import app
from kinlens.training.config.settings import Input, Model, RenderedData
from kinlens.training.evaluation.retrieval import with_interval
from kinlens.training.export.bundle import export_backbone
from kinlens.training.folder import Result
from kinlens.training.rendered.catalogue import write_catalogue
from tests.training.jobs import TINY_TRUNK, calibrated_weights, small_job

runner = CliRunner()


def run_folder(folder: Path, recall: float, split: str = "a" * 64, **settings: Any) -> Path:
    """What a finished run leaves: 10 classes of 20 test images, one of a single image."""
    folder.mkdir()
    job = small_job(folder / "products", **settings).as_dict()
    figures = {"R@1": recall, "MAP@R": 12.34, "uniformity": -1.2345}
    result = Result(job, figures, {"R@1": 70.0}, 3, "last", 12.0, split)
    (folder / "result.json").write_text(json.dumps(asdict(result)))
    for name, classes in (("test", 10), ("validation", 5)):
        with (folder / f"{name}.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(("key", "path", "class"))
            writer.writerows((f"{c}-{n}", f"{c}-{n}", c) for c in range(classes) for n in range(20))
            writer.writerow(("lone", "lone", "lone"))
    return folder


def compared(*folders: Path) -> str:
    done = runner.invoke(app, ["compare", *map(str, folders)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_figures_come_with_the_interval_of_their_queries(tmp_path: Path) -> None:
    text = compared(run_folder(tmp_path / "one", 60.0))
    assert f"| {with_interval(60, 200)} | 12.3 | -1.23 | 12 |" in text
    assert f"| {with_interval(70, 100)} |" in text


def test_only_settings_that_differ_and_matter_are_shown(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "one", 60.0)
    two = run_folder(tmp_path / "two", 62.5, lr_trunk=1e-4)
    text = compared(one, two)
    assert "| `optimizer.lr_trunk` | 0.001 | 0.0001 |" in text
    assert "batch_size" not in text
    assert "data.root" not in text, "where the images lie changes nothing"
    assert "two: +2.5 points of R@1 against" in text
    assert "on the same 200 queries" in text


def test_runs_on_other_images_are_not_subtracted(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "one", 60.0)
    text = compared(one, run_folder(tmp_path / "two", 62.5, split="b" * 64))
    assert "tested on other images" in text
    assert "points of R@1" not in text


def test_a_folder_without_a_finished_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(KinlensError, match="has no finished run"):
        runner.invoke(app, ["compare", str(tmp_path)], catch_exceptions=False)


def test_a_bundle_without_a_job_is_evaluated_on_a_folder_or_a_list(tmp_path: Path) -> None:
    weights = calibrated_weights(tmp_path / "weights.pth")
    spec = Input(size_px=32, resize_px=36)
    out = tmp_path / "trunk"
    bundle = str(
        export_backbone("trunk", Model(backbone=TINY_TRUNK, weights=str(weights)), spec, out).path
    )
    shop = tmp_path / "shop"
    write_catalogue(
        shop, RenderedData(kind="rendered", root=str(shop), products=3, views=4, size_px=40)
    )
    with pytest.raises(KinlensError, match="--data /my/shop"):
        runner.invoke(app, ["evaluate", bundle], catch_exceptions=False)
    with pytest.raises(KinlensError, match="--data nowhere: there is no such folder or CSV"):
        runner.invoke(app, ["evaluate", bundle, "--data", "nowhere"], catch_exceptions=False)

    done = runner.invoke(app, ["evaluate", bundle, "--data", str(shop), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == {"R@1", "R@2", "R@4", "R@8", "MAP@R"}
    paths = sorted(path.relative_to(shop) for path in shop.rglob("*.jpg"))
    rows = [f"{path},{path.parent}" for path in paths]
    (shop / "list.csv").write_text("path,label\n" + "\n".join(rows))
    done = runner.invoke(app, ["evaluate", bundle, "--data", str(shop / "list.csv")])
    assert f"R@1 {with_interval(found['R@1'], 12)}" in done.output

    (shop / "list.csv").write_text("path,label\n" + "\n".join(rows[:4]))
    with pytest.raises(KinlensError, match="every answer would be right"):
        runner.invoke(
            app,
            ["evaluate", bundle, "--data", str(shop / "list.csv")],
            catch_exceptions=False,
        )
