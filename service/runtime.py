"""Everything a running service consists of, built once and handed to the routes."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from embedder.errors import KinlensError
from embedder.session import Embedder
from service.batching import MicroBatcher
from service.cache import Cache
from service.encoding import Encoder
from service.health import Health
from service.metrics import Metrics
from service.pools import BoundedPool
from service.resources import (
    check_galleries,
    create_cache,
    missing_image_roots,
    open_embedder,
    open_galleries,
)
from service.search import SearchService, Timeouts
from service.settings import Settings
from service.types import Gallery

_FILES_PER_SEARCH = 16  # a page of results asks for that many pictures at once; each is short


@dataclass(frozen=True, slots=True)
class Runtime:
    """The parts of one service; `start` and `stop` run in its event loop."""

    settings: Settings
    embedder: Embedder
    galleries: Mapping[str, Gallery]
    metrics: Metrics
    cache: Cache
    pools: Mapping[str, BoundedPool]
    batcher: MicroBatcher
    searching: SearchService
    health: Health

    async def start(self) -> None:
        """Start the workers, connect the cache and run the model once."""
        self.batcher.start()
        await self.cache.start()
        await self.health.warm_up()
        structlog.get_logger().info(
            "serving",
            bundle_id=self.embedder.bundle_id,
            provider=self.embedder.provider,
            galleries=list(self.galleries),
            redis=self.cache.remote_state,
        )
        for warning in missing_image_roots(self.galleries):
            structlog.get_logger().warning("image root is missing", detail=warning)

    async def observe_sizes(self) -> None:
        """Publish the number of items of each gallery; of one that fails it stays as it was."""
        for name, gallery in self.galleries.items():
            with contextlib.suppress(KinlensError):
                state = await self.searching.state(gallery, urgent=True)
                self.metrics.gallery_items.labels(name, gallery.generation).set(state.size)

    async def stop(self) -> None:
        """Stop the workers, disconnect, let go of the threads; one that hangs is left behind."""
        await self.batcher.stop()
        await self.cache.close()
        await asyncio.gather(*(asyncio.to_thread(pool.close) for pool in self.pools.values()))


def build_runtime(
    settings: Settings,
    embedder: Embedder | None = None,
    galleries: Mapping[str, Gallery] | None = None,
    cache: Cache | None = None,
) -> Runtime:
    """Open what is not given, check that it fits together, and connect the parts.

    Raises: BundleError, GalleryError.
    """
    embedder = embedder or open_embedder(settings)
    if galleries is None:
        galleries = open_galleries(settings, embedder.bundle_id)
    check_galleries(galleries, embedder)
    metrics = Metrics()
    cache = cache or create_cache(settings)
    cache.observe(metrics.observe_lookup)
    pools = _create_pools(settings)
    batcher = _create_batcher(settings, embedder, metrics)
    encoder = Encoder(embedder, cache, pools["decode"], batcher)
    timeouts = Timeouts(settings.request_timeout_ms / 1e3, settings.search_timeout_ms / 1e3)
    searching = SearchService(
        embedder.bundle_id,
        galleries,
        encoder,
        cache,
        pools["search"],
        pools["lookup"],
        timeouts,
        metrics,
    )
    health = Health(
        embedder, galleries, encoder, searching, batcher, cache, settings.ready_timeout_ms / 1e3
    )
    _publish(metrics, embedder, batcher, cache)
    return Runtime(settings, embedder, galleries, metrics, cache, pools, batcher, searching, health)


def _create_pools(settings: Settings) -> dict[str, BoundedPool]:
    waiting = settings.queue_size
    return {
        "decode": BoundedPool("decode", settings.decode_workers, waiting),
        "search": BoundedPool("search", settings.search_workers, waiting),
        "lookup": BoundedPool("lookup", settings.search_workers, _FILES_PER_SEARCH * waiting),
        "file": BoundedPool("file", settings.decode_workers, _FILES_PER_SEARCH * waiting),
    }


def _create_batcher(settings: Settings, embedder: Embedder, metrics: Metrics) -> MicroBatcher:
    return MicroBatcher(
        embedder.embed,
        batch_size=settings.batch_size,
        queue_size=settings.queue_size,
        workers=settings.embed_workers,
        on_batch=metrics.batch_size.observe,
    )


def _publish(
    metrics: Metrics,
    embedder: Embedder,
    batcher: MicroBatcher,
    cache: Cache,
) -> None:
    metrics.describe(embedder.provider, embedder.bundle_id)
    metrics.gauge("kinlens_queue_depth", "Images that wait for the model.", lambda: batcher.depth)
    metrics.gauge("kinlens_worker_alive", "1 while images are accepted.", lambda: batcher.alive)
    metrics.gauge("kinlens_redis_up", "1 while Redis answers.", lambda: cache.remote_state == "up")
