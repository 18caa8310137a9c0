"""Run a network over images: embeddings and their figures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from embedder.errors import DatasetError, TrainingError
from training.config.job import Job
from training.data.images import EvaluationImages, build_loader
from training.data.records import LabelledImages, labels_in
from training.device import choose_device
from training.distributed import gather_objects, is_main, local_world, rank, world
from training.evaluation.suite import evaluate_embeddings
from training.models.embedding import EmbeddingNet
from training.regularizers.determinant import local_lipschitz

_LIPSCHITZ_IMAGES = 16


def evaluate(
    net: EmbeddingNet,
    images: LabelledImages,
    job: Job,
    gallery: LabelledImages | None = None,
    full: bool = False,
) -> dict[str, float]:
    """Recall@K and MAP@R of `net` on `images`, preprocessed as in the service, in float32.

    Args:
        gallery: what is searched; without it each image is searched for among the others.
        full: also clustering, structure and, with a flow, its local Lipschitz constant.

    Under several ranks each embeds its share and all get the figures.
    """
    parts = [images] if gallery is None else [images, gallery]
    vectors = [embed(net, part, job) for part in parts]
    figures = figures_of(vectors, parts, job, full) if is_main() else {}
    if full:
        figures |= flow_lipschitz(net, images, job)
    found: dict[str, float] = gather_objects(figures)[0]
    return found


def figures_of(
    vectors: list[NDArray[np.float32]], parts: list[LabelledImages], job: Job, full: bool
) -> dict[str, float]:
    """Figures of embedded test images or, with two parts, of queries and their gallery."""
    images, *others = parts
    device = choose_device(job.runtime)
    test, *rest = (torch.as_tensor(part, device=device) for part in vectors)
    gallery = labels = None
    if others:
        gallery, labels = rest[0], labels_in(others[0], images.class_names)
    return evaluate_embeddings(
        test, images.labels, gallery, labels, ks=job.recall_at, full=full, seed=job.seed
    )


def embed(
    net: EmbeddingNet,
    images: LabelledImages,
    job: Job,
    function: Callable[[Tensor], Tensor] | None = None,
) -> NDArray[np.float32]:
    """Embeddings (N, D) of all images, in their order; several ranks share the work.

    In float32 whatever the precision of the training, as the bundle is: figures in bf16 are of
    another network. `function` of `net` is called in its place, for what it gives (N, ...).
    """
    function = function or net
    device = next(net.parameters()).device
    mine = np.array_split(np.arange(len(images)), world())[rank()]
    dataset = Subset(EvaluationImages(images, job.input.preprocessing()), mine.tolist())
    loader = build_loader(
        dataset, job.optimizer.batch_size, job.runtime, device, job.seed, local_world()
    )
    with evaluating(net), torch.inference_mode():
        chunks = [function(b.to(device)).float().cpu().numpy() for b, _ in batches(loader)]
    shares = [chunk for share in gather_objects(chunks) for chunk in share]
    vectors: NDArray[np.float32] = np.concatenate(shares)
    return vectors


def flow_lipschitz(net: EmbeddingNet, images: LabelledImages, job: Job) -> dict[str, float]:
    """Local Lipschitz constant of the flow on some images: mean and largest; {} without a flow."""
    if net.flow is None:
        return {}
    chosen = np.linspace(0, len(images) - 1, min(_LIPSCHITZ_IMAGES, len(images)), dtype=int)
    dataset = EvaluationImages(images, job.input.preprocessing())
    pixels = torch.stack([dataset[int(number)][0] for number in chosen])
    with evaluating(net), torch.no_grad():
        features = net.features(pixels.to(next(net.parameters()).device))
        constants = local_lipschitz(net.flow, features)
    return {
        "lipschitz_mean": float(constants.mean()),
        "lipschitz_max": float(constants.max()),
    }


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """A block in which `net` is in evaluation mode, so that looking at images changes nothing.

    Convolutions run in full float32, which cuDNN by itself rounds to TF32.
    """
    was_training, rounded = net.training, torch.backends.cudnn.allow_tf32
    net.eval()
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = rounded
        net.train(was_training)


def batches(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a loader; a fault in an image is one line, also from a worker process.

    Raises: DatasetError; TrainingError where a worker process dies, as one does for want of shared
        memory.
    """
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise TrainingError(
            f"A process that reads images died ({str(error).splitlines()[0]}). If it was a bus "
            "error, give the container more shared memory (--shm-size=2g); set runtime.workers "
            "lower, or to 0 to read without other processes."
        ) from error
    except DatasetError as error:
        # A worker process sends its whole traceback as the message; the last line is ours.
        line = str(error).strip().splitlines()[-1]
        raise DatasetError(line.removeprefix("embedder.errors.DatasetError: ")) from error
