"""A user's own loss, miner, sampler, regularizer, augmentation and backbone, by import path."""

import sys
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kinlens.embedder.bundle import WEIGHTS
from kinlens.embedder.errors import CheckpointError, EvaluationError, JobError
from kinlens.training import (
    Callback,
    MlflowCallback,
    Regularizer,
    WandbCallback,
    evaluate,
    export,
    fit,
    load_job,
)
from kinlens.training.evaluation.structure import require_distinct
from kinlens.training.library.sources import job_of
from kinlens.training.parts.own import register, source_sha256
from tests.training.jobs import small_job

ROOT = Path(__file__).parents[2]

PARTS = '''
import numpy as np
import torch
from PIL import ImageOps
from torch import nn
from torch.nn import functional as F

from kinlens.training import Regularizer, Triplets, semi_hard


class NormFace(nn.Module):
    """Softmax over cosines with learnt centres.

    Args:
        scale: sharpness.
    """

    def __init__(self, classes, dim, scale: float = 16.0):
        super().__init__()
        self.scale = scale
        self.centres = nn.Parameter(torch.randn(classes, dim))

    def forward(self, embeddings, labels):
        cosines = embeddings @ F.normalize(self.centres, dim=1).T
        return F.cross_entropy(self.scale * cosines, labels)


class Spread(Regularizer):
    def __init__(self, weight: float = 0.1):
        super().__init__()
        self.weight = weight

    def forward(self, embeddings, labels, loss):
        return (embeddings @ embeddings.T).mean()


def mined(similarities, labels):
    found = semi_hard(similarities, labels)
    return Triplets(found.mined, found.negative)


def in_order(labels, batch_size, rng):
    return rng.permutation(len(labels))[: len(labels) // batch_size * batch_size].reshape(
        -1, batch_size
    )


def grey(view, rng):
    return ImageOps.grayscale(view).convert("RGB") if rng.random() < 0.5 else view


class Tiny(nn.Module):
    channels = 6

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Conv2d(3, 6, 8, stride=8)

    def forward(self, images):
        return self.layer(images).relu()
'''


def own_job(folder: Path, **changes: Any) -> dict[str, Any]:
    """A job whose parts are all in `folder`/parts.py, on rendered products."""
    (folder / "parts.py").write_text(PARTS)
    content = small_job(folder / "products", regularized=False).as_dict()
    part = lambda name: f"{folder}/parts.py:{name}"
    content["loss"] = {"name": part("NormFace"), "scale": 8.0}
    content["regularizers"]["own"] = {"spread": {"name": part("Spread"), "weight": 0.5}}
    content["sampling"]["kind"] = part("in_order")
    content["input"]["augment"] = part("grey")
    content["model"] |= {"backbone": part("Tiny"), "pooling": "gap"}
    for table, values in changes.items():
        content[table] |= values
    return content


class Seen(Callback):
    def __init__(self) -> None:
        self.parts: list[dict[str, float]] = []

    def step_done(self, parts: dict[str, float]) -> None:
        self.parts.append(parts)


def test_every_part_of_a_job_may_be_a_file_of_the_user(tmp_path: Path) -> None:
    run, seen = tmp_path / "run", Seen()
    result = fit(own_job(tmp_path), out=run, callbacks=[seen])
    assert seen.parts
    assert all(part["spread"] != 0 for part in seen.parts)
    assert evaluate(run)["R@1"] == result.figures["R@1"]
    bundle = export(run, tmp_path / "bundle", keep_weights=True)
    assert evaluate(tmp_path / "bundle")["R@1"] == pytest.approx(result.figures["R@1"], abs=0.1)
    assert (bundle.path / WEIGHTS).is_file()


def test_a_run_continues_with_the_source_that_it_began_with_alone(tmp_path: Path) -> None:
    job, run = own_job(tmp_path, model={"backbone": "timm:test_resnet"}), tmp_path / "run"
    fit(job, out=run)
    again = fit(job, out=run, resume=True)
    assert again.best_epoch == 1
    file, other = tmp_path / "parts.py", PARTS.replace("self.scale *", "2 * self.scale *")

    class Editing(Callback):
        def step_done(self, parts: dict[str, float]) -> None:
            file.write_text(other)

    fit(job, out=tmp_path / "edited", callbacks=[Editing()])
    with pytest.raises(CheckpointError, match=r"another source of .*parts.py:NormFace"):
        fit(job, out=tmp_path / "edited", resume=True)
    with pytest.raises(CheckpointError, match=r"another source of .*parts.py:NormFace"):
        fit(job, out=run, resume=True)
    assert evaluate(run)["R@1"] == again.figures["R@1"]  # the loss is not of the model


class Margin(nn.Module):
    def __init__(self, margin: float, options: Any = None) -> None:
        super().__init__()
        self.margin = margin
        self.options = options

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return (embeddings[labels == labels[0]] - self.margin).square().sum()


