"""The network of a checkpoint, and the average that a run keeps of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from training.checkpoint import Checkpoint
from training.config.job import Job, parse_job
from training.models.embedding import EmbeddingNet


def network_of(checkpoint: Checkpoint) -> tuple[Job, EmbeddingNet]:
    """The job and the trained network of a checkpoint, in evaluation mode on the CPU."""
    job = parse_job(checkpoint.job, origin="the job in the checkpoint")
    random_start = job.model.model_copy(update={"weights": "none"})
    net = EmbeddingNet(random_start, job.regularizers.determinant)
    net.load_state_dict(checkpoint.net)
    if checkpoint.average is not None:
        own = {k.removeprefix("module."): v for k, v in checkpoint.average.items()}
        own.pop("n_averaged")
        net.load_state_dict(own)
    return job, net.eval()


def averaged(net: EmbeddingNet, job: Job) -> AveragedModel:
    """The exponential moving average of the weights and buffers of `net`.

    The decay is that of the job, but less in the first steps, min(decay, (1 + n) / (10 + n)), so
    that a short run is not held back by where it began.
    """
    limit = job.optimizer.average or 0.0

    @torch.no_grad()
    def update(mean: Sequence[Tensor], now: Sequence[Tensor], count: int | Tensor) -> None:
        decay = min(limit, (1 + int(count)) / (10 + int(count)))
        for old, new in zip(mean, now, strict=True):
            if old.is_floating_point():
                old.lerp_(new.to(old), 1 - decay)
            else:
                old.copy_(new)

    return AveragedModel(net, multi_avg_fn=update, use_buffers=True)
