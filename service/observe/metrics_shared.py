"""Metrics of several processes: each writes its own files in one folder, and any can render all.

    parent: shared_folder() ──► children: PROMETHEUS_MULTIPROC_DIR ──► render(): sums over the files

Without the variable, the metrics of a single process stay in its memory.
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
RESTARTS = (
    "kinlens_process_restarts",
    "With `--workers`: serving processes that ended and were replaced.",
)
"""Name and help text of the counter of the parent process."""


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Create a temporary folder that is shared by all processes started inside this block.

    The library chooses its storage on import, so only new processes use it.
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
    """Remove an ended process from the gauges; its counters stay in the sums."""
    mark_process_dead(process_id, str(folder))  # type: ignore[no-untyped-call]


def restarts_counter() -> Callable[[], None]:
    """A function that counts one replaced process per call, in the shared folder."""
    name, text = RESTARTS
    value = MultiProcessValue(lambda: _PARENT)(  # type: ignore[no-untyped-call]
        "counter", name, f"{name}_total", (), (), text
    )
    return lambda: value.inc(1)


def _is_shared() -> bool:
    """Whether several processes share their metrics."""
    return _VARIABLE in os.environ


def render(
    registry: CollectorRegistry, own: Sequence[Collector], galleries: Collection[str]
) -> bytes:
    """The metrics of this process as text, or the sums over all processes of the folder, together
    with the `own` collectors. Series of galleries other than `galleries` are omitted.
    """
    if _is_shared():
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        for collector in own:
            registry.register(collector)
    return generate_latest(_OfGalleries(registry, galleries))


class _OfGalleries(Collector):
    """Filters out the series of deleted galleries, since the library cannot remove a series from
    the shared files.
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

    async def refresh_forever() -> None:
        while True:
            refresh()
            await asyncio.sleep(_REFRESH_S)

    task = asyncio.create_task(refresh_forever())
    try:
        yield
    finally:
        task.cancel()
