"""The moving average that a run keeps of its network's weights."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from training.models.embedding import EmbeddingNet


class Average:
    """The exponential moving average of the weights and buffers of a network.

    The decay is `decay`, but less in the first steps, min(decay, (1 + n) / (10 + n)), so that a
    short run is not held back by where it began.
    """

    def __init__(self, net: EmbeddingNet, decay: float) -> None:
        self.net = copy.deepcopy(net)
        self.decay = decay
        self.steps = 0

    @torch.no_grad()
    def update(self, net: EmbeddingNet) -> None:
        """Take note of the weights after a step."""
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps)) if self.steps else 0.0
        self.steps += 1
        means, values = [], []
        for mean, value in zip(_tensors(self.net), _tensors(net), strict=True):
            if mean.is_floating_point():
                means.append(mean)
                values.append(value)
            else:
                mean.copy_(value)
        torch._foreach_lerp_(means, values, 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """What `load_state_dict` and `weights` read."""
        own = {f"module.{name}": value for name, value in self.net.state_dict().items()}
        return {"n_averaged": torch.tensor(self.steps), **own}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where a run stopped."""
        self.net.load_state_dict(self.weights(state))
        self.steps = int(state["n_averaged"])

    @staticmethod
    def weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state dict of the network in that of an average."""
        return {k.removeprefix("module."): v for k, v in state.items() if k != "n_averaged"}


def _tensors(net: EmbeddingNet) -> list[Tensor]:
    return [*net.parameters(), *net.buffers()]
