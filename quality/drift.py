r"""Whether the queries that come are like the labelled ones: a test after each query.

What is compared is the score of the best product. If queries come as the labelled ones were drawn,
the rank of a new score among all earlier ones, labelled and live, is uniform and independent of the
earlier ranks, whatever the distribution of the scores. The test bets against that (a conformal test
martingale): a bet multiplies its stake by a factor :math:`f(p)` of the rank, of mean 1. A part of
the money is staked at each query, so that a change at any time is found. By Ville's inequality, all
the money together ever grows :math:`1 / \alpha`-fold with a probability of at most :math:`\alpha`.

References:
    Algorithmic Learning in a Random World, chapter 8 (Vovk, Gammerman, Shafer 2022)
    Testing randomness online (Vovk 2021), https://arxiv.org/abs/1906.09256
"""

import random
from collections.abc import Callable, Iterable
from math import acos, log2

FALSE_ALARMS = 0.01
"""Probability that a test ever gives an alarm although the queries are like the labelled ones: of
each process that compares, at each start."""

COUNTED = 10_000
"""Number of the last queries that are known, so that the same query counts once."""

_BINS_PER_RADIAN = 128  # chosen without the labels, as the test must be
_SHIFTS = (-0.9, -0.3, 0.3, 0.9)  # bets on higher or lower scores; each below 1 in size
_SPREADS = (-0.45, 0.45)  # bets on scores that are closer together or further apart


class DriftTest:
    """Compares scores with those of labelled queries. Its size is bounded. Not thread safe.

    labelled: the best score of each labelled query, a cosine.
    uniform: draws a random number from 0 to 1, which orders equal scores.
    """

    def __init__(
        self, labelled: Iterable[float], uniform: Callable[[], float] = random.random
    ) -> None:
        self._counts = [0] * (_bin(-1.0) + 1)
        for score in labelled:
            self._counts[_bin(score)] += 1
        self._seen = sum(self._counts)
        self._uniform = uniform
        self._stakes = [0.0] * (len(_SHIFTS) + len(_SPREADS))
        self._unused = 1.0  # money that is not staked yet
        self._known: dict[bytes, None] = {}  # the last queries, oldest first
        self.queries = 0

    def add(self, best: float, query: bytes | None = None) -> bool:
        """Count the best score of a live query; whether this is an alarm. One that asks again for
        the same `query`, with another filter or size, is not independent, and does not count.
        """
        if query is not None:
            if query in self._known:
                return False
            self._known[query] = None
            if len(self._known) > COUNTED:
                del self._known[next(iter(self._known))]
        position = _bin(best)
        self._counts[position] += 1
        self._seen += 1
        below, equal = sum(self._counts[:position]), self._counts[position]
        rank = (below + self._uniform() * equal) / self._seen
        self.queries += 1
        # All parts add up to 1. The n-th is not much smaller than 1 / n, so late changes count.
        unused = 1 / log2(self.queries + 2)
        part, self._unused = (self._unused - unused) / len(self._stakes), unused
        shift = 2 * rank - 1
        spread = 3 * shift * shift - 1
        factors = [1 + bet * shift for bet in _SHIFTS] + [1 + bet * spread for bet in _SPREADS]
        self._stakes = [
            (stake + part) * factor for stake, factor in zip(self._stakes, factors, strict=True)
        ]
        return self._unused + sum(self._stakes) >= 1 / FALSE_ALARMS


def _bin(score: float) -> int:
    """The bin of a cosine, by its angle: cosines near 1 need narrower bins."""
    return int(acos(max(-1.0, min(1.0, score))) * _BINS_PER_RADIAN)
