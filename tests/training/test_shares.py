import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kinlens.training.config.job import Job, parse_job
from kinlens.training.data.load import load_split
from kinlens.training.regularizers.shares import WIDEST, Shares, gradient_norms
from kinlens.training.report.notices import after_epoch
from kinlens.training.state import create_run
from kinlens.training.trainer import fit
from tests.training.jobs import Silent, small_job

EPOCH = 45


class Toy:
    """A point between two wells: a loss, and a penalty whose gradient is 1,000 times smaller."""

    def __init__(self, share: float | None, strength: float = 1e-3) -> None:
        torch.manual_seed(0)
        self.point = nn.Parameter(torch.randn(8))
        self.shares = Shares({"pull": share})
        self.shares.calibration_steps = EPOCH
        self.strength = strength

    def terms(self) -> tuple[Tensor, Tensor]:
        return (self.point - 1).square().sum(), self.strength * (self.point + 1).square().sum()

    def train(self, steps: int = EPOCH) -> "Toy":
        for _ in range(steps):
            loss, penalty = self.terms()
            if self.shares.is_due():
                self.shares.measure(loss, {"pull": penalty}, self.point, {})
            total = loss + self.shares.scaled({"pull": penalty})["pull"]
            (gradient,) = torch.autograd.grad(total, [self.point])
            with torch.no_grad():
                self.point -= 0.005 * gradient
        return self

    @property
    def scale(self) -> float:
        return self.shares.terms["pull"].scale

    def share(self) -> float:
        loss, penalty = self.terms()
        (own,), (of_loss,) = (gradient_norms(x, [[self.point]]) for x in (penalty, loss))
        return self.scale * own / of_loss


@pytest.mark.parametrize("wanted", [0.02, 0.05])
def test_a_calibration_reaches_its_share_and_holds_the_scale(wanted: float) -> None:
    toy = Toy(wanted).train()
    assert toy.share() == pytest.approx(wanted, rel=0.2)
    held = toy.scale
    assert toy.train(3 * EPOCH).scale == held


def test_a_gradient_that_all_but_vanishes_gives_a_bounded_scale() -> None:
    assert Toy(0.2, strength=1e-12).train().scale == pytest.approx(WIDEST)


def test_a_penalty_that_is_far_too_strong_is_scaled_down_at_its_first_measurement() -> None:
    toy = Toy(0.2, strength=3.0).train(steps=3)
    assert toy.scale < 0.5
    assert toy.train().share() == pytest.approx(0.2, rel=0.2)


def test_without_a_gradient_the_scale_waits_and_the_share_is_zero() -> None:
    toy = Toy(0.2, strength=0.0).train()
    assert toy.shares.figures() == {"share pull": 0.0, "scale pull": 1.0}
    toy.strength = 1e-3  # it begins to act, as a flow that was fitted first does
    assert toy.train().scale > 1


def test_a_fixed_weight_is_measured_and_never_scaled() -> None:
    toy = Toy(None).train()
    assert toy.scale == 1.0
    assert toy.shares.figures()["share pull"] == pytest.approx(toy.share(), rel=0.2)


def test_the_norm_of_a_term_without_a_gradient_there_is_zero() -> None:
    x, y = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    assert gradient_norms(x.sum(), [[y]]) == [0]
    assert gradient_norms(torch.zeros(()), [[y], [x]]) == [0, 0]
    both = gradient_norms(3 * x.sum() + 4 * y.sum(), [[x, y], [y]])
    assert both == pytest.approx([(3 * 25) ** 0.5, 4 * 3**0.5])


def with_share(job: Job, share: float | None) -> Job:
    content = job.as_dict()
    content["regularizers"]["determinant"]["share"] = share
    return parse_job(content)


def test_measuring_changes_nothing_in_a_step(tmp_path: Path) -> None:
    """A share of a term at the size that its fixed weight has anyway trains the same weights."""
    job = small_job(tmp_path / "products")
    states = []
    for every in (1, 10**9):
        torch.manual_seed(0)
        run = create_run(job, 3)
        run.objective.shares.is_due = lambda every=every: every == 1  # type: ignore[method-assign]
        images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
        terms = run.begin_epoch(trunk_frozen=False).train()(images, torch.arange(6) % 3)
        terms.total.backward()
        states.append([p.grad for p in run.net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_shares_are_in_log_rows_and_notices(tmp_path: Path) -> None:
    job = with_share(small_job(tmp_path / "products", epochs=6, min_steps=20), None)
    faint = job.as_dict()
    faint["regularizers"]["determinant"] |= {"lambda1": 1e-6, "lambda2": 1e-6}
    listener = Silent()
    history = fit(parse_job(faint), load_split(job.data), tmp_path, listener)
    assert 0 < history[-1]["share determinant"] < 0.01
    assert history[-1]["scale determinant"] == 1.0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert any("share determinant" in line for line in lines if line["kind"] == "step")
    cure = "Set regularizers.determinant.share = 0.2, or raise lambda1 and lambda2"
    assert any(cure in sentence for sentence in listener.sentences)


def test_a_determinant_that_moves_its_flow_alone_is_named(tmp_path: Path) -> None:
    """Its share is measured at its flow; what of it reaches the embedding is another figure."""
    job = with_share(small_job(tmp_path / "products", epochs=8), 0.2)
    listener = Silent()
    history = fit(job, load_split(job.data), tmp_path, listener)
    assert history[-1]["share determinant"] > 0.05
    assert 0 < history[-1]["reach determinant"] < 0.01
    messages = [sentence for sentence in listener.sentences if "at the features" in sentence]
    assert len(messages) == 1
    assert messages[0].startswith(
        "epoch 2: regularizers.determinant changes flow 1, but hardly the"
    )


def test_a_gradient_that_stays_in_its_flow_is_said_once(tmp_path: Path) -> None:
    job = with_share(small_job(tmp_path / "products"), 0.2)
    figures = {"share determinant": 0.2, "scale determinant": 1.0, "reach determinant": 1e-4}
    rows = [{"epoch": epoch, **figures} for epoch in (1.0, 2.0, 3.0)]
    assert after_epoch(job, rows[:1]) == []
    [aloof] = after_epoch(job, rows[:2])
    assert "changes flow 1" in aloof
    assert after_epoch(job, rows) == []


def test_a_run_of_few_steps_says_so_and_min_steps_raises_the_epochs(tmp_path: Path) -> None:
    job, listener = small_job(tmp_path / "products", epochs=1), Silent()
    split = load_split(job.data)
    fit(job, split, tmp_path, listener)
    assert any("too few to learn much" in sentence for sentence in listener.sentences)
    more = small_job(tmp_path / "products", epochs=1, min_steps=7)
    (tmp_path / "more").mkdir()
    assert len(fit(more, split, tmp_path / "more", Silent())) == 3  # of 3 steps each
