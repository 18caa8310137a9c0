"""One query in one gallery: what a cache has, the vectors of its views, the search, the answer."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from embedder.calibration import Calibration
from embedder.errors import DeadlineExceededError, ImageError
from service.galleries.registry import Served
from service.observe.metrics import Metrics, Stage
from service.observe.tracing import span
from service.search.abandoned import Waiting
from service.search.cache import Cache, Lookup, answer_key
from service.search.encoding import Encoded, Encoder
from service.search.finding import Found, find
from service.search.payloads import Shown, checked_results
from service.search.pools import BoundedPool
from service.search.query import Query, View
from service.search.recall import RecallSampler
from service.search.thresholds import least_score

T = TypeVar("T")
Vector = NDArray[np.float32]
Checkpoint = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Stages:
    """Milliseconds in each stage; 0 for one that a cache made unnecessary.

    Of several images that are worked on at the same time the slowest counts.
    """

    decode: float = 0.0
    embed: float = 0.0
    search: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Results as a JSON object, and where they come from; `min_score` is the effective one."""

    bundle_id: str
    gallery: str
    gallery_version: str
    query: Query
    min_score: float | None
    results: bytes
    cached: bool
    stages: Stages


@dataclass(frozen=True, slots=True)
class GalleryCalls:
    """Threads for calls that search a gallery, and for those that only look something up."""

    searching: BoundedPool
    looking: BoundedPool
    limit_s: float

    async def search(self, work: Callable[[Checkpoint], T], *, urgent: bool = False) -> T:
        """`work` is given what it must call between pieces: it raises once nobody waits any more.

        Raises: DeadlineExceededError, OverloadedError, what `work` raises.
        """
        waiting = Waiting()
        try:
            with span("search"):
                return await self._within_limit(self.searching, lambda: work(waiting.check), urgent)
        finally:
            waiting.end()

    async def look(self, work: Callable[[], T], *, urgent: bool = False) -> T:
        """Raises: DeadlineExceededError, OverloadedError, what `work` raises."""
        return await self._within_limit(self.looking, work, urgent)

    async def _within_limit(self, pool: BoundedPool, work: Callable[[], T], urgent: bool) -> T:
        try:
            async with asyncio.timeout(self.limit_s):
                return await pool.run(work, urgent=urgent)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"The gallery took longer than {self.limit_s:g} s, which is the limit. "
                "Ask for fewer results or try again in a second."
            ) from error


class Answerer:
    """Answers single queries. Those of a crowd share `crowd` places for each step, so that they
    never fill the queues before other searches.
    """

    def __init__(
        self,
        cache: Cache,
        calls: GalleryCalls,
        metrics: Metrics,
        crowd: int,
        sampler: RecallSampler | None,
    ) -> None:
        self._cache = cache
        self._calls = calls
        self._metrics = metrics
        self._places = asyncio.Semaphore(crowd)
        self._sampler = sampler

    async def answer(self, served: Served, query: Query, *, crowded: bool) -> Answer:
        """The answer of the gallery and model of `served`, which a lease holds.

        Raises: ImageError, GalleryError, SearchError.
        """
        started = time.perf_counter()
        gallery, model = served.gallery, served.model
        version, digest, calibration = await self._calls.look(
            lambda: (gallery.version, query.digest, _calibration(served))
        )
        min_score = least_score(
            query.min_score, query.min_probability, calibration, model.no_calibration
        )
        shown = Shown.of(served.name, gallery.generation, calibration, query.offset)
        key = _key(served, version, digest)
        results, vectors = await self._cached(key, query, model.encoder, shown)
        stages, cached = Stages(), results is not None
        if results is None:
            encoded = await self._encoded(model.encoder, query.views, vectors, crowded)
            embedded = time.perf_counter()
            found = await self._found(served, query, encoded, min_score, shown, crowded)
            results = found.payload
            if found.version == version:
                # Otherwise they may be from a later version than the one that the key names.
                self._cache.set(key, results)
            if self._sampler is not None:
                self._sampler.offer(served.name, query.k, found)
            stages = _slowest(encoded, _ms_since(embedded))
        stages = Stages(stages.decode, stages.embed, stages.search, _ms_since(started))
        self._observe(stages)
        return Answer(
            model.bundle_id, served.name, version, query, min_score, results, cached, stages
        )

    async def _cached(
        self, key: str, query: Query, encoder: Encoder, shown: Shown
    ) -> tuple[bytes | None, list[Vector | None]]:
        """The results, and the vector of each view, as far as a cache has them."""
        started = time.perf_counter()
        answers = Lookup("answer", key, bytes, lambda value: checked_results(value, query.k, shown))
        results = self._cache.get_local(answers)
        if results is not None:
            return results, []
        lookups = [encoder.lookup(view) for view in query.views]
        results, *vectors = await self._cache.get_all([answers, *lookups])
        self._metrics.observe_stage("cache", time.perf_counter() - started)
        return results, vectors

    async def _encoded(
        self,
        encoder: Encoder,
        views: Sequence[View],
        vectors: Sequence[Vector | None],
        crowded: bool,
    ) -> list[Encoded]:
        """Every view as a vector, those without one worked on at the same time."""
        several = len({view.digest for view in views}) > 1

        async def encode(view: View) -> Encoded:
            try:
                async with self._place(crowded):
                    return await encoder.compute(view)
            except ImageError as error:
                if several:
                    raise type(error)(f"Image {view.number}: {error}") from error
                raise

        missing = [view for view, vector in zip(views, vectors, strict=True) if vector is None]
        if len(missing) == 1:
            computed = [await encode(missing[0])]
        else:
            computed = await _all([encode(view) for view in missing])
        rest = iter(computed)
        return [next(rest) if vector is None else Encoded(vector) for vector in vectors]

    async def _found(
        self,
        served: Served,
        query: Query,
        encoded: Sequence[Encoded],
        min_score: float | None,
        shown: Shown,
        crowded: bool,
    ) -> Found:
        vectors = [each.vector for each in encoded]
        async with self._place(crowded):
            return await self._calls.search(
                lambda checkpoint: find(
                    served.gallery, query, vectors, min_score, shown, checkpoint
                )
            )

    def _place(self, crowded: bool) -> contextlib.AbstractAsyncContextManager[object]:
        return self._places if crowded else contextlib.nullcontext()

    def _observe(self, stages: Stages) -> None:
        found: tuple[tuple[Stage, float], ...] = (
            ("decode", stages.decode),
            ("embed", stages.embed),
            ("search", stages.search),
            ("total", stages.total),
        )
        for stage, milliseconds in found:
            if milliseconds:
                self._metrics.observe_stage(stage, milliseconds / 1e3)


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first error ends the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _key(served: Served, version: str, digest: str) -> str:
    model, gallery = served.model, served.gallery
    precision = model.embedder.precision
    return answer_key(model.bundle_id, precision, served.name, gallery.generation, version, digest)


def _calibration(served: Served) -> Calibration | None:
    """That of the model, for the gallery as large as it is now; may block."""
    calibration = served.model.calibration
    return calibration and calibration.for_gallery(served.gallery.size)


def _slowest(encoded: Sequence[Encoded], search_ms: float) -> Stages:
    decode_ms = max((each.decode_ms for each in encoded), default=0.0)
    embed_ms = max((each.embed_ms for each in encoded), default=0.0)
    return Stages(decode_ms, embed_ms, search_ms)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
