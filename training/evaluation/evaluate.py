"""Run a model over images and compute the embeddings and all figures."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset

from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.types import Embed, Embeddings
from kinlens.training.config.job import Job
from kinlens.training.config.settings import Runtime
from kinlens.training.data.features import Computed, pooled_views
from kinlens.training.data.images import EvaluationImages, at_once, batches, build_loader
from kinlens.training.data.records import LabelledImages, labels_in
from kinlens.training.device import choose_device
from kinlens.training.distributed import (
    gather_objects,
    is_main,
    local_world,
    main_first,
    rank,
    world,
)
from kinlens.training.evaluation.retrieval import Labels, Vectors, gain, retrieval
from kinlens.training.evaluation.structure import clustering, require_distinct, structure
from kinlens.training.models.embedding import EmbeddingNet, device_of, evaluating, torch_embed
from kinlens.training.regularizers.determinant import local_lipschitz

OnBatch = Callable[[int], None]
"""Called with the number of images just embedded."""

_CPU = torch.device("cpu")
_LIPSCHITZ_IMAGES = 16


def evaluate(
    net: EmbeddingNet,
    parts: list[LabelledImages],
    job: Job,
    full: bool = False,
    before: Tensor | None = None,
    may_collapse: bool = False,
) -> dict[str, float]:
    """Recall@K and MAP@R of `net` on test images, searched in a second part if there is one.

    Images are preprocessed as in the service. In `full`, also clustering, structure and, with a
    flow, its local Lipschitz constant. `before` (N,) are the ranks of another model on the same
    queries; they add `gain`. Under several ranks each embeds its share, and all get the figures.

    Raises: EvaluationError if the embeddings are one point or too few, unless the model
        `may_collapse`.
    """
    vectors = [embed(net, part, job) for part in parts]
    if not may_collapse:
        require_distinct(torch.from_numpy(vectors[0]), parts[0].labels)
    figures: dict[str, float] = {}
    if is_main():
        there = [torch.as_tensor(x, device=choose_device(job.runtime)) for x in vectors]
        figures = evaluate_embeddings(
            *searched(there, parts), ks=job.recall_at, full=full, seed=job.seed, before=before
        )
    if full:
        figures |= _flow_lipschitz(net, parts[0], job)
    found: dict[str, float] = gather_objects(figures)[0]
    return found


def searched(
    vectors: Sequence[Vectors], parts: Sequence[LabelledImages]
) -> tuple[Vectors, Labels, Vectors | None, Labels | None]:
    """The first arguments of `retrieval`: images among each other, or queries in a gallery."""
    if len(parts) == 1:
        return vectors[0], parts[0].labels, None, None
    return vectors[0], parts[0].labels, vectors[1], labels_in(parts[1], parts[0].class_names)


def evaluate_embeddings(
    test: Vectors,
    labels: Labels,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    full: bool = True,
    seed: int = 0,
    before: Tensor | None = None,
) -> dict[str, float]:
    """Recall and MAP@R by name; in full, also cluster agreement and structure, which take minutes.

    **Reading.** With a gallery (In-Shop), retrieval searches for the test images in the gallery.
    Clusters and structure cover both together, which are the test images of the split.

    Raises: DatasetError, EvaluationError, as the functions that it calls.
    """
    found = retrieval(test, labels, gallery, gallery_labels, ks)
    figures = found.as_dict()
    figures |= gain(before, found.ranks, labels)
    if not full:
        return figures
    if gallery is not None and gallery_labels is not None:
        test = torch.cat([torch.as_tensor(part) for part in (test, gallery)])
        labels = np.concatenate([labels, gallery_labels])
    return figures | clustering(test, labels, seed) | structure(test, labels)


def embed(net: EmbeddingNet, images: LabelledImages, job: Job) -> NDArray[np.float32]:
    """Embeddings (N, D) of all images in float32, like the bundle; several ranks share the work."""
    if not net.frozen_trunk:
        return _computed(net, net, images, job)
    return torch_embed(net, pooled(net, images, job).numpy(), net.embed_pooled)


def pooled(
    net: EmbeddingNet, images: LabelledImages, job: Job, computed: Computed | None = None
) -> Tensor:
    """Pooled trunk features (N, C), float32 on the CPU; those of a frozen trunk are cached."""
    if net.frozen_trunk:
        with main_first():
            return pooled_views(net, images, job.input, job.runtime, computed=computed)[:, 0]
    return torch.from_numpy(_computed(net, net.pooled, images, job))


def _computed(
    net: EmbeddingNet, function: Callable[[Tensor], Tensor], images: LabelledImages, job: Job
) -> NDArray[np.float32]:
    on_device = partial(torch_embed, net, function=function)
    spec, size = job.input.preprocessing(), job.optimizer.batch_size
    device = device_of(net)
    return embed_with({"": on_device}, images, spec, job.runtime, None, size, device)[""]


def embed_with(
    functions: Mapping[str, Embed],
    images: LabelledImages,
    spec: Preprocessing,
    runtime: Runtime,
    on_batch: OnBatch | None = None,
    batch_size: int | None = None,
    device: torch.device = _CPU,
) -> dict[str, Embeddings]:
    """The result of each function for all images (N, ...), preprocessed as in the service.

    Every image is decoded once, in the processes of `runtime`; several ranks share the images.
    `device` is that of the functions. Raises: DatasetError if an image cannot be read.
    """
    mine = np.array_split(np.arange(len(images)), world())[rank()]
    dataset = Subset(EvaluationImages(images, spec), mine.tolist())
    size = batch_size or at_once(runtime)
    loader = build_loader(dataset, size, runtime, device, 0, local_world())
    chunks: dict[str, list[Embeddings]] = {name: [] for name in functions}
    for batch, _ in batches(loader):
        for name, function in functions.items():
            chunks[name].append(function(batch.numpy()))
        if on_batch is not None:
            on_batch(len(batch))
    shares = gather_objects(chunks)
    return {
        name: np.concatenate([chunk for share in shares for chunk in share[name]])
        for name in functions
    }


def _flow_lipschitz(net: EmbeddingNet, images: LabelledImages, job: Job) -> dict[str, float]:
    """Local Lipschitz constant of the flow on some images: mean and largest; {} without a flow."""
    if net.flow is None:
        return {}
    chosen = np.linspace(0, len(images) - 1, min(_LIPSCHITZ_IMAGES, len(images)), dtype=int)
    dataset = EvaluationImages(images, job.input.preprocessing())
    pixels = torch.stack([dataset[int(number)][0] for number in chosen])
    with evaluating(net), torch.no_grad():
        features = net.features(pixels.to(device_of(net)))
        constants = local_lipschitz(net.flow, features).detach()
    return {"lipschitz_mean": float(constants.mean()), "lipschitz_max": float(constants.max())}
