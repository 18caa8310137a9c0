"""Which index a gallery gets: by number of vectors, dimension, memory and device.

Nothing is built here. `auto` takes the first kind that fits the memory, from the one that suits so
many vectors to ever smaller ones (`indexer.index.kinds`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from embedder.errors import PlanError
from embedder.machine import core_count
from embedder.machine import memory_mb as machine_memory_mb
from indexer.index.gpu import gpu_memory_mb, why_no_gpu
from indexer.index.kinds import KINDS, Device, IndexKind, Kind, kinds_on

_MIB = 2**20
_BASE_BUILD_MB = 100.0  # batches on their way from the catalogue to the file, held-out queries
_BUILD_ITEM_BYTES = 60  # measured by benchmarks/memory.py: keys and numbers of items
ITEM_DISK_BYTES = 400
"""Of its row in the catalogue with five attributes and their columns, beside the vector: 310 where
their texts are short."""
_WRITE_BYTES_PER_S = 200e6

MAX_DIM = 8192
MAX_N = 2**31 - 1
"""FAISS counts the nodes of a graph and the entries of a list in 32 bits."""

EXACT_TARGET = 0.9995
"""From this target on only an exact index will do."""

MEMORY_PART = 0.8
"""Of the machine's memory; the rest is for the process itself and its neighbours."""


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """What index to make. `memory_mb` None: what the machine or container has."""

    kind: str = "auto"
    memory_mb: float | None = None
    device: str = "cpu"
    target_recall: float = 0.98


