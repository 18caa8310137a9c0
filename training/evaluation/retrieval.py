"""Recall at K and MAP@R, for a torch network and an ONNX file alike, with intervals."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kinlens.embedder.errors import DatasetError, EvaluationError
from kinlens.training.data.records import LabelledImages, labels_in

Vectors = NDArray[np.float32] | Tensor
Labels = NDArray[np.int64]

TIE = 1e-5
"""Scores that differ by less are a tie."""

GAIN = ("gain low", "gain high")
"""Names of the bounds of the interval of a change in R@1, in points."""

SCORES = 1 << 22
"""Similarities in memory at a time, 16 MB; a few blocks of that size exist at once."""


@dataclass(frozen=True)
class Retrieval:
    """Recall at each K and MAP@R in percent over `queries`, which have a positive.

    `ranks` (N,) has the rank from 0 of the best positive of each query, -1 without one, and
    `precisions` (N,) the average precision at R of each in 0..1, whose mean is MAP@R.
    """

    recall: dict[int, float]
    map_at_r: float
    queries: int
    ranks: Tensor = field(compare=False, repr=False)
    precisions: Tensor = field(compare=False, repr=False)

    def recall_by_name(self) -> dict[str, float]:
        return {f"R@{k}": value for k, value in self.recall.items()}

    def as_dict(self) -> dict[str, float]:
        return self.recall_by_name() | {"MAP@R": self.map_at_r}


def retrieval(
    queries: Vectors,
    query_labels: Labels,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
) -> Retrieval:
    r"""Recall at K and MAP@R of queries in a gallery, or of each image among all the others.

    A query with R positives in the gallery succeeds at K if one of them is among the K most similar
    images. With P(i) the precision of the i most similar images,

    .. math:: \text{MAP@R} = \operatorname{mean}_{queries} \frac{1}{R}
        \sum_{i = 1}^{R} P(i) \, [\text{image } i \text{ is a positive}]

    **Ties** are pessimistic: a negative ranks before a positive unless it is worse by more than
    1e-5, so that rounding decides nothing. Without a gallery, the query itself is excluded by its
    index, never by its score. A query without a positive is excluded and counted. See
    docs/decisions/0001.

    Tensors are ranked on their device, arrays on the CPU. Vectors have unit norm. Extra memory is a
    few blocks of `SCORES`, whatever N, or one query's M scores if they are more.

    Raises: DatasetError if no query has a positive; EvaluationError if an embedding is not finite.

    References:
        A Metric Learning Reality Check (MAP@R), https://arxiv.org/abs/2003.08505
    """
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels must be given together.")
    asking = checked(queries, query_labels)
    known = asking if gallery is None else checked(gallery, gallery_labels)
    classes = torch.tensor(query_labels, device=asking.device)
    known_classes = classes if gallery is None else classes.new_tensor(gallery_labels)
    rows = max(1, SCORES // max(1, len(known)))
    rank = torch.empty(len(asking), dtype=torch.int64, device=asking.device)
    precision = rank.double()
    with full_precision():
        for start in range(0, len(asking), rows):
            block = slice(start, start + rows)
            scores = asking[block] @ known.T  # (q, M)
            same = classes[block, None] == known_classes
            if gallery is None:
                same.diagonal(start).fill_(False)
                scores.diagonal(start).fill_(-torch.inf)
            rank[block], precision[block] = _ranked(scores, same)
    answered = rank >= 0
    if not answered.any():
        raise DatasetError(
            "No test image has another image of its class, so recall is not defined. Give test "
            "classes with at least 2 images each, and a gallery with the classes of the queries."
        )
    found = rank[answered]
    return Retrieval(
        {k: 100 * float((found < k).double().mean()) for k in ks},
        100 * float(precision[answered].mean()),
        len(found),
        rank.cpu(),
        precision.cpu(),
    )


def _ranked(scores: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of the best positive (-1 without one) and precision at R, (q,); overwrites `scores`."""
    query, image = same.nonzero(as_tuple=True)  # (P,) each, of all positives
    count = query.bincount(minlength=len(scores))
    lowered = scores[query, image] - TIE
    scores[query, image] = lowered
    worst = scores.new_full(count.shape, -torch.inf)
    best = worst.scatter_reduce(0, query, lowered, "amax")
    # Sums of float32, exact up to 2^24, are far faster than of bool.
    rank = (scores > best[:, None]).float().sum(dim=1).long()
    first = scores.topk(int(count.max()), dim=1).indices  # (q, R)
    position = torch.arange(1, first.shape[1] + 1, device=scores.device)
    right = same.gather(1, first) & (position <= count[:, None])
    precision = right.cumsum(dim=1) / position.double()
    total = precision.masked_fill_(~right, 0).sum(dim=1)
    return rank.masked_fill_(count == 0, -1), total / count.clamp(min=1)


