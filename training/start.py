"""Initial weights of a run: a projection from the trunk's features, proxies at the class means."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.seen import Seen
from kinlens.training.config.job import Job
from kinlens.training.data.features import Computed
from kinlens.training.data.records import LabelledImages, Split
from kinlens.training.evaluation.evaluate import pooled
from kinlens.training.evaluation.retrieval import mean_by_class, retrieval
from kinlens.training.losses.base import ProxyLoss
from kinlens.training.models.embedding import Head
from kinlens.training.models.from_bundle import bundle_of
from kinlens.training.state import Run

WHITENING = 0.25
"""Each direction is divided by its variance to this power: 0 keeps the trunk's cosines, 0.5 scales
all directions alike. On cars196-half 0.25 to 0.5 is 4 to 5 points of R@1 above the trunk itself."""

FEWEST_CLASSES = 4
"""Minimum number of train classes to learn from. A shop that tests on half of its classes has 8."""

NOT_PROVEN = (
    "The model is the trunk itself: on train classes that it was not estimated on, no whitening is "
    "better beyond chance."
)

_HALVINGS, _COMPARED, _SURE = 8, 1000, 0.995  # times, images, one-sided confidence

_RANK = 1e-10  # of the largest eigenvalue; smaller ones are rounding

_RIDGE = 3.0  # in mean variances within a class; 1 to 10 are alike on shops of 8 to 40 products

_FLOOR = 0.1  # of the mean variance: lower bound for directions that few images show


def start_from_trunk(run: Run, images: LabelledImages, computed: Computed) -> None:
    """Set projection and proxies of a fresh run; a projection of a bundle is unchanged."""
    settings = run.job.start
    if settings.projection == "random" and settings.proxies == "random":
        return
    chosen = images.some(settings.images, run.job.seed)
    start_from_features(run, pooled(run.net, chosen, run.job, computed), chosen.labels)


def start_from_features(run: Run, features: Tensor, labels: NDArray[np.int64]) -> None:
    """`start_from_trunk`, given the pooled features (N, C) of images and their classes (N,)."""
    settings, net = run.job.start, run.net
    features = features.to(run.device)
    if settings.projection != "random" and not continues_model(run.job):
        head = net.projection
        layer = head.linear if isinstance(head, Head) else head
        assert isinstance(layer, nn.Linear)  # the job sets model.dim
        if settings.projection == "trunk":
            set_projection(layer, features)
        elif settings.projection == "proven" and not whitening_helps(
            features, labels, run.job.seed
        ):
            run.trunk_alone = True
        else:
            whiten_within(layer, features, labels)
    if settings.proxies == "class_means":
        with torch.no_grad():
            embeddings = net.embed_pooled(features).cpu()
        for loss in (run.objective.loss, run.objective.second_loss):
            if isinstance(loss, ProxyLoss):
                set_proxies(loss, embeddings, labels)


def too_few(split: Split) -> str:
    """Why nothing can be learnt from these classes; "" if something can."""
    found = split.train.classes
    if found >= FEWEST_CLASSES:
        return ""
    whole = found + split.test.classes
    return (
        f"There are {whole} classes, {found} of them to train on: too few to learn from, which "
        f"needs {FEWEST_CLASSES} ({2 * FEWEST_CLASSES} classes in all, half of them to test on). "
        "So nothing is trained: the model is the trunk itself or, with a trained bundle as "
        "model.weights, that model."
    )


def continues_model(job: Job) -> bool:
    """Whether a run continues the trained model of a bundle, rather than start from a trunk."""
    bundle = bundle_of(job.model.weights)
    return bundle is not None and bool(Bundle.open(bundle).manifest.job)


def seen_before(job: Job) -> Seen | None:
    """What the bundle that a run starts from was trained on; None if the bundle does not say it."""
    bundle = bundle_of(job.model.weights)
    return Seen.of() if bundle is None else Bundle.open(bundle).seen()


def may_have_seen(job: Job, split: Split) -> bool:
    """Whether the bundle that a run continues may have been trained on test classes of `split`."""
    seen, bundle = seen_before(job), bundle_of(job.model.weights)
    if seen is not None:
        return any(part.seen_by(seen) for part in split.tested)
    assert bundle is not None
    return Bundle.open(bundle).manifest.split_sha256 != split.sha256()


def set_projection(layer: nn.Linear, pooled: Tensor) -> None:
    r"""Set `layer` to the first D principal directions of `pooled` (N, C), partly whitened.

    With eigenvectors v_d and eigenvalues sigma_d^2 of the covariance and the mean mu,

    .. math:: y_d = \sigma_d^{-2 \cdot 0.25} \, v_d^T (x - \mu)

    times a constant that gives the weights the norm of a random start, so that learning rates keep
    their meaning. Directions beyond C are 0.

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
    _set(layer, (directions * scales).T, mean)


