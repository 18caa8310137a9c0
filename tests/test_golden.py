"""Files of earlier versions go on opening: see tests/golden/README.md."""

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import CalibrationError
from kinlens.embedder.session import OnnxEmbedder
from tests.support import profiles
from tests.support.odd_images import colour_spaces, street_photo
from tests.tiny import encoded
from tests.training.jobs import called

GOLDEN = Path(__file__).parent / "golden"
BUNDLE_ID = "7762826234cc5b8f15a91155efcd82b70198845b36eb71b14fb227151305006a"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(GOLDEN / "training.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_a_stored_bundle_opens_in_all_its_precisions(stored: Path) -> None:
    bundle = Bundle.open(stored / "bundle")
    assert bundle.bundle_id == BUNDLE_ID
    assert bundle.precisions == ("fp32", "int8", "fp16")
    assert bundle.manifest.baseline is not None
    assert bundle.manifest.baseline.recall["R@1"] == pytest.approx(24.3, abs=0.1)
    for precision in ("fp32", "auto"):
        embedder = OnnxEmbedder.open(bundle, SessionSettings(precision=precision))
        vectors = embedder.embed(bundle.golden_inputs())
        cosines = (vectors * bundle.golden_vectors()).sum(1)
        assert cosines.min() > 0.99
    wide = colour_spaces()["prophoto-PNG"]  # what the bundle made of it when it was exported
    plain = encoded(profiles.stored_in(street_photo(), profiles.named("prophoto")))
    assert np.array_equal(embedder.preprocess(wide), embedder.preprocess(plain))
    calibration = bundle.manifest.calibration
    assert calibration is not None
    assert all(one.search_score > one.pair_score for one in calibration.thresholds)
    with pytest.raises(CalibrationError, match="Export the model again"):
        calibration.curve_for(100, 2.0)


def test_a_stored_run_is_reported_evaluated_and_exported(stored: Path, tmp_path: Path) -> None:
    run, images = stored / "run", f"data.root={tmp_path / 'images'}"
    study = tmp_path / "study.json"
    assert "| run | 1 | 24.3 | 10.4 |" in called("report", study, run)
    assert json.loads(study.read_text())["records"][0]["seed"] == 0
    assert "R@1" in called("evaluate", run, "--set", images)
    called("export", run, "--out", tmp_path / "bundle", "--set", images)
    old, new = Bundle.open(stored / "bundle"), Bundle.open(tmp_path / "bundle")
    assert np.abs(old.golden_vectors() - new.golden_vectors()).max() < 1e-4
    assert old.manifest.split_sha256 == new.manifest.split_sha256
    assert old.manifest.baseline == new.manifest.baseline
    assert json.loads((new.path / "manifest.json").read_text())["preprocessing"]["colour"] == "srgb"


def test_a_stored_run_goes_on(stored: Path, tmp_path: Path) -> None:
    """As if it had been stopped after its first epoch."""
    run = Path(shutil.copytree(stored / "run", tmp_path / "run"))
    (run / "result.json").unlink()
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    checkpoint |= {"epoch": 1, "evaluated": 1, "step": 6, "history": checkpoint["history"][:1]}
    torch.save(checkpoint, run / "checkpoint.pt")
    job = json.loads((run / "job.json").read_text())
    job["data"]["root"] = str(tmp_path / "images")
    (tmp_path / "job.toml").write_text(tomli_w.dumps(without_none(job)))
    called("fit", tmp_path / "job.toml", "--out", run, "--resume")
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if row["kind"] == "epoch"][-1] == 2
    assert json.loads((run / "result.json").read_text())["figures"]["R@1"] > 0


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: the settings that a job omits."""
    return {
        name: without_none(value) if isinstance(value, dict) else value
        for name, value in table.items()
        if value is not None
    }
