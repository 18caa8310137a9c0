"""How sure a figure is: 95 % intervals of a part of queries, and of a change from old to new."""

from collections.abc import Sequence
from math import sqrt

import numpy as np

from kinlens.golden import Interval

_SEED = 0
_DRAWS = 2000
_Z = 1.96  # of a normal distribution, 95 % lie within as many standard deviations


def wilson(right: int, queries: int) -> Interval:
    """Interval of a part of independent queries, at least one.

    References: Wilson, Probable Inference, the Law of Succession, and Statistical Inference (1927).
    """
    part, z2 = right / queries, _Z**2 / queries
    middle = (part + z2 / 2) / (1 + z2)
    half = _Z * sqrt(part * (1 - part) / queries + z2 / (4 * queries)) / (1 + z2)
    return round(max(middle - half, 0.0), 6), round(min(middle + half, 1.0), 6)


def over_classes(change: Sequence[int], names: Sequence[object]) -> Interval | None:
    """Interval of the mean of `change` (N,), paired differences: a bootstrap that draws whole
    classes (N,) with replacement, since queries of one class are alike. None for fewer than two.
    """
    number = {name: index for index, name in enumerate(dict.fromkeys(names))}
    if len(number) < 2:
        return None
    rows = np.array([number[name] for name in names])
    sums, sizes = np.bincount(rows, np.array(change, dtype=float)), np.bincount(rows)
    rng = np.random.default_rng(_SEED)
    means = []
    for _ in range(_DRAWS):
        drawn = rng.integers(0, len(number), len(number))
        means.append(sums[drawn].sum() / sizes[drawn].sum())
    low, high = np.quantile(means, (0.025, 0.975))
    return round(float(low), 6), round(float(high), 6)
