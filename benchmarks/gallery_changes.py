"""What changes cost, when they are seen, and what a compaction does to searches meanwhile."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from clustered import clustered_later
from gallery_make import K, Setting, later_entries
from gallery_process import beside, compact, follow
from gallery_report import Report

from embedder.types import Embeddings
from indexer.gallery import Gallery

_SEEN = 100
_SINGLE = 100
_HUNDREDS = 20
_BEFORE_S = 5.0
_AFTER = 200


def measure_changes(setting: Setting, queries: Embeddings, report: Report) -> None:
    """Report how soon added items are found by another process, and what a durable add takes."""
    later = clustered_later(setting.n, setting.dim, count=_SEEN + _SINGLE + 100 * _HUNDREDS)
    gallery = Gallery.open(setting.path)
    gallery.search(queries[:1], K)
    seen = _until_seen(setting, gallery, later[:_SEEN])
    report.add("added item found by another process after: p50", _percentile(seen, 50), "ms")
    report.add("added item found by another process after: p99", _percentile(seen, 99), "ms")
    first = _SEEN
    for size, count in ((1, _SINGLE), (100, _HUNDREDS)):
        chunks = [later[first + size * i : first + size * (i + 1)] for i in range(count)]
        adds = [later_entries(first + size * i, chunk) for i, chunk in enumerate(chunks)]
        seconds = _each([lambda add=add: gallery.add(add) for add in adds])
        report.add(f"durable add of {size}: p50", _percentile(seconds, 50), "ms")
        report.add(f"durable add of {size}: p99", _percentile(seconds, 99), "ms")
        first += size * count
    gallery.close()


def measure_compaction(setting: Setting, queries: Embeddings, report: Report) -> None:
    """Report what searches take while another process compacts the gallery."""
    gallery = Gallery.open(setting.path)

    def search(number: int) -> float:
        row = number % len(queries)
        started = time.perf_counter()
        gallery.search(queries[row : row + 1], K)
        return time.perf_counter() - started

    before: list[float] = []
    deadline = time.monotonic() + _BEFORE_S
    while time.monotonic() < deadline:
        before.append(search(len(before)))
    started = time.perf_counter()
    meanwhile: list[float] = []
    with beside(compact, setting) as process:
        while process.poll() is None:
            meanwhile.append(search(len(meanwhile)))
    seconds = time.perf_counter() - started
    # The first of these takes over the new segment.
    meanwhile += [search(number) for number in range(_AFTER)]
    p99_before, p99 = _percentile(before, 99), _percentile(meanwhile, 99)
    report.add("compaction", seconds, "s")
    report.add("p99 of searches before a compaction", p99_before, "ms")
    report.add("p99 of searches during it", p99, "ms")
    report.add("p99 during / before", p99 / p99_before)
    report.add("slowest search during it", 1000 * max(meanwhile), "ms")
    gallery.close()


def _until_seen(setting: Setting, gallery: Gallery, vectors: Embeddings) -> list[float]:
    """Seconds from the acknowledgement of an add to the first answer that has the item."""
    file = setting.folder / "later.npy"
    np.save(file, vectors)
    seconds = []
    with beside(follow, setting, vectors=str(file), first=0) as process:
        assert process.stdout is not None
        for entry in later_entries(0, vectors):
            _expect_ready(process.stdout.readline())
            gallery.add([entry])
            acknowledged = time.monotonic()
            found = float(process.stdout.readline())
            # A search that began before the acknowledgement may already have found it.
            seconds.append(max(0.0, found - acknowledged))
    Path(file).unlink()
    return seconds


def _expect_ready(line: str) -> None:
    if line.strip() != "ready":
        raise SystemExit("the searching process ended; its message is above")


def _each(calls: list[Callable[[], object]]) -> list[float]:
    seconds = []
    for call in calls:
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def _percentile(seconds: list[float], percent: float) -> float:
    return 1000 * float(np.percentile(seconds, percent))
