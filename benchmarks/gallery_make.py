"""The galleries of benchmarks/gallery.py: what is in them, whether they fit, how they are built."""

import resource
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from clustered import clustered_batches
from numpy.typing import NDArray

from embedder.errors import PlanError
from embedder.types import Embeddings
from indexer.folder.layout import GalleryFolder
from indexer.index.plan import IndexSettings, Plan, plan_index
from indexer.index.segment import INDEX, VECTORS, read_manifest
from indexer.ingest.build import import_gallery
from indexer.live.compaction import SEGMENTS
from indexer.types import Dump, Entry

K = 10
BUCKETS = 1000
BUNDLE_ID = "0" * 64
_ROW_BYTES = 400  # of an item in the catalogue, beside its vector
_PROCESS_MB = 500
_BATCH = 10_000


@dataclass(frozen=True)
class Setting:
    """A gallery: `n` vectors of `dim` numbers below `folder`, indexed as `index` says."""

    n: int
    dim: int
    folder: Path
    index: str = "auto"
    memory_mb: float | None = None

    @property
    def path(self) -> Path:
        return self.folder / f"{self.n}x{self.dim}-{self.index}"

    @property
    def settings(self) -> IndexSettings:
        return IndexSettings(kind=self.index, memory_mb=self.memory_mb)

    def plan(self) -> Plan:
        return plan_index(self.n, self.dim, kind=self.index, memory_mb=self.memory_mb)

    def __str__(self) -> str:
        return label(self.n, self.dim)


def label(n: int, dim: int) -> str:
    size = f"{n // 1_000_000}M" if n >= 1_000_000 else f"{n // 1000}k" if n >= 1000 else str(n)
    return f"{size} x {dim}"


def key_of(position: int) -> str:
    return f"{position:09d}"


def buckets(n: int) -> NDArray[np.int16]:
    """The attribute `bucket` of every item: uniform in 0..999."""
    return np.random.default_rng((n, BUCKETS)).integers(0, BUCKETS, n, dtype=np.int16)


def entries(n: int, dim: int) -> Iterator[Entry]:
    """The items of a gallery, in the order of their positions."""
    number, bucket = 0, buckets(n)
    for batch in clustered_batches(n, dim, batch=_BATCH):
        for vector in batch:
            attributes = {"bucket": int(bucket[number])}
            yield Entry(key_of(number), vector, f"{number:064x}", attributes)
            number += 1


def later_entries(first: int, vectors: Embeddings) -> list[Entry]:
    """Items that come into the gallery later; `first` numbers them."""
    return [
        Entry(f"later-{number}", vector, f"{10**12 + number:064x}", {"bucket": number % BUCKETS})
        for number, vector in enumerate(vectors, first)
    ]


def segment_folder(setting: Setting) -> Path:
    """The segment that the build made; a compaction replaces it."""
    (folder,) = (GalleryFolder(setting.path).current() / SEGMENTS).iterdir()
    return folder


def codes_mb(setting: Setting) -> float:
    """Size of what a search compares with first, in MB: the compressed index, or all vectors."""
    files = read_manifest(segment_folder(setting)).files
    return files[INDEX if INDEX in files else VECTORS].bytes / 1e6


def refusal(setting: Setting, with_peers: bool) -> str | None:
    """Why this gallery cannot be measured on this machine; None if it can."""
    try:
        plan = setting.plan()
    except PlanError as error:
        return str(error)
    vectors_mb = setting.n * setting.dim * 4 / 1e6
    # Raw FAISS reads the whole index; each of the two peers keeps its own vectors and graph.
    searching_mb = plan.memory_mb + vectors_mb + (2.6 * vectors_mb if with_peers else 0)
    memory_mb = _PROCESS_MB + max(plan.build_memory_mb, searching_mb)
    # A compaction writes the new index beside the old one.
    disk_mb = 2 * plan.disk_mb + vectors_mb + setting.n * _ROW_BYTES / 1e6
    free_mb = shutil.disk_usage(setting.folder).free / 1e6
    if memory_mb > available_mb():
        return f"needs {memory_mb:,.0f} MB of memory, {available_mb():,.0f} MB are available"
    if disk_mb > free_mb:
        return f"needs {disk_mb:,.0f} MB in {setting.folder}, {free_mb:,.0f} MB are free"
    return None


def available_mb() -> float:
    """Memory that can be had without swapping, in MB."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return kib * 1024 / 1e6


def build(setting: Setting) -> dict[str, Any]:
    """Make the gallery; to be called in a process of its own, whose peak memory is taken."""
    facts = {"name": "benchmark", "bundle_id": BUNDLE_ID}
    dump = Dump(facts, setting.dim, setting.n, lambda: iter(entries(setting.n, setting.dim)))
    started = time.perf_counter()
    import_gallery(dump, setting.path, settings=setting.settings)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"seconds": seconds, "peak_mb": peak}
