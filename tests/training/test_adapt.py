"""A head on a frozen trunk, what is kept of its features, and which model is chosen."""

import json
import re
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import CheckpointError
from kinlens.embedder.types import Embeddings, Images
from kinlens.training.__main__ import app
from kinlens.training.bundles.bundle import export_checkpoint
from kinlens.training.checkpoint import BEST, START, between, load_checkpoint, load_chosen
from kinlens.training.config.job import Job, parse_job
from kinlens.training.config.settings import Input, Runtime
from kinlens.training.data.features import FeatureStore, pooled_views
from kinlens.training.data.load import load_split
from kinlens.training.data.records import Split
from kinlens.training.folder import replace_json
from kinlens.training.models.embedding import EmbeddingNet, torch_embed
from kinlens.training.models.from_bundle import new_network
from kinlens.training.runner import run_job
from kinlens.training.start import whiten_within, whitening_helps
from kinlens.training.trainer import fit
from tests.training.jobs import TINY_TRUNK, Silent, Stopping, small_job


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def head_job(root: Path, weights: Path, products: int = 8, **tables: dict[str, object]) -> Job:
    """A head on the frozen trunk of the small job, from a whitening."""
    content = small_job(root, regularized=False, weights=weights, epochs=4, lr_head=1e-2).as_dict()
    content["data"]["products"] = products
    content["model"] |= {"frozen_trunk": True, "views": 2}
    content["start"] = {"projection": "within_class", "proxies": "class_means"}
    content["protocol"] = {"choose_by": "alpha", "evaluate_test": "end"}
    for name, table in tables.items():
        content[name] |= table
    return parse_job(content)


def ran(job: Job, folder: Path) -> tuple[Split, Silent]:
    split, listener = load_split(job.data), Silent()
    run_job(job, split, folder, listener)
    return split, listener


