"""Whether scores tell right pairs from wrong ones: the area under their ROC curve, with doubt."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_NORMAL_95 = 1.959964

Vector = NDArray[np.float64]


class Area(NamedTuple):
    """An area under a ROC curve, 0.5 for chance, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def roc_area(
    scores: NDArray[np.floating],
    right: NDArray[np.bool_],
    weights: NDArray[np.floating | np.integer],
    classes: NDArray[np.integer],
) -> Area:
    r"""The weighted probability that a right pair has a higher score than a wrong one; ties half.

    The images of a class are alike, so the interval is that of classes drawn at random, and not of
    pairs: with :math:`V_i` the share of pairs of the other kind that pair i beats,

    .. math:: \operatorname{Var}(A) = \frac{C}{C-1} \sum_c \Bigl(
        \sum_{i \in c, +} \tfrac{w_i}{W_+} (V_i - A) + \sum_{j \in c, -} \tfrac{w_j}{W_-} (V_j - A)
        \Bigr)^2

    Args:
        scores, right, weights, classes: (P,), each pair with the class of its query; of at least
            two classes, and with pairs of both kinds.

    References:
        Nonparametric analysis of clustered ROC curve data (Obuchowski 1997)
    """
    s, w = scores.astype(np.float64), weights.astype(np.float64)
    beaten = np.empty(len(s))
    beaten[right] = _share_below(s[right], s[~right], w[~right])
    beaten[~right] = 1 - _share_below(s[~right], s[right], w[right])
    part = np.where(right, w / w[right].sum(), w / w[~right].sum())
    area = min(float((part[right] * beaten[right]).sum()), 1.0)
    _, cluster = np.unique(classes, return_inverse=True)
    moved = np.bincount(cluster, weights=part * (beaten - area))
    doubt = _NORMAL_95 * float(np.sqrt(len(moved) / max(len(moved) - 1, 1) * (moved**2).sum()))
    return Area(area, area - doubt, area + doubt)


def _share_below(scores: Vector, others: Vector, weights: Vector) -> Vector:
    """For each score, the weight of the others below it and half of those beside it, over all."""
    order = np.argsort(others, kind="stable")
    ranked = others[order]
    total = np.concatenate(([0.0], np.cumsum(weights[order])))
    below = total[np.searchsorted(ranked, scores, "left")]
    upto = total[np.searchsorted(ranked, scores, "right")]
    share: Vector = 0.5 * (below + upto) / total[-1]
    return share
