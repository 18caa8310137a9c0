"""Metrics of searches, models, galleries and jobs, which are read on each scrape."""

import asyncio
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kinlens.embedder.errors import GalleryNotFoundError
from kinlens.indexer.galleries import checked_s
from kinlens.models import JobState
from kinlens.service.backups.folder import last_backup
from kinlens.service.concurrency import KeyedThreads, Recent, within
from kinlens.service.encoding.model import Models
from kinlens.service.encoding.sandbox import active_names
from kinlens.service.health import Health
from kinlens.service.observe.logs import dropped_lines
from kinlens.service.observe.metrics import Described, Metrics
from kinlens.service.search.guarantee import withdrawn
from kinlens.service.search.pipeline import Pipeline

_RENDER_S = 5.0
_LIMIT_S = 0.5  # for each value, so a scrape ends before its timeout
_AT_ONCE = 16

Sample = tuple[str, Sequence[str], float]
"""The name of a metric, its labels and its value."""


@dataclass(eq=False)
class Observer(Collector):
    """Collects the state of searches, models, galleries and jobs; values that cannot be read are
    omitted.
    """

    metrics: Metrics
    health: Health
    searching: Pipeline
    models: Models
    jobs: Callable[[], Mapping[JobState, int]] = dict
    state: Path | None = None

    def __post_init__(self) -> None:
        self._omitted: dict[str, str] = {}  # the error of each subject at the last scrape
        self._threads = KeyedThreads(_AT_ONCE)
        self._samples: list[Sample] = []
        self._families = _families([])
        self._recent = Recent(self._render)
        self.metrics.add(self, FAMILIES)

    def collect(self) -> Sequence[GaugeMetricFamily]:
        """The values of the last scrape."""
        return self._families

    def refresh(self) -> None:
        """Read what needs no disk again, in the event loop, which changes it."""
        self._families = _families([*self._of_process(), *self._samples])

    async def render(self) -> bytes:
        """All metrics as text, at most one second old.

        The cache bounds the cost, since scrapes have no rate limit.
        """
        return await self._recent.get()

    async def _render(self) -> bytes:
        self._samples = await self._read()
        self.refresh()
        async with within(_RENDER_S, "Reading the metrics"):
            return await self._threads.run("render", self.metrics.render, None)

    def _of_process(self) -> Iterator[Sample]:
        workers = self.models.workers()
        layers = (len(active_names(each.layers)) for each in workers)
        yield "kinlens_searches_in_flight", (), self.searching.in_flight
        yield "kinlens_queue_depth", (), self.searching.search_threads.waiting
        yield "kinlens_decoder_restarts", (), sum(each.restarts for each in workers)
        yield "kinlens_decoder_kills", (), sum(each.kills for each in workers)
        yield "kinlens_decoder_sandbox_layers", (), min(layers, default=0)
        yield "kinlens_log_lines_dropped", (), dropped_lines()
        yield "kinlens_ready", (), self.health.passed
        yield "kinlens_redis_up", (), self.searching.cache.remote_state == "up"
        for model in self.models.running():
            labels = model.embedder.provider, model.embedder.mode.precision, model.bundle_id
            yield "kinlens_provider_info", labels, 1
        for name, is_ready in self.health.galleries().items():
            yield "kinlens_gallery_ready", (name,), is_ready

    async def _read(self) -> list[Sample]:
        samples: list[Sample] = []
        reads: dict[str, Callable[[], list[Sample]]] = {
            "jobs": lambda: [("kinlens_jobs", (state,), n) for state, n in self.jobs().items()]
        }
        folders = [path.parent for path in self.searching.registry.folders(copies=True)]
        if self.state is not None:
            reads["backup"] = partial(_read_backup, self.state)
            folders.insert(0, self.state)
        for name in self.searching.registry.names():
            reads[f"gallery {name}"] = partial(self._read_gallery, name)
        devices: dict[int, Path] = {}
        for folder in folders:
            reads[f"disk {folder}"] = partial(_read_disk, folder, devices)
        self._omitted = {name: why for name, why in self._omitted.items() if name in reads}
        for read in await asyncio.gather(*(self._try(*each) for each in reads.items())):
            samples += read
        return samples

    async def _try(self, subject: str, read: Callable[[], list[Sample]]) -> list[Sample]:
        """The result of `read`, or nothing; logs only when it starts or stops failing."""
        samples, reason = list[Sample](), ""
        try:
            samples = await self._threads.run(subject, read, _LIMIT_S)
        except GalleryNotFoundError:
            return []  # concurrently deleted
        except Exception as error:  # whatever fails, such as sqlite3, all others are shown
            reason = type(error).__name__
        if reason != self._omitted.get(subject, ""):
            self._omitted[subject] = reason
            if reason:
                structlog.get_logger().warning("metrics omitted", subject=subject, error=reason)
            else:
                structlog.get_logger().info("metrics read again", subject=subject)
        return samples

    def _read_gallery(self, name: str) -> list[Sample]:
        with self.searching.registry.lease(name) as served:
            made_at = datetime.fromisoformat(served.gallery.created_at)
            age_s = (datetime.now(UTC) - made_at).total_seconds()
            samples: list[Sample] = [
                ("kinlens_gallery_items", (name,), served.gallery.size),
                ("kinlens_gallery_age_seconds", (name,), age_s),
            ]
            if (why := withdrawn(served)) is not None:
                samples.append(("kinlens_guarantee_withdrawn", (name,), bool(why)))
            if served.follows is not None and served.path is not None:
                checked = checked_s(served.path)
                since_s = math.inf if checked is None else time.time() - checked
                samples.append(("kinlens_replica_checked_seconds", (name,), since_s))
            return samples


