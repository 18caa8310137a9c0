import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kinlens.training.checkpoint import load_checkpoint, load_chosen
from kinlens.training.config.job import Job, parse_job
from kinlens.training.data.load import load_split
from kinlens.training.data.records import with_protocol
from kinlens.training.evaluation.evaluate import pooled
from kinlens.training.evaluation.retrieval import GAIN, retrieval
from kinlens.training.folder import Result
from kinlens.training.report.notices import verdict_of
from kinlens.training.runner import run_job
from kinlens.training.start import WHITENING, set_projection, set_proxies
from kinlens.training.state import create_run
from kinlens.training.terms import build_loss
from tests.training.jobs import Silent, small_job, step_job


def started(job: Job, **protocol: object) -> Job:
    content = job.as_dict()
    content["start"] = {"projection": "trunk", "proxies": "class_means"}
    content["protocol"] |= protocol
    return parse_job(content)


def test_the_projection_gives_uncorrelated_numbers_that_are_partly_whitened() -> None:
    torch.manual_seed(0)
    pooled = torch.randn(500, 12) @ torch.randn(12, 12) + 3
    layer = nn.Linear(12, 5)
    length = layer.weight.norm().item()
    set_projection(layer, pooled)
    y = layer(pooled).double()
    torch.testing.assert_close(y.mean(0), torch.zeros(5).double(), atol=1e-4, rtol=0)
    covariance = torch.cov(pooled.double().T, correction=0)
    variances = torch.linalg.eigvalsh(covariance).flip(0)[:5]
    floored = variances.clamp(min=0.1 * covariance.trace() / 12)
    expected = torch.diag(variances / floored ** (2 * WHITENING))
    found = torch.cov(y.T, correction=0)
    torch.testing.assert_close(found / found[0, 0], expected / expected[0, 0], atol=1e-4, rtol=1e-4)
    assert layer.weight.norm().item() == pytest.approx(length, rel=1e-5)
    wide = nn.Linear(12, 14)
    set_projection(wide, pooled)
    assert not wide(pooled)[:, 12:].any()  # directions beyond those of the trunk


@pytest.mark.parametrize("centres", [1, 3])
def test_proxies_start_at_the_class_means_or_around_them(centres: int) -> None:
    loss = {"name": "soft_triple", "centres_per_class": centres}
    criterion = build_loss(step_job({}, loss=loss).loss, 3, 8)
    before, labels_of = criterion.proxies.detach().clone(), criterion.centre_labels()
    embeddings = F.normalize(torch.randn(20, 8), dim=1)
    labels = np.arange(20) % 2  # class 2 is not seen
    set_proxies(criterion, embeddings, labels)
    torch.testing.assert_close(criterion.proxies.norm(dim=1), before.norm(dim=1))
    assert torch.equal(criterion.proxies[labels_of == 2], before[labels_of == 2])
    for label in (0, 1):
        mean = F.normalize(embeddings[labels == label].mean(0), dim=0)
        drawn = F.normalize(before[labels_of == label], dim=1) if centres > 1 else 0
        expected = F.normalize(mean + drawn, dim=-1).expand(centres, 8)
        torch.testing.assert_close(criterion.centres()[labels_of == label], expected)


def test_the_untrained_trunk_is_measured_as_served(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_WEIGHTS", str(weights.parent))
    content = small_job(tmp_path / "products", regularized=False).as_dict()
    content["model"] |= {"weights": "$SOME_WEIGHTS/weights.pth", "batch_norm": "frozen"}
    job = started(parse_job(content))
    split, listener = load_split(job.data), Silent()
    result = run_job(job, split, tmp_path / "run", listener)
    net = create_run(job, split.train.classes).net
    vectors = F.normalize(pooled(net, split.test, job), dim=1)
    assert result.trunk["R@1"] == retrieval(vectors, split.test.labels).recall[1]
    assert any("the untrained trunk" in sentence for sentence in listener.sentences)
    assert "the untrained trunk" in (tmp_path / "run" / "report.md").read_text()


def test_a_training_without_effect_has_no_gain(tmp_path: Path, weights: Path) -> None:
    """Without a step that moves weights the answers of the trunk stay, query by query."""
    rates = {"lr_trunk": 1e-12, "lr_head": 1e-12}
    job = small_job(tmp_path / "products", regularized=False, weights=weights, **rates)
    content = started(job).as_dict()
    content["model"] |= {"dim": 64}
    job, listener = parse_job(content), Silent()
    result = run_job(job, load_split(job.data), tmp_path / "run", listener)
    assert result.verdict.startswith("No gain")
    assert "To take no risk, export the trunk itself" in result.verdict
    assert result.figures["gain low"] <= 0 <= result.figures["gain high"]
    report = (tmp_path / "run" / "report.md").read_text()
    stored = json.loads((tmp_path / "run" / "result.json").read_text())["verdict"]
    assert result.verdict == listener.sentences[-1] == stored
    assert result.verdict in report
    assert "95 % interval" in report


@pytest.mark.parametrize(
    ("interval", "word"),
    [((1.0, 9.0), "Gain"), ((-2.0, 12.0), "No gain"), ((-9.0, -1.0), "Worse"), (None, "Gain")],
)
def test_a_gain_needs_its_whole_interval(interval: tuple[float, float] | None, word: str) -> None:
    change = 5.0 if interval is None else sum(interval) / 2
    found = {"R@1": 50.0 + change} | dict(zip(GAIN, interval or (), strict=False))
    result = Result({}, found, {}, 1, "last", 1.0, trunk={"R@1": 50.0})
    assert verdict_of(result, Path("run")).startswith(word)


def test_a_harmful_training_is_recognised(tmp_path: Path, weights: Path) -> None:
    job = small_job(tmp_path / "products", regularized=False, weights=weights, lr_trunk=0.1)
    content = started(job, validation_fraction=0.5, choose_by="validation").as_dict()
    content["data"]["products"] = 12
    job = parse_job(content)
    split = with_protocol(load_split(job.data), job.protocol)
    result = run_job(job, split, tmp_path / "run", Silent())
    (trained,) = load_checkpoint(tmp_path / "run").history
    assert trained.figures.validation["R@1"] < result.validation["R@1"]
    assert result.best_epoch == load_chosen(tmp_path / "run").epoch == 0


def test_the_average_is_that_of_the_weights_and_is_what_a_checkpoint_gives(tmp_path: Path) -> None:
    job = small_job(tmp_path / "products", average=0.5)
    run = create_run(job, 3)
    assert run.average is not None
    name, parameter = next(iter(run.net.named_parameters()))
    expected = parameter.detach().clone()
    for count in range(4):
        with torch.no_grad():
            parameter.add_(1.0)
        run.average.update(run.net)
        decay = 0.0 if count == 0 else min(0.5, (1 + count) / (10 + count))
        expected = decay * expected + (1 - decay) * parameter.detach()
    torch.testing.assert_close(dict(run.served.named_parameters())[name], expected)
    split = load_split(job.data)
    _, net = run.checkpoint(split).network()
    torch.testing.assert_close(dict(net.named_parameters())[name], expected)
