"""Several processes that train one model, with the result of a single process.

Every rank computes the whole objective on the embeddings of all ranks. The gather sums gradients
over the ranks and DistributedDataParallel averages them, so that network, proxies and flows get
exactly the gradient of one process with the whole batch.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kinlens.embedder.errors import TrainingError

_LONGEST_WAIT = timedelta(hours=2)
"""Timeout in which the other processes wait while one clusters a large test set."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_world() -> int:
    """Number of processes on this machine, which share its cores; torchrun sets it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world()))


def is_main() -> bool:
    """Whether this process writes files and prints messages."""
    return rank() == 0


@contextmanager
def process_group(device: str = "auto") -> Iterator[None]:
    """Join the processes that `torchrun` started, over NCCL or gloo. Raises: TrainingError."""
    if "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if gpus and local >= gpus:
        raise TrainingError(
            f"torchrun started local rank {local}, but there are {gpus} GPUs. Start with "
            f'--nproc-per-node={gpus}, or set runtime.device = "cpu".'
        )
    if gpus:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if gpus else "gloo", timeout=_LONGEST_WAIT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def gather(x: Tensor) -> Tensor:
    """The rows of all ranks, equally many, with gradient: (B, ...) to (W B, ...)."""
    if world() == 1:
        return x
    gathered: Tensor = _Gather.apply(x)
    return gathered


def gather_objects(value: Any) -> list[Any]:
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def wait_for_all() -> None:
    if world() > 1:
        dist.barrier()


@contextmanager
def main_first() -> Iterator[None]:
    """A block that the main process runs before the others: it may write files."""
    if not is_main():
        wait_for_all()
    yield
    if is_main():
        wait_for_all()


class _Gather(torch.autograd.Function):
    """All-gather; the gradient of a row is the sum of its gradients on all ranks."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(world())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.chunk(world())[rank()]
