"""The confidence interval of a paired change, and exact binomial bounds."""

from collections.abc import Sequence
from functools import lru_cache
from math import log, log1p

import numpy as np
from numpy.typing import NDArray

from kinlens.golden import Interval

_SEED = 0
_DRAWS = 2000
_STEPS = 50  # bisections of an exact bound


def over_classes(change: Sequence[int], names: Sequence[object]) -> Interval | None:
    """Interval of the mean of the paired differences `change` (N,); None for fewer than 2 classes.

    A bootstrap that draws whole classes (`names`, (N,)) with replacement, since queries of one
    class are correlated.
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


def tail(wrong: int, count: int, rate: float) -> float:
    """The probability of at most `wrong` errors among `count`, each with the probability `rate`."""
    if wrong >= count:
        return 1.0
    is_low = 2 * wrong < count
    terms = np.arange(wrong + 1) if is_low else np.arange(wrong + 1, count + 1)
    whole = _log_factorials(1 << count.bit_length())
    ways = whole[count] - whole[terms] - whole[count - terms]
    part = float(np.exp(ways + terms * log(rate) + (count - terms) * log1p(-rate)).sum())
    return min(part, 1.0) if is_low else max(1.0 - part, 0.0)


@lru_cache(maxsize=2)
def _log_factorials(size: int) -> NDArray[np.float64]:
    """ln n! of the first `size` numbers n."""
    logs: NDArray[np.float64] = np.log(np.maximum(np.arange(size, dtype=np.float64), 1)).cumsum()
    return logs


@lru_cache(maxsize=256)
def upper_bound(wrong: int, count: int, confidence: float) -> float:
    """The upper bound (Clopper and Pearson, 1934) of a rate of which `wrong` errors among `count`
    are known: the true rate is at most that, with the probability `confidence`.
    """
    if wrong >= count:
        return 1.0
    low, high = wrong / count, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(wrong, count, middle) > 1 - confidence else (low, middle)
    return high


def exact_interval(wrong: int, count: int) -> tuple[float, float]:
    """The exact 95 % interval of a rate."""
    return 1 - upper_bound(count - wrong, count, 0.975), upper_bound(wrong, count, 0.975)
