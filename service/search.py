"""The use case: an upload in, ranked hits out. Knows nothing of HTTP.

sha256 ─► answers cached? ─► vector (cached? decode ─► batch) ─► gallery ─► answer
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from embedder.errors import DeadlineExceededError, GalleryNotFoundError
from embedder.types import Hit
from indexer.engine import SearchOptions
from service.cache import Cache, answer_key
from service.encoding import Encoded, Encoder
from service.metrics import Metrics
from service.payloads import decode_hits, encode_hits
from service.pools import BoundedPool
from service.types import Gallery

T = TypeVar("T")
_PATIENCE = 4


@dataclass(frozen=True, slots=True)
class Query:
    """What is searched, and where; without `gallery` in the first one."""

    data: bytes
    k: int
    gallery: str | None = None
    min_score: float | None = None


@dataclass(frozen=True, slots=True)
class Stages:
    """Milliseconds in each stage; 0 for one that a cache made unnecessary."""

    decode: float = 0.0
    embed: float = 0.0
    search: float = 0.0
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Hits, best first, and where they come from."""

    gallery: str
    generation: str
    gallery_version: str
    hits: list[Hit]
    cached: bool
    stages: Stages


@dataclass(frozen=True, slots=True)
class State:
    """A gallery at one moment."""

    version: str
    size: int


@dataclass(frozen=True, slots=True)
class Found:
    """Hits of a search, and the version of the gallery when it was over."""

    hits: list[Hit]
    version: str


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a whole request and its search in the gallery may take."""

    request_s: float
    search_s: float


class SearchService:
    """Answers queries in any of `galleries`, whose first is the default."""

    def __init__(
        self,
        bundle_id: str,
        galleries: Mapping[str, Gallery],
        encoder: Encoder,
        cache: Cache,
        searching: BoundedPool,
        looking: BoundedPool,
        timeouts: Timeouts,
        metrics: Metrics,
    ) -> None:
        self._bundle_id = bundle_id
        self._galleries = galleries
        self._encoder = encoder
        self._cache = cache
        self._searching = searching
        self._looking = looking
        self._timeouts = timeouts
        self._metrics = metrics

    def gallery(self, name: str | None) -> tuple[str, Gallery]:
        """A gallery and its name. Raises: GalleryNotFoundError naming the known ones."""
        if name is None:
            return next(iter(self._galleries.items()))
        if name not in self._galleries:
            raise GalleryNotFoundError(
                f"gallery = {name[:64]!r} is unknown. Known are: {', '.join(self._galleries)}."
            )
        return name, self._galleries[name]

    async def search(self, query: Query) -> Answer:
        """Answer one query within the request's time limit.

        Raises: ImageError, GalleryNotFoundError, SearchError.
        """
        with self._metrics.in_flight.track_inprogress():
            try:
                async with asyncio.timeout(self._timeouts.request_s):
                    answer = await self._search(query)
            except TimeoutError as error:
                raise DeadlineExceededError(
                    f"The search took longer than {self._timeouts.request_s:g} s, which is the "
                    "limit. Try again in a second."
                ) from error
        self._observe(answer.stages)
        return answer

    async def state(self, gallery: Gallery, *, urgent: bool = False) -> State:
        """Version and size of a gallery at one moment.

        Raises: DeadlineExceededError, OverloadedError, GalleryError.
        """
        return await self._within_limit(self._looking, lambda: _state(gallery), urgent)

    async def search_gallery(
        self,
        gallery: Gallery,
        encoded: Encoded,
        k: int,
        min_score: float | None,
        *,
        urgent: bool = False,
    ) -> Found:
        """The hits of one vector; an `urgent` search goes first.

        Raises: DeadlineExceededError, OverloadedError.
        """
        queries = np.ascontiguousarray(encoded.vector[np.newaxis])
        options = SearchOptions(min_score=min_score)

        def search() -> Found:
            [hits] = gallery.search(queries, k, options)
            return Found(hits, gallery.version)

        return await self._within_limit(self._searching, search, urgent)

    async def _within_limit(
        self, pool: BoundedPool, work: Callable[[], T], urgent: bool = False
    ) -> T:
        try:
            async with asyncio.timeout(self._timeouts.search_s):
                return await pool.run(work, urgent=urgent)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"The gallery took longer than {self._timeouts.search_s:g} s, which is the limit. "
                "Ask for fewer results or try again in a second."
            ) from error

    async def _search(self, query: Query) -> Answer:
        started = time.perf_counter()
        name, gallery = self.gallery(query.gallery)
        version = await self._within_limit(self._looking, lambda: gallery.version)
        digest = await asyncio.to_thread(_sha256, query.data)
        key = answer_key(self._bundle_id, name, version, digest, query.k, query.min_score)
        hits = await self._cache.get("answer", key, lambda value: decode_hits(value, query.k))
        if hits is not None:
            stages = Stages(total=_ms_since(started))
            return Answer(name, gallery.generation, version, hits, True, stages)
        encoded = await self._encoder.encode(query.data, digest)
        embedded = time.perf_counter()
        found = await self.search_gallery(gallery, encoded, query.k, query.min_score)
        search_ms = _ms_since(embedded)
        if found.version == version:
            # Otherwise the hits may be from a later version than the one that the key names.
            self._cache.set(key, encode_hits(found.hits))
        stages = Stages(encoded.decode_ms, encoded.embed_ms, search_ms, _ms_since(started))
        return Answer(name, gallery.generation, version, found.hits, False, stages)

    def _observe(self, stages: Stages) -> None:
        for stage in ("decode", "embed", "search", "total"):
            milliseconds = getattr(stages, stage)
            if milliseconds:
                self._metrics.stage_seconds.labels(stage).observe(milliseconds / 1e3)


def _state(gallery: Gallery) -> State:
    """Both of one moment, unless the gallery changes all the time."""
    for _ in range(_PATIENCE):
        version, size = gallery.version, gallery.size
        if gallery.version == version:
            break
    return State(version, size)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