def test_the_trunk_keeps_its_weights_and_its_features_are_computed_once(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = head_job(tmp_path / "products", weights)
    batches: list[int] = []
    pooled = EmbeddingNet.pooled

    def counted(net: EmbeddingNet, images: torch.Tensor) -> torch.Tensor:
        batches.append(len(images))
        return pooled(net, images)

    monkeypatch.setattr(EmbeddingNet, "pooled", counted)
    split, _ = ran(job, tmp_path / "run")
    looked_at = [size for size in batches if size > 1]  # the sizes are checked with one image
    assert sum(looked_at) == 2 * len(split.train) + len(split.test)
    net, fresh = load_checkpoint(tmp_path / "run").network()[1], new_network(job)
    assert not torch.equal(net.projection.weight, fresh.projection.weight)
    for name, value in net.trunk.state_dict().items():
        assert torch.equal(value, fresh.trunk.state_dict()[name])
    batches.clear()
    ran(job.model_copy(update={"seed": 1}), tmp_path / "again")
    assert not [size for size in batches if size > 1]


def test_features_depend_on_content_trunk_and_size_alone(tmp_path: Path, weights: Path) -> None:
    job = head_job(tmp_path / "products", weights)
    images = load_split(job.data).train
    net, store = new_network(job), FeatureStore(tmp_path / "features.sqlite")

    def features(spec: Input = job.input) -> tuple[torch.Tensor, list[int]]:
        """The features, and how many there were after each batch that was computed."""
        made: list[int] = []
        runtime = Runtime(workers=0, device="cpu")
        found = pooled_views(net, images, spec, runtime, 2, store, lambda n, _: made.append(n))
        return found, made

    first, made = features()
    assert made
    assert first.shape == (len(images), 2, net.channels)
    path = images.root / images.paths[0]
    path.rename(path.with_suffix(".old"))
    shutil.copy(path.with_suffix(".old"), path)  # another file of the same content
    again, made = features()
    assert not made
    assert torch.equal(again, first)
    assert features(job.input.model_copy(update={"resize_px": 40}))[1]
    varied, made = features(job.input.model_copy(update={"colour": 0.4}))
    assert made[0] > len(images)  # those as served are at hand
    assert torch.equal(varied[:, 0], first[:, 0])
    assert not torch.isclose(varied[:, 1], first[:, 1]).all(dim=1).any()
    next(net.trunk.parameters()).data.mul_(1.5)
    other, made = features()
    assert made
    assert not torch.equal(other, first)


def test_the_store_of_features_forgets_what_came_first(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path / "features.sqlite", largest=200_000)
    keys = [str(number).encode() for number in range(100)]
    for start in range(0, 100, 10):
        vectors = np.full((10, 1024), start, np.float32)
        store.put(keys[start : start + 10], vectors)
    found = store.get(keys)
    assert keys[0] not in found
    assert set(keys[90:]) <= found.keys()
    assert 20 <= len(found) <= 50
    assert (found[keys[99]] == 90).all()


def test_a_stopped_head_resumes_as_if_never_stopped(tmp_path: Path, weights: Path) -> None:
    job = head_job(tmp_path / "products", weights, protocol={"choose_by": "last"})
    split = load_split(job.data)
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole = fit(job, split, tmp_path / "whole", Silent())
    with pytest.raises(KeyboardInterrupt):
        fit(job, split, tmp_path / "stopped", Stopping(7))
    rest = fit(job, split, tmp_path / "stopped", Silent(), resume=True)
    assert [one.loss for one in rest] == [one.loss for one in whole]


def test_the_model_is_a_point_between_start_and_last_epoch(tmp_path: Path, weights: Path) -> None:
    job, folder = head_job(tmp_path / "products", weights), tmp_path / "run"
    same = {"split_sha256": load_split(job.data).sha256(), "job": small_job(tmp_path).as_dict()}
    known = {"figures": {"R@1": 99.6, "MAP@R": 98.7}, "validation": {}, "best_epoch": 1}
    result = {**same, **known, "chosen_by": "folds", "seconds_per_epoch": 1.0}
    replace_json(tmp_path / "other" / "result.json", result)  # of version 0.2
    replace_json(tmp_path / "elsewhere" / "result.json", result | {"split_sha256": "f00"})
    replace_json(tmp_path / "broken" / "result.json", [])
    _, listener = ran(job, folder)
    report = (folder / "report.md").read_text()
    first, second = (x for x in report.splitlines() if "| a trained" in x)
    assert first == "| [other](../other/report.md) | a trained network | 99.6 | 98.7 |"
    assert second.startswith("| **run** | a trained head |")
    assert "in the order of their time. Do not choose one by its test figures" in report
    name, files = "projection.weight", (folder / START, folder, folder / BEST)
    start, last, chosen = (load_checkpoint(file).network()[1].state_dict() for file in files)
    torch.testing.assert_close(chosen[name], 0.75 * start[name] + 0.25 * last[name])
    assert torch.equal(between(start, last, 0.0)[name], start[name])
    assert torch.equal(between(start, last, 1.0)[name], last[name])
    other = head_job(tmp_path / "products", weights, optimizer={"lr_head": 1e-3})
    with pytest.raises(CheckpointError, match=r"lr_head = 0.01, now 0.001"):
        ran(other, folder)
    again = head_job(tmp_path / "products", weights, protocol={"alpha": 1.0})
    _, listener = ran(again.model_copy(update={"recall_at": (1, 2)}), folder)
    assert listener.steps == []
    torch.testing.assert_close(load_chosen(folder).network()[1].state_dict()[name], last[name])


def test_a_shop_too_small_to_choose_gets_the_trunk(tmp_path: Path, weights: Path) -> None:
    job = head_job(tmp_path / "products", weights, products=6)
    split, listener = ran(job, tmp_path / "run")
    assert split.train.classes == 3
    assert listener.steps == []
    too_few = "There are 6 classes, 3 of them to train on: too few"
    assert any(too_few in sentence for sentence in listener.sentences)
    assert "too few" in (tmp_path / "run" / "report.md").read_text()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["figures"]["R@1"] == result["trunk"]["R@1"]
    bundle = export_checkpoint(load_chosen(tmp_path / "run"), split, tmp_path / "bundle")
    assert bundle.manifest.dim == new_network(job).channels


def test_the_whitening_shrinks_the_directions_in_which_a_class_varies() -> None:
    torch.manual_seed(0)
    labels = np.repeat(np.arange(20), 15)
    noise = torch.randn(300, 12) * torch.tensor([10.0, *[0.5] * 11])
    pooled = torch.randn(20, 12)[torch.from_numpy(labels)] + noise
    layer = nn.Linear(12, 12).requires_grad_(False)
    length = layer.weight.norm().item()
    whiten_within(layer, pooled, labels)
    assert layer.weight.norm().item() == pytest.approx(length, rel=1e-5)
    torch.testing.assert_close(layer(pooled).mean(0), torch.zeros(12), atol=1e-4, rtol=0)
    # A covariance by hand: the maps of two points differ by (S / s + 3)^(-1/2), up to a rotation.
    x = pooled.double()
    residuals = x - torch.stack([x[labels == c].mean(0) for c in range(20)])[labels]
    within = residuals.T @ residuals / len(x)
    scaled = within / within.diagonal().mean() + 3 * torch.eye(12).double()
    steps = x[:40:2] - x[1:40:2]
    expected = (steps @ torch.linalg.inv(scaled) * steps).sum(1)
    found = (steps @ layer.weight.double().T).square().sum(1)
    torch.testing.assert_close(found / found[0], expected / expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("nuisance", "helps"), [(10.0, True), (0.5, False)])
def test_a_whitening_is_taken_only_if_it_helps_other_classes(nuisance: float, helps: bool) -> None:
    """In one direction images of a class differ by `nuisance`; in the others all differ alike."""
    torch.manual_seed(0)
    labels = np.repeat(np.arange(40), 6)
    noise = torch.randn(240, 12) * torch.tensor([nuisance, *[0.5] * 11])
    pooled = torch.randn(40, 12)[torch.from_numpy(labels)] + noise
    assert whitening_helps(pooled, labels, seed=0) == helps
    few = labels < 3
    assert not whitening_helps(pooled[few], labels[few], seed=0)


@pytest.mark.parametrize("helps", [True, False])
def test_without_a_proof_the_model_is_the_trunk_itself(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch, helps: bool
) -> None:
    monkeypatch.setattr("kinlens.training.start.whitening_helps", lambda *_, **__: helps)
    start = {"projection": "proven"}
    job = head_job(tmp_path / "products", weights, start=start, protocol={"alpha": 0.0})
    split, listener = ran(job, tmp_path / "run")
    assert listener.steps == []
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["figures"]["MAP@R"] == result["trunk"]["MAP@R"]) == (not helps)
    assert any("no whitening is better" in x for x in listener.sentences) == (not helps)
    _, listener = ran(job, tmp_path / "run")
    assert listener.steps == []
    embedded: list[int] = []

    def counted(net: nn.Module, images: Images) -> Embeddings:
        embedded.append(len(images))
        return torch_embed(net, images)

    monkeypatch.setattr("kinlens.training.bundles.bundle.torch_embed", counted)
    bundle = export_checkpoint(load_chosen(tmp_path / "run"), split, tmp_path / "bundle")
    assert bundle.manifest.dim == (16 if helps else new_network(job).channels)
    assert embedded == [len(bundle.golden_inputs())], "the features of the photos are known"
    assert bundle.manifest.parity is not None
    assert bundle.manifest.parity.recall_at_1_torch == pytest.approx(result["figures"]["R@1"])


