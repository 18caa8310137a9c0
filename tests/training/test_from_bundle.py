"""A training that starts from a bundle."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kinlens.embedder.bundle import Bundle, write_bundle
from kinlens.embedder.errors import CheckpointError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.training.checkpoint import load_checkpoint
from kinlens.training.config.job import Job, parse_job
from kinlens.training.config.settings import Input, Model
from kinlens.training.data.load import load_split
from kinlens.training.export.bundle import export_backbone, export_checkpoint
from kinlens.training.models.embedding import torch_embed
from kinlens.training.state import create_run
from kinlens.training.trainer import fit
from tests.training.jobs import TINY_TRUNK, Silent, small_job


@pytest.fixture(scope="module")
def bundle(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Of a small job with a flow, one epoch old."""
    folder = tmp_path_factory.mktemp("run")
    job = small_job(folder / "products", weights=weights)
    split = load_split(job.data)
    fit(job, split, folder, Silent())
    return export_checkpoint(load_checkpoint(folder), split, folder / "bundle")


def job_from(bundle: Bundle, **model: Any) -> Job:
    """The job that made the bundle, to start from it."""
    content = dict(bundle.manifest.job or {})
    content["model"] = content["model"] | {"weights": str(bundle.path)} | model
    return parse_job(content)


def some_images(bundle: Bundle) -> Any:
    side = bundle.manifest.preprocessing.crop_px
    return np.random.default_rng(0).integers(0, 256, (4, 3, side, side), dtype=np.uint8)


@pytest.mark.parametrize("batch_norm", ["frozen", "statistics", "folded"])
def test_a_run_begins_with_the_embeddings_of_its_bundle(bundle: Bundle, batch_norm: str) -> None:
    run = create_run(job_from(bundle, batch_norm=batch_norm), classes=3)
    images = some_images(bundle)
    served = OnnxEmbedder.open(bundle).embed(images)
    assert np.abs(torch_embed(run.net.cpu().eval(), images) - served).max() < 1e-3
    assert np.abs(served[0] - served[1]).max() > 1e-2


def test_a_trunk_alone_lends_its_trunk_and_leaves_the_head(weights: Path, tmp_path: Path) -> None:
    spec, model = Input(size_px=32, resize_px=36), Model(backbone=TINY_TRUNK, weights=str(weights))
    trunk = export_backbone("trunk", model, spec, tmp_path / "trunk")
    job = small_job(tmp_path / "products", weights=trunk.path)
    net = create_run(job, classes=3).net.cpu().eval()
    images = some_images(trunk)
    pooled = net.pool(net.trunk(net.normalize(torch.from_numpy(images)))).detach().numpy()
    unit = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    assert np.abs(unit - OnnxEmbedder.open(trunk).embed(images)).max() < 1e-3
    assert net.dim == 16


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dim": 32}, r"model.dim is 16 in the bundle and 32 in the job"),
        ({"pooling": "gem"}, r"model.pooling is 'gap\+gmp' in the bundle and 'gem' in the job"),
        ({"backbone": "resnet50"}, r"model.backbone is 'timm:test_resnet' in the bundle"),
        ({"batch_norm": "train"}, r'Set model.batch_norm to "frozen"'),
    ],
)
def test_what_does_not_fit_is_named(bundle: Bundle, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        create_run(job_from(bundle, **setting), classes=3)


def test_a_job_without_the_flow_of_the_bundle_is_refused(bundle: Bundle) -> None:
    content = job_from(bundle).as_dict() | {"regularizers": {}}
    with pytest.raises(
        CheckpointError, match=r"regularizers.determinant.flow is .* in the bundle and None"
    ):
        create_run(parse_job(content), classes=3)


def test_a_network_must_give_the_golden_vectors(bundle: Bundle, tmp_path: Path) -> None:
    other = write_bundle(
        tmp_path / "other",
        bundle.manifest.model_copy(update={"modes": {}}),
        bundle.model_path,
        bundle.golden_images(),
        bundle.golden_inputs(),
        np.roll(bundle.golden_vectors(), 1, axis=0),
    )
    with pytest.raises(CheckpointError, match=r"cannot be read back .* golden vectors differ"):
        create_run(job_from(bundle, weights=str(other.path)), classes=3)
