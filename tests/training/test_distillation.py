"""Distillation: cosines of a batch that follow those of a teacher, a bundle."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.embedder.errors import BundleError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.training.bundles.bundle import export_backbone
from kinlens.training.config.job import Job, parse_job
from kinlens.training.config.settings import Input, Model, Runtime
from kinlens.training.data.features import CachedFeatures, FeatureStore, WithTeacher, taught_by
from kinlens.training.data.load import load_split
from kinlens.training.regularizers.distillation import DistillationRegularizer
from kinlens.training.runner import run_job
from tests.training.jobs import TINY_TRUNK, Silent, small_job


def unit(count: int, dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dim, generator=generator, dtype=torch.float64), dim=1)


def value(x: Tensor, taught: Tensor) -> Tensor:
    return DistillationRegularizer("unused")(x, taught)


def test_it_is_the_mean_squared_difference_of_the_cosines_of_two_images() -> None:
    x, taught = unit(7, 5), unit(7, 3, seed=1)
    naive = 0.0
    for i in range(7):
        for j in range(7):
            if i != j:
                naive += float((x[i] @ x[j] - taught[i] @ taught[j]) ** 2) / 42
    assert float(value(x, taught)) == pytest.approx(naive, abs=1e-12)


def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient() -> None:
    taught = unit(7, 3)
    turned = torch.linalg.qr(torch.randn(5, 3, dtype=torch.float64)).Q  # into 5 dimensions
    for x in (taught.clone(), taught @ turned.T):
        x.requires_grad_()
        found = value(x, taught)
        found.backward()
        assert found.item() == pytest.approx(0, abs=1e-24)
        assert x.grad.abs().max() < 1e-15


def test_a_single_image_has_no_loss_and_a_finite_gradient() -> None:
    for count in (0, 1):
        x = unit(count, 5).requires_grad_()
        found = value(x, unit(count, 3))
        found.backward()
        assert found.item() == 0
        assert x.grad.isfinite().all()


@pytest.fixture(scope="module")
def teacher(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "bundle"
    model = Model(backbone=TINY_TRUNK, weights=str(weights), pooling="gap")
    return export_backbone("teacher", model, Input(size_px=40, resize_px=48), path).path


def test_the_teacher_embeds_each_image_once_as_it_is_served(tmp_path: Path, teacher: Path) -> None:
    images = load_split(small_job(tmp_path / "products").data).train
    store, runtime = FeatureStore(tmp_path / "features.sqlite"), Runtime(workers=0)
    first = taught_by(str(teacher), images, runtime, store)
    expected = OnnxEmbedder.open(teacher).embed_files(images.root / x for x in images.paths)
    np.testing.assert_allclose(first.numpy(), expected, atol=1e-6)
    made: list[int] = []
    again = taught_by(str(teacher), images, runtime, store, lambda n, _: made.append(n))
    assert not made
    assert torch.equal(again, first)
    views = CachedFeatures(torch.zeros(len(images), 2, 3), images.labels, 0)
    features, label, taught = WithTeacher(views, first)[4, 5, 1]
    assert features.shape == (3,)
    assert label == images.labels[5]
    assert torch.equal(taught, first[5])


def distilled(root: Path, weights: Path, teacher: Path) -> Job:
    content = small_job(root, regularized=False, weights=weights, epochs=6, lr_head=1e-2).as_dict()
    content["model"] |= {"frozen_trunk": True, "views": 2, "pooling": "gmp"}
    content["regularizers"]["distillation"] = {"teacher": str(teacher), "weight": 1000.0}
    return parse_job(content)


def test_a_head_comes_nearer_to_its_teacher(
    tmp_path: Path, weights: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job, listener = distilled(tmp_path / "products", weights, teacher), Silent()
    run_job(job, load_split(job.data), tmp_path / "run", listener)
    found = [step["distillation"] for step in listener.steps]
    assert sum(found[-3:]) < 0.5 * sum(found[:3])
    missing = distilled(tmp_path / "products", weights, tmp_path / "missing")
    with pytest.raises(BundleError, match="missing"):
        run_job(missing, load_split(job.data), tmp_path / "other", listener)
