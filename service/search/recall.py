"""How good the answers are while they are given: one search in so many is run again exactly.

In the background, one at a time, in a thread of its own; what is over before it ends is dropped.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog
from numpy.typing import NDArray

from embedder.types import Hit
from indexer.types import SearchOptions
from service.concurrency import DaemonThreads
from service.galleries.registry import Registry
from service.observe.metrics import Metrics

_TIE = 1e-6  # of a cosine: items that score the same may stand in for each other


@dataclass(frozen=True, slots=True)
class Measurable:
    """A search as it can be run again: its vector (D,), what it found, in which version."""

    vector: NDArray[np.float32]
    options: SearchOptions
    hits: Sequence[Hit]
    version: str


class RecallSampler:
    """Measures the recall of every `every`-th search that an index answered; 0 measures none.

    A gallery that looks at every item anyway, without a segment or with a flat one, is left out:
    its 1.0 would hide what the others miss.
    """

    def __init__(self, registry: Registry, metrics: Metrics, every: int) -> None:
        self._registry = registry
        self._metrics = metrics
        self._every = every
        self._offered = 0
        self._threads = DaemonThreads("recall", 1)
        self._running = threading.Lock()

    @property
    def is_running(self) -> bool:
        """Whether a search is being run again now."""
        return self._running.locked()

    def offer(self, gallery: str, k: int, search: Measurable | None) -> None:
        """Take note of a search, and run it again if it is its turn; returns at once."""
        if not self._every or search is None or search.options.exact:
            return
        self._offered += 1
        if self._offered % self._every == 0 and self._running.acquire(blocking=False):
            self._threads.submit(lambda: self._measure(gallery, k, search))

    def close(self) -> None:
        """Drop what is under way."""
        self._threads.close()

    def _measure(self, name: str, k: int, search: Measurable) -> None:
        try:
            with self._registry.lease(name) as served:
                gallery = served.gallery
                segment = gallery.facts().segment
                if segment is None or segment.kind == "flat":
                    return
                options = replace(search.options, exact=True)
                [exact] = gallery.search(search.vector[np.newaxis], k, options)
                if gallery.version == search.version and exact:
                    recall = recall_of(search.hits, exact)
                    self._metrics.online_recall.labels(name).observe(recall)
        except Exception as error:
            # Whatever it is, it concerns no request; searches themselves report it.
            structlog.get_logger().debug("recall not measured", error=type(error).__name__)
        finally:
            self._running.release()


def recall_of(hits: Sequence[Hit], exact: Sequence[Hit]) -> float:
    """The share of the true best, at least one, that `hits` have; equal scores count as equal."""
    least = exact[-1].score - _TIE
    return min(1.0, sum(hit.score >= least for hit in hits) / len(exact))
