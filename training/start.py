"""Where a run begins: a projection with the directions of the trunk, proxies at the class means.

Shapes: N images, C channels of the trunk, D dimensions of an embedding.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from embedder.bundle import Bundle
from training.config.job import Job
from training.data.records import LabelledImages
from training.evaluation.evaluate import embed
from training.losses.base import ProxyLoss
from training.models.from_bundle import bundle_of
from training.state import Run

WHITENING = 0.25
"""Each direction is divided by its variance to this power: 0 keeps the trunk's cosines, 0.5 makes
all directions alike. On cars196-half 0.25 to 0.5 is 4 to 5 points of R@1 above the trunk itself."""

_FLOOR = 0.1  # of the mean variance: what a direction that few images show counts at least


def start_from_trunk(run: Run, images: LabelledImages) -> None:
    """Give projection and proxies of a fresh run the start values that its job asks for.

    A projection that comes from a bundle (`model.weights`) stays as it is.
    """
    settings = run.job.start
    if settings.projection == "random" and settings.proxies == "random":
        return
    net, chosen = run.net, images.some(settings.images, run.job.seed)
    pooled = torch.from_numpy(embed(net, chosen, run.job, net.pooled)).to(run.device)  # (N, C)
    if settings.projection == "trunk" and not goes_on(run.job):
        assert isinstance(net.projection, nn.Linear)  # the job asks for a length
        set_projection(net.projection, pooled)
    if settings.proxies == "class_means":
        with torch.no_grad():
            embeddings = net.embed(net.project(pooled)).cpu()
        for loss in (run.objective.loss, run.objective.second_loss):
            if isinstance(loss, ProxyLoss):
                set_proxies(loss, embeddings, chosen.labels)


def goes_on(job: Job) -> bool:
    """Whether a run begins with the trained model of a bundle, and not with a trunk alone."""
    bundle = bundle_of(job.model.weights)
    return bundle is not None and bool(Bundle.open(bundle).manifest.job)


def set_projection(layer: nn.Linear, pooled: Tensor) -> None:
    r"""Make `layer` the first D principal directions of `pooled` (N, C), partly whitened, in place.

    With eigenvectors v_d and eigenvalues sigma_d^2 of the covariance and the mean mu,

    .. math:: y_d = \sigma_d^{-2 \cdot 0.25} \, v_d^T (x - \mu)

    times a constant that gives the weights the size of a random start, so that learning rates mean
    the same. Directions beyond C are 0.

    References:
        Jégou, Chum, Negative evidences and co-occurences in image retrieval: the benefit of PCA
        and whitening, section 3. https://doi.org/10.1007/978-3-642-33709-3_55
    """
    x = pooled.double()
    mean = x.mean(0)
    variances, directions = torch.linalg.eigh(torch.cov((x - mean).T, correction=0))  # (C,), (C, C)
    top = min(layer.out_features, len(variances))
    variances, directions = variances.flip(0)[:top], directions.flip(1)[:, :top]
    scales = variances.clamp(min=_FLOOR * float(variances.mean()) + 1e-12).pow(-WHITENING)
    rows = (directions * scales).T  # (top, C)
    rows *= layer.weight.detach().double().norm() / rows.norm()
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:top] = rows.to(layer.weight)
        layer.bias.zero_()
        layer.bias[:top] = -(rows @ mean.to(rows)).to(layer.bias)


def set_proxies(loss: ProxyLoss, embeddings: Tensor, labels: NDArray[np.int64]) -> None:
    """Put every proxy at the mean of its class, of the length of a random one, in place.

    A class of which no image was looked at keeps its random proxy; several centres of a class
    (SoftTriple) start around its mean, as far apart as they were drawn.
    """
    drawn = loss.proxies.detach()
    lengths = drawn.norm(dim=1, keepdim=True)  # (P, 1)
    sums = torch.zeros(loss.classes, drawn.shape[1])
    sums.index_add_(0, torch.from_numpy(labels), embeddings)
    sums = sums.to(drawn.device)
    means = nn.functional.normalize(sums, dim=1)[loss.centre_labels()]
    several = len(drawn) > loss.classes
    moved = lengths * nn.functional.normalize(means + several * drawn / lengths, dim=1)
    seen = (sums.norm(dim=1) > 0)[loss.centre_labels()][:, None]
    with torch.no_grad():
        loss.proxies.copy_(torch.where(seen, moved.to(drawn), drawn))
