"""NMI and F1: do the clusters of k-means agree with the classes?"""

import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

from training.evaluation.arrays import Labels, Vectors, check

Init = Literal["k-means++", "random"]

MOST_CLASSES_FOR_PLUS_PLUS = 2000
"""With more classes, choosing the first centres one after the other takes longer than k-means."""

_ITERATIONS = 30


@dataclass(frozen=True)
class Clustering:
    """NMI and F1 over pairs, in percent, with `clusters` clusters."""

    nmi: float
    f1: float
    clusters: int

    def __post_init__(self) -> None:
        if not (0 <= self.nmi <= 100 and 0 <= self.f1 <= 100 and self.clusters >= 1):
            raise ValueError(f"Not an agreement of clusters and classes: {self}.")

    def as_dict(self) -> dict[str, float]:
        """{"NMI": ..., "F1": ...}"""
        return {"NMI": self.nmi, "F1": self.f1}


def clustering(
    embeddings: Vectors,
    labels: Labels,
    seed: int = 0,
    iterations: int = _ITERATIONS,
    init: Init | None = None,
) -> Clustering:
    """Agreement of the classes with as many clusters of k-means (Lloyd, one start).

    Lloyd's algorithm, not mini-batches: with five images in a class a mini-batch sees a cluster
    less than once. Memory beside the embeddings is one copy of them and a few times the centres;
    a round costs N x classes x D. The same seed gives the same clusters on the same machine.

    Args:
        embeddings: (N, D).
        labels: (N,); the number of different ones is the number of clusters.
        seed: of the first centres.
        iterations: the most rounds; fewer if the centres rest.
        init: how the first centres are chosen among the embeddings. None: "k-means++" up to 2,000
            classes, "random" above.

    Raises: EvaluationError if an embedding is not finite.

    References:
        Deep Metric Learning via Lifted Structured Feature Embedding (k-means with K = number of
        classes, NMI, F1), https://arxiv.org/abs/1511.06452
    """
    check(embeddings, labels)
    classes = len(np.unique(labels))
    if init is None:
        init = "k-means++" if classes <= MOST_CLASSES_FOR_PLUS_PLUS else "random"
    means = KMeans(classes, init=init, n_init=1, max_iter=iterations, random_state=seed)
    with warnings.catch_warnings():
        # Fewer different points than clusters: a collapsed network, which the figures will show.
        warnings.simplefilter("ignore", ConvergenceWarning)
        clusters = means.fit_predict(embeddings.astype(np.float32, copy=False))
    return agreement(labels, clusters.astype(np.int64))


def agreement(labels: Labels, clusters: Labels) -> Clustering:
    r"""NMI and F1 of two partitions of the same images.

    .. math:: \text{NMI} = \frac{2 I(\Omega, C)}{H(\Omega) + H(C)}, \qquad
        F_1 = \frac{2 P R}{P + R}

    P is the part of the pairs inside a cluster that share a class, R the part of the pairs inside a
    class that share a cluster. Two equal partitions have 100, also where a formula is 0 / 0. Memory
    is that of the cells of the contingency table that are not empty.

    Args:
        labels: (N,), C.
        clusters: (N,), Omega.

    References:
        Deep Metric Learning with Graph Consistency, AAAI 2021, evaluation (NMI and F1)
    """
    cell, cluster, of_class = _cells(labels, clusters)
    shared = _pairs(cell)
    either = _pairs(cluster) + _pairs(of_class)
    f1 = 2 * shared / either if either else 1.0
    entropies = _entropy(cluster) + _entropy(of_class)
    # I = H(clusters) + H(classes) - H(both)
    nmi = 2 * (entropies - _entropy(cell)) / entropies if entropies else 1.0
    return Clustering(100 * min(max(nmi, 0.0), 1.0), 100 * f1, len(cluster))


def _cells(labels: Labels, clusters: Labels) -> tuple[NDArray[np.int64], ...]:
    """Images per non-empty cell of the contingency table, per cluster and per class."""
    classes, rows = np.unique(labels, return_inverse=True)
    names, columns = np.unique(clusters, return_inverse=True)
    cell = np.unique(rows * len(names) + columns, return_counts=True)[1]
    return cell, np.bincount(columns), np.bincount(rows, minlength=len(classes))


def _pairs(sizes: NDArray[np.int64]) -> int:
    return int((sizes * (sizes - 1) // 2).sum())


def _entropy(sizes: NDArray[np.int64]) -> float:
    parts = sizes / sizes.sum()
    return float(-(parts * np.log(parts)).sum())
