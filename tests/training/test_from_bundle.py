"""A training that starts from a bundle, and figures of a bundle on other images."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kinlens.embedder.bundle import WEIGHTS, Bundle
from kinlens.embedder.errors import CheckpointError, ExportError, KinlensError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.golden import with_interval
from kinlens.rendered.catalogue import write_catalogue
from kinlens.training.__main__ import app
from kinlens.training.bundles import bundle as bundle_module
from kinlens.training.bundles.bundle import export_backbone, export_checkpoint
from kinlens.training.checkpoint import START, between, load_checkpoint, load_chosen
from kinlens.training.config.job import Job, parse_job
from kinlens.training.config.settings import Input, Model
from kinlens.training.data.load import load_split
from kinlens.training.models.backbones import write_weights
from kinlens.training.models.embedding import Pool, torch_embed
from kinlens.training.runner import run_job
from kinlens.training.start import may_have_seen
from kinlens.training.state import create_run
from kinlens.training.trainer import fit
from tests.training.jobs import TINY_TRUNK, Silent, called, small_job

VIT = "timm:test_vit.r160_in1k"


@pytest.fixture(scope="module")
def bundle(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Of a small job with a flow, one epoch old; as of 0.2, without the file of weights."""
    folder = tmp_path_factory.mktemp("run")
    exported(small_job(folder / "products", weights=weights), folder)
    checkpoint = load_checkpoint(folder)
    split = load_split(parse_job(checkpoint.job).data)
    with mock.patch.object(bundle_module, "folded", lambda net, _: net):  # the exporter folds it
        return export_checkpoint(checkpoint, split, folder / "bundle")


@pytest.fixture(scope="module")
def kept(bundle: Bundle) -> Bundle:
    """The same bundle with its weights."""
    return Bundle.open(bundle.path.with_name("kept"))


def exported(job: Job, folder: Path) -> Bundle:
    """Trained in `folder`, and exported with its weights."""
    split = load_split(job.data)
    fit(job, split, folder, Silent())
    return export_checkpoint(load_checkpoint(folder), split, folder / "kept", keep_weights=True)


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


def test_kept_weights_are_those_of_the_run_and_read_as_from_the_onnx_file(
    bundle: Bundle, kept: Bundle
) -> None:
    trained = load_checkpoint(bundle.path.parent).network()[1].state_dict()
    state = create_run(job_from(kept), classes=3).net.cpu().state_dict()
    assert all(torch.equal(state[name], value) for name, value in trained.items())
    alone = Bundle.open(shutil.copytree(kept.path, bundle.path.with_name("alone")))
    (alone.path / WEIGHTS).unlink()
    folded, *read = (
        create_run(job_from(one, batch_norm="folded"), classes=3).net.cpu().state_dict()
        for one in (kept, alone, bundle)
    )
    for found in read:
        assert folded.keys() == found.keys()
        for name, value in folded.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)
    create_run(job_from(kept, batch_norm="train"), classes=3)


def test_a_transformer_is_continued_from_its_kept_weights(tmp_path: Path) -> None:
    content = small_job(tmp_path / "products", regularized=False).as_dict()
    content["model"] = {"backbone": VIT, "weights": "none", "dim": 16, "pooling": "cls"}
    made = exported(parse_job(content), tmp_path)
    net = create_run(job_from(made), classes=3).net.cpu().eval()
    images = some_images(made)
    assert np.abs(torch_embed(net, images) - OnnxEmbedder.open(made).embed(images)).max() < 1e-4
    (made.path / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"rebuilt from its ONNX file.* --keep-weights"):
        create_run(job_from(made), classes=3)


def test_kept_weights_of_another_network_are_refused(kept: Bundle, tmp_path: Path) -> None:
    copy = Bundle.open(shutil.copytree(kept.path, tmp_path / "copy"))
    net = create_run(job_from(kept), classes=3).net.cpu()
    net.projection.weight.data *= -1
    write_weights(net, copy.path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"from its weights\.safetensors: the golden vectors"):
        create_run(job_from(copy), classes=3)


def test_a_dimension_that_is_not_given_is_that_of_the_trunk_or_the_bundle(
    bundle: Bundle, weights: Path, tmp_path: Path
) -> None:
    assert create_run(job_from(bundle, dim="auto"), classes=3).net.dim == bundle.manifest.dim
    content = small_job(tmp_path / "products", regularized=False, weights=weights).as_dict()
    content["model"]["dim"] = "auto"
    net = create_run(parse_job(content), classes=3).net
    assert net.dim == net.channels == net.projection.weight.shape[0]


