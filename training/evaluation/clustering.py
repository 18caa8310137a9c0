"""NMI and F1: agreement between the clusters of k-means and the classes."""

import warnings

import numpy as np

from kinlens.training.evaluation.retrieval import Labels, Vectors, checked

_MOST_FOR_PLUS_PLUS = 200
"""With more classes, k-means++, which chooses one centre after the other, takes most of the time:
150 s for 1,000 classes of 10 images, where all else takes 2 s."""

_ROUNDS = 30


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