def test_a_run_continues_with_the_options_of_its_loss_alone(tmp_path: Path) -> None:
    job, run = own_job(tmp_path), tmp_path / "run"
    fit(job, out=run, loss=Margin(0.5))
    fit(job, out=run, loss=Margin(0.5), resume=True)
    with pytest.raises(CheckpointError, match=r":Margin, or with other options"):
        fit(job, out=run, loss=Margin(0.6), resume=True)


@pytest.mark.parametrize(
    "options",
    [lambda n: [n], lambda n: {"a": (n,)}, lambda n: torch.full((2000,), n), lambda n: {n}],
)
def test_options_in_containers_are_part_of_the_source(options: Any) -> None:
    def source(n: float) -> str:
        return source_sha256(register(Margin(0.5, options(n))))

    assert source(1.0) == source(1.0) != source(2.0)


def test_the_next_run_imports_an_edited_file_and_takes_other_images(tmp_path: Path) -> None:
    job = own_job(tmp_path)
    fit(job, out=tmp_path / "first")
    (tmp_path / "parts.py").write_text(PARTS.replace("class Spread", "class Other"))
    with pytest.raises(JobError, match="Spread cannot be imported"):
        fit(job, out=tmp_path / "second")
    del job["regularizers"]
    products = job.pop("data")["root"]  # rendered by the first run
    result = fit(job, products, out=tmp_path / "third")
    assert result.job["data"]["root"] == products


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": {"scales": 2.0}}, "loss.scales: unknown key"),
        ({"loss": {"scale": "high"}}, "loss.scale = 'high'"),
        ({"loss": {"name": "nowhere.losses:NormFace"}}, "cannot be imported.*name the file"),
        ({"start": {"proxies": "class_means"}}, "has no proxies"),
    ],
)
def test_options_of_an_own_part_are_checked_before_the_training(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        load_job(own_job(tmp_path, **change))


def test_a_miner_of_the_user_selects_the_triplets(tmp_path: Path) -> None:
    from kinlens.training import TripletLoss

    own_job(tmp_path)
    vectors = nn.functional.normalize(torch.randn(8, 4, generator=torch.manual_seed(0)), dim=1)
    labels = torch.arange(8) // 2
    by_path = TripletLoss(mining=f"{tmp_path}/parts.py:mined")(vectors, labels)
    assert torch.equal(by_path, TripletLoss(mining="semi_hard")(vectors, labels))


@pytest.mark.parametrize(
    ("package", "tracker", "file"),
    [
        ("mlflow", MlflowCallback, "runs/*/*/metrics/test R_at_1"),
        ("wandb", WandbCallback, "wandb/offline-run-*/*.wandb"),
    ],
)
def test_a_tracker_of_another_package_gets_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, tracker: Any, file: str
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    job = small_job(tmp_path / "products", regularized=False)
    result = fit(job, out=tmp_path / "run", callbacks=[tracker()])
    [written] = tmp_path.glob(file)
    assert written.stat().st_size
    if package == "mlflow":
        assert float(written.read_text().split()[1]) == pytest.approx(result.figures["R@1"])


class Interrupting(Callback):
    def __init__(self) -> None:
        self.ends: list[str] = []

    def step_done(self, parts: dict[str, float]) -> None:
        raise KeyboardInterrupt

    def finished(self, result: Any) -> None:
        self.ends.append("finished")

    def stopped(self) -> None:
        self.ends.append("stopped")


def test_a_tracked_run_ends_with_its_training_also_if_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of a tracker that stays open would refuse the next one, or take its figures."""
    job, tracked = small_job(tmp_path / "products", regularized=False), mock.Mock()
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, getattr(tracked, name))
    interrupting = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        fit(job, out=tmp_path / "a", callbacks=[MlflowCallback(), WandbCallback(), interrupting])
    assert interrupting.ends == ["stopped"]
    tracked.mlflow.end_run.assert_called_once_with("FAILED")
    tracked.wandb.init.return_value.finish.assert_called_once_with(exit_code=1)


def test_a_tracker_that_fails_keeps_neither_its_error_back_nor_the_others_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, tracked = small_job(tmp_path / "products", regularized=False), mock.Mock()
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, getattr(tracked, name))
    tracked.mlflow.log_metrics.side_effect = OSError("the server is gone")
    tracked.mlflow.end_run.side_effect = OSError("still gone")
    with pytest.raises(OSError, match="the server is gone"):
        fit(job, out=tmp_path / "a", callbacks=[MlflowCallback(), WandbCallback()])
    tracked.wandb.init.return_value.finish.assert_called_once_with(exit_code=1)
    assert "MlflowCallback could not end its run: still gone" in capsys.readouterr().err


class Bare(nn.Module):
    """Has no constructor of its own."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        del labels
        return embeddings.square().sum()


class WithFlow(Regularizer):
    needs: ClassVar = {"flow": ""}


def test_what_an_own_part_may_ask_for(tmp_path: Path) -> None:
    """A constructor is not needed; a flow is refused, since no term but ours is called with it."""
    content = load_job(own_job(tmp_path)).as_dict()
    assert load_job({**content, "loss": {"name": register(Bare)}}).loss.name.endswith(":Bare")
    content["regularizers"] = {"own": {"mine": {"name": register(WithFlow)}}}
    with pytest.raises(JobError, match="needs a flow"):
        load_job(content)


def test_an_override_may_idle_what_a_file_says_but_not_be_idle(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('base = "shop"\n[optimizer]\ngamma = 0.9\nschedule = "step"\n')
    assert job_of(file, ["optimizer.schedule=constant"]).optimizer.schedule == "constant"
    with pytest.raises(JobError, match=r"optimizer\.gamma = 0\.8 has no effect here"):
        job_of(file, ["optimizer.schedule=constant", "optimizer.gamma=0.8"])


def test_settings_of_a_training_are_named_where_nothing_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.toml"
    file.write_text('base = "adapt"\n[optimizer]\nepochs = 40\n')
    for source, override, name in (
        (file, [], "optimizer.epochs"),
        ("adapt", ["loss.margin=0.2"], "loss.margin"),
    ):
        job_of(source, override)
        assert f"No effect: {name}, since adapt trains nothing" in capsys.readouterr().err
    assert job_of(file, ["protocol.alpha=0.25"]).optimizer.epochs == 40
    assert job_of("shop", ["protocol.alpha=0"]).optimizer.epochs == 5
    assert job_of("adapt").protocol.alpha == 0
    assert "No effect" not in capsys.readouterr().err


class Remembering(nn.Module):
    def __init__(self, classes: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(classes, dim))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return (embeddings - self.get_buffer("means")[labels]).square().sum()


def test_vectors_that_are_not_learnt_cannot_be_cut(tmp_path: Path) -> None:
    content = small_job(tmp_path / "products", regularized=False).as_dict()
    content["loss"] = {"name": register(Remembering), "matryoshka": [4]}
    with pytest.raises(JobError, match="Remembering keeps vectors of all 16 numbers in a buffer"):
        fit(content, out=tmp_path / "run")


class Collapsing(nn.Module):
    """Pulls all embeddings to one point, whatever their class."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return 1e4 * (embeddings - embeddings.new_tensor([1.0] + [0.0] * 15)).square().sum()


def test_a_collapsed_model_ends_its_run_and_is_not_exported(tmp_path: Path) -> None:
    job = small_job(tmp_path / "products", regularized=False, epochs=2, kind="adam").as_dict()
    job["optimizer"] |= {"lr_trunk": 0.0, "lr_head": 0.0}
    run = tmp_path / "run"
    fit(job, out=run, loss=Collapsing())
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    state["net"]["projection.weight"].zero_()
    state["net"]["projection.bias"].fill_(1.0)
    torch.save(state, run / "checkpoint.pt")
    for use in (evaluate, lambda run: export(run, tmp_path / "bundle")):
        with pytest.raises(EvaluationError, match="All embeddings are equal"):
            use(run)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("points", [2, 10])
def test_a_collapse_to_a_few_points_is_a_collapse(points: int) -> None:
    labels = np.arange(400) % 50
    vectors, noise = torch.randn(2, 400, 16, generator=torch.manual_seed(0))
    few = nn.functional.normalize(vectors[labels % points] + 1e-4 * noise, dim=1)
    with pytest.raises(EvaluationError, match=f"of 50 classes are only {points} different points"):
        require_distinct(few, labels)


@pytest.mark.parametrize("spread", [0.02, 0.01, 0.005])
def test_tight_classes_in_two_distant_groups_are_no_collapse(spread: float) -> None:
    labels = np.arange(600) // 2
    noise, centres = torch.randn(2, 600, 64, generator=torch.manual_seed(0))
    group = torch.ones(64) * (1 - 2 * (torch.arange(300) % 2))[:, None]
    found = (group + spread * centres[:300])[labels] + 0.1 * spread * noise
    found = nn.functional.normalize(found, dim=1)
    scores = (found.double() @ found.double().T).fill_diagonal_(-1)
    assert (labels[scores.argmax(dim=1)] == labels).all()  # R@1 is 1
    require_distinct(found, labels)


@pytest.mark.parametrize("classes", [2, 3, 10, 50])
def test_good_and_untrained_models_are_no_collapse(classes: int) -> None:
    labels = np.arange(400) % classes
    vectors, noise = torch.randn(2, 400, 16, generator=torch.manual_seed(0))
    perfect = vectors[labels]  # one point for each class
    half = vectors[(labels + 1) // 2]  # two classes that share all images
    untrained = 1 + 0.02 * noise  # almost one direction
    for found in (perfect, half, untrained):
        require_distinct(nn.functional.normalize(found, dim=1), labels)


def test_the_example_of_the_documentation_trains_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs/own-loss.md").read_text(encoding="utf-8")
    losses, script = (part.partition("\n```")[0] for part in text.split("```python\n")[1:3])
    (tmp_path / "losses.py").write_text(losses)
    job = small_job(tmp_path / "products", regularized=False)
    fit(job, out=tmp_path / "first")  # renders the products
    tables = {name: job.as_dict()[name] for name in ("model", "input", "optimizer", "runtime")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(script, {"SETTINGS": tables})
    assert (tmp_path / "bundles/own/manifest.json").is_file()
