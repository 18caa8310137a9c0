"""Memory of a process tree, and the confidence that it grows."""

import contextlib
import random
from pathlib import Path

import numpy as np

Points = list[tuple[float, float]]
"""Pairs of seconds and MB."""

_RESAMPLES = 400
_MOST_POINTS = 120


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def tree_mb(pid: int) -> float:
    """Memory of the tree in MB: shared pages count once, file pages do not count."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    total += int(line.split()[1])
    return total / 1024


def slope(points: Points) -> float:
    """MB an hour: the median over all pairs of points, so that single peaks do not count."""
    seconds, mb = np.array(points).T
    first, second = np.triu_indices(len(points), 1)
    apart = seconds[second] != seconds[first]
    first, second = first[apart], second[apart]
    return 3600 * float(np.median((mb[second] - mb[first]) / (seconds[second] - seconds[first])))


def slope_range(points: Points, seed: int = 0) -> tuple[float, float]:
    """The range in which nearly all such runs would have their slope.

    The residuals from the slope are resampled in blocks of neighbours, because memory a few seconds
    apart is correlated.
    """
    points = _thinned(points)
    seconds, mb = np.array(points).T
    line = slope(points) / 3600 * seconds
    left = mb - line
    block, rng = max(2, round(len(points) ** 0.5)), random.Random(seed)
    found = []
    for _ in range(_RESAMPLES):
        starts = [rng.randrange(len(left)) for _ in range(-(-len(left) // block))]
        order = [(start + n) % len(left) for start in starts for n in range(block)]
        again = line + left[order[: len(left)]]
        found.append(slope(list(zip(seconds, again, strict=True))))
    low, high = np.quantile(found, [0.005, 0.995])
    return float(low), float(high)


def _thinned(points: Points) -> Points:
    """At most `_MOST_POINTS`, each the median of its neighbours."""
    each = -(-len(points) // _MOST_POINTS)
    groups = [points[n : n + each] for n in range(0, len(points), each)]
    return [
        (float(np.mean([s for s, _ in g])), float(np.median([m for _, m in g]))) for g in groups
    ]
