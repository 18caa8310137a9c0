"""Chooses the index of a gallery by number of vectors, dimension, memory and device.

Nothing is built here. `auto` starts with the preferred index type and takes the first one that fits
into memory, from larger to smaller ones (`kinlens.indexer.index.index_types`).
"""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from kinlens.embedder.errors import PlanError, ProviderError
from kinlens.embedder.machine import core_count, free_memory_mb
from kinlens.embedder.machine import memory_mb as machine_memory_mb
from kinlens.indexer.index.gpu import RESERVE_MB, gpu_memory, why_no_gpu
from kinlens.indexer.index.index_types import (
    INDEX_TYPES,
    Device,
    IndexKind,
    IndexType,
    index_types_on,
)
from kinlens.indexer.types import NUMBER_BYTES, VectorType

_log = logging.getLogger(__name__)

_MIB = 2**20
_BASE_BUILD_MB = 100.0  # batches read from the catalogue, and held-out queries
_BUILD_ITEM_BYTES = 60  # keys and ids of items, as measured
ITEM_DISK_BYTES = 400
"""Disk space per item in addition to its vector: its row in the catalogue with five attributes, and
their columns. 310 for short texts."""
_WRITE_BYTES_PER_S = 200e6

MAX_DIM = 8192
MAX_N = 2**31 - 1
"""FAISS counts the nodes of a graph and the entries of a list in 32 bits."""

EXACT_TARGET = 0.9995
"""Target recall from which on only an exact index is accepted."""

_DEVICES = {
    "cpu": "the CPU; on a GPU with --index-device cuda",
    "cuda": "the GPU (--index-device cuda); on the CPU if there is none",
}

MEMORY_PART = 0.8
"""Share of the machine's memory for an index; the rest is for this and other processes."""


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


