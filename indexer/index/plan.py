"""Chooses the index of a gallery by number of vectors, dimension, memory and device.

Nothing is built here. `auto` takes the first index type of its row in `_CHOICES` that fits into
memory.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, get_args

from kinlens.embedder.errors import PlanError, ProviderError
from kinlens.embedder.machine import free_memory_mb
from kinlens.embedder.machine import memory_mb as machine_memory_mb
from kinlens.indexer.index.gpu import RESERVE_MB, gpu_memory, why_no_gpu
from kinlens.indexer.index.index_types import INDEX_TYPES, Device, IndexKind, IndexType
from kinlens.indexer.types import NUMBER_BYTES, VectorType
from kinlens.reports import Report

_log = logging.getLogger(__name__)

_MIB = 2**20
_BASE_BUILD_MB = 100.0  # batches read from the catalogue, and held-out queries
_BUILD_ITEM_BYTES = 60  # keys and ids of items, as measured
ITEM_DISK_BYTES = 400
"""Disk space per item in addition to its vector: its row in the catalogue with five attributes, and
their columns. 310 for short texts."""

MAX_DIM = 8192
MAX_N = 2**31 - 1
"""FAISS counts the nodes of a graph and the entries of a list in 32 bits."""

EXACT_TARGET = 0.9995
"""Target recall from which on only an exact index is accepted."""

_HNSW_MAX = 500_000
"""IVF-PQ is faster and smaller for many vectors: at 200,000 x 128 it took 232 us (p50) and 51 bytes
per vector, HNSW 775 us and 400 bytes. At 1 million, HNSW took 510 s to build and needed efSearch
352."""

# Device, bytes of vectors (fp32) and number of vectors up to which a row applies; index types in
# the order in which they are tried, and why.
_CHOICES: tuple[tuple[Device, float, float, tuple[IndexKind, ...], str], ...] = (
    ("cpu", 200e6, math.inf, ("flat", "hnsw", "ivf-pq"), "few enough for brute force"),
    ("cpu", math.inf, _HNSW_MAX, ("hnsw", "ivf-pq"), "too many for brute force"),
    ("cpu", math.inf, math.inf, ("ivf-pq",), "too many for a graph"),
    ("cuda", 2e9, math.inf, ("flat", "ivf-pq"), "few enough for brute force"),
    ("cuda", math.inf, math.inf, ("ivf-pq", "flat"), "too many for brute force"),
)

_DEVICES = {
    "cpu": "the CPU; on a GPU with --index-device cuda",
    "cuda": "the GPU (--index-device cuda); on the CPU if there is none",
}

MEMORY_PART = 0.8
"""Share of the machine's memory for an index; the rest is for this and other processes."""


