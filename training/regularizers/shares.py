"""How much of the gradient a regularizer makes, and the scale that gives it a wanted share."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

WIDEST = 100.0
"""A calibrated weight stays within 1/100 to 100 times the one that the job gives."""

LEAST = 0.01
"""A term below this share of the gradient does next to nothing, and the run says so."""

_MEASURE_EVERY = 10
_CALIBRATE_EVERY = 3
_FEWEST_MEASUREMENTS = 8
_TRUST = 0.4  # in a new measurement, against those before it


class Share(nn.Module):
    r"""The scale c of one penalty: 1, or set from the penalty's measured share of the gradient,

    .. math:: \frac{c \, \lVert \nabla_\theta R \rVert}{\lVert \nabla_\theta L \rVert},

    with respect to where the penalty acts: the features of the batch or, for one that acts there
    alone, proxies or the parameters of a flow. With `wanted` c is calibrated over the first epoch
    in which the penalty has a gradient: in the first third of it c may fall but not rise, since a
    flow that starts as the identity has a gradient in its last layers alone; then c is a mean of
    logarithms that trusts newer measurements more, within 1/100 to 100; then it is held. It is not
    chased for longer: the gradient of a penalty that saturates vanishes, and a weight that follows
    it grows until it destroys the embedding.

    All that it knows are buffers, so that a resumed run goes on with them.

    Args:
        wanted: share to calibrate c to; None fixes c at 1.
    """

    scale: Tensor
    last: Tensor
    measured: Tensor

    def __init__(self, wanted: float | None) -> None:
        super().__init__()
        self.wanted = wanted
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.register_buffer("last", -torch.ones((), dtype=torch.float64))  # not yet measured
        self.register_buffer("measured", torch.zeros((), dtype=torch.int64))

    def observe(self, loss: Tensor, penalty: Tensor, calibration: int) -> None:
        """Take note of the norms of both gradients, (), that of the penalty at scale 1.

        The first `calibration` measurements with a gradient of the penalty set the scale. Without
        a gradient of the loss there is nothing to compare with.
        """
        if not loss > 0:
            return
        ratio = penalty.double() / loss.double()
        if not bool(torch.isfinite(ratio) & (ratio > 0)):
            self.last.zero_()
            return
        if self.calibrates(calibration):
            wanted = torch.log((self.wanted or 0.0) / ratio)
            if int(self.measured) < calibration // 3:
                mean = wanted.clamp(max=0.0)
            else:
                trust = _TRUST if int(self.measured) > calibration // 3 else 1.0
                mean = trust * wanted + (1 - trust) * self.scale.log()
            self.scale.copy_(mean.exp().clamp(1 / WIDEST, WIDEST))
        self.measured += 1
        self.last.copy_(self.scale * ratio)

    def calibrates(self, calibration: int) -> bool:
        """Whether the next measurement is one of the calibration."""
        return self.wanted is not None and int(self.measured) < calibration


class Shares(nn.Module):
    """The shares of the penalties of an objective, measured in some of its training steps.

    `calibration_steps`: length of the calibration; who trains sets it to an epoch.

    Args:
        wanted: the share that each penalty is to have, None for a fixed scale.
    """

    steps: Tensor

    def __init__(self, wanted: Mapping[str, float | None]) -> None:
        super().__init__()
        self.terms = nn.ModuleDict({name: Share(share) for name, share in wanted.items()})
        self.calibration_steps = 1
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def __getitem__(self, name: str) -> Share:
        share = self.terms[name]
        assert isinstance(share, Share)
        return share

    def is_due(self) -> bool:
        """Count a training step; whether it is one to measure."""
        self.steps += 1
        step = int(self.steps)
        if step % _CALIBRATE_EVERY == 0 and any(
            self[name].calibrates(self._measurements) for name in self.terms
        ):
            return True
        return step % _MEASURE_EVERY == 0 and len(self.terms) > 0

    def measure(
        self, loss: Tensor, penalties: Mapping[str, Tensor], sites: Mapping[str, Sequence[Tensor]]
    ) -> None:
        """Observe each penalty at scale 1, (), beside the loss, (), at its site."""
        for name, penalty in penalties.items():
            site = sites[name]
            beside = gradient_norm(loss, site)
            self[name].observe(beside, gradient_norm(penalty, site), self._measurements)

    def scaled(self, penalties: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each penalty times its scale."""
        return {name: self[name].scale.to(x.dtype) * x for name, x in penalties.items()}

    def figures(self) -> dict[str, float]:
        """For the log: "share NAME" as last measured, once it was, and "scale NAME"."""
        found = {}
        for name in self.terms:
            if self[name].last >= 0:
                found[f"share {name}"] = float(self[name].last)
                found[f"scale {name}"] = float(self[name].scale)
        return found

    @property
    def _measurements(self) -> int:
        return max(self.calibration_steps // _CALIBRATE_EVERY, _FEWEST_MEASUREMENTS)


def gradient_norm(term: Tensor, at: Sequence[Tensor]) -> Tensor:
    """Norm of the gradient of a scalar with respect to all of `at`; 0 where it has none."""
    if not term.requires_grad:
        return torch.zeros((), device=term.device)
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        term, list(at), retain_graph=True, allow_unused=True
    )
    norms = [gradient.norm() for gradient in found if gradient is not None]
    return torch.stack(norms).norm() if norms else torch.zeros((), device=term.device)
