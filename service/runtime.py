"""Everything a running service consists of, built once and handed to the routes."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from embedder.session import Embedder
from service.access.keys import KeyStore, open_keys
from service.galleries.items import Items
from service.galleries.locations import managed_folder
from service.galleries.managed import ManagedGalleries
from service.galleries.pictures import Renditions, Sweeper
from service.galleries.registry import Gallery, Registry
from service.jobs.manager import JobManager, open_jobs
from service.observe.health import Health
from service.observe.metrics import Metrics
from service.observe.observer import Observer, publish
from service.resources import create_cache, missing_image_roots, open_registry
from service.search.batching import MicroBatcher
from service.search.cache import Cache
from service.search.decoder import Decoder, create_decoder
from service.search.encoding import Encoder
from service.search.model import Connect, Models
from service.search.pools import BoundedPool
from service.search.recall import RecallSampler
from service.search.use_case import SearchService, Timeouts
from service.settings import Settings

_WRITERS = 2  # a catalogue has one writer at a time; the other one prepares
_FILES_PER_SEARCH = 16  # a page of results asks for that many pictures at once; each is short


@dataclass(frozen=True, slots=True)
class Runtime:
    """The parts of one service; `start` and `stop` run in its event loop."""

    settings: Settings
    registry: Registry
    models: Models
    metrics: Metrics
    cache: Cache
    pools: Mapping[str, BoundedPool]
    decoding: Decoder
    renditions: Renditions
    searching: SearchService
    health: Health
    observer: Observer
    keys: KeyStore | None
    items: Items
    sweeper: Sweeper | None
    managed: ManagedGalleries
    jobs: JobManager | None

    @property
    def galleries(self) -> Mapping[str, Gallery]:
        """The galleries by name; a request takes a lease of the registry instead."""
        return self.registry.galleries()

    @property
    def embedder(self) -> Embedder:
        """That of the first gallery."""
        return self.registry.model.embedder

    @property
    def batcher(self) -> MicroBatcher:
        """That of the first gallery."""
        return self.registry.model.batcher

    async def start(self) -> None:
        """Connect the cache, warm the models up, serve the galleries and keep them fresh."""
        await self.decoding.start()
        await self.cache.start()
        await self.registry.start(self.settings.reload_interval_ms / 1e3)
        if self.sweeper is not None:
            self.sweeper.start()
        if self.jobs is not None:
            self.jobs.open()
        structlog.get_logger().info(
            "serving",
            bundle_id=self.registry.model.bundle_id,
            provider=self.registry.model.provider,
            precision=self.embedder.precision,
            galleries=self.registry.names(),
            redis=self.cache.remote_state,
        )
        for warning in missing_image_roots(self.galleries):
            structlog.get_logger().warning("image root is missing", detail=warning)

    async def observe(self) -> None:
        """Publish models and galleries in the metrics."""
        await self.observer.observe()

    async def stop(self) -> None:
        """Stop the workers, disconnect, let go of the threads; one that hangs is left behind."""
        if self.jobs is not None:
            await asyncio.to_thread(self.jobs.close)
        if self.sweeper is not None:
            await asyncio.to_thread(self.sweeper.stop)
        await self.registry.stop()
        await self.decoding.close()
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
    metrics = Metrics()
    cache = cache or create_cache(settings)
    cache.observe(metrics.observe_lookup)
    pools = _create_pools(settings)
    decoding = create_decoder(settings)
    connect = _connector(settings, cache, decoding, metrics)
    registry, models = open_registry(
        settings,
        connect,
        lambda name: metrics.reload_failures.labels(name).inc(),
        embedder,
        galleries,
    )
    publish(metrics, models, decoding, cache)
    jobs = open_jobs(settings)
    observer = Observer(
        *(metrics, registry, models, pools["lookup"], settings.search_timeout_ms / 1e3),
        jobs=None if jobs is None else jobs.counts,
    )
    folder, limit_s = managed_folder(settings.state), settings.request_timeout_ms / 1e3
    return Runtime(
        settings=settings,
        registry=registry,
        models=models,
        metrics=metrics,
        cache=cache,
        pools=pools,
        decoding=decoding,
        renditions=_create_renditions(settings, decoding),
        searching=_create_search(settings, registry, cache, pools, metrics),
        health=Health(registry, models, decoding, pools["lookup"], settings.ready_timeout_ms / 1e3),
        observer=observer,
        keys=open_keys(settings.state),
        items=Items(registry, pools["write"], limit_s, puts=settings.state is not None),
        sweeper=_create_sweeper(settings, registry),
        managed=ManagedGalleries(registry, models, folder, pools["write"], jobs, limit_s),
        jobs=jobs,
    )


def _create_search(
    settings: Settings,
    registry: Registry,
    cache: Cache,
    pools: Mapping[str, BoundedPool],
    metrics: Metrics,
) -> SearchService:
    timeouts = Timeouts(settings.request_timeout_ms / 1e3, settings.search_timeout_ms / 1e3)
    sampler = RecallSampler(registry, pools["recall"], metrics, settings.recall_sample)
    return SearchService(
        *(registry, cache, pools["search"], pools["lookup"], timeouts, metrics),
        crowd=max(1, settings.queue_size // 2),
        sampler=sampler,
    )


def _create_sweeper(settings: Settings, registry: Registry) -> Sweeper | None:
    return None if settings.state is None else Sweeper(settings.state, registry.folders)


def _create_renditions(settings: Settings, decoding: Decoder) -> Renditions:
    at_once = max(1, settings.decode_workers // 2)
    waiting = _FILES_PER_SEARCH * settings.queue_size
    limit_s = settings.request_timeout_ms / 1e3
    return Renditions(decoding, settings.image_limits(), at_once, waiting, limit_s)


def _create_pools(settings: Settings) -> dict[str, BoundedPool]:
    waiting = settings.queue_size
    return {
        "search": BoundedPool("search", settings.search_workers, waiting),
        "lookup": BoundedPool("lookup", settings.search_workers, _FILES_PER_SEARCH * waiting),
        "write": BoundedPool("write", _WRITERS, waiting),
        "recall": BoundedPool("recall", 1, 1),
        "file": BoundedPool("file", settings.decode_workers, _FILES_PER_SEARCH * waiting),
    }


def _connector(settings: Settings, cache: Cache, decoding: Decoder, metrics: Metrics) -> Connect:
    def connect(embedder: Embedder) -> tuple[MicroBatcher, Encoder]:
        batcher = MicroBatcher(
            embedder.embed,
            batch_size=settings.images_at_once(),
            queue_size=settings.queue_size,
            workers=settings.embed_workers,
            on_batch=metrics.batch_size.observe,
            on_wait=metrics.observe_queue,
        )
        return batcher, Encoder(embedder, cache, decoding, batcher)

    return connect