def _read_disk(folder: Path, devices: dict[int, Path]) -> list[Sample]:
    """The space of a file system, once for all folders on it, of which `devices` has the first."""
    if devices.setdefault(folder.stat().st_dev, folder) != folder:
        return []
    usage = shutil.disk_usage(folder)
    return [
        ("kinlens_disk_free_bytes", (str(folder),), usage.free),
        ("kinlens_disk_size_bytes", (str(folder),), usage.total),
    ]


def _read_backup(state: Path) -> list[Sample]:
    last = last_backup(state)
    return [
        ("kinlens_backup_last_success_timestamp_seconds", (), last.succeeded_at),
        ("kinlens_backup_failed", (), last.has_failed),
    ]


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
        "kinlens_guarantee_withdrawn",
        "1 after a guarantee has ended, until the golden set is run again: other queries came (a "
        "false alarm in 1 of 100 starts of a process), a fifth of the items changed, or the "
        "gallery was rebuilt. Absent without a guarantee.",
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
    _described("kinlens_searches_in_flight", "Searches being answered."),
    _described("kinlens_queue_depth", "Searches waiting for a search thread."),
    _described("kinlens_decoder_restarts", "Worker processes that were replaced."),
    _described("kinlens_decoder_kills", "Worker processes that were killed for time or memory."),
    _described(
        "kinlens_decoder_sandbox_layers", "Active layers of the decoder sandbox, at most 2."
    ),
    _described(
        "kinlens_log_lines_dropped",
        "Log lines that could not be written: stderr is full, closed or blocked.",
    ),
    _described("kinlens_ready", "1 while the last readiness check passed."),
    _described("kinlens_redis_up", "1 while Redis permits all commands of the service."),
)
"""The metrics of `Observer`."""


def _families(samples: Iterable[Sample]) -> list[GaugeMetricFamily]:
    families = {
        one.name: GaugeMetricFamily(one.name, one.text, labels=one.labels) for one in FAMILIES
    }
    for name, labels, value in samples:
        families[name].add_metric(labels, value)
    return list(families.values())
