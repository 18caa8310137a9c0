"""Embeddings in the plane: t-SNE, and its points coloured by class."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import JobError
from kinlens.embedder.types import Embeddings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NAMES = 20
_PERPLEXITY = 30.0


def require_plot(path: Path) -> None:
    """Raises: JobError if no plot can be written in the format of `path`."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise JobError(f"--plot {path}: give a file that ends in .png, .svg or .pdf.")


def positions(embeddings: Embeddings, seed: int = 0) -> NDArray[np.float32]:
    """t-SNE of unit embeddings: (N, D) to (N, 2); the same for the same seed.

    References:
        van der Maaten and Hinton, Visualizing Data using t-SNE, JMLR 2008,
        https://www.jmlr.org/papers/v9/vandermaaten08a.html
    """
    from sklearn.manifold import TSNE

    count, dim = embeddings.shape
    plane: NDArray[np.float32] = TSNE(
        perplexity=min(_PERPLEXITY, (count - 1) / 3),
        init="pca" if min(count, dim) > 1 else "random",
        random_state=seed,
    ).fit_transform(embeddings)
    return plane


def scatter(axes: "Axes", plane: NDArray[np.float32], classes: Sequence[str]) -> None:
    """Draw points (N, 2), coloured by their classes (N,), with a legend if these are few."""
    names, labels = np.unique(np.array(classes, object), return_inverse=True)
    points = axes.scatter(plane[:, 0], plane[:, 1], c=labels, cmap="nipy_spectral", s=8)
    if len(names) <= _MOST_NAMES:
        handles, _ = points.legend_elements(num=list(range(len(names))))
        axes.legend(handles, list(names))
    axes.set(xticks=[], yticks=[])


def draw_embeddings(path: Path, embeddings: Embeddings, classes: Sequence[str], seed: int) -> None:
    """Write the t-SNE of embeddings (N, D), images of these classes (N,), as a drawing."""
    from matplotlib.figure import Figure  # here, since its import takes a second

    figure = Figure(figsize=(10, 10), layout="constrained")
    axes = figure.subplots()
    scatter(axes, positions(embeddings, seed), classes)
    axes.set_title(f"{len(classes):,} images of {len({*classes}):,} classes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
