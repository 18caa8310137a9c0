"""Common base of the regularizers: what each is given in a training step.

Shapes: B samples, D dimensions.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn


class Regularizer(nn.Module):
    """A term that is added to the loss, `weight` times.

    `forward(embeddings, labels, loss)` maps unit embeddings (B, D), their labels (B,) and the loss,
    whose proxies it may read, to a scalar. Parameters learn at the rate of flows and are not
    exported.

    `needs` names what else must be in the job, each with the option that does without it or "":

    - "proxies": a loss with proxies.
    - "draws": two draws of the same classes, which are the halves of the batch.
    - "flow": a flow in the network. `forward(features, labels, flow)` then maps features (B, D)
      before the flow, of any length, to the outputs of two branches, see `DeterminantRegularizer`.
    """

    needs: ClassVar[Mapping[str, str]] = {}
    weight: float = 1.0
    loss_weight: float = 1.0
    """Factor of the loss in its presence."""

    @classmethod
    def needs_with(cls, options: Any) -> Mapping[str, str]:
        """`needs` with the options of a job."""
        del options
        return cls.needs

    @classmethod
    def idle(cls, options: Any) -> Mapping[str, str]:
        """The options of a job without effect next to its others, each with what it needs."""
        del options
        return {}

    def begin_epoch(self, epoch: int) -> None:
        """Called before each epoch with the number of finished ones."""

    def sites(self, loss: nn.Module) -> list[Tensor]:
        """The tensors that alone get its gradient; [] if they are the embeddings."""
        del loss
        return []
