"""The share of a regularizer in the gradient, and the scale that gives it a wanted share."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WIDEST = 100.0
"""A share scales a weight by 1/100 to 100."""

LEAST = 0.01
"""A term below this share of the gradient has almost no effect, and the run reports it."""

_EVERY = 10  # steps
_DECIDES = 5
"""The measurement, counted from the first gradient of the penalty, that fixes its scale."""
_STATE = ("scale", "last", "measured")


@dataclass
class Share:
    r"""The scale c of one penalty: 1, or fixed once by the penalty's share of the gradient,

    .. math:: \frac{c \, \lVert \nabla_\theta R \rVert}{\lVert \nabla_\theta L \rVert},

    with respect to the features of the batch or, for a penalty that acts only there, proxies or the
    parameters of a flow. With `wanted`, c may fall but not rise until the measurement that fixes
    it: a flow that starts as the identity first has a gradient in its last layers only, so its
    share is measured too small. `last` is the last measured share, negative before that.
    """

    wanted: float | None
    scale: float = 1.0
    last: float = -1.0
    measured: int = 0

    @property
    def is_fixed(self) -> bool:
        return self.wanted is None or self.measured >= _DECIDES

    def observe(self, loss: float, penalty: float) -> None:
        """Record the norms of both gradients at scale 1."""
        if not loss > 0:
            return
        ratio = penalty / loss
        if not (math.isfinite(ratio) and ratio > 0):
            self.last = 0.0
            return
        if self.wanted is not None and not self.is_fixed:
            self.measured += 1
            needed = min(max(self.wanted / ratio, 1 / WIDEST), WIDEST)
            self.scale = needed if self.measured >= _DECIDES else min(needed, 1.0)
        self.last = self.scale * ratio


class Shares:
    """The shares of the penalties of an objective, measured at every tenth training step.

    Plain numbers, not buffers, so that reading them does not synchronise a GPU. `wanted` is the
    target share of each penalty, None for a fixed scale.
    """

    def __init__(self, wanted: Mapping[str, float | None]) -> None:
        self.terms = {name: Share(share) for name, share in wanted.items()}
        self.steps = 0

    def is_due(self) -> bool:
        """Count a step; whether it is measured."""
        self.steps += 1
        return len(self.terms) > 0 and self.steps % _EVERY == 0

    def measure(
        self,
        loss: Tensor,
        penalties: Mapping[str, Tensor],
        features: Tensor,
        sites: Mapping[str, Sequence[Tensor]],
    ) -> None:
        """Compare each penalty at scale 1, (), with the loss, (), at its site or the features."""
        for name, penalty in penalties.items():
            place = sites.get(name, [features])
            self.terms[name].observe(gradient_norm(loss, place), gradient_norm(penalty, place))

    def scaled(self, penalties: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.terms[name].scale * x for name, x in penalties.items()}

    def figures(self) -> dict[str, float]:
        """For the log: "share NAME" as last measured and "scale NAME", once the scale is fixed.

        A penalty that has no gradient is reported at once.
        """
        found: dict[str, float] = {}
        for name, term in self.terms.items():
            if term.last == 0 or (term.is_fixed and term.last > 0):
                found |= {f"share {name}": term.last, f"scale {name}": term.scale}
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


def gradient_norm(term: Tensor, place: Sequence[Tensor]) -> float:
    """Norm of the gradient of a scalar with respect to all these tensors."""
    if not term.requires_grad:
        return 0.0
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        term, list(place), retain_graph=True, allow_unused=True
    )
    norms = [x.norm() for x in found if x is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0