def whiten_within(layer: nn.Linear, pooled: Tensor, labels: NDArray[np.int64]) -> None:
    r"""Set `layer` to a whitening that shrinks directions in which images of one class vary.

    With S the covariance of features (N, C) around the mean of their class, its mean eigenvalue s,
    the mean mu of all features, and the first D principal directions U of
    :math:`(S / s + 3)^{-1/2} x`,

    .. math:: y = U^T (S / s + 3)^{-1/2} (x - \mu)

    scaled as by `set_projection`. Differences between views of one product (light, place,
    background) also occur in unseen products, so few classes are enough to estimate them.

    References:
        Mikolajczyk, Matas, Improving descriptors for fast tree matching by optimal linear
        projection (2007), section 3; the ridge is ours.
    """
    x = pooled.double()
    whitening = _Whitening(x, labels)
    rows = torch.eye(x.shape[1], dtype=x.dtype, device=x.device) + whitening.change
    _, directions = _principal(whitening(x))
    top = min(layer.out_features, x.shape[1])
    if len(directions) < top:  # any directions complete those that the images show
        directions = torch.linalg.qr(directions.T, mode="complete")[0].T
    _set(layer, directions[:top] @ rows, whitening.centre)


class _Whitening:
    """The map of `whiten_within` without its rotation, times sqrt(3): x + x `change`, centred."""

    def __init__(self, x: Tensor, labels: NDArray[np.int64]) -> None:
        classes = torch.from_numpy(labels).to(x.device)
        sums = x.new_zeros(int(classes.max()) + 1, x.shape[1]).index_add_(0, classes, x)
        means = sums / classes.bincount().clamp(min=1)[:, None]
        residuals = x - means[classes]
        values, directions = _principal(residuals)
        size = residuals.square().sum().clamp(min=1e-12) / x.shape[1]
        factors = (values / size / _RIDGE + 1).rsqrt() - 1
        self.centre = x.mean(0)
        self.change = (directions.T * factors) @ directions  # (C, C)

    def __call__(self, x: Tensor) -> Tensor:
        x = x - self.centre
        return x + x @ self.change


def _principal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (r,) of x^T x, the largest first, and their directions (r, C); r is the rank."""
    wide = len(x) < x.shape[1]  # the smaller product is far faster
    values, vectors = torch.linalg.eigh(x @ x.T if wide else x.T @ x)
    seen = values > _RANK * values[-1]
    values, vectors = values[seen].flip(0), vectors[:, seen].flip(1)
    return values, (vectors / values.sqrt()).T @ x if wide else vectors.T


def whitening_helps(features: Tensor, labels: NDArray[np.int64], seed: int) -> bool:
    """Whether the whitening of some classes (N, C) is better for other classes, beyond chance.

    It is estimated on a random half of the classes, eight times. Images of the other half are
    searched among themselves and among the images of all classes. In both, the gain in MAP@R over
    the trunk must be above 0 with 99.5 %; classes count as independent.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.unique(labels))
    sizes = np.bincount(labels)[order]
    order = order[: max(FEWEST_CLASSES, int((sizes.cumsum() <= _COMPARED).sum()))]
    rows = np.isin(labels, order)
    x, labels = features[rows].double(), labels[rows]
    if len(order) < FEWEST_CLASSES:
        return False
    every = np.full(len(labels), True)
    of_trunk = _precisions(x, labels, every)
    gains, asked = np.zeros((2, len(labels))), np.zeros(len(labels))
    for _ in range(_HALVINGS):
        held_out = np.isin(labels, rng.permutation(order)[: len(order) // 2])
        moved = _Whitening(x[~held_out], labels[~held_out])(x)
        alone, among_all = gains
        alone += _precisions(moved, labels, held_out) - _precisions(x, labels, held_out)
        among_all += (_precisions(moved, labels, every) - of_trunk) * held_out
        asked += held_out
    from scipy import special  # here, since its import takes a second

    for found in gains:
        mean, error, classes = mean_by_class(found[asked > 0] / asked[asked > 0], labels[asked > 0])
        if mean <= special.stdtrit(classes - 1, _SURE) * error:
            return False
    return True


def _precisions(
    x: Tensor, labels: NDArray[np.int64], gallery: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """MAP@R of each image (N,) of the gallery, searched for among its others; 0 elsewhere."""
    found = np.zeros(len(labels))
    of_gallery = retrieval(functional.normalize(x[gallery]), labels[gallery])
    found[gallery] = of_gallery.precisions.numpy()
    return found


def _set(layer: nn.Linear, rows: Tensor, centre: Tensor) -> None:
    """Set the layer to rows (top, C), with the norm of its own weights, around a centre (C,)."""
    rows = rows * (layer.weight.detach().double().norm() / rows.norm())
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[: len(rows)] = rows.to(layer.weight)
        layer.bias.zero_()
        layer.bias[: len(rows)] = -(rows @ centre.to(rows)).to(layer.bias)


def set_proxies(loss: ProxyLoss, embeddings: Tensor, labels: NDArray[np.int64]) -> None:
    """Set every proxy to the mean of its class, with the norm of a random one, in place.

    A class without a sampled image keeps its random proxy. Several centres of a class (SoftTriple)
    start around its mean, with the distances of their random values.
    """
    drawn = loss.proxies.detach()
    lengths = drawn.norm(dim=1, keepdim=True)  # (P, 1)
    sums = torch.zeros(loss.classes, drawn.shape[1])
    sums.index_add_(0, torch.from_numpy(labels), embeddings)
    sums = sums.to(drawn.device)
    means = functional.normalize(sums, dim=1)[loss.centre_labels()]
    several = len(drawn) > loss.classes
    moved = lengths * functional.normalize(means + several * drawn / lengths, dim=1)
    seen = (sums.norm(dim=1) > 0)[loss.centre_labels()][:, None]
    with torch.no_grad():
        loss.proxies.copy_(torch.where(seen, moved.to(drawn), drawn))