def test_runs_and_bundles_of_0_2_with_a_hidden_layer_are_read(
    weights: Path, tmp_path: Path
) -> None:
    content = small_job(tmp_path / "products", weights=weights).as_dict()
    content["model"]["hidden"] = 6
    exported(parse_job(content), tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    checkpoint.job["model"]["dim"] = "auto"
    net = checkpoint.network()[1]
    assert net.projection.inner.weight.shape[0] == 6
    assert net.projection.outer.weight.abs().max() > 0
    checkpoint.job["model"]["dim"] = 16
    with mock.patch.object(bundle_module, "folded", lambda net, _: net):
        split = load_split(parse_job(checkpoint.job).data)
        made = export_checkpoint(checkpoint, split, tmp_path / "bundle", with_map=True)
    images = some_images(made)
    served = OnnxEmbedder.open(made).embed(images)
    begun = create_run(job_from(made), classes=3).net.cpu().eval()
    assert np.abs(torch_embed(net, images) - served).max() < 1e-4
    assert np.abs(torch_embed(begun, images) - served).max() < 1e-4
    with pytest.raises(CheckpointError, match=r"model\.hidden is 6 in the bundle and None"):
        create_run(job_from(made, hidden=None), classes=3)


@pytest.fixture(scope="module")
def trunk(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    model = Model(backbone=TINY_TRUNK, weights=str(weights), pooling="gap")
    spec = Input(size_px=32, resize_px=36)
    return export_backbone("trunk", model, spec, tmp_path_factory.mktemp("trunk") / "bundle")


def test_a_trunk_alone_lends_its_trunk_and_leaves_the_head(trunk: Bundle, tmp_path: Path) -> None:
    job = small_job(tmp_path / "products", weights=trunk.path)
    net = create_run(job, classes=3).net.cpu().eval()
    images = some_images(trunk)
    maps = net.trunk(net.normalize(torch.from_numpy(images)))
    pooled = Pool("gap", 0)(maps).detach().numpy()
    unit = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    assert np.abs(unit - OnnxEmbedder.open(trunk).embed(images)).max() < 1e-3
    assert net.dim == 16


def test_a_bundle_without_a_job_is_evaluated_on_images(trunk: Bundle, tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    write_catalogue(shop, products=3, views=4, size_px=40)
    paths = sorted(path.relative_to(shop) for path in shop.rglob("*.jpg"))
    rows = [f"{path},{path.parent}" for path in paths]
    for name, listed in (("list", rows), ("same", rows[:4])):
        (shop / f"{name}.csv").write_text("path,label\n" + "\n".join(listed))
    for more, message in (
        ((), "--data /my/shop"),
        (("--data", "nowhere"), "nowhere does not exist"),
        (("--data", shop / "same.csv"), "every answer would be right"),
    ):
        with pytest.raises(KinlensError, match=message):
            called("evaluate", trunk.path, *more)
    printed = called("evaluate", trunk.path, "--data", shop, "--json")
    found = json.loads(printed[printed.index("{") :])
    assert found.keys() == {"R@1", "R@2", "R@4", "R@8", "MAP@R"}
    listed = called("evaluate", trunk.path, "--data", shop / "list.csv")
    assert f"R@1 {with_interval(found['R@1'], 12)}" in listed


def test_a_job_of_folds_gives_the_point_between_bundle_and_last_epoch(
    bundle: Bundle, tmp_path: Path
) -> None:
    """Jobs of earlier versions chose by folds; a run that continued a bundle never had any."""
    content = job_from(bundle, dim="auto").as_dict()
    content["protocol"] = {"choose_by": "folds", "folds": 2, "alpha": 0.5}
    content["data"] |= {"root": str(tmp_path / "products"), "products": 10}
    job, folder = parse_job(content), tmp_path / "run"
    assert (job.protocol.choose_by, job.protocol.folds) == ("alpha", None)
    run_job(job, load_split(job.data), folder, Silent())
    checkpoints = load_checkpoint(folder / START), load_checkpoint(folder), load_chosen(folder)
    before, after, found = (one.network()[1].state_dict() for one in checkpoints)
    for name, value in between(before, after, 0.5).items():
        torch.testing.assert_close(found[name], value)


def test_a_bundle_of_another_split_may_have_seen_test_classes(bundle: Bundle) -> None:
    job = job_from(bundle)
    split = load_split(job.data)
    assert not may_have_seen(job, split)
    other = job.data.model_copy(update={"split_seed": 5})
    assert may_have_seen(job, load_split(other))
    fresh = job.model_copy(update={"model": job.model.model_copy(update={"weights": "none"})})
    assert not may_have_seen(fresh, load_split(other))
    run = replace(load_checkpoint(bundle.path.parent), began_with="the model that it continued")
    with pytest.raises(ExportError, match="it has no untrained trunk"):
        export_checkpoint(run, split, bundle.path.with_name("trunk"), trunk=True)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"model": {"dim": 32}}, r"model.dim is 16 in the bundle and 32 in the job"),
        ({"model": {"pooling": "gem"}}, r"model.pooling is 'gap\+gmp' in the bundle and 'gem' in"),
        ({"model": {"backbone": "resnet50"}}, r"model.backbone is '.*:TinyNet' in the bund"),
        ({"model": {"batch_norm": "train"}}, r'Set model.batch_norm to "frozen"'),
        (
            {"regularizers": {"determinant": None}},
            r"regularizers.determinant.flow is .* in the bundle and None",
        ),
    ],
)
def test_what_does_not_fit_is_named(bundle: Bundle, table: dict[str, Any], message: str) -> None:
    content = job_from(bundle).as_dict()
    for name, settings in table.items():
        content[name] |= settings
    with pytest.raises(CheckpointError, match=message):
        create_run(parse_job(content), classes=3)


def test_adapt_says_that_it_leaves_a_trained_model_as_it_is(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_split(small_job(tmp_path / "shop").data.model_copy(update={"products": 10}))
    monkeypatch.setattr("kinlens.training.runner.fit", mock.Mock(side_effect=KeyboardInterrupt))
    command = ["adapt", "--data", str(tmp_path / "shop"), "--out", str(tmp_path / "out")]
    command += ["--run", str(tmp_path / "run"), "--backbone", TINY_TRUNK]
    for setting in ("input={size_px=32,resize_px=36}", "model.batch_norm=frozen"):
        command += ["--set", setting]
    words = "is trained already, and adapt does not change it"
    for more, expected in (([], True), (["--set", "protocol.alpha=0.25"], False)):
        found = CliRunner().invoke(app, [*command, "--weights", str(bundle.path), *more])
        assert (words in found.output.replace("\n", " ")) == expected, found.output
