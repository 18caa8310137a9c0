"""Structure of embeddings: uniformity, density, spectral decay, class spread, and clusters."""

import math
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.embedder.errors import DatasetError, EvaluationError
from kinlens.training.evaluation import retrieval
from kinlens.training.evaluation.retrieval import Labels, Vectors, checked, full_precision

_ROWS = 4096
_SOME = 256  # rows that show a collapse
_LEAST_RANK = 1.0001  # random networks are above 1.001, rounded equal vectors below 1.00001
_EQUAL = 1e-6  # cosine distances up to the rounding of float32 count as none
_FEW = 4  # classes per distinct point
_SMALLEST_DISTANCE = 1e-8
_SMALLEST_SINGULAR_VALUE = float(torch.finfo(torch.float32).eps)
_MOST_FOR_PLUS_PLUS = 200
"""With more classes, k-means++, which chooses one centre after the other, takes most of the time:
150 s for 1,000 classes of 10 images, where all else takes 2 s."""
_ROUNDS = 30


def structure(embeddings: Vectors, labels: Labels) -> dict[str, float]:
    """All measures of this file, each under the name of its function.

    Measured on the device of the embeddings (N, D), normalised here in float64. The cost of
    `uniformity` alone grows with N^2.

    Raises: DatasetError without two classes, one of them with two images; EvaluationError if an
        embedding is not finite.

    References:
        Non-isotropy Regularization for Proxy-based Deep Metric Learning, the table of structure
        metrics, https://arxiv.org/abs/2203.08547
    """
    vectors = checked(embeddings, labels)
    sizes = np.unique(labels, return_counts=True)[1]
    if len(sizes) < 2 or sizes.max() < 2:
        raise DatasetError(
            f"{len(labels):,} images of {len(sizes):,} classes: structure measures need at least 2 "
            "classes, one of them with 2 images. Give more test images."
        )
    sums, counts = class_sums(vectors, labels)
    several = counts > 1
    pairs = counts[several] * (counts[several] - 1)
    scores = (sums[several].square().sum(dim=1) - counts[several]) / pairs
    inner = (1 - scores).clamp(min=0)  # mean distance inside each class with two images or more
    return {
        "uniformity": uniformity(vectors),
        "density": density(sums, inner),
        "spectral_decay": spectral_decay(vectors),
        "class_variance": class_variance(inner),
    }


