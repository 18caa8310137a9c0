"""Plots of evaluations, probabilities and vectors, as `kinlens.plot`.

    axes = kinlens.plot.map(gallery, "class")
    axes.figure.savefig("map.png")

Each function draws on `ax`, axes of matplotlib, or else on a new figure, and returns the axes. They
need `kinlens[plot]`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from kinlens.environment import needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from kinlens.indexer.entries import Item
    from kinlens.library.gallery import Gallery

__all__ = ["calibration", "map", "recall", "spectrum"]

P = ParamSpec("P")
R = TypeVar("R")

_BINS = 10
_LEAST_SHARE = 1e-12  # of the variance: below it float32 has rounding alone
_THUMBNAIL_PX = 48
_APART = 0.06  # of the width of the map: the least distance of two thumbnails


def _with_matplotlib(function: Callable[P, R]) -> Callable[P, R]:
    """Name the extra to install if matplotlib or scikit-learn is missing, before any work."""

    @wraps(function)
    def checked(*given: P.args, **named: P.kwargs) -> R:
        with needs(f"kinlens.plot.{function.__name__}", "plot"):
            import_module("matplotlib")
            return function(*given, **named)

    return checked


@_with_matplotlib
def recall(
    *evaluations: Any, labels: Sequence[str] | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Draw R@K over K of one or more evaluations, in percent, with 95 % intervals.

    R@K is the share of the queries with a right item among the first K hits. The intervals
    (Wilson) take queries as independent; an evaluation without a number of queries has none.

    Args:
        evaluations: results of `gallery.evaluate`, `kinlens.training.evaluate` or
            `kinlens.training.fit`, or mappings such as {"R@1": 71.2, "R@10": 90.4} in percent.
        labels: their names in the legend.
        ax: axes to draw on.

    Raises: InvalidParameterError for an evaluation without R@K.

    Examples:
        >>> axes = kinlens.plot.recall(before, after, labels=["before", "after"])
    """
    from kinlens.golden import wilson

    curves = [(*_recalls(one), name) for one, name in _named("evaluations", evaluations, labels)]
    axes, seen = _axes(ax), set[int]()
    for figures, queries, label in curves:
        ks = sorted(figures)
        [line] = axes.plot(ks, [figures[k] for k in ks], marker="o", label=label)
        if queries:
            bounds = [wilson(round(figures[k] * queries / 100), queries) for k in ks]
            low, high = ([100 * side for side in sides] for sides in zip(*bounds, strict=True))
            axes.fill_between(ks, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        seen |= figures.keys()
    axes.set_xscale("log")
    axes.set_xticks(sorted(seen), [str(k) for k in sorted(seen)])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="K", ylabel="R@K, %")
    return _finished(axes, labels)


@_with_matplotlib
def calibration(gallery: "Gallery", *, searches: int = 500, ax: "Axes | None" = None) -> "Axes":
    """Draw how often the first hit is right over the probability that the gallery gave it.

    Up to `searches` items that name their product are searched for among the others. Ten groups of
    searches with similar probabilities are points, with 95 % intervals (Wilson). On the diagonal
    the probabilities are true. The title has the expected calibration error.

    The curve of a gallery is fitted to its items, so expect a larger error for new photos; the
    report of `gallery.calibrate` has one on items that were not fitted.

    Args:
        gallery: a gallery in a folder, after `gallery.calibrate()`.
        searches: number of items; 500 take a few seconds.
        ax: axes to draw on.

    Raises: InvalidParameterError for a gallery without probabilities.
    """
    import numpy as np

    from kinlens.embedder.calibration import calibration_error
    from kinlens.embedder.errors import InvalidParameterError
    from kinlens.golden import wilson
    from kinlens.library.stores import folder_of
    from kinlens.quality.calibration import identity, product_of
    from kinlens.quality.calibrator import Calibrator
    from kinlens.values import single

    folder = folder_of(gallery.store, "has no probabilities")
    known = Calibrator(folder).stored()
    first, is_right = [], []
    if known is not None and known.product is not None:
        for item in folder.sample(searches)[0]:
            own = single(item.attributes.get(known.product))
            hits = gallery.search(positives=[item.key], k=1)
            if own is not None and hits and hits[0].probability is not None:
                first.append(hits[0].probability)
                is_right.append(product_of(hits[0], known.product) == identity(own))
    if not first:
        raise InvalidParameterError(
            f"The gallery {gallery.name} gives no probabilities. Give items an attribute `product` "
            "or `class`, and call gallery.calibrate(), which names what else is missing."
        )
    axes = _axes(ax)
    likely, right = np.array(first), np.array(is_right)
    axes.plot([0, 100], [0, 100], color="grey", linestyle=":")
    for part in np.array_split(np.argsort(likely, kind="stable"), _BINS):
        if len(part):
            share = 100 * right[part].mean()
            low, high = wilson(int(right[part].sum()), len(part))
            lengths = [[max(share - 100 * low, 0)], [max(100 * high - share, 0)]]
            axes.errorbar(100 * likely[part].mean(), share, lengths, fmt="o", color="C0")
    error = 100 * calibration_error(likely, right)
    axes.set(
        title=f"{len(first):,} searches, calibration error {error:.1f} %",
        xlabel="probability of the first hit, %",
        ylabel="first hits that are right, %",
    )
    return _finished(axes, None)


