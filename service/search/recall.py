"""How good the answers are while they are given: one search in so many is run again exactly.

In the background, one at a time, in a thread of its own; what is over before it ends is dropped.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import structlog

from embedder.types import Hit
from service.galleries.registry import Registry
from service.observe.metrics import Metrics
from service.search.finding import Found
from service.search.pools import BoundedPool

_TIE = 1e-6  # of a cosine: items that score the same may stand in for each other


class RecallSampler:
    """Measures the recall of every `every`-th search that an index answered; 0 measures none.

    A gallery that looks at every item anyway, without a segment or with a flat one, is left out:
    its 1.0 would hide what the others miss.
    """

    def __init__(self, registry: Registry, pool: BoundedPool, metrics: Metrics, every: int) -> None:
        self._registry = registry
        self._pool = pool
        self._metrics = metrics
        self._every = every
        self._offered = 0
        self._running: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a search is being run again now."""
        return self._running is not None and not self._running.done()

    def offer(self, gallery: str, k: int, found: Found) -> None:
        """Take note of a search, and run it again if it is its turn; returns at once."""
        if not self._every or found.hits is None or found.options.exact:
            return
        self._offered += 1
        if self._offered % self._every == 0 and not self.is_running:
            self._running = asyncio.create_task(self._measure(gallery, k, found))

    async def _measure(self, name: str, k: int, found: Found) -> None:
        try:
            with self._registry.lease(name) as served:
                gallery = served.gallery
                segment = gallery.facts().segment
                if segment is None or segment.kind == "flat":
                    return
                options = replace(found.options, exact=True)

                def again() -> tuple[list[Hit], str]:
                    [hits] = gallery.search(found.vector[np.newaxis], k, options)
                    return hits, gallery.version

                exact, version = await self._pool.run(again)
        except Exception as error:
            # Whatever it is, it concerns no request; searches themselves report it.
            structlog.get_logger().debug("recall not measured", error=type(error).__name__)
            return
        if version == found.version and exact and found.hits is not None:
            self._metrics.online_recall.labels(name).observe(recall(found.hits, exact))


def recall(hits: Sequence[Hit], exact: Sequence[Hit]) -> float:
    """The share of the true best, at least one, that `hits` have; equal scores count as equal."""
    least = exact[-1].score - _TIE
    return min(1.0, sum(hit.score >= least for hit in hits) / len(exact))
