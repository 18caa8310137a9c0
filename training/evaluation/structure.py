"""How the embeddings fill their sphere: uniformity, density, spectral decay, class spread."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from training.evaluation.arrays import (
    Labels,
    Vectors,
    check,
    check_pairs,
    unit_block,
    unit_blocks,
)

_CHUNK_ROWS = 1024
_SPECTRUM_ROWS = 4096
_SMALLEST_DISTANCE = 1e-8
_SMALLEST_SINGULAR_VALUE = float(torch.finfo(torch.float32).eps)


@dataclass(frozen=True)
class Structure:
    """The measures of `structure`; each field is explained at the function of its name."""

    uniformity: float
    density: float
    density_pairs: float
    spectral_decay: float
    class_variance: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) for value in asdict(self).values()):
            raise ValueError(f"Not finite: {self}.")

    def as_dict(self) -> dict[str, float]:
        """{"uniformity": ..., "density": ..., ...}"""
        return asdict(self)


def structure(
    embeddings: Vectors,
    labels: Labels,
    rows: int | None = None,
    chunk_rows: int = _CHUNK_ROWS,
    on_rows: Callable[[int], None] | None = None,
) -> Structure:
    """All measures of this file.

    Memory beside the embeddings is a few blocks of chunk_rows x chunk_rows and one float64 vector
    per class, whatever N.

    Args:
        embeddings: (N, D), normalised here in float64.
        labels: (N,).
        rows, chunk_rows, on_rows: of `uniformity`, the only measure whose cost grows with N^2.

    Raises: DatasetError without two classes, one of them with two images; EvaluationError if an
        embedding is not finite.

    References:
        Non-isotropy Regularization for Proxy-based Deep Metric Learning, the table of structure
        metrics, https://arxiv.org/abs/2203.08547
    """
    check(embeddings, labels)
    check_pairs(labels)
    sums, sizes = _class_sums(embeddings, labels)
    return Structure(
        uniformity(embeddings, rows, chunk_rows, on_rows),
        _density(sums, sizes),
        _density_pairs(sums, sizes),
        spectral_decay(embeddings),
        _class_variance(sums, sizes),
    )


def uniformity(
    embeddings: Vectors,
    rows: int | None = None,
    chunk_rows: int = _CHUNK_ROWS,
    on_rows: Callable[[int], None] | None = None,
) -> float:
    r"""log of the mean Gaussian potential over the pairs of images; lower is more uniform.

    .. math:: \log \operatorname{mean}_{i < j} \exp(-2 |e_i - e_j|^2)

    Args:
        embeddings: (N, D), N at least 2.
        rows: only the pairs whose i is among the first so many images.
        chunk_rows: a block of scores is chunk_rows x chunk_rows.
        on_rows: called with the number of images whose pairs were just summed.

    References:
        Understanding Contrastive Representation Learning through Alignment and Uniformity on the
        Hypersphere (t = 2), https://arxiv.org/abs/2005.10242
    """
    count = len(embeddings)
    rows = count if rows is None else min(rows, count)
    total = 0.0
    for start in range(0, rows, chunk_rows):
        block = unit_block(embeddings, start, min(chunk_rows, rows - start), torch.float32)
        own = _potentials(block, block)
        total += (float(own.sum(dtype=torch.float64)) - float(own.trace())) / 2
        for later in range(start + len(block), count, chunk_rows):
            others = unit_block(embeddings, later, chunk_rows, torch.float32)
            total += float(_potentials(block, others).sum(dtype=torch.float64))
        if on_rows is not None:
            on_rows(len(block))
    pairs = rows * (2 * count - rows - 1) // 2
    return math.log(total / pairs)


def density(embeddings: Vectors, labels: Labels) -> float:
    r"""pi: mean distance inside a class / mean distance between classes; lower is denser.

    Distances are cosine distances, d(a, b) = 1 - a.b = |a - b|^2 / 2. With m_c the normalised mean
    of class c,

    .. math:: \pi = \frac{\operatorname{mean}_c \operatorname{mean}_{i \neq j \in c} d(e_i, e_j)}
        {\operatorname{mean}_{c \neq c'} d(m_c, m_{c'})}

    **Reading.** The paper names the measure without its formula. This is the class-wise form of the
    work that introduced it: every class counts the same, and the denominator compares class means.
    Classes with one image have no inner distance and are left out of the numerator. The denominator
    is at least 1e-8, so that a collapsed embedding has 0. `density_pairs` is the other reading.

    References:
        Revisiting Training Strategies and Generalization Performance in Deep Metric Learning
        (pi_ratio), https://arxiv.org/abs/2002.08473
    """
    return _density(*_class_sums(embeddings, labels))


def density_pairs(embeddings: Vectors, labels: Labels) -> float:
    r"""Mean cosine distance over all pairs of the same class / over all pairs of two classes.

    The other reading of `density`: large classes weigh more, and the denominator contains the
    spread of the classes, not of their means alone.
    """
    return _density_pairs(*_class_sums(embeddings, labels))


def class_variance(embeddings: Vectors, labels: Labels) -> float:
    r"""Variance over the classes of the size of a class cluster; 0 if all are equally large.

    **Reading.** The paper says "variability in class-cluster sizes" and no more. The size of a
    class is here its mean inner distance, mean_{i != j in c} d(e_i, e_j), the term of `density`;
    the variance is that of the population, over the classes with at least two images.
    """
    return _class_variance(*_class_sums(embeddings, labels))


def spectral_decay(embeddings: Vectors, chunk_rows: int = _SPECTRUM_ROWS) -> float:
    r"""rho: how far the singular values of the embeddings are from equal; 0 if they are.

    .. math:: \rho = \operatorname{KL}(\mathcal{U} \,\|\, S)
        = -\log r - \frac{1}{r} \sum_{i = 1}^{r} \log S_i

    S are the r = min(N, D) singular values of the matrix (N, D), not centred, divided by their sum.
    They are those of a triangular matrix R (D, D), updated by a QR decomposition with each block of
    rows, in float64. **Reading**: a singular value below 1.2e-7 of the largest, the rounding of
    float32, counts as that, so that embeddings of lower rank have a large rho and not infinity.

    References:
        Revisiting Training Strategies and Generalization Performance in Deep Metric Learning
        (rho), https://arxiv.org/abs/2002.08473
    """
    triangle = torch.empty(0, embeddings.shape[1], dtype=torch.float64)
    for block in unit_blocks(embeddings, chunk_rows, torch.float64):
        triangle = torch.linalg.qr(torch.cat([triangle, block]), mode="r").R  # (<= D, D)
    values: Tensor = torch.linalg.svdvals(triangle)
    values = values.clamp(min=_SMALLEST_SINGULAR_VALUE * float(values[0]))
    return float(-math.log(len(values)) - (values / values.sum()).log().mean())


def _potentials(block: Tensor, others: Tensor) -> Tensor:
    """exp(-2 |a - b|^2) = exp(4 (a.b - 1)) of unit vectors: (a, b)."""
    scores: Tensor = block @ others.T
    return scores.sub_(1).mul_(4).exp_()


def _class_sums(embeddings: Vectors, labels: Labels) -> tuple[Tensor, Tensor]:
    """Sum (C, D) and number (C,) of the unit vectors of each class, in float64."""
    classes, members = np.unique(labels, return_inverse=True)
    member = torch.from_numpy(members)
    sums = torch.zeros(len(classes), embeddings.shape[1], dtype=torch.float64)
    start = 0
    for block in unit_blocks(embeddings, _CHUNK_ROWS, torch.float64):
        sums.index_add_(0, member[start : start + len(block)], block)
        start += len(block)
    return sums, member.bincount(minlength=len(classes)).double()


def _density(sums: Tensor, sizes: Tensor) -> float:
    inside = float(_class_sizes(sums, sizes).mean())
    centres = torch.nn.functional.normalize(sums, dim=1)
    count = len(centres)
    scores = centres.sum(dim=0).square().sum() - centres.square().sum()
    return inside / max(1 - float(scores) / (count * (count - 1)), _SMALLEST_DISTANCE)


def _density_pairs(sums: Tensor, sizes: Tensor) -> float:
    squares = sums.square().sum(dim=1)  # (C,): sum of the scores of all pairs of a class
    inside = (squares - sizes).sum() / (sizes * (sizes - 1)).sum()
    between = sums.sum(dim=0).square().sum() - squares.sum()
    between = between / (sizes.sum().square() - sizes.square().sum())
    return max(1 - float(inside), 0.0) / max(1 - float(between), _SMALLEST_DISTANCE)


def _class_variance(sums: Tensor, sizes: Tensor) -> float:
    return float(_class_sizes(sums, sizes).var(correction=0))


def _class_sizes(sums: Tensor, sizes: Tensor) -> Tensor:
    """Mean cosine distance inside each class with at least two images."""
    sums, sizes = sums[sizes > 1], sizes[sizes > 1]
    scores = (sums.square().sum(dim=1) - sizes) / (sizes * (sizes - 1))
    return (1 - scores).clamp(min=0)
