"""Events that may come many times a minute and are told rarely."""

import math
import time
from collections.abc import Callable

TOLD_EVERY_S = 30.0


class Repeats:
    """Says how often something happened, at most once in `every_s`."""

    def __init__(
        self, every_s: float = TOLD_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every_s = every_s
        self._clock = clock
        self._count = 0
        self._told_at = -math.inf

    def add(self) -> None:
        """It happened once more."""
        self._count += 1

    def due(self) -> int:
        """How often it happened since this was told last, if it is time to tell it; otherwise 0."""
        now = self._clock()
        if now - self._told_at < self._every_s:
            return 0
        count, self._count = self._count, 0
        if count:
            self._told_at = now
        return count
