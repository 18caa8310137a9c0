"""The share of a regularizer in the gradient, and the scale that gives it a wanted share."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

WIDEST = 100.0
"""A calibrated weight stays within 1/100 to 100 times the weight of the job."""

LEAST = 0.01
"""A term below this share of the gradient has almost no effect, and the run reports it."""

_MEASURE_EVERY, _CALIBRATE_EVERY = 10, 3  # steps
_FEWEST_MEASUREMENTS = 8
_STATE = ("scale", "last", "measured", "reach")
_TRUST = 0.4  # weight of a new measurement against the earlier ones


@dataclass
class Share:
    r"""The scale c of one penalty: 1, or set from the penalty's measured share of the gradient,

    .. math:: \frac{c \, \lVert \nabla_\theta R \rVert}{\lVert \nabla_\theta L \rVert},

    with respect to the features of the batch or, for a penalty that acts only there, proxies or the
    parameters of a flow. With `wanted` c is calibrated over the first epoch in which the penalty
    has a gradient:

    - In the first third of that epoch c may fall but not rise: a flow that starts as the identity
      has a gradient in its last layers only, so its share is measured too small.
    - Later in the epoch c is a geometric mean of what each measurement asks for; the newer weigh
      more.
    - Then c stays fixed. The gradient of a penalty that saturates vanishes, and a weight that
      followed it would grow until it destroys the embedding.

    `last` is the last measured share, negative before that. `reach` is the share at the features of
    a penalty that is measured elsewhere: a flow may absorb all of its gradient.
    """

    wanted: float | None
    scale: float = 1.0
    last: float = -1.0
    measured: int = 0
    reach: float = -1.0

    def observe(self, loss: float, penalty: float, calibration: int) -> None:
        """Record the norms of both gradients at scale 1; the first `calibration` set the scale."""
        if not loss > 0:
            return
        ratio = penalty / loss
        if not (math.isfinite(ratio) and ratio > 0):
            self.last = 0.0
            return
        if self.wanted is not None and self.measured < calibration:
            needed, first_third = self.wanted / ratio, calibration // 3
            if self.measured < first_third:
                scale = min(needed, 1.0)
            else:
                # The first measurement after the first third replaces what came before.
                trust = 1.0 if self.measured == first_third else _TRUST
                scale = needed**trust * self.scale ** (1 - trust)
            self.scale = min(max(scale, 1 / WIDEST), WIDEST)
        self.measured += 1
        self.last = self.scale * ratio

    def calibrates(self, calibration: int) -> bool:
        return self.wanted is not None and self.measured < calibration


class Shares:
    """The shares of the penalties of an objective, measured in some of its training steps.

    Plain numbers, not buffers, so that reading them does not synchronise a GPU. `wanted` is the
    target share of each penalty, None for a fixed scale; `calibration_steps` is set to an epoch.
    """

    def __init__(self, wanted: Mapping[str, float | None]) -> None:
        self.terms = {name: Share(share) for name, share in wanted.items()}
        self.calibration_steps = 1
        self.steps = 0

    def is_due(self) -> bool:
        """Count a step; whether it is measured: every third while calibrating, and every tenth."""
        self.steps += 1
        terms = self.terms.values()
        if any(term.calibrates(self._calibration) for term in terms):
            return self.steps % _CALIBRATE_EVERY == 0 or self.steps % _MEASURE_EVERY == 0
        return len(terms) > 0 and self.steps % _MEASURE_EVERY == 0

    def measure(
        self,
        loss: Tensor,
        penalties: Mapping[str, Tensor],
        features: Tensor,
        sites: Mapping[str, Sequence[Tensor]],
    ) -> None:
        """Compare each penalty at scale 1, (), with the loss, (), at its site or the features."""
        at_features, *at_sites = gradient_norms(loss, [[features], *sites.values()])
        of_loss = dict(zip(sites, at_sites, strict=True))
        for name, penalty in penalties.items():
            term = self.terms[name]
            groups = [[features], sites[name]] if name in sites else [[features]]
            reaches, *own = gradient_norms(penalty, groups)
            term.observe(of_loss.get(name, at_features), (own or [reaches])[0], self._calibration)
            if own and reaches > 0 and at_features > 0:
                term.reach = term.scale * reaches / at_features

    def scaled(self, penalties: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.terms[name].scale * x for name, x in penalties.items()}

    def figures(self) -> dict[str, float]:
        """For the log: "share NAME" as last measured (if ever), "scale NAME", "reach NAME".

        "calibrates NAME" is 1 while the scale of a penalty with a gradient may still change.
        """
        found: dict[str, float] = {}
        for name, term in self.terms.items():
            if term.last >= 0:
                found |= {f"share {name}": term.last, f"scale {name}": term.scale}
            if term.last > 0 and term.calibrates(self._calibration):
                found[f"calibrates {name}"] = 1.0
            if term.reach >= 0:
                found[f"reach {name}"] = term.reach
        return found

    def state_dict(self) -> dict[str, Tensor]:
        state = {"steps": torch.tensor(self.steps)}
        for name, term in self.terms.items():
            for key in _STATE:
                value = torch.tensor(getattr(term, key), dtype=torch.float64)
                state[f"terms.{name}.{key}"] = value
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the measurements of a run; checkpoints older than shares have none."""
        if not state:
            return
        self.steps = int(state["steps"])
        for name, term in self.terms.items():
            for key in _STATE:
                if (stored := state.get(f"terms.{name}.{key}")) is not None:
                    setattr(term, key, type(getattr(term, key))(stored))

    @property
    def _calibration(self) -> int:
        return max(self.calibration_steps // _CALIBRATE_EVERY, _FEWEST_MEASUREMENTS)


def gradient_norms(term: Tensor, groups: Sequence[Sequence[Tensor]]) -> list[float]:
    """Norm of the gradient with respect to each group of tensors, in one backward pass."""
    if not term.requires_grad:
        return [0.0] * len(groups)
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        term, [x for group in groups for x in group], retain_graph=True, allow_unused=True
    )
    gradients = iter(found)
    norms = []
    for group in groups:
        parts = [x.norm() for x in islice(gradients, len(group)) if x is not None]
        norms.append(float(torch.stack(parts).norm()) if parts else 0.0)
    return norms
