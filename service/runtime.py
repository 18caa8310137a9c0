"""The parts of a running service, built once and passed to the routes."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

import structlog

from kinlens.embedder.errors import GalleryNotFoundError, StateMissingError
from kinlens.embedder.session import Embedder, ModelFacts
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.indexer.images import ImageAddress
from kinlens.service.access.audit import AuditLog
from kinlens.service.access.keys import open_keys
from kinlens.service.concurrency import BoundedPool, SearchThreads, in_thread, within
from kinlens.service.encoding.cache import Cache, LruCache
from kinlens.service.encoding.model import Backend, Model, Models
from kinlens.service.encoding.sandbox import absences, holding
from kinlens.service.encoding.workers import Workers
from kinlens.service.galleries.bundles import Bundles
from kinlens.service.galleries.feedback import open_feedback, tidy_feedback
from kinlens.service.galleries.following import Following
from kinlens.service.galleries.items import Items
from kinlens.service.galleries.locations import Locations, Opened
from kinlens.service.galleries.managed import ManagedGalleries
from kinlens.service.galleries.registry import Served, change
from kinlens.service.galleries.reloads import Reloads
from kinlens.service.galleries.remote import DiskCache, ImageStores
from kinlens.service.galleries.renditions import Renditions
from kinlens.service.galleries.uploads import Sweeper
from kinlens.service.health import Health
from kinlens.service.jobs.manager import JobManager
from kinlens.service.observe.metrics import Metrics
from kinlens.service.observer import Observer
from kinlens.service.redis import SharedRedis
from kinlens.service.search.pipeline import Pipeline, RecallSampler
from kinlens.service.settings import Settings

P = TypeVar("P")
T = TypeVar("T")
_WRITERS = 4
_WRITERS_PER_GALLERY = 2  # a catalogue has one writer at a time; the other prepares its write
_STATE_THREADS = 4  # each file of the state folder uses one at a time
_CLOSE_S = 5.0  # of each part, at the end
IMAGE_CACHE = ".image-cache"
"""The subfolder of the state folder with copies of images in object stores; not backed up."""

_BODY_READERS = 2  # parsing holds the GIL, so more threads would only slow down searches


class Runtime:
    """The parts of one service; `start` and `stop` run in its event loop."""

    def __init__(
        self,
        settings: Settings,
        embedder: Embedder | None = None,
        galleries: Mapping[str, Opened] | None = None,
        workers: Workers | None = None,
    ) -> None:
        """Open the omitted parts, check that all parts match, and connect them. With given
        galleries, only the managed ones of the state folder are served too.

        Raises: BundleError, GalleryError.
        """
        state, limit_s = settings.state, settings.request_timeout_ms / 1e3
        self.settings = settings
        self.metrics = Metrics()
        self.redis = open_redis(settings)
        local = LruCache(settings.cache_max_entries, settings.cache_max_bytes)
        self.cache = Cache(local, self.redis, self.metrics.observe_lookup)
        self.pools = _create_pools(settings)
        self.search_threads = SearchThreads(settings.search_threads, settings.queue_size, limit_s)
        self.following = Following(settings)
        self.following.load()
        bundles = Bundles(settings, embedder, workers)
        bundles.begin()
        try:
            self.models = Models(bundles.open, self._connect)
            self.reloads = self._open_galleries(bundles.primary(), galleries)
            self.registry = self.reloads.registry
        finally:
            bundles.end_unused()
        self.sampler = RecallSampler(self.registry, self.metrics, settings.recall_sample)
        self.searching = Pipeline(
            self.registry,
            self.search_threads,
            self.cache,
            self.metrics,
            self.sampler,
            limit_s,
            settings.no_match_prior,
            settings.image_url,
        )
        cache = (
            None if state is None else DiskCache(state / IMAGE_CACHE, settings.image_cache_bytes)
        )
        self.image_stores = ImageStores(cache, settings.pictures_timeout_ms / 1e3)
        self.renditions = Renditions(settings, self.search_threads, self.models)
        self.keys = None if state is None else open_keys(state)
        self.audit = None if state is None else AuditLog(state)
        self.jobs = None if state is None else JobManager(settings)
        self.feedback = None if settings.feedback == "off" else open_feedback(settings)
        tidy: list[Callable[[], None]] = [partial(tidy_feedback, settings, self.feedback)]
        if self.jobs is not None:
            tidy.append(self.jobs.tidy)
        self.sweeper = None if state is None else Sweeper(state, self.registry.folders, tidy)
        self.items = Items(self.registry, self.pools["write"], limit_s, puts=state is not None)
        self.managed = ManagedGalleries(
            self.registry,
            self.models,
            state,
            self.pools["write"],
            (lambda _: None) if self.jobs is None else self.jobs.store.active_in,
            limit_s,
        )
        ready_s, is_on_gpu = settings.ready_timeout_ms / 1e3, settings.searched_on() == "cuda"
        self.health = Health(self.registry, self.models, self.image_stores, ready_s, is_on_gpu)
        count_jobs = dict if self.jobs is None else self.jobs.store.counts
        self.observer = Observer(
            self.metrics, self.health, self.searching, self.models, count_jobs, state
        )

    def _connect(self, backend: Backend) -> Model:
        batch_size, on_batch = self.settings.images_at_once(), self.metrics.batch_size.observe
        return Model(backend, self.cache, self.search_threads, batch_size, on_batch)

    def _open_galleries(self, primary: str, galleries: Mapping[str, Opened] | None) -> Reloads:
        settings = self.settings
        locations = Locations(settings, galleries)
        self.hidden = locations.hidden()
        if settings.state is None and not locations.list_galleries():
            raise GalleryNotFoundError(
                "There is no gallery. Set at least one folder with --gallery or KINLENS_GALLERIES, "
                "or a folder for galleries created over HTTP with --state."
            )
        return Reloads(locations, self.models, primary, settings, self.metrics)

    @property
    def galleries(self) -> Mapping[str, Opened]:
        """The galleries by name. Requests must acquire a lease from the registry instead."""
        return {name: served.whole for name, served in self.registry.served.items()}

    @property
    def embedder(self) -> ModelFacts:
        """The model of the first gallery."""
        return self.registry.model.embedder

    async def start(self) -> None:
        """Connect to Redis, warm up the models, open the galleries and start background work."""
        if self.redis is not None:
            await self.redis.start()
        await self.reloads.start(self.settings.reload_interval_ms / 1e3)
        layers = self.registry.model.workers.layers
        log, absent = structlog.get_logger(), absences(layers)
        if absent:
            log.warning("decoder sandbox", layers=holding(layers), absent=absent)
        else:
            log.info("decoder sandbox", layers=holding(layers))
        if self.sweeper is not None:
            self.sweeper.start()
        if self.jobs is not None:
            self.jobs.open()
        self.following.start()
        self.health.start()
        log.info(
            "serving",
            bundle_id=self.registry.model.bundle_id,
            provider=self.embedder.provider,
            engine=self.embedder.mode.engine,
            precision=self.embedder.mode.precision,
            galleries=self.registry.names(),
            redis=self.cache.remote_state,
        )
        for warning in missing_image_roots(self.galleries):
            log.warning("image root is missing", detail=warning)
        for name, warning in self.hidden.items():
            log.warning("gallery is hidden", gallery=name, detail=warning)

    async def read(
        self,
        what: str,
        work: Callable[[], T],
        pool: str = "file",
        served: Served | None = None,
        subject: str | None = None,
        since: float | None = None,
    ) -> T:
        """Run `work` in a thread of `pool` within the request timeout.

        Args:
            what: the thing that is read, for the error message.
            work: the call.
            pool: the name of the pool.
            served: the gallery that it reads from; a hanging gallery is refused at once.
            subject: the file or gallery that may hang, as in `BoundedPool.run`.
            since: when the timeout began, as in `within`.

        Raises: DeadlineExceededError, OverloadedError, any error of `work`.
        """
        limit_s = self.settings.request_timeout_ms / 1e3
        if served is not None:
            served.refuse_if_hanging(limit_s)
            work = partial(_watched, served, limit_s, work)
        async with within(limit_s, f"Reading {what}", since=since):
            return await self.pools[pool].run(work, subject=subject)

    async def read_in(self, name: str, what: str, read: Callable[[Served], T]) -> T:
        """The result of `read` with a gallery. Raises: GalleryNotFoundError; as `read`."""
        async with self.registry.find(name) as served:
            return await self.read(what, partial(read, served), served=served)

    async def in_state(self, subject: str, part: P | None, work: Callable[[P], T]) -> T:
        """Run `work` with a part of the state folder in a thread, within the request timeout.
        `subject` is its file, which may hang.

        Raises: StateMissingError without the part, DeadlineExceededError, OverloadedError; what
            `work` raises.
        """
        if part is None:
            raise StateMissingError(
                "The service has no state folder for keys, jobs and the audit log. Start it with "
                "--state DIR."
            )
        what = f"or changing {subject[:1].lower()}{subject[1:]}"
        return await self.read(what, partial(work, part), "state", subject=subject)

    async def change(self, served: Served, work: Callable[[], T]) -> T:
        """Run `work`, a change of a gallery, within the request timeout.

        Raises: DeadlineExceededError, OverloadedError, any error of `work`.
        """
        return await change(
            self.pools["write"], served, work, self.settings.request_timeout_ms / 1e3
        )

    async def stop(self) -> None:
        """Stop workers and threads, and disconnect; hanging threads are not waited for."""

        def close(*works: Callable[[], None]) -> None:
            async def all_closed() -> None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.gather(*(in_thread(work, _CLOSE_S) for work in works))

            ending.push_async_callback(all_closed)

        async with AsyncExitStack() as ending:  # runs every step, even if others fail
            if self.feedback is not None:
                close(self.feedback.close)
            if self.redis is not None:
                ending.push_async_callback(self.redis.close)
            close(*(pool.close for pool in self.pools.values()), self.image_stores.close)
            close(self.search_threads.close)
            close(self.sampler.close)
            ending.push_async_callback(self.reloads.stop)
            ending.push_async_callback(self.following.stop)
            if self.sweeper is not None:
                ending.callback(self.sweeper.stop)
            if self.jobs is not None:
                close(self.jobs.close)
            ending.push_async_callback(self.health.stop)


def _watched(served: Served, limit_s: float, work: Callable[[], T]) -> T:
    served.refuse_if_hanging(limit_s)  # it may hang since this call was queued
    with served.reading():
        return work()


def _create_pools(settings: Settings) -> dict[str, BoundedPool]:
    waiting = settings.waiting_files()
    overdue_s = settings.request_timeout_ms / 1e3
    return {
        "body": BoundedPool("body", _BODY_READERS, settings.queue_size),
        "write": BoundedPool(
            "write", _WRITERS, settings.queue_size, overdue_s, _WRITERS_PER_GALLERY
        ),
        "file": BoundedPool("file", settings.search_threads, waiting, overdue_s),
        "image": BoundedPool("image", settings.search_threads, waiting, overdue_s),
        "state": BoundedPool("state", _STATE_THREADS, settings.queue_size, overdue_s),
    }


def missing_image_roots(galleries: Mapping[str, Opened]) -> list[str]:
    """A warning for each gallery whose image folder is missing."""
    return [
        f"The images of gallery {name!r} cannot be shown: {gallery.image_root} is not a folder. "
        f"Set their folder with --image-root {name}=DIR or KINLENS_IMAGE_ROOTS."
        for name, gallery in galleries.items()
        # The images of a copy are stored where it was published.
        if not (isinstance(gallery, IndexedGallery) and gallery.copy_of is not None)
        # The readiness checks report stores that do not answer.
        and not isinstance(gallery.image_root, ImageAddress)
        and not os.path.isdir(gallery.image_root)  # noqa: PTH112 (unlike Path: no PermissionError)
    ]


def open_redis(settings: Settings, at_least_s: float = 0.0) -> SharedRedis | None:
    """The Redis of the settings, not connected yet, with a timeout of `at_least_s` or more."""
    if settings.redis_url is None:
        return None
    timeout_s = max(at_least_s, settings.redis_timeout_ms / 1e3)
    return SharedRedis(settings.redis_url.get_secret_value(), timeout_s)