@dataclass(frozen=True, slots=True)
class Plan:
    """An index that fits, and what it costs.

    memory_mb: resident while searching (on the GPU for cuda); build_memory_mb: while building.
    mapped_mb: full-precision vectors, read from the disk through the page cache. code_bytes: of the
    index alone. disk_mb: of the whole gallery.
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
    parameters: Mapping[str, int] = field(default_factory=dict)

    @property
    def needs(self) -> str:
        """Its needs in one line."""
        return (
            f"{_mb(self.memory_mb)} of memory ({_mb(self.build_memory_mb)} while it is built) "
            f"and {_mb(self.disk_mb)} of disk"
        )

    def lines(self) -> list[str]:
        """The plan for people, a fact a line."""
        parameters = ", ".join(f"{name} {value:,}" for name, value in self.parameters.items())
        is_known = KINDS[self.kind].is_scan
        facts = {
            "index": f"{self.kind} on {self.device}" + f" ({parameters})" * bool(parameters),
            "vectors": f"{self.n:,} x {self.dim}",
            "memory": f"{_mb(self.memory_mb)} while searching",
            "mapped": f"{_mb(self.mapped_mb)} of full-precision vectors",
            "disk": f"{_mb(self.disk_mb)}, and as much again while a later build is made",
            "build": f"{_minutes(self.build_minutes)}, {_mb(self.build_memory_mb)} of memory",
            f"recall@10 {'expected' if is_known else 'target'}": f"{self.expected_recall:.3f}",
            "reason": self.reason,
        }
        return [f"{name:<20}{fact}" for name, fact in facts.items()]


def plan_index(n: int, dim: int, settings: IndexSettings) -> Plan:
    """The index for `n` vectors of length `dim`, of the kind asked for or of the first that fits.

    Raises: PlanError for numbers out of range, a kind or device that is not there, or too little
        memory; it names the flag to change. ProviderError.
    """
    _check_numbers(n, dim, settings)
    _check_device(settings.device)
    budget = _budget_mb(settings)
    if settings.kind == "auto":
        return _first_that_fits(n, dim, settings, budget)
    chosen = _named(settings.kind, settings.device)
    check_target(chosen.name, settings.target_recall)
    if problem := chosen.problem(n, dim):
        raise PlanError(problem)
    plan = _plan(chosen, n, dim, settings, "asked for with --index")
    if not _fits(plan, budget):
        raise PlanError(_too_big(plan, budget))
    return plan


def plans_for(n: int, dim: int, settings: IndexSettings) -> list[Plan]:
    """The index to make, and with `auto` those to make if it misses the target recall: smaller
    ones, then larger ones, as far as they fit. Raises: as `plan_index`.
    """
    first = plan_index(n, dim, settings)
    if settings.kind != "auto":
        return [first]
    kinds = kinds_on(settings.device)
    place = kinds.index(KINDS[first.kind])
    plans = [
        _plan(kind, n, dim, settings, f"{first.kind} misses the target recall")
        for kind in (*kinds[place + 1 :], *kinds[:place][::-1])
        if not kind.problem(n, dim)
    ]
    return [first, *(plan for plan in plans if _fits(plan, _budget_mb(settings)))]


def settings_here(settings: IndexSettings) -> IndexSettings:
    """The settings of an index as they can be kept on this machine: one of a GPU is made on the
    CPU where there is none.
    """
    if settings.device == "cpu" or not why_no_gpu():
        return settings
    names = {kind.name for kind in kinds_on("cpu")}
    kind = settings.kind if settings.kind in names else "auto"
    return replace(settings, device="cpu", kind=kind)


def check_target(kind: IndexKind, target_recall: float) -> None:
    """Raises: PlanError for a target out of range, or that no index of this kind can promise."""
    if not 0 < target_recall <= 1:
        raise PlanError(
            f"A target recall of {target_recall} cannot be reached: it lies above 0 and goes up "
            "to 1. Change --target-recall."
        )
    if KINDS[kind].least_recall < 1 and target_recall >= EXACT_TARGET:
        raise PlanError(
            f"The index {kind} is approximate, and a target recall of {target_recall} needs an "
            f"exact one. Choose --index flat, or a --target-recall below {EXACT_TARGET}."
        )


def _first_that_fits(n: int, dim: int, settings: IndexSettings, budget: float) -> Plan:
    refused: list[Plan] = []
    for kind, reason in _preferred(n, dim, settings.device, settings.target_recall):
        if kind.problem(n, dim):
            continue
        if refused:
            needs = ", ".join(f"{plan.kind} needs {_mb(_peak(plan))}" for plan in refused)
            reason = f"{needs}, but there are only {_mb(budget)}"
        plan = _plan(kind, n, dim, settings, reason)
        if _fits(plan, budget):
            return plan
        refused.append(plan)
    raise PlanError(_too_big(min(refused, key=_peak), budget))


def _preferred(n: int, dim: int, device: str, target_recall: float) -> list[tuple[Kind, str]]:
    """Kinds from the one that suits best to ever smaller ones, and why."""
    if target_recall >= EXACT_TARGET:
        return [(kinds_on(device)[0], f"a target recall of {target_recall} needs an exact index")]
    kinds = kinds_on(device)
    first = next(place for place, kind in enumerate(kinds) if kind.suits(n, dim, device))
    return [(kind, kind.reason(n, dim)) for kind in kinds[first:]]


def _plan(kind: Kind, n: int, dim: int, settings: IndexSettings, reason: str) -> Plan:
    parameters = kind.parameters(n, dim)
    full, codes = 4.0 * n * dim, kind.code_bytes(n, dim, parameters)
    written_s = full / _WRITE_BYTES_PER_S
    return Plan(
        kind=kind.name,
        n=n,
        dim=dim,
        device=settings.device,
        memory_mb=kind.memory_bytes(n, dim, parameters) / _MIB,
        mapped_mb=full / _MIB,
        code_bytes=codes,
        disk_mb=(full + codes + ITEM_DISK_BYTES * n) / _MIB,
        build_memory_mb=(kind.build_bytes(n, dim, parameters) + _BUILD_ITEM_BYTES * n) / _MIB
        + _BASE_BUILD_MB,
        build_minutes=(written_s + kind.build_s(n, dim, parameters, core_count())) / 60,
        expected_recall=max(kind.least_recall, settings.target_recall),
        reason=reason,
        parameters=parameters,
    )


def _check_numbers(n: int, dim: int, settings: IndexSettings) -> None:
    if not 1 <= n <= MAX_N:
        raise PlanError(
            f"An index of {n:,} vectors cannot be made: 1 to {MAX_N:,} are possible. "
            "Split the gallery, or use a vector database (kinlens-index import --out milvus:...)."
        )
    if not 1 <= dim <= MAX_DIM:
        raise PlanError(
            f"An index of dimension {dim:,} cannot be made: 1 to {MAX_DIM:,} are possible. "
            "Export a bundle with a smaller embedding."
        )
    check_target("flat", settings.target_recall)
    if settings.memory_mb is not None and not settings.memory_mb > 0:
        raise PlanError(f"{settings.memory_mb} MB of memory is not a limit. Change --memory-mb.")


def _check_device(device: str) -> None:
    if device not in get_args(Device):
        raise PlanError(
            f"There is no device {device!r}. Choose --index-device {' or '.join(get_args(Device))}."
        )
    if device == "cuda" and (why := why_no_gpu()):
        raise PlanError(f"{why} Or choose --index-device cpu.")


def _named(kind: str, device: str) -> Kind:
    names = [known.name for known in kinds_on(device)]
    for known in KINDS.values():
        if kind == known.name and device in known.devices:
            return known
    if kind in KINDS:
        other = "cpu" if device == "cuda" else "cuda"
        raise PlanError(
            f"The index {kind} is not made on {device}. Choose --index-device {other}, or --index "
            f"auto, {', '.join(names)}."
        )
    raise PlanError(f"There is no index {kind!r}. Choose --index auto, {', '.join(names)}.")


def _budget_mb(settings: IndexSettings) -> float:
    if settings.memory_mb is not None:
        return settings.memory_mb
    return MEMORY_PART * (gpu_memory_mb() if settings.device == "cuda" else machine_memory_mb())


def _peak(plan: Plan) -> float:
    return max(plan.memory_mb, plan.build_memory_mb)


def _fits(plan: Plan, budget: float) -> bool:
    return _peak(plan) <= budget


def _too_big(plan: Plan, budget: float) -> str:
    smaller = (
        "" if plan.kind == kinds_on(plan.device)[-1].name else ", choose a smaller one with --index"
    )
    return (
        f"The index {plan.kind} for {plan.n:,} vectors of length {plan.dim} needs {plan.needs}, "
        f"but there are only {_mb(budget)} of memory. Raise --memory-mb if the machine has "
        f"more{smaller}, or change --index-device."
    )


def _mb(value: float) -> str:
    return f"{value:,.0f} MB" if value >= 10 else f"{value:.1f} MB"


def _minutes(value: float) -> str:
    return f"about {value:,.0f} min" if value >= 1.5 else f"about {60 * value:,.0f} s"
