import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kinlens.training.config.job import parse_job
from kinlens.training.data.load import load_split
from kinlens.training.regularizers.shares import WIDEST, Shares, gradient_norms
from kinlens.training.report.notices import after_epoch
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


@pytest.mark.parametrize(("wanted", "strength"), [(0.02, 1e-3), (0.05, 1e-3), (0.2, 3.0)])
def test_a_calibration_reaches_its_share_and_holds_the_scale(
    wanted: float, strength: float
) -> None:
    toy = Toy(wanted, strength).train()
    assert toy.share() == pytest.approx(wanted, rel=0.2)
    held = toy.scale
    assert toy.train(3 * EPOCH).scale == held


def test_without_a_gradient_the_scale_waits_and_the_share_is_zero() -> None:
    toy = Toy(0.2, strength=0.0).train()
    assert toy.shares.figures() == {"share pull": 0.0, "scale pull": 1.0}
    toy.strength = 1e-3  # it begins to act, as a flow that was fitted first does
    assert toy.train().scale > 1
    assert Toy(0.2, strength=1e-12).train().scale == pytest.approx(WIDEST)  # all but vanishing


def test_no_sentence_on_a_share_comes_before_its_calibration_has_ended(tmp_path: Path) -> None:
    content = small_job(tmp_path / "products").as_dict()
    content["regularizers"]["determinant"]["share"] = 0.2
    job = parse_job(content)
    early = {"epoch": 1.0, "share determinant": 0.004, "scale determinant": 1.0}
    early["calibrates determinant"] = 1.0
    late = {"epoch": 2.0, "share determinant": 0.1, "scale determinant": WIDEST}
    late["reach determinant"] = 0.0001
    assert after_epoch(job, [early]) == []
    in_flow, at_bound = after_epoch(job, [early, late])
    assert "hardly the layers before it" in in_flow
    assert "at the bound of its calibration" in at_bound
    [faint] = after_epoch(job, [early, {**late, "share determinant": 0.004}])
    assert "almost no effect" in faint


def test_shares_are_in_log_rows_and_few_steps_are_said_and_raised(tmp_path: Path) -> None:
    content = small_job(tmp_path / "products", epochs=1, min_steps=20).as_dict()
    content["regularizers"]["determinant"] |= {"lambda1": 1e-6, "lambda2": 1e-6}
    job, listener = parse_job(content), Silent()
    history = fit(job, load_split(job.data), tmp_path, listener)
    assert len(history) == 7  # of 3 steps each
    assert 0 < history[-1]["share determinant"] < 0.01
    assert history[-1]["scale determinant"] == 1.0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert any("share determinant" in line for line in lines if line["kind"] == "step")
    for wanted in (
        "too few to learn much",
        "Set regularizers.determinant.share = 0.2, or raise lambda1 and lambda2",
    ):
        assert any(wanted in sentence for sentence in listener.sentences)
