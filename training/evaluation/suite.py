"""All measures of one embedding, by name, for tables and reports."""

from collections.abc import Sequence

import numpy as np
import torch

from training.evaluation.clustering import clustering
from training.evaluation.retrieval import Labels, Vectors, retrieval
from training.evaluation.structure import structure

MEANING = {
    "R@K": "recall at K, %: queries with an image of their class among the K most similar ones",
    "MAP@R": "mean average precision at R, %, with R the number of positives of a query",
    "NMI": "normalised mutual information of classes and k-means clusters, %",
    "F1": "F1 over pairs of images of classes and k-means clusters, %",
    "uniformity": "log mean exp(-2 |a - b|^2) over pairs of images; lower is more uniform",
    "density": "mean cosine distance inside a class / between class means; lower is denser",
    "density_pairs": "the same over all pairs of images",
    "spectral_decay": "KL(uniform || singular values); lower uses more directions",
    "class_variance": "variance over classes of their mean inner cosine distance",
}
"""Every name that `evaluate_embeddings` can return, and what it means; "R@K" once for each K."""


def evaluate_embeddings(
    test: Vectors,
    labels: Labels,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    full: bool = True,
    seed: int = 0,
) -> dict[str, float]:
    """Recall, MAP@R and, in full, the agreement of clusters and the structure.

    **Reading.** With a gallery (In-Shop), retrieval asks the test images in the gallery; clusters
    and structure are those of both together, which are the test images of the split.

    Args:
        test: (N, D), unit norm; a tensor is measured on its device.
        labels: (N,).
        gallery: (M, D), unit norm; None for self-retrieval.
        gallery_labels: (M,), with a gallery.
        ks: values of K.
        full: also NMI, F1 and the measures of `structure`; minutes from 10,000 classes on.
        seed: of k-means.

    Returns: the names of `MEANING`, "R@K" as "R@1" and so on.

    Raises: DatasetError, EvaluationError, see the functions of the parts.
    """
    figures = retrieval(test, labels, gallery, gallery_labels, ks).as_dict()
    if not full:
        return figures
    if gallery is not None and gallery_labels is not None:
        test = torch.cat([torch.as_tensor(part) for part in (test, gallery)])
        labels = np.concatenate([labels, gallery_labels])
    return figures | clustering(test, labels, seed) | structure(test, labels)