class IndexChoice(TypedDict, total=False):
    """What a caller chooses of an index. None is the same as omitted.

    index: an index type, or auto.
    memory_mb: memory limit in MiB.
    target_recall: recall@10 that the index must reach.
    index_device: the device that searches it, cpu or cuda.
    """

    index: str | None
    memory_mb: float | None
    target_recall: float | None
    index_device: str | None


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """How to build an index.

    kind: an index type, or auto.
    memory_mb: memory limit; None for a share of the memory of the machine or container.
    device: the device that will search it.
    """

    kind: str = "auto"
    memory_mb: float | None = None
    device: str = "cpu"
    target_recall: float = 0.98

    def changed(
        self,
        index: str | None = None,
        memory_mb: float | None = None,
        target_recall: float | None = None,
        index_device: str | None = None,
    ) -> "IndexSettings":
        """These settings with what was chosen, an `IndexChoice`."""
        given: dict[str, Any] = {
            "kind": index,
            "memory_mb": memory_mb,
            "target_recall": target_recall,
            "device": index_device,
        }
        return replace(self, **{n: value for n, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Plan(Report):
    """An index and its cost.

    memory_mb, build_memory_mb: resident memory while searching and while building.
    mapped_mb: memory-mapped vectors, read through the page cache.
    code_bytes: size of the index file.
    disk_mb: size of the whole gallery.
    gpu_memory_mb, gpu_free_mb: GPU memory while searching, and available; 0 without a GPU.
    """

    kind: IndexKind
    n: int
    dim: int
    device: str
    memory_mb: float
    mapped_mb: float
    code_bytes: float
    disk_mb: float
    build_memory_mb: float
    expected_recall: float
    reason: str
    gpu_memory_mb: float = 0.0
    gpu_free_mb: float = 0.0
    parameters: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak_mb(self) -> float:
        """The highest resident memory."""
        return max(self.memory_mb, self.build_memory_mb)

    def shortage(self, budget_mb: float) -> str | None:
        """What is missing of `budget_mb` of memory or of the GPU; None if the plan fits."""
        if self.peak_mb > budget_mb:
            return f"{_mb(self.peak_mb)} of memory, but there are only {_mb(budget_mb)}"
        if self.gpu_memory_mb > self.gpu_free_mb:
            there = _mb(self.gpu_free_mb)
            return f"{_mb(self.gpu_memory_mb)} of the GPU, but there are only {there}"
        return None

    def lines(self) -> list[str]:
        """A readable description, one fact per line."""
        parameters = ", ".join(f"{name} {value:,}" for name, value in self.parameters.items())
        is_known = INDEX_TYPES[self.kind].is_scan
        facts = {
            "index": f"{self.kind} on {self.device}" + f" ({parameters})" * bool(parameters),
            "searched on": _DEVICES[self.device],
            "vectors": f"{self.n:,} x {self.dim}",
            "memory": f"{_mb(self.memory_mb)} while searching, {_mb(self.build_memory_mb)} while "
            f"building; {_mb(free_memory_mb())} are free",
            "GPU memory": f"{_mb(self.gpu_memory_mb)} of {_mb(self.gpu_free_mb)} free",
            "mapped": f"{_mb(self.mapped_mb)} of vectors",
            "disk": f"{_mb(self.disk_mb)}, twice as much during a later build",
            f"recall@10 {'expected' if is_known else 'target'}": f"{self.expected_recall:.3f}",
            "reason": self.reason,
        }
        if self.device == "cpu":
            del facts["GPU memory"]
        return [f"{name:<20}{fact}" for name, fact in facts.items()]


def plan_index(
    n: int,
    dim: int,
    settings: IndexSettings,
    vector_type: VectorType = "fp32",
    *,
    replaces: bool = False,
) -> Plan:
    """The index for `n` vectors of length `dim`: of the requested type, or the first that fits.

    replaces: the index replaces another one, whose GPU memory will be free.

    Raises: PlanError for numbers out of range, an unknown type or device, or too little memory; it
        names the option to change. ProviderError.
    """
    _check_size(n, dim, settings)
    if settings.device not in get_args(Device):
        devices = " or ".join(get_args(Device))
        raise PlanError(f"Unknown device {settings.device!r}. Choose --index-device {devices}.")
    if settings.device == "cuda" and (why := why_no_gpu()):
        raise PlanError(f"{why} Or choose --index-device cpu.")
    budget = settings.memory_mb or MEMORY_PART * machine_memory_mb()  # checked: it is above 0
    gpu_mb = _gpu_mb(settings, replaces)
    refused: list[tuple[Plan, str]] = []
    for index_type, reason in _choices(n, dim, settings):
        if refused:
            reason = "; ".join(f"{one.kind} needs {needs}" for one, needs in refused)
        plan = _plan(index_type, n, dim, settings, reason, gpu_mb, vector_type)
        shortage = plan.shortage(budget)
        if shortage is None:
            return plan
        refused.append((plan, shortage))
    plan, shortage = min(refused, key=lambda one: one[0].peak_mb)
    smaller = "" if plan.kind == "ivf-pq" else ", choose a smaller one with --index"
    raise PlanError(
        f"The index {plan.kind} for {n:,} vectors of length {dim} needs {shortage}. Raise "
        f"--memory-mb if the machine has more{smaller}, or change --index-device."
    )


def plan_compaction(
    n: int, dim: int, settings: IndexSettings, vector_type: VectorType = "fp32"
) -> Plan:
    """The plan of an index that replaces another one: for the CPU if it does not fit on the GPU,
    and flat while the gallery has too few different images for the requested type.

    Raises: PlanError or ProviderError if no index fits.
    """
    for wanted in INDEX_TYPES.values():
        if wanted.name == settings.kind and (problem := wanted.problem(n)):
            _log.warning("%s The index flat is built until there are more.", problem)
            settings = replace(settings, kind="flat")
    try:
        return plan_index(n, dim, settings, vector_type, replaces=True)
    except (PlanError, ProviderError) as error:
        if settings.device == "cpu":
            raise
        _log.warning("The index is built for the CPU: %s", error)
    return plan_index(n, dim, replace(settings, device="cpu"), vector_type)


def check_target(name: IndexKind, target_recall: float) -> None:
    """Check a target recall. Raises: PlanError if it is out of range, or too high for the type."""
    if not 0 < target_recall <= 1:
        raise PlanError(
            f"The target recall must be above 0 and at most 1, not {target_recall}. Change "
            "--target-recall."
        )
    if not INDEX_TYPES[name].is_scan and target_recall >= EXACT_TARGET:
        raise PlanError(
            f"The index {name} is approximate, but a target recall of {target_recall} needs an "
            f"exact one. Choose --index flat, or a --target-recall below {EXACT_TARGET}."
        )


def _choices(n: int, dim: int, settings: IndexSettings) -> list[tuple[IndexType, str]]:
    """The index types to try, in order, each with a reason. Raises: PlanError."""
    if settings.kind != "auto":
        named = _named(settings.kind, settings.device)
        check_target(named.name, settings.target_recall)
        if problem := named.problem(n):
            raise PlanError(problem)
        return [(named, "asked for with --index")]
    if settings.target_recall >= EXACT_TARGET:
        reason = f"a target recall of {settings.target_recall} needs an exact index"
        return [(INDEX_TYPES["flat"], reason)]
    size = 4.0 * n * dim
    kinds, reason = next(
        (kinds, reason)
        for device, max_bytes, max_n, kinds, reason in _CHOICES
        if device == settings.device and size <= max_bytes and n <= max_n
    )
    reason = f"{n:,} vectors of {_mb(size / _MIB)} are {reason}"
    found = [INDEX_TYPES[kind] for kind in kinds]
    return [(index_type, reason) for index_type in found if not index_type.problem(n)]


def _plan(
    index_type: IndexType,
    n: int,
    dim: int,
    settings: IndexSettings,
    reason: str,
    gpu_mb: float,
    vector_type: VectorType,
) -> Plan:
    parameters = index_type.parameters(n, dim)
    full = float(NUMBER_BYTES[vector_type]) * n * dim
    codes = index_type.code_bytes(n, dim, parameters)
    is_on_gpu = settings.device == "cuda"
    # With a GPU, the codes stay in memory for the CPU to take over.
    resident = full if index_type.is_scan and not is_on_gpu else codes
    return Plan(
        kind=index_type.name,
        n=n,
        dim=dim,
        device=settings.device,
        memory_mb=resident / _MIB,
        mapped_mb=full / _MIB,
        code_bytes=codes,
        disk_mb=(full + codes + ITEM_DISK_BYTES * n) / _MIB,
        build_memory_mb=(index_type.build_bytes(n, dim, parameters) + _BUILD_ITEM_BYTES * n) / _MIB
        + _BASE_BUILD_MB,
        expected_recall=1.0 if index_type.is_scan else settings.target_recall,
        reason=reason,
        gpu_memory_mb=index_type.gpu_bytes(n, dim, parameters) / _MIB if is_on_gpu else 0.0,
        gpu_free_mb=gpu_mb,
        parameters=parameters,
    )


def _check_size(n: int, dim: int, settings: IndexSettings) -> None:
    if not 1 <= n <= MAX_N:
        raise PlanError(
            f"An index of {n:,} vectors cannot be built: 1 to {MAX_N:,} are possible. "
            "Split the gallery, or use a vector database (kinlens-index import --out milvus:...)."
        )
    if not 1 <= dim <= MAX_DIM:
        raise PlanError(
            f"An index of dimension {dim:,} cannot be built: 1 to {MAX_DIM:,} are possible. "
            "Export a bundle with a smaller embedding."
        )
    check_target("flat", settings.target_recall)
    if settings.memory_mb is not None and not settings.memory_mb > 0:
        raise PlanError(f"--memory-mb must be above 0, not {settings.memory_mb}.")


def _named(name: str, device: str) -> IndexType:
    known = {kind: one for kind, one in INDEX_TYPES.items() if device in one.devices}
    for kind, index_type in known.items():
        if kind == name:
            return index_type
    others = f"--index auto, {', '.join(known)}"
    if name in INDEX_TYPES:
        raise PlanError(
            f"The index {name} cannot be built on {device}. Choose --index-device "
            f"{'cpu' if device == 'cuda' else 'cuda'}, or {others}."
        )
    raise PlanError(f"Unknown index {name!r}. Choose {others}.")


def _gpu_mb(settings: IndexSettings, replaces: bool) -> float:
    """The GPU memory available for an index. Raises: ProviderError."""
    if settings.device == "cpu":
        return 0.0
    memory = gpu_memory()
    return max(0.0, (memory.total_mb if replaces else memory.free_mb) - RESERVE_MB)


def _mb(value: float) -> str:
    return f"{value:,.0f} MB" if value >= 10 else f"{value:.1f} MB"
