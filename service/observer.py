"""Metrics of models, galleries and jobs, which are read on each scrape."""

import asyncio
import functools
import math
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kinlens.embedder.errors import GalleryNotFoundError, KinlensError
from kinlens.indexer.gallery import checked_s
from kinlens.models import JobState
from kinlens.service.backups.folder import last_backup
from kinlens.service.concurrency import KeyedThreads, Recent, SearchThreads, within
from kinlens.service.encoding.cache import Cache
from kinlens.service.encoding.model import Models
from kinlens.service.encoding.sandbox import active_names
from kinlens.service.galleries.registry import Registry
from kinlens.service.health import Health
from kinlens.service.observe.logs import dropped_lines
from kinlens.service.observe.metrics import Described, Metrics

_RENDER_S = 5.0
_LIMIT_S = 0.5  # for each value, so a scrape ends before its timeout


class Observer(Collector):
    """Collects the state of models, galleries and jobs; values that cannot be read are omitted."""

    def __init__(
        self,
        metrics: Metrics,
        registry: Registry,
        models: Models,
        health: Health,
        jobs: Callable[[], Mapping[JobState, int]] = dict,
        state: Path | None = None,
    ) -> None:
        self._metrics = metrics
        self._registry = registry
        self._models = models
        self._health = health
        self._omitted: dict[str, str] = {}
        self._threads = KeyedThreads()
        self._jobs = jobs
        self._state = state
        self._families = _families()
        self._recent = Recent(self._render)

    def collect(self) -> Sequence[GaugeMetricFamily]:
        """The values of the last scrape."""
        return self._families

    async def render(self) -> bytes:
        """All metrics as text, at most one second old.

        The cache bounds the cost, since scrapes have no rate limit.
        """
        return await self._recent.get()

    async def _render(self) -> bytes:
        self._families = await self._read()
        self._metrics.refresh()  # not in a thread, since it reads state of the event loop
        galleries = {*self._registry.names(), *self._registry.failures.verdicts()}
        render = functools.partial(self._metrics.render, galleries)
        async with within(_RENDER_S, "Reading the metrics"):
            return await self._threads.run("render", render, None)

    async def _read(self) -> Sequence[GaugeMetricFamily]:
        families = _families()
        provider, jobs, items, age, ready, replicas, *of_disks = families
        for model in self._models.running():
            precision = model.embedder.mode.precision
            provider.add_metric([model.provider, precision, model.bundle_id], 1)
        for name, is_ready in self._health.galleries().items():
            ready.add_metric([name], is_ready)

        async def count_jobs() -> None:
            for state, count in (await self._threads.run("jobs", self._jobs, _LIMIT_S)).items():
                jobs.add_metric([state], count)

        async def read_gallery(name: str) -> None:
            with self._registry.lease(name) as own:
                gallery = own.gallery
                count = await self._threads.run(own, lambda: gallery.size, _LIMIT_S)
                items.add_metric([name], count)
                made_at = datetime.fromisoformat(gallery.created_at)
                age.add_metric([name], (datetime.now(UTC) - made_at).total_seconds())
                if own.follows is not None and own.path is not None:
                    checked = checked_s(own.path)
                    replicas.add_metric(
                        [name], math.inf if checked is None else time.time() - checked
                    )

        names = self._registry.names()
        reads = [self._try(f"gallery {name}", read_gallery(name)) for name in names]
        reads.append(self._try("jobs", count_jobs()))
        await asyncio.gather(*reads, *self._disk_reads(names, *of_disks))
        self._omitted = {
            subject: reason
            for subject, reason in self._omitted.items()
            if not subject.startswith("gallery ") or subject.removeprefix("gallery ") in names
        }
        return families

    def _disk_reads(
        self,
        names: Sequence[str],
        free: GaugeMetricFamily,
        size: GaugeMetricFamily,
        saved_at: GaugeMetricFamily,
        has_failed: GaugeMetricFamily,
    ) -> list[Coroutine[Any, Any, None]]:
        """Coroutines that fill the metrics of file systems and backups."""
        devices = set[int]()

        async def read_disk(folder: Path) -> None:
            device, usage = await self._threads.run(folder, lambda: _usage(folder), _LIMIT_S)
            if device not in devices:
                devices.add(device)
                free.add_metric([str(folder)], usage.free)
                size.add_metric([str(folder)], usage.total)

        async def read_backup(state: Path) -> None:
            last = await self._threads.run("backup", lambda: last_backup(state), _LIMIT_S)
            saved_at.add_metric([], last.succeeded_at)
            has_failed.add_metric([], last.has_failed)

        reads = [self._try(f"disk {path}", read_disk(path)) for path in self._folders(names)]
        if self._state is not None:
            reads.append(self._try("backup", read_backup(self._state)))
        return reads

    def _folders(self, names: Sequence[str]) -> list[Path]:
        """The state folder, and the folders that hold galleries."""
        folders = dict.fromkeys([] if self._state is None else [self._state])
        for name in names:
            with suppress(KinlensError), self._registry.lease(name) as own:
                if own.path is not None:
                    folders[own.path.parent] = None
        return list(folders)

    async def _try(self, subject: str, reading: Coroutine[Any, Any, None]) -> None:
        """Await `reading`; log only when it starts or stops failing, not on each scrape."""
        reason = ""
        try:
            await reading
        except GalleryNotFoundError:
            return  # concurrently deleted
        except Exception as error:  # whatever fails, such as sqlite3, all others are shown
            reason = type(error).__name__
        if reason != self._omitted.get(subject, ""):
            self._omitted[subject] = reason
            if reason:
                structlog.get_logger().warning("metrics omitted", subject=subject, error=reason)
            else:
                structlog.get_logger().info("metrics read again", subject=subject)


