"""All measures of one embedding, by name, for tables and reports."""

from collections.abc import Callable, Sequence

import numpy as np

from training.evaluation.arrays import Labels, Vectors
from training.evaluation.clustering import clustering as cluster
from training.evaluation.retrieval import Duplicates, retrieval
from training.evaluation.structure import structure as measure_structure

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
    duplicates: Duplicates = "keep",
    clustering: bool = True,
    structure: bool = True,
    seed: int = 0,
    on_rows: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Recall, MAP@R and, where asked for, the agreement of clusters and the structure.

    **Reading.** With a gallery (In-Shop), retrieval asks the test images in the gallery; clusters
    and structure are those of both together, which are the test images of the split.

    Args:
        test: (N, D), unit norm.
        labels: (N,).
        gallery: (M, D), unit norm; None for self-retrieval.
        gallery_labels: (M,), with a gallery.
        ks: values of K.
        duplicates: see `retrieval`.
        clustering: also NMI and F1; the dearest part, with minutes from 10,000 classes on.
        structure: also the measures of `structure`.
        seed: of k-means.
        on_rows: called with the number of queries that were just answered.

    Returns: the names of `MEANING`, "R@K" as "R@1" and so on.

    Raises: DatasetError, EvaluationError, see the functions of the parts.
    """
    found = retrieval(test, labels, gallery, gallery_labels, ks, duplicates, on_rows=on_rows)
    figures = found.as_dict()
    if gallery is not None and gallery_labels is not None and (clustering or structure):
        test, labels = np.concatenate([test, gallery]), np.concatenate([labels, gallery_labels])
    if clustering:
        figures |= cluster(test, labels, seed).as_dict()
    if structure:
        figures |= measure_structure(test, labels).as_dict()
    return figures
