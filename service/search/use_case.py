"""The use case: queries in, ranked results out. Knows nothing of HTTP.

lease ─► version ─► answer or vectors cached? ─► (decode ─► batch) each view ─► gallery ─► answer
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from embedder.errors import DeadlineExceededError, KinlensError
from service.galleries.registry import Gallery, Registry, Served
from service.observe.metrics import Metrics
from service.search.answering import Answer, Answerer, GalleryCalls
from service.search.cache import Cache
from service.search.pools import BoundedPool
from service.search.query import Query
from service.search.recall import RecallSampler

_CROWD = 32
_PATIENCE = 4


@dataclass(frozen=True, slots=True)
class State:
    """A gallery at one moment."""

    version: str
    size: int


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a whole request and its search in the gallery may take."""

    request_s: float
    search_s: float


class SearchService:
    """Answers queries in the galleries of `registry`, within the time limits.

    `crowd`: how many images of queries with several, or of batches, are worked on at a time.
    """

    def __init__(
        self,
        registry: Registry,
        cache: Cache,
        searching: BoundedPool,
        looking: BoundedPool,
        timeouts: Timeouts,
        metrics: Metrics,
        *,
        crowd: int = _CROWD,
        sampler: RecallSampler | None = None,
    ) -> None:
        self._registry = registry
        self._cache = cache
        self._calls = GalleryCalls(searching, looking, timeouts.search_s)
        self._limit_s = timeouts.request_s
        self._metrics = metrics
        self._answerer = Answerer(cache, self._calls, metrics, crowd, sampler)

    async def search(self, query: Query) -> Answer:
        """Answer one query.

        Raises: ImageError, GalleryError, SearchError.
        """
        self._cache.begin()
        await self._registry.refresh_if_unknown(query.gallery)
        with self._metrics.in_flight.track_inprogress(), self._registry.lease(query.gallery) as own:
            try:
                async with asyncio.timeout(self._limit_s):
                    return await self._answerer.answer(own, query, crowded=len(query.views) > 1)
            except TimeoutError as error:
                raise self._too_late() from error

    async def search_all(self, queries: Sequence[Query | Exception]) -> list[Answer | Exception]:
        """Answer queries at the same time, each by itself: what fails is an error in its place,
        and an error among the queries is its own outcome.

        Queries of one gallery are answered by one pair of gallery and model.
        """
        self._cache.begin()
        names = {query.gallery for query in queries if isinstance(query, Query)}
        await asyncio.gather(*(self._registry.refresh_if_unknown(name) for name in names))
        with self._metrics.in_flight.track_inprogress(), ExitStack() as leases:
            served = {name: self._leased(name, leases) for name in names}
            tasks = [asyncio.create_task(self._answered(query, served)) for query in queries]
            try:
                await asyncio.wait(tasks, timeout=self._limit_s)
                return [task.result() if task.done() else self._too_late() for task in tasks]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def state(self, gallery: Gallery, *, urgent: bool = False) -> State:
        """Version and size of a gallery at one moment.

        Raises: DeadlineExceededError, OverloadedError, GalleryError.
        """
        return await self._calls.look(lambda: _state(gallery), urgent=urgent)

    async def _answered(
        self, query: Query | Exception, served: dict[str | None, Served | KinlensError]
    ) -> Answer | Exception:
        if isinstance(query, Exception):
            return query
        own = served[query.gallery]
        if isinstance(own, KinlensError):
            return own
        try:
            return await self._answerer.answer(own, query, crowded=True)
        except Exception as error:
            # Also what nobody foresaw: the other queries are answered all the same.
            return error

    def _leased(self, name: str | None, leases: ExitStack) -> Served | KinlensError:
        try:
            return leases.enter_context(self._registry.lease(name))
        except KinlensError as error:
            return error

    def _too_late(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"The search took longer than {self._limit_s:g} s, which is the limit. "
            "Try again in a second."
        )


def _state(gallery: Gallery) -> State:
    """Both of one moment, unless the gallery changes all the time."""
    for _ in range(_PATIENCE):
        version, size = gallery.version, gallery.size
        if gallery.version == version:
            break
    return State(version, size)
