"""Plots: embeddings in the plane, and R@1 over embedding sizes."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import JobError
from kinlens.embedder.types import Embeddings
from kinlens.training.data.records import LabelledImages

if TYPE_CHECKING:
    import pandas as pd

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


def draw_embeddings(path: Path, embeddings: Embeddings, images: LabelledImages, seed: int) -> None:
    """The t-SNE of the embeddings (N, D) of images, coloured by class; names of few classes."""
    from matplotlib.figure import Figure  # here, since its import takes a second

    plane = positions(embeddings, seed)
    figure = Figure(figsize=(10, 10), layout="constrained")
    axis = figure.subplots()
    points = axis.scatter(plane[:, 0], plane[:, 1], c=images.labels, cmap="nipy_spectral", s=8)
    if images.classes <= _MOST_NAMES:
        handles, _ = points.legend_elements(num=list(range(images.classes)))
        axis.legend(handles, images.class_names)
    axis.set(title=f"{len(images):,} images of {images.classes:,} classes", xticks=[], yticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_sizes(path: Path, runs: "pd.DataFrame") -> None:
    """R@1 of each competitor over its sizes, the mean over seeds; a panel for each network.

    `runs` has the columns grid, backbone, dim, competitor and R@1.
    """
    from matplotlib.figure import Figure

    panels = dict(list(runs.groupby(["grid", "backbone"], sort=False)))
    figure = Figure(figsize=(6 * len(panels), 5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (names, of) in zip(axes, panels.items(), strict=True):
        for competitor, scores in of.groupby("competitor", sort=False):
            means = scores.groupby("dim")["R@1"].mean()
            axis.plot(means.index, means, marker="o", label=str(competitor))
        axis.set_xscale("log", base=2)
        sizes = sorted(of["dim"].unique())
        axis.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
        axis.set(title=" ".join(filter(None, names)), xlabel="dimensions", ylabel="R@1, %")
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
