"""Cross-batch memory: pairs of a batch with the embeddings of earlier batches.

Shapes: B samples, D dimensions, M samples in the memory.
"""

import torch
from torch import Tensor

from kinlens.training.losses.base import MetricLoss
from kinlens.training.losses.pairs import PairLoss


class CrossBatchMemory(MetricLoss):
    """A loss over the pairs of each sample with its batch and the last M samples before it.

    The samples in the memory are neighbours and no anchors, without gradient: a trained network
    changes slowly, so their embeddings are almost those of now. While the memory fills, only what
    it has counts. In evaluation mode nothing is added to it.

    References:
        Cross-Batch Memory for Embedding Learning (Wang et al., 2020), algorithm 1.
        https://arxiv.org/abs/1912.06798

    Args:
        loss: the loss over pairs.
        size: M.
        dim: D.
    """

    queue: Tensor
    queue_labels: Tensor

    def __init__(self, loss: PairLoss, size: int, dim: int) -> None:
        super().__init__()
        self.loss = loss
        self.register_buffer("queue", torch.zeros(size, dim))
        self.register_buffer("queue_labels", torch.full((size,), -1))

    def value(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        found = self.loss.over(
            embeddings,
            labels,
            torch.cat([embeddings, self.queue.to(embeddings)]),
            torch.cat([labels, self.queue_labels.to(labels)]),
        )
        if self.training:
            size = len(self.queue)
            with torch.no_grad():  # the oldest fall out
                rows = torch.cat([self.queue, embeddings.detach().to(self.queue)])[-size:]
                numbers = torch.cat([self.queue_labels, labels.to(self.queue_labels)])[-size:]
                self.queue.copy_(rows)
                self.queue_labels.copy_(numbers)
        return found
