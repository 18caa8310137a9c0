"""Metrics of several processes: each writes files of its own in one folder, any of them shows all.

    parent: shared_folder() ──► children: PROMETHEUS_MULTIPROC_DIR ──► render(): sums over the files

Without the variable everything stays in the memory of the one process.
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from prometheus_client.values import MultiProcessValue

GaugeMode = Literal["livesum", "livemin"]
_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_REFRESH_S = 1.0
_PARENT = "parent"
RESTARTS = ("kinlens_process_restarts", "Serving processes that ended and were replaced.")
"""Name and text of what the parent counts, who answers no request himself."""


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A new, empty folder that processes started inside this block share; removed in the end.

    The library chooses its storage when it is imported, so only new processes are concerned.
    """
    with tempfile.TemporaryDirectory(
        prefix="kinlens-metrics-", ignore_cleanup_errors=True
    ) as folder:
        os.environ[_VARIABLE] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[_VARIABLE]


def forget(folder: Path, process_id: int) -> None:
    """Leave a process that ended out of the gauges; what it counted stays in the sums."""
    mark_process_dead(process_id, str(folder))  # type: ignore[no-untyped-call]


def restarts_counter() -> Callable[[], None]:
    """Counts one more replaced process at each call, in the shared folder of this block."""
    name, text = RESTARTS
    value = MultiProcessValue(lambda: _PARENT)(  # type: ignore[no-untyped-call]
        "counter", name, f"{name}_total", (), (), text
    )
    return lambda: value.inc(1)


def _is_shared() -> bool:
    """Whether the metrics of this process are those of several."""
    return _VARIABLE in os.environ


def render(
    registry: CollectorRegistry, own: Sequence[Collector], galleries: Collection[str]
) -> bytes:
    """The metrics of this process, or the sums over all that share the folder and the `own` ones
    of this process, as text. Series of other galleries than these are omitted.
    """
    if _is_shared():
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        for collector in own:
            registry.register(collector)
    return generate_latest(_OfGalleries(registry, galleries))


class _OfGalleries(Collector):
    """Without the series of deleted galleries. The library cannot remove a series from the files
    that processes share, so they are left out of the text.
    """

    def __init__(self, registry: CollectorRegistry, galleries: Collection[str]) -> None:
        self._registry = registry
        self._galleries = galleries

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [
                sample
                for sample in metric.samples
                if "gallery" not in sample.labels or sample.labels["gallery"] in self._galleries
            ]
            yield metric


@contextlib.asynccontextmanager
async def kept_fresh(refresh: Callable[[], None]) -> AsyncIterator[None]:
    """Call `refresh` every second inside this block if the metrics are shared."""
    if not _is_shared():
        yield
        return

    async def refresh_for_ever() -> None:
        while True:
            refresh()
            await asyncio.sleep(_REFRESH_S)

    task = asyncio.create_task(refresh_for_ever())
    try:
        yield
    finally:
        task.cancel()
