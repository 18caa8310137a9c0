"""Run a network over images: devices, precision, embeddings, recall."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from embedder.errors import DatasetError, TrainingError
from training.config.job import Job
from training.config.optimizer import Runtime
from training.data.dataset import EvaluationImages
from training.data.records import LabelledImages
from training.evaluation import Recall, recall_at
from training.models.embedding import EmbeddingNet
from training.regularizers.determinant import local_lipschitz

_LIPSCHITZ_IMAGES = 16


def evaluate(net: EmbeddingNet, images: LabelledImages, job: Job) -> Recall:
    """Recall of `net` on `images`, preprocessed as in the service."""
    return recall_at(embed(net, images, job), images.labels, job.recall_at)


def embed(net: EmbeddingNet, images: LabelledImages, job: Job) -> NDArray[np.float32]:
    """Embeddings (N, D) of all images, in their order."""
    was_training = net.training
    net.eval()
    device = next(net.parameters()).device
    dataset = EvaluationImages(images, job.input.preprocessing())
    loader = DataLoader(dataset, job.optimizer.batch_size, num_workers=job.runtime.workers)
    with torch.inference_mode(), autocast(job.runtime, device):
        chunks = [net(batch.to(device)).float().cpu().numpy() for batch, _ in batches(loader)]
    net.train(was_training)
    vectors: NDArray[np.float32] = np.concatenate(chunks)
    return vectors


def choose_device(runtime: Runtime) -> torch.device:
    """The device of the job. Raises: TrainingError if CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    if runtime.device == "cuda" and not available:
        raise TrainingError(
            'runtime.device = "cuda", but torch sees no GPU. Check the driver, or set it to '
            '"auto" or "cpu".'
        )
    return torch.device("cuda" if available and runtime.device != "cpu" else "cpu")


def autocast(runtime: Runtime, device: torch.device) -> torch.autocast:
    """bf16 where asked for or, under "auto", where the processor computes in it."""
    if runtime.precision == "auto":
        fast = (
            torch.cuda.is_bf16_supported()
            if device.type == "cuda"
            else torch.cpu._is_avx512_bf16_supported()
        )
    else:
        fast = runtime.precision == "bf16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=fast)


def flow_lipschitz(net: EmbeddingNet, images: LabelledImages, job: Job) -> dict[str, float]:
    """Local Lipschitz constant of the flow on some images: mean and largest; {} without a flow."""
    if net.flow is None:
        return {}
    chosen = np.linspace(0, len(images) - 1, min(_LIPSCHITZ_IMAGES, len(images)), dtype=int)
    dataset = EvaluationImages(images, job.input.preprocessing())
    pixels = torch.stack([dataset[int(number)][0] for number in chosen])
    with torch.no_grad():
        features = net.features(pixels.to(next(net.parameters()).device))
        constants = local_lipschitz(net.flow, features)
    return {
        "lipschitz_mean": float(constants.mean()),
        "lipschitz_max": float(constants.max()),
    }


def batches(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a loader; a fault in an image is one line, also from a worker process.

    Raises: DatasetError.
    """
    try:
        yield from loader
    except DatasetError as error:
        # A worker process sends its whole traceback as the message; the last line is ours.
        line = str(error).strip().splitlines()[-1]
        raise DatasetError(line.removeprefix("embedder.errors.DatasetError: ")) from error