def checked(embeddings: Vectors, labels: Labels | None) -> Tensor:
    """The embeddings (N, D) as float32 on their device. Raises: EvaluationError, ValueError."""
    if embeddings.ndim != 2 or labels is None or labels.shape != embeddings.shape[:1]:
        raise ValueError(
            f"Embeddings are {tuple(embeddings.shape)} and labels "
            f"{None if labels is None else labels.shape}; expected (N, D), (N,)."
        )
    if isinstance(embeddings, np.ndarray):
        embeddings = torch.from_numpy(np.require(embeddings, np.float32, ("C", "W")))
    broken = sum(int((~part.isfinite()).any(dim=1).sum()) for part in torch.split(embeddings, 8192))
    if broken:
        raise EvaluationError(
            f"{broken:,} of {len(embeddings):,} embeddings are not finite numbers. "
            "Train again with lower learning rates."
        )
    return embeddings.float()


@contextmanager
def full_precision() -> Iterator[None]:
    """A block whose float32 products are not rounded to TF32 or bf16, whatever training set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def gain(before: Tensor | None, after: Tensor, labels: Labels) -> dict[str, float]:
    r"""`GAIN`: 95 % interval of the change in R@1 between two models on the same queries.

    Queries of one class are alike, so classes count as independent and queries do not. With
    :math:`d_g` the sum of the paired changes in class g of :math:`n_g` queries, and G classes,

    .. math:: \hat d = \frac{\sum_g d_g}{\sum_g n_g}, \quad
        s^2 = \frac{G}{G - 1} \frac{\sum_g (d_g - \hat d n_g)^2}{(\sum_g n_g)^2}

    and the interval is :math:`\hat d \pm t_{G - 1} s`. The result is {} for a single class, and
    without `before`. Ranks are those of `Retrieval`.

    References:
        Cameron and Miller, A Practitioner's Guide to Cluster-Robust Inference (2015)
    """
    if before is None:
        return {}
    answered = (after >= 0).numpy()
    change = ((after == 0).long() - (before == 0).long()).numpy()[answered]
    mean, error, classes = mean_by_class(change, labels[answered])
    if classes < 2:
        return {}
    from scipy import special  # here, since its import takes a second

    half = float(special.stdtrit(classes - 1, 0.975)) * error
    return dict(zip(GAIN, (100 * (mean - half), 100 * (mean + half)), strict=True))


def mean_by_class(values: NDArray[Any], labels: Labels) -> tuple[float, float, int]:
    """The mean of values (N,), its standard error s in `gain` (0 for one class), and G."""
    _, numbers = np.unique(labels, return_inverse=True)
    sizes, sums = np.bincount(numbers), np.bincount(numbers, values)
    classes, mean = len(sizes), float(values.mean())
    variance = classes / max(classes - 1, 1) * ((sums - mean * sizes) ** 2).sum()
    return mean, float(np.sqrt(variance)) / len(values), classes


def queries_in(images: LabelledImages, gallery: LabelledImages | None = None) -> int:
    """Number of `images` with another image of their class, among them or in a gallery."""
    if gallery is not None:
        return int(np.isin(images.labels, labels_in(gallery, images.class_names)).sum())
    sizes = np.bincount(images.labels, minlength=images.classes)
    return int(sizes[sizes > 1].sum())
