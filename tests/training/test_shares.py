import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kinlens.training.checkpoint import Epoch
from kinlens.training.config.job import parse_job
from kinlens.training.data.load import load_split
from kinlens.training.regularizers.shares import WIDEST, Shares, gradient_norm
from kinlens.training.report.notices import after_epoch
from kinlens.training.trainer import fit
from tests.training.jobs import Silent, small_job

STEPS = 60


class Toy:
    """A point between two wells: a loss, and a penalty whose gradient is 1,000 times smaller."""

    def __init__(self, share: float | None, strength: float = 1e-3) -> None:
        torch.manual_seed(0)
        self.point = nn.Parameter(torch.randn(8))
        self.shares = Shares({"pull": share})
        self.strength = strength

    def terms(self) -> tuple[Tensor, Tensor]:
        return (self.point - 1).square().sum(), self.strength * (self.point + 1).square().sum()

    def train(self, steps: int = STEPS) -> "Toy":
        for _ in range(steps):
            loss, penalty = self.terms()
            if self.shares.is_due():
                self.shares.measure(loss, {"pull": penalty}, self.point, {})
            total = loss + self.shares.scaled({"pull": penalty})["pull"]
            (gradient,) = torch.autograd.grad(total, [self.point])
            with torch.no_grad():
                self.point -= 0.001 * gradient
        return self

    @property
    def scale(self) -> float:
        return self.shares.terms["pull"].scale

    def share(self) -> float:
        own, of_loss = (gradient_norm(x, [self.point]) for x in reversed(self.terms()))
        return self.scale * own / of_loss


@pytest.mark.parametrize(("wanted", "strength"), [(0.02, 1e-3), (0.05, 1e-3), (0.2, 3.0)])
def test_a_share_is_reached_and_its_scale_held(wanted: float, strength: float) -> None:
    toy = Toy(wanted, strength).train(40)
    assert toy.scale <= 1, "a weight does not rise before its share is known"
    assert toy.shares.figures() == {}
    toy.train(20)
    assert toy.share() == pytest.approx(wanted, rel=0.2)
    assert toy.shares.figures()["share pull"] == pytest.approx(wanted, rel=0.2)
    held = toy.scale
    assert toy.train(3 * STEPS).scale == held


def test_without_a_gradient_the_scale_waits_and_the_share_is_zero() -> None:
    toy = Toy(0.2, strength=0.0).train()
    assert toy.shares.figures() == {"share pull": 0.0, "scale pull": 1.0}
    toy.strength = 1e-3  # it begins to act, as a flow that was fitted first does
    assert toy.train().scale > 1
    assert Toy(0.2, strength=1e-12).train().scale == pytest.approx(WIDEST)  # all but vanishing


def test_a_share_that_was_stored_is_measured_on_as_if_never_stopped() -> None:
    whole, first, second = (Toy(0.05) for _ in range(3))
    whole.train(55)
    first.train(25)
    second.shares.load_state_dict(first.shares.state_dict())
    second.point.data.copy_(first.point.data)
    assert second.train(30).shares.terms == whole.shares.terms


def test_no_sentence_on_a_share_comes_before_it_is_known(tmp_path: Path) -> None:
    content = small_job(tmp_path / "products").as_dict()
    content["regularizers"]["determinant"]["share"] = 0.2
    job = parse_job(content)
    early = Epoch(1, 1.0, 1.0, 1.0, {"share determinant": 0.0, "scale determinant": 1.0})
    fine = replace(early, epoch=2, terms={})
    faint = replace(early, epoch=3, terms={"share determinant": 0.004, "scale determinant": WIDEST})
    assert after_epoch(job, [early]) == after_epoch(job, [early, fine]) == []
    [sentence] = after_epoch(job, [early, fine, faint])
    assert sentence.endswith("so it has almost no effect. Raise lambda1 and lambda2.")
    assert after_epoch(job, [early, fine, faint, replace(faint, epoch=4)]) == []


def test_shares_are_in_log_rows_and_few_steps_are_said_and_raised(tmp_path: Path) -> None:
    content = small_job(tmp_path / "products", epochs=1, min_steps=20).as_dict()
    content["regularizers"]["determinant"] |= {"lambda1": 1e-6, "lambda2": 1e-6}
    job, listener = parse_job(content), Silent()
    history = fit(job, load_split(job.data), tmp_path, listener)
    assert len(history) == 7  # of 3 steps each
    assert 0 < history[-1].shares["determinant"] < 0.01
    assert history[-1].terms["scale determinant"] == 1.0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert any("share determinant" in line for line in lines if line["kind"] == "step")
    norms = [line["feature_norm"] for line in lines if line["kind"] == "epoch"]
    assert len(norms) == 7
    assert min(norms) > 0
    for wanted in (
        "too few to learn much",
        "Set regularizers.determinant.share = 0.2, or raise lambda1 and lambda2",
    ):
        assert any(wanted in sentence for sentence in listener.sentences)