def _usage(folder: Path) -> tuple[int, Any]:
    return folder.stat().st_dev, shutil.disk_usage(folder)


def _described(name: str, text: str, *labels: str) -> Described:
    return Described(name, "gauge", labels, text)


FAMILIES = (
    _described(
        "kinlens_provider_info",
        "Execution provider, model and precision.",
        "provider",
        "precision",
        "bundle_id",
    ),
    _described("kinlens_jobs", "Jobs in each state.", "state"),
    _described(
        "kinlens_gallery_items", "Items of a gallery, counted when the metrics are read.", "gallery"
    ),
    _described(
        "kinlens_gallery_age_seconds", "Time since the current generation was built.", "gallery"
    ),
    _described(
        "kinlens_gallery_ready",
        "1 while the last readiness check of the gallery passed; 0 also if it cannot be opened.",
        "gallery",
    ),
    _described(
        "kinlens_replica_checked_seconds",
        "Time since a copy of a published gallery was known to have the newest snapshot.",
        "gallery",
    ),
    _described(
        "kinlens_disk_free_bytes",
        "Free space of each file system with the state folder or galleries, by one folder on it.",
        "folder",
    ),
    _described("kinlens_disk_size_bytes", "Size of these file systems.", "folder"),
    _described(
        "kinlens_backup_last_success_timestamp_seconds",
        "When the last complete `kinlens-serve backup` of this state folder ended, in seconds "
        "since 1970; 0 if there was none.",
    ),
    _described("kinlens_backup_failed", "1 if a backup has failed since the last complete one."),
)
"""The metrics of `Observer`, in the order of `_read`."""


def _families() -> Sequence[GaugeMetricFamily]:
    return [GaugeMetricFamily(one.name, one.text, labels=one.labels) for one in FAMILIES]


def publish(
    metrics: Metrics, search_threads: SearchThreads, models: Models, cache: Cache, health: Health
) -> None:
    """Register the gauges that are read on each scrape."""
    metrics.gauge(
        "kinlens_queue_depth",
        "Searches waiting for a search thread.",
        lambda: search_threads.waiting,
    )
    metrics.gauge(
        "kinlens_decoder_restarts",
        "Worker processes that were replaced.",
        lambda: sum(workers.restarts for workers in models.workers()),
    )
    metrics.gauge(
        "kinlens_decoder_kills",
        "Worker processes that were killed for time or memory.",
        lambda: sum(workers.kills for workers in models.workers()),
    )
    metrics.gauge(
        "kinlens_decoder_sandbox_layers",
        "Active layers of the decoder sandbox, at most 2.",
        lambda: min((len(active_names(each.layers)) for each in models.workers()), default=0),
    )
    metrics.gauge(
        "kinlens_log_lines_dropped",
        "Log lines that could not be written: stderr is full, closed or blocked.",
        dropped_lines,
    )
    metrics.gauge(
        "kinlens_ready",
        "1 while the last readiness check passed.",
        lambda: health.passed,
    )
    metrics.gauge(
        "kinlens_redis_up",
        "1 while Redis permits all commands of the service.",
        lambda: cache.remote_state == "up",
    )