def require_distinct(embeddings: Tensor, labels: Labels) -> None:
    """Raises: EvaluationError if unit embeddings (N, D) are all equal, or all on one line, or if
    they are so few points that each represents more than four classes.

    On one line their effective rank, the exponential of the entropy of their spectrum, is 1. Fewer
    points than classes are no fault in themselves: classes may share images. Embeddings are one
    point within 1e-6 of 1 - cosine, the rounding of float32. A collapse that leaves more noise
    about its points passes, since classes that are found may be as close to each other.
    """
    step = max(len(embeddings) // _SOME, 1)
    rows = embeddings[::step].double()  # (M, D)
    count = len(rows)
    if count < 2 or not bool(rows.isfinite().all()):
        return
    gram = rows @ rows.T  # (M, M)
    shares = (torch.linalg.eigvalsh(gram) / gram.trace()).clamp(min=1e-12)
    rank = float((-shares * shares.log()).sum().exp())
    if rank < _LEAST_RANK:
        cosine = float((gram.sum() - gram.trace()) / (count * (count - 1)))
        what = "are equal" if cosine > 0.5 else "lie on one line"  # two opposite ones
        raise EvaluationError(
            f"All embeddings {what} (mean pairwise cosine {cosine:.6f}, effective rank "
            f"{rank:.4f}): the model has collapsed, and its answers are arbitrary. Train again "
            "with lower learning rates, or smaller weights of the regularizers."
        )
    distances = (1 - gram).clamp(min=0)
    near = distances <= _EQUAL
    points = count - int(near.tril(diagonal=-1).any(dim=1).sum())  # rows that equal no earlier one
    classes = len(np.unique(np.asarray(labels)[::step]))
    if _FEW * points < classes:
        raise EvaluationError(
            f"{count:,} embeddings of {classes:,} classes are only {points:,} different points: "
            "the model has collapsed, and most of its answers are arbitrary. Train again with "
            "lower learning rates, or smaller weights of the regularizers."
        )


def uniformity(vectors: Tensor) -> float:
    r"""log of the mean Gaussian potential over the pairs of images; lower is more uniform.

    .. math:: \log \operatorname{mean}_{i < j} \exp(-2 |e_i - e_j|^2)

    References:
        Understanding Contrastive Representation Learning through Alignment and Uniformity on the
        Hypersphere (t = 2), https://arxiv.org/abs/2005.10242
    """
    count, total = len(vectors), 0.0
    unit = torch.cat([block.float() for block in _unit_blocks(vectors)])
    rows = max(1, retrieval.SCORES // count)
    with full_precision():
        for start in range(0, count, rows):
            scores = unit[start : start + rows] @ unit[start:].T
            # exp(-2 |a - b|^2) = exp(4 (a.b - 1)) of unit vectors
            potentials = scores.sub_(1).mul_(4).exp_().triu_(diagonal=1)
            total += float(potentials.sum(dtype=torch.float64))
    return math.log(total / (count * (count - 1) / 2))


def class_sums(vectors: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """Sum (C, D) and number (C,) of the normalised vectors (N, D) of each class, in float64."""
    classes, members = np.unique(labels, return_inverse=True)
    member = torch.from_numpy(members).to(vectors.device)
    sums = vectors.new_zeros(len(classes), vectors.shape[1], dtype=torch.float64)
    for block, of_class in zip(_unit_blocks(vectors), torch.split(member, _ROWS), strict=True):
        sums.index_add_(0, of_class, block)
    return sums, member.bincount(minlength=len(classes)).double()


def density(sums: Tensor, inner: Tensor) -> float:
    r"""pi: mean distance inside a class / mean distance between classes; lower is denser.

    With cosine distances d(a, b) = 1 - a.b, and m_c the normalised mean of class c,

    .. math:: \pi = \frac{\operatorname{mean}_c \operatorname{mean}_{i \neq j \in c} d(e_i, e_j)}
        {\operatorname{mean}_{c \neq c'} d(m_c, m_{c'})}

    **Reading.** The paper names the measure without its formula. This is the class-wise form of the
    work that introduced it: every class counts the same, except those with one image, which have no
    inner distance. The denominator is at least 1e-8, so that a collapsed embedding has 0.

    References:
        Revisiting Training Strategies and Generalization Performance in Deep Metric Learning
        (pi_ratio), https://arxiv.org/abs/2002.08473
    """
    centres = F.normalize(sums, dim=1)
    count = len(centres)
    scores = centres.sum(dim=0).square().sum() - centres.square().sum()
    between = max(1 - float(scores) / (count * (count - 1)), _SMALLEST_DISTANCE)
    return float(inner.mean()) / between


def class_variance(inner: Tensor) -> float:
    """Variance over the classes of the size of a class cluster; 0 if all are equally large.

    **Reading.** The paper has "variability in class-cluster sizes" only. Here a class's size is
    its mean inner distance, the term of `density`.
    """
    return float(inner.var(correction=0))


def spectral_decay(vectors: Tensor) -> float:
    r"""rho: deviation of the singular values of the embeddings from uniform; 0 if they are equal.

    .. math:: \rho = \operatorname{KL}(\mathcal{U} \,\|\, S)
        = -\log r - \frac{1}{r} \sum_{i = 1}^{r} \log S_i

    S are the r = min(N, D) singular values of the normalised vectors (N, D), not centred, divided
    by their sum. They are those of a triangular matrix R (D, D), updated by a QR decomposition with
    each block of rows, in float64. **Reading**: a singular value below 1.2e-7 of the largest, the
    rounding of float32, counts as that, so that embeddings of lower rank have a large but finite
    rho; those that are all zero count as a single direction.

    References:
        Revisiting Training Strategies and Generalization Performance in Deep Metric Learning
        (rho), https://arxiv.org/abs/2002.08473
    """
    triangle = vectors.new_empty(0, vectors.shape[1], dtype=torch.float64)
    for block in _unit_blocks(vectors):
        triangle = torch.linalg.qr(torch.cat([triangle, block]), mode="r").R  # (<= D, D)
    values: Tensor = torch.linalg.svdvals(triangle)
    values[0].clamp_(min=_SMALLEST_DISTANCE)
    values = values.clamp(min=_SMALLEST_SINGULAR_VALUE * float(values[0]))
    return float(-math.log(len(values)) - (values / values.sum()).log().mean())


def _unit_blocks(vectors: Tensor) -> Iterator[Tensor]:
    """The vectors in blocks of rows, each row divided by its norm in float64: (r, D)."""
    for block in torch.split(vectors, _ROWS):
        yield F.normalize(block.double(), dim=1)


def clustering(embeddings: Vectors, labels: Labels, seed: int = 0) -> dict[str, float]:
    """Agreement in percent of the classes and as many k-means clusters (Lloyd, one start).

    Lloyd's algorithm, not mini-batches: with five images in a class a mini-batch sees a cluster
    less than once. It starts from k-means++ up to 200 classes, from random embeddings above.
    An iteration costs N x classes x D, on the CPU.

    Raises: EvaluationError if an embedding is not finite.

    References:
        Deep Metric Learning via Lifted Structured Feature Embedding (k-means with K = number of
        classes, NMI, F1), https://arxiv.org/abs/1511.06452
    """
    # scikit-learn is imported by those who need it: a third of the time to import a training.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    vectors = checked(embeddings, labels).cpu().numpy()
    classes = len(np.unique(labels))
    init = "k-means++" if classes <= _MOST_FOR_PLUS_PLUS else "random"
    means = KMeans(classes, init=init, n_init=1, max_iter=_ROUNDS, random_state=seed)
    with warnings.catch_warnings():
        # k-means warns if a collapsed network has fewer points than clusters; the figures show it.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return agreement(labels, means.fit_predict(vectors))


def agreement(labels: Labels, clusters: Labels) -> dict[str, float]:
    r"""NMI and F1 of two partitions of the same images, in percent: {"NMI": ..., "F1": ...}.

    .. math:: \text{NMI} = \frac{2 I(\Omega, C)}{H(\Omega) + H(C)}, \qquad
        F_1 = \frac{2 P R}{P + R}

    P is the part of the pairs inside a cluster that share a class, R the part of the pairs inside a
    class that share a cluster. Two equal partitions have 100, also if a formula is 0 / 0.

    References:
        Deep Metric Learning with Graph Consistency, AAAI 2021, evaluation (NMI and F1)
    """
    from sklearn.metrics import normalized_mutual_info_score
    from sklearn.metrics.cluster import pair_confusion_matrix

    nmi = float(normalized_mutual_info_score(labels, clusters))
    (_, in_cluster_alone), (in_class_alone, in_both) = pair_confusion_matrix(labels, clusters)
    pairs = 2 * int(in_both) + int(in_cluster_alone) + int(in_class_alone)
    f1 = 2 * int(in_both) / pairs if pairs else 1.0
    return {"NMI": 100 * min(max(nmi, 0.0), 1.0), "F1": 100 * f1}