@_with_matplotlib
def spectrum(
    *vectors: Any, labels: Sequence[str] | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Draw the spectrum of vectors: the share of their variance in each principal direction.

    The shares, in percent, are the eigenvalues of the covariance over their sum, largest first. The
    legend has the effective rank, the exponential of the entropy of the shares: D for vectors that
    use all directions alike, near 1 for those on a line.

    Args:
        vectors: arrays (N, D) of floats, or galleries, of which all vectors are read.
        labels: their names in the legend.
        ax: axes to draw on.

    Raises: InvalidParameterError for other shapes, or vectors that are all equal.

    References:
        Roy and Vetterli, The effective rank: a measure of effective dimensionality, EUSIPCO 2007.
    """
    spectra = [(*_shares(rows), name) for rows, name in _named("vectors", vectors, labels)]
    axes = _axes(ax)
    for shares, rank, label in spectra:
        name = "" if label is None else f"{label}, "
        numbers = range(1, len(shares) + 1)
        axes.plot(numbers, 100 * shares, label=f"{name}effective rank {rank:.1f}")
    axes.set_yscale("log")
    axes.set(xlabel="principal direction", ylabel="share of the variance, %")
    axes.legend()
    return _finished(axes, None)


@_with_matplotlib
def map(
    gallery: "Gallery",
    by: str | None = None,
    *,
    filter: Any = None,
    limit: int = 1000,
    seed: int = 0,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the items of a gallery in the plane, similar ones near each other (t-SNE).

    Neighbours are meaningful; sizes of groups and distances between them are not. The axes have no
    unit.

    Args:
        by: an attribute that colours the points, numbers with a colour bar. Without it, thumbnails
            are drawn where there is space.
        filter: only items that match, such as `'price < 60'`.
        limit: number of items; of more, a random sample is drawn. 1,000 take about 5 s.
        seed: of the sample and of t-SNE; the same one gives the same map.
        ax: axes to draw on.

    Raises: InvalidParameterError for an unknown attribute or fewer than two items; FilterError.

    Examples:
        >>> axes = kinlens.plot.map(gallery, "class", limit=300)
    """
    from kinlens.embedder.errors import InvalidParameterError
    from kinlens.training.report.plane import positions, scatter

    schema = gallery.schema()
    if by is not None and by not in schema:
        raise InvalidParameterError(
            f"by = {by!r} is no attribute. The gallery has {', '.join(schema) or 'none'}."
        )
    items = _sample(gallery, filter, limit, seed)
    if len(items) < 2:
        raise InvalidParameterError(f"A map needs two items or more, and {len(items)} match.")
    plane = positions(gallery.vectors([item.key for item in items]), seed)
    axes = _axes(ax)
    if by is None:
        _draw_thumbnails(axes, plane, items, gallery)
    elif schema[by] == "number":
        _draw_numbers(axes, plane, [item.attributes.get(by) for item in items], by)
    else:
        from kinlens.reports import written

        values = [item.attributes.get(by) for item in items]
        scatter(axes, plane, ["no value" if x is None else written(x) for x in values])
    axes.set(title=f"{len(items):,} of {gallery.size:,} items", xticks=[], yticks=[])
    return axes


def _axes(ax: "Axes | None") -> "Axes":
    """The axes to draw on, or those of a new figure."""
    if ax is not None:
        return ax
    from matplotlib import pyplot as plt

    return plt.subplots(layout="constrained")[1]


def _finished(axes: "Axes", labels: Sequence[str] | None) -> "Axes":
    axes.grid(alpha=0.3)
    if labels is not None:
        axes.legend()
    return axes


def _named(
    what: str, given: Sequence[Any], labels: Sequence[str] | None
) -> list[tuple[Any, str | None]]:
    """What is drawn, each with its label. Raises: InvalidParameterError."""
    from kinlens.embedder.errors import InvalidParameterError

    if not given or isinstance(labels, str) or (labels is not None and len(labels) != len(given)):
        number = 0 if labels is None else len(labels)
        raise InvalidParameterError(
            f"There are {len(given)} {what} and {number} labels. Pass one or more {what}, and a "
            "list with a label for each."
        )
    return [*zip(given, labels or (None,) * len(given), strict=True)]


def _recalls(evaluation: Any) -> tuple[dict[int, float], int]:
    """R@K in percent by K, and the number of queries; 0 if it is not known."""
    from kinlens.embedder.errors import InvalidParameterError
    from kinlens.golden import GoldenRun

    if isinstance(evaluation, GoldenRun):
        parts = {1: evaluation.recall_at_1, 5: evaluation.recall_at_5, 10: evaluation.recall_at_10}
        found = {k: 100 * part for k, part in parts.items() if part is not None}
        queries = evaluation.judged
    else:
        figures = getattr(evaluation, "figures", evaluation)
        given = figures if isinstance(figures, Mapping) else {}
        names = [name for name in given if name.startswith("R@")]
        found = {int(name.removeprefix("R@")): given[name] for name in names}
        queries = getattr(evaluation, "queries", 0)
    if not found:
        raise InvalidParameterError(
            f"An evaluation of type {type(evaluation).__name__} has no R@K. Pass the result of "
            "gallery.evaluate, of kinlens.training.evaluate or fit, or a mapping of R@K."
        )
    return found, queries


def _shares(vectors: Any) -> tuple["NDArray[Any]", float]:
    """The share of the variance in each direction (min(N - 1, D),), and the effective rank."""
    import numpy as np

    from kinlens.embedder.errors import InvalidParameterError
    from kinlens.library.gallery import Gallery

    rows = np.asarray(vectors.vectors() if isinstance(vectors, Gallery) else vectors, np.float64)
    if rows.ndim != 2 or len(rows) < 2:
        raise InvalidParameterError(
            f"vectors of shape {rows.shape} must be (N, D) with two rows or more."
        )
    centred = rows - rows.mean(axis=0)
    variances = np.linalg.svd(centred, compute_uv=False)[: len(rows) - 1] ** 2
    if variances.sum() <= _LEAST_SHARE * (rows**2).sum():
        raise InvalidParameterError(
            f"The {len(rows):,} vectors are equal, so they have no spectrum."
        )
    shares = variances / variances.sum()
    kept = shares[shares > _LEAST_SHARE]
    return kept, float(np.exp(-(kept * np.log(kept)).sum()))


def _sample(gallery: "Gallery", where: Any, limit: int, seed: int) -> "list[Item]":
    """Up to `limit` of the items that match, by ascending id."""
    import numpy as np

    count = gallery.count(where)
    chosen = {*np.random.default_rng(seed).permutation(count)[:limit].tolist()}
    return [item for n, item in enumerate(gallery.each_item(filter=where)) if n in chosen]


def _draw_numbers(axes: "Axes", plane: "NDArray[Any]", values: Sequence[Any], name: str) -> None:
    """Points (N, 2) coloured by numbers (N,); those without one are grey."""
    import numpy as np

    from kinlens.values import single

    numbers = np.array([single(value) for value in values], float)  # None becomes NaN
    has_one = np.isfinite(numbers)
    x, y = plane.T
    axes.scatter(x[~has_one], y[~has_one], c="lightgrey", s=8)
    points = axes.scatter(x[has_one], y[has_one], c=numbers[has_one], s=8)
    axes.figure.colorbar(points, ax=axes, label=name)


def _draw_thumbnails(
    axes: "Axes", plane: "NDArray[Any]", items: "Sequence[Item]", gallery: "Gallery"
) -> None:
    """Points (N, 2), and the images of those that are not too near to an earlier image."""
    import io

    import numpy as np
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage
    from PIL import Image

    from kinlens.embedder.errors import ImageMissingError

    axes.scatter(plane[:, 0], plane[:, 1], c="lightgrey", s=8)
    least = _APART * float(np.ptp(plane, axis=0).max())
    drawn = np.empty((0, 2))
    for item, place in zip(items, plane, strict=True):
        if not item.has_image or (np.linalg.norm(drawn - place, axis=1) < least).any():
            continue
        try:
            data = gallery.image(item.key, _THUMBNAIL_PX)
        except ImageMissingError:
            continue  # its file was removed: the point stays
        photo = OffsetImage(np.asarray(Image.open(io.BytesIO(data))), zoom=0.6)
        axes.add_artist(AnnotationBbox(photo, tuple(place), frameon=False))
        drawn = np.append(drawn, [place], axis=0)