@dataclass(frozen=True, slots=True)
class Plan:
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
    build_minutes: float
    expected_recall: float
    reason: str
    gpu_memory_mb: float = 0.0
    gpu_free_mb: float = 0.0
    parameters: Mapping[str, int] = field(default_factory=dict)

    @property
    def needs(self) -> str:
        """Its requirements in one line."""
        on_gpu = f"{_mb(self.gpu_memory_mb)} of the GPU, " if self.gpu_memory_mb else ""
        return (
            f"{on_gpu}{_mb(self.memory_mb)} of memory ({_mb(self.build_memory_mb)} while it is "
            f"built) and {_mb(self.disk_mb)} of disk"
        )

    @property
    def gpu_peak_mb(self) -> float:
        """The highest GPU memory, while a compaction builds the next index there."""
        return self.gpu_memory_mb * (2 if INDEX_TYPES[self.kind].gpu_builds else 1)

    @property
    def peak_mb(self) -> float:
        """The highest resident memory."""
        return max(self.memory_mb, self.build_memory_mb)

    def fits(self, budget_mb: float, gpu_mb: float | None = None) -> bool:
        """Whether `budget_mb` of memory suffice, and `gpu_mb` of GPU memory are available.

        By default, `gpu_mb` is the GPU memory while searching.
        """
        needed_mb = self.gpu_memory_mb if gpu_mb is None else gpu_mb
        return self.peak_mb <= budget_mb and needed_mb <= self.gpu_free_mb

    def shortage(self, budget_mb: float) -> str:
        """The missing resource of a plan that does not fit."""
        if self.peak_mb > budget_mb:
            return f"{_mb(self.peak_mb)} of memory, but there are only {_mb(budget_mb)}"
        needed = _mb(
            self.gpu_memory_mb if self.gpu_memory_mb > self.gpu_free_mb else self.gpu_peak_mb
        )
        return f"{needed} of the GPU, but there are only {_mb(self.gpu_free_mb)}"

    def lines(self) -> list[str]:
        """A readable description, one fact per line."""
        parameters = ", ".join(f"{name} {value:,}" for name, value in self.parameters.items())
        is_known = INDEX_TYPES[self.kind].is_scan
        facts = {
            "index": f"{self.kind} on {self.device}" + f" ({parameters})" * bool(parameters),
            "searched on": _DEVICES[self.device],
            "vectors": f"{self.n:,} x {self.dim}",
            "memory": f"{_mb(self.memory_mb)} while searching; {_mb(free_memory_mb())} are free",
            "GPU memory": f"{_mb(self.gpu_memory_mb)} of {_mb(self.gpu_free_mb)} free",
            "mapped": f"{_mb(self.mapped_mb)} of vectors",
            "disk": f"{_mb(self.disk_mb)}, twice as much during a later build",
            "build": f"{_minutes(self.build_minutes)}, {_mb(self.build_memory_mb)} of memory",
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
    _check_device(settings.device)
    budget, gpu_mb = _budget_mb(settings), _gpu_mb(settings, replaces)
    if settings.kind == "auto":
        return _first_that_fits(n, dim, settings, budget, gpu_mb, vector_type)
    chosen = _named(settings.kind, settings.device)
    check_target(chosen.name, settings.target_recall)
    if problem := chosen.problem(n, dim, vector_type):
        raise PlanError(problem)
    plan = _plan(chosen, n, dim, settings, "asked for with --index", gpu_mb, vector_type)
    if not plan.fits(budget):
        raise PlanError(_does_not_fit(plan, budget))
    return plan


def plans_for(
    n: int, dim: int, settings: IndexSettings, vector_type: VectorType = "fp32"
) -> list[Plan]:
    """The preferred plan of a new index, followed by fallbacks in case its build fails.

    With `auto`, fallbacks are smaller and larger index types that fit; for a GPU, plans for the CPU
    come last.

    Raises: PlanError or ProviderError if no index fits.
    """
    if settings.device == "cpu":
        return _plans_on(n, dim, settings, vector_type)
    is_known = settings.kind in {one.name for one in index_types_on("cpu")}
    on_cpu = replace(settings, device="cpu", kind=settings.kind if is_known else "auto")
    try:
        found = _plans_on(n, dim, settings, vector_type)
    except (PlanError, ProviderError) as error:
        _log.warning("The index is built for the CPU: %s", error)
        return _plans_on(n, dim, on_cpu, vector_type)
    with contextlib.suppress(PlanError):
        found += _plans_on(n, dim, on_cpu, vector_type)
    return found


def _plans_on(n: int, dim: int, settings: IndexSettings, vector_type: VectorType) -> list[Plan]:
    first = plan_index(n, dim, settings, vector_type, replaces=True)
    if settings.kind != "auto":
        return [first]
    index_types = index_types_on(settings.device)
    chosen = index_types.index(INDEX_TYPES[first.kind])
    plans = [
        _plan(index_type, n, dim, settings, "another one failed", first.gpu_free_mb, vector_type)
        for index_type in (*index_types[chosen + 1 :], *index_types[:chosen][::-1])
        if not index_type.problem(n, dim, vector_type)
    ]
    budget = _budget_mb(settings)
    return [first, *(plan for plan in plans if plan.fits(budget, plan.gpu_peak_mb))]


def check_target(name: IndexKind, target_recall: float) -> None:
    """Check a target recall. Raises: PlanError if it is out of range, or too high for the type."""
    if not 0 < target_recall <= 1:
        raise PlanError(
            f"The target recall must be above 0 and at most 1, not {target_recall}. Change "
            "--target-recall."
        )
    if INDEX_TYPES[name].least_recall < 1 and target_recall >= EXACT_TARGET:
        raise PlanError(
            f"The index {name} is approximate, but a target recall of {target_recall} needs an "
            f"exact one. Choose --index flat, or a --target-recall below {EXACT_TARGET}."
        )


def _first_that_fits(
    n: int,
    dim: int,
    settings: IndexSettings,
    budget: float,
    gpu_mb: float,
    vector_type: VectorType,
) -> Plan:
    refused: list[Plan] = []
    for index_type, reason in _preferred(n, dim, settings.device, settings.target_recall):
        if index_type.problem(n, dim, vector_type):
            continue
        if refused:
            reason = "; ".join(f"{plan.kind} needs {plan.shortage(budget)}" for plan in refused)
        plan = _plan(index_type, n, dim, settings, reason, gpu_mb, vector_type)
        if plan.fits(budget, plan.gpu_peak_mb):
            return plan
        refused.append(plan)
    raise PlanError(_does_not_fit(min(refused, key=lambda plan: plan.peak_mb), budget))


def _preferred(n: int, dim: int, device: str, target_recall: float) -> list[tuple[IndexType, str]]:
    """The preferred index type and smaller ones, each with a reason."""
    index_types = index_types_on(device)
    if target_recall >= EXACT_TARGET:
        return [(index_types[0], f"a target recall of {target_recall} needs an exact index")]
    first = next(i for i, one in enumerate(index_types) if one.is_preferred(n, dim, device))
    return [(index_type, index_type.reason(n, dim)) for index_type in index_types[first:]]


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
    if is_on_gpu:
        resident = index_type.host_bytes(n, dim, parameters)
    else:
        resident = full if index_type.is_scan else index_type.memory_bytes(n, dim, parameters)
    written_s = full / _WRITE_BYTES_PER_S
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
        build_minutes=(written_s + index_type.build_s(n, dim, parameters, core_count())) / 60,
        expected_recall=max(index_type.least_recall, settings.target_recall),
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


def _check_device(device: str) -> None:
    if device not in get_args(Device):
        raise PlanError(
            f"Unknown device {device!r}. Choose --index-device {' or '.join(get_args(Device))}."
        )
    if device == "cuda" and (why := why_no_gpu()):
        raise PlanError(f"{why} Or choose --index-device cpu.")


def _named(name: str, device: str) -> IndexType:
    names = [known.name for known in index_types_on(device)]
    for known in INDEX_TYPES.values():
        if name == known.name and device in known.devices:
            return known
    if name in INDEX_TYPES:
        other = "cpu" if device == "cuda" else "cuda"
        raise PlanError(
            f"The index {name} cannot be built on {device}. Choose --index-device {other}, or "
            f"--index auto, {', '.join(names)}."
        )
    raise PlanError(f"Unknown index {name!r}. Choose --index auto, {', '.join(names)}.")


def _budget_mb(settings: IndexSettings) -> float:
    if settings.memory_mb is not None:
        return settings.memory_mb
    return MEMORY_PART * machine_memory_mb()


def _gpu_mb(settings: IndexSettings, replaces: bool) -> float:
    """The GPU memory available for an index. Raises: ProviderError."""
    if settings.device == "cpu":
        return 0.0
    memory = gpu_memory()
    return max(0.0, (memory.total_mb if replaces else memory.free_mb) - RESERVE_MB)


def _does_not_fit(plan: Plan, budget: float) -> str:
    is_smallest = plan.kind == index_types_on(plan.device)[-1].name
    smaller = "" if is_smallest else ", choose a smaller one with --index"
    return (
        f"The index {plan.kind} for {plan.n:,} vectors of length {plan.dim} needs {plan.needs}: "
        f"{plan.shortage(budget)}. Raise --memory-mb if the machine has more{smaller}, or change "
        "--index-device."
    )


def _mb(value: float) -> str:
    return f"{value:,.0f} MB" if value >= 10 else f"{value:.1f} MB"


def _minutes(value: float) -> str:
    return f"about {value:,.0f} min" if value >= 1.5 else f"about {60 * value:,.0f} s"