@pytest.mark.parametrize(
    ("dim", "named"), [(16, "the trunk with a random head"), (None, "the trunk itself")]
)
def test_a_head_that_nothing_has_set_is_no_whitening(
    tmp_path: Path, weights: Path, dim: int | None, named: str
) -> None:
    start = {"projection": "random", "proxies": "random"}
    protocol, model = {"alpha": 0.0}, {"dim": dim, "frozen_trunk": dim is not None}
    job = head_job(tmp_path / "products", weights, start=start, protocol=protocol, model=model)
    ran(job, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["model"] == named


def adapt_command(shop: Path, out: Path, run: Path, weights: Path) -> list[str]:
    command = ["adapt", "--data", str(shop), "--out", str(out), "--run", str(run), "--map"]
    command += ["--backbone", TINY_TRUNK, "--weights", str(weights)]
    for setting in (
        "input={size_px=32,resize_px=36}", "model.dim=16", "model.batch_norm=frozen",
        "runtime={workers=0,device='cpu'}",
    ):  # fmt: skip
        command += ["--set", setting]
    return command


def test_a_run_that_trains_nothing_leaves_the_folder_of_the_user_as_it_was(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, run = tmp_path / "shop", tmp_path / "run"
    load_split(small_job(shop).data.model_copy(update={"products": 10}))
    earlier = run / "earlier" / "report.md"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("of another run")
    failing = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("kinlens.training.runner.fit", failing)
    for _ in range(2):
        command = adapt_command(shop, tmp_path / "bundle", run, weights)
        assert CliRunner().invoke(app, command).exit_code == 130
        assert list(run.rglob("*")) == [earlier.parent, earlier]
    assert failing.call_count == 2


def test_one_command_makes_a_bundle_and_goes_on_where_it_was_stopped(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, out, run = tmp_path / "my shop", tmp_path / "bundle", tmp_path / "run"
    weights = Path(shutil.copy(weights, tmp_path))
    load_split(small_job(shop).data.model_copy(update={"products": 10}))
    damaged = next(shop.glob("p000*")) / "damaged.jpg"
    damaged.write_bytes(b"no image")
    command = adapt_command(shop, out, run, weights)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kinlens.training.runner.fit", stopped)
        assert CliRunner().invoke(app, command).exit_code == 130
    assert not run.exists(), "nothing was trained"
    with monkeypatch.context() as patch:
        patch.setattr("kinlens.training.runner.write_chosen", stopped)
        begun = CliRunner().invoke(app, [*command, "--verbose"])
    assert begun.exit_code != 0
    with pytest.raises(CheckpointError, match="is not finished"):
        load_chosen(run)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert not re.search("fold|trunk|alpha|R@1|loss|epoch", done.output), (
        "the words of a laboratory"
    )
    assert f"Next: kinlens-index build '{shop}' --bundle {out} --out galleries/my-shop" in lines
    assert sum(" photos of 10 products" in line for line in lines) == 1
    line = f"1 image(s) are missing or damaged, and skipped: {damaged.relative_to(shop)}: "
    assert all(line in output for output in (begun.output, done.output))
    assert (run / "skipped.txt").read_text().startswith(f"{damaged.relative_to(shop)}: The file is")
    report = (run / "report.md").read_text(encoding="utf-8")
    assert "- 1 unreadable images are skipped; `skipped.txt` lists all" in report
    bundle = Bundle.open(out)
    assert bundle.manifest.map is not None
    assert bundle.manifest.dim in (16, 96)
    assert (run / BEST).is_file()
    assert "exists already" in str(CliRunner().invoke(app, command).exception)
    command[command.index(str(out))] = str(tmp_path / "other")
    content = weights.read_bytes()
    weights.write_bytes(content + b"0")  # a file of other weights under the same name
    assert "Give another --run" in str(CliRunner().invoke(app, command).exception)
    weights.write_bytes(content)
    first = sorted(p for p in shop.glob("*/*.*") if p.is_file())[0]
    first.with_name(f"another{first.suffix}").write_bytes(first.read_bytes())
    found = CliRunner().invoke(app, [*command, "--set", "optimizer.epochs=9"])
    assert "No effect: optimizer.epochs, since adapt trains nothing" in found.output
    assert "1 image(s) are copies within their class" in found.output.replace("\n", " ")
    assert "Give another --run" in str(found.exception)


def test_without_a_test_no_answers_are_counted(tmp_path: Path, weights: Path) -> None:
    shop, out = tmp_path / "shop", tmp_path / "bundle"
    load_split(small_job(shop).data.model_copy(update={"products": 10}))
    command = adapt_command(shop, out, tmp_path / "run", weights)
    command.remove("--map")
    found = CliRunner().invoke(app, [*command, "--set", "protocol.evaluate_test=never"])
    assert found.exit_code == 0, found.output
    assert "The result was not tested" in found.output
    assert "of 100 photos" not in found.output
