"""Which index a gallery gets: by number of vectors, dimension, memory and device.

Nothing is built here. `auto` takes the first of these that fits the memory:

    cpu   flat     up to FLAT_BYTES of vectors: a scan of all answers in about 10 ms
          fp16     up to twice that: half the bytes, the same time, scores still exact
          hnsw     up to HNSW_MAX: a graph over 8-bit codes
          ivf-pq   above: lists of 4-bit product codes (FastScan)
    cuda  flat     up to GPU_FLAT_BYTES
          cagra    above: a graph built and searched on the GPU

All but flat are followed by a comparison with the full-precision vectors, which stay on the disk,
mapped into memory.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from embedder.errors import PlanError
from embedder.machine import core_count
from embedder.machine import memory_mb as machine_memory_mb
from indexer.index.gpu import gpu_memory_mb, why_no_gpu

_MIB = 2**20

HNSW_M = 32
HNSW_EF_CONSTRUCTION = 80
PQ_BITS = 4
COARSE_HNSW_FROM = 16_384
"""From so many lists on, a graph finds the nearest ones."""
COARSE_M = 32
TRAIN_PER_LIST = 64
KMEANS_ROUNDS = 8
CAGRA_DEGREE = 64

_BASE_BUILD_MB = 100.0  # batches on their way from the catalogue to the file, held-out queries

# Seconds of one core, measured on an AMD EPYC of family 26 with AVX-512: CPU time of a build with
# two threads, 50k to 300k clustered vectors of 128 and 512 dimensions; HNSW at m 32, ef 80.
_HNSW_S = 9e-6
_PRODUCTS_PER_S = 45e9
_GRAPH_ASSIGN_S = 40e-6
_ENCODE_S = 4e-6
_WRITE_BYTES_PER_S = 200e6
_CAGRA_S = 5e-5  # of the GPU, not measured yet
_TUNE_QUERIES = 1000

IndexKind = Literal["flat", "fp16", "hnsw", "ivf-pq", "ivf-rabitq", "cagra"]
Device = Literal["cpu", "cuda"]

MAX_DIM = 8192
MAX_N = 2**31 - 1
"""FAISS counts the nodes of a graph and the entries of a list in 32 bits."""

FLAT_BYTES = 200e6
FP16_BYTES = 2 * FLAT_BYTES
HNSW_MAX = 500_000
"""Lists of codes answer sooner and are smaller: at 200,000 x 128 IVF-PQ took 232 us (p50) and 51
bytes a vector, HNSW 775 us and 400 bytes; at 1 million HNSW was built in 510 s and needed efSearch
352."""
GPU_FLAT_BYTES = 2e9
EXACT_TARGET = 0.9995
"""From this target on only an exact index will do."""

IVF_POINTS_PER_LIST = 39
"""What FAISS asks for at least to train a centroid."""
PQ_MIN = 16 * IVF_POINTS_PER_LIST

MEMORY_PART = 0.8
"""Of the machine's memory; the rest is for the process itself and its neighbours."""

_CPU_KINDS: tuple[IndexKind, ...] = ("flat", "fp16", "hnsw", "ivf-pq", "ivf-rabitq")
_CUDA_KINDS: tuple[IndexKind, ...] = ("flat", "cagra")


@dataclass(frozen=True, slots=True)
class Costs:
    """MiB and minutes; see Plan."""

    memory_mb: float
    mapped_mb: float
    disk_mb: float
    build_memory_mb: float
    build_minutes: float


def default_parameters(kind: str, n: int, dim: int) -> dict[str, int]:
    """What the index is built with."""
    if kind == "hnsw":
        return {"m": HNSW_M, "ef_construction": HNSW_EF_CONSTRUCTION}
    if kind == "ivf-pq":
        return {"nlist": lists_for(n), "pq_m": dim // 2}
    if kind == "ivf-rabitq":
        return {"nlist": lists_for(n)}
    if kind == "cagra":
        return {"graph_degree": CAGRA_DEGREE, "intermediate_graph_degree": 2 * CAGRA_DEGREE}
    return {}


def lists_for(n: int) -> int:
    """Inverted lists: 4 sqrt(n) to the next power of two, few enough to train; then in steps."""
    if n > 10_000_000:
        return 65_536
    if n >= 1_000_000:
        return 16_384
    return int(min(2 ** round(math.log2(4 * math.sqrt(n))), max(1, n // 39)))


def costs_of(kind: str, n: int, dim: int, parameters: Mapping[str, int], cores: int) -> Costs:
    """The costs of an index of `n` vectors of length `dim`."""
    full = 4.0 * n * dim
    codes = _code_bytes(kind, n, dim, parameters)
    resident = full if kind == "flat" else codes + full * (kind == "cagra")
    rows = TRAIN_PER_LIST * parameters.get("nlist", 0)
    sample = 4.0 * dim * rows if rows < n else 0.0  # all vectors are read where they are mapped
    build = codes + sample + (full if kind == "cagra" else 0)
    return Costs(
        memory_mb=resident / _MIB,
        mapped_mb=full / _MIB,
        disk_mb=(full + codes + 8.0 * n) / _MIB,
        build_memory_mb=build / _MIB + _BASE_BUILD_MB,
        build_minutes=_build_s(kind, n, dim, parameters, cores) / 60,
    )


def _code_bytes(kind: str, n: int, dim: int, parameters: Mapping[str, int]) -> float:
    if kind == "fp16":
        return 2.0 * n * dim
    if kind == "hnsw":
        return n * (dim + _graph_bytes(parameters["m"]))
    if kind == "cagra":
        return n * (4.0 * parameters["graph_degree"] + 12)
    if kind in ("ivf-pq", "ivf-rabitq"):
        nlist = parameters["nlist"]
        code = parameters["pq_m"] * PQ_BITS / 8 if kind == "ivf-pq" else dim / 8 + 8
        # FastScan keeps codes in blocks of 32, so half a block a list is empty.
        stored = (n + 16 * nlist) * code + 8 * n
        graph = _graph_bytes(COARSE_M) if nlist >= COARSE_HNSW_FROM else 0
        return stored + nlist * (4 * dim + graph)
    return 0.0


def _graph_bytes(m: int) -> float:
    """Of a node: 2 m neighbours below, m on each of the few levels above, offset and level."""
    return 8 * m + 4 * m / (m - 1) + 12


def _build_s(kind: str, n: int, dim: int, parameters: Mapping[str, int], cores: int) -> float:
    written = 4.0 * n * dim / _WRITE_BYTES_PER_S
    truth = 2.0 * n * dim * _TUNE_QUERIES / _PRODUCTS_PER_S
    wider = 1 + dim / 1500
    if kind == "hnsw":
        effort = parameters["m"] * parameters["ef_construction"] / (32 * 80)
        return written + (truth + n * _HNSW_S * math.log2(n + 1) * wider * effort) / cores
    if kind == "cagra":
        return written + n * _CAGRA_S
    if "nlist" not in parameters:
        return written
    nlist = parameters["nlist"]
    assign = 2.0 * nlist * dim / _PRODUCTS_PER_S
    if nlist >= COARSE_HNSW_FROM:
        assign = _GRAPH_ASSIGN_S * wider
    train = min(n, TRAIN_PER_LIST * nlist) * assign * KMEANS_ROUNDS
    return written + (truth + train + n * (assign + _ENCODE_S)) / cores


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
    mapped_mb: full-precision vectors, read from the disk through the page cache.
    """

    kind: IndexKind
    n: int
    dim: int
    device: str
    memory_mb: float
    mapped_mb: float
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
        is_known = self.kind in ("flat", "fp16")
        facts = {
            "index": f"{self.kind} on {self.device}" + f" ({parameters})" * bool(parameters),
            "vectors": f"{self.n:,} x {self.dim}",
            "memory": f"{_mb(self.memory_mb)} while searching",
            "mapped": f"{_mb(self.mapped_mb)} of full-precision vectors",
            "disk": _mb(self.disk_mb),
            "build": f"{_minutes(self.build_minutes)}, {_mb(self.build_memory_mb)} of memory",
            f"recall@10 {'expected' if is_known else 'target'}": f"{self.expected_recall:.3f}",
            "reason": self.reason,
        }
        return [f"{name:<20}{fact}" for name, fact in facts.items()]


def plan_index(
    n: int,
    dim: int,
    *,
    kind: str = "auto",
    memory_mb: float | None = None,
    device: str = "cpu",
    cores: int | None = None,
    target_recall: float = 0.98,
) -> Plan:
    """The index for `n` vectors of length `dim`, of that kind or of the first kind that fits.

    Raises: PlanError for numbers out of range, a kind or device that is not there, or too little
        memory; it names the flag to change.
    """
    _check_numbers(n, dim, target_recall, memory_mb)
    _check_device(device)
    budget = _budget_mb(memory_mb, device)
    cores = cores or core_count()
    if kind != "auto":
        chosen = _named(kind, device)
        check_target(chosen, target_recall)
        if problem := _problem(chosen, n, dim):
            raise PlanError(problem)
        plan = _plan(chosen, n, dim, device, cores, target_recall, "asked for with --index")
        if not _fits(plan, budget):
            raise PlanError(_too_big(plan, budget))
        return plan
    return _first_that_fits(n, dim, device, cores, target_recall, budget)


def check_target(kind: IndexKind, target_recall: float) -> None:
    """Raises: PlanError for a target out of range, or that no index of this kind can promise."""
    if not 0 < target_recall <= 1:
        raise PlanError(
            f"A target recall of {target_recall} cannot be reached: it lies above 0 and goes up "
            "to 1. Change --target-recall."
        )
    if kind != "flat" and target_recall >= EXACT_TARGET:
        raise PlanError(
            f"The index {kind} is approximate, and a target recall of {target_recall} needs an "
            f"exact one. Choose --index flat, or a --target-recall below {EXACT_TARGET}."
        )


def _first_that_fits(
    n: int, dim: int, device: str, cores: int, target_recall: float, budget: float
) -> Plan:
    refused: list[Plan] = []
    candidates = _preferred(n, dim, device, target_recall)
    for kind, reason in candidates:
        if _problem(kind, n, dim):
            continue
        if refused:
            needs = ", ".join(f"{plan.kind} needs {_mb(_peak(plan))}" for plan in refused)
            reason = f"{needs}, but there are only {_mb(budget)}"
        plan = _plan(kind, n, dim, device, cores, target_recall, reason)
        if _fits(plan, budget):
            return plan
        refused.append(plan)
    raise PlanError(_too_big(min(refused, key=_peak), budget))


def _preferred(n: int, dim: int, device: str, target_recall: float) -> list[tuple[IndexKind, str]]:
    """Kinds from the one that suits best to ever smaller ones."""
    size = 4.0 * n * dim
    if device == "cuda":
        order: list[tuple[IndexKind, str]] = [
            ("flat", f"{_mb(size / 2**20)} of vectors are few enough to compare with all"),
            ("cagra", f"{_mb(size / 2**20)} of vectors are too many to compare with all"),
        ]
        return order[:1] if size <= GPU_FLAT_BYTES or target_recall >= EXACT_TARGET else order[1:]
    order = [
        ("flat", f"{_mb(size / 2**20)} of vectors: a scan of all answers in about 10 ms"),
        ("fp16", f"{_mb(size / 2**20)} of vectors: a scan at half precision takes about 10 ms"),
        ("hnsw", f"{n:,} vectors are too many for a scan of all, and few enough for a graph"),
        ("ivf-pq", f"{n:,} vectors are too many for a graph"),
        ("ivf-rabitq", "the smallest index"),
    ]
    if target_recall >= EXACT_TARGET:
        kind, _ = order[0]
        return [(kind, f"a target recall of {target_recall} needs an exact index")]
    limits = (size <= FLAT_BYTES, size <= FP16_BYTES, n <= HNSW_MAX, True)
    return order[limits.index(True) :]


def _plan(
    kind: IndexKind, n: int, dim: int, device: str, cores: int, target_recall: float, reason: str
) -> Plan:
    parameters = default_parameters(kind, n, dim)
    costs: Costs = costs_of(kind, n, dim, parameters, cores)
    expected = {"flat": 1.0, "fp16": max(0.999, target_recall)}.get(kind, target_recall)
    return Plan(
        kind=kind,
        n=n,
        dim=dim,
        device=device,
        memory_mb=costs.memory_mb,
        mapped_mb=costs.mapped_mb,
        disk_mb=costs.disk_mb,
        build_memory_mb=costs.build_memory_mb,
        build_minutes=costs.build_minutes,
        expected_recall=expected,
        reason=reason,
        parameters=parameters,
    )


def _check_numbers(n: int, dim: int, target_recall: float, memory_mb: float | None) -> None:
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
    check_target("flat", target_recall)
    if memory_mb is not None and not memory_mb > 0:
        raise PlanError(f"{memory_mb} MB of memory is not a limit. Change --memory-mb.")


def _check_device(device: str) -> None:
    if device not in get_args(Device):
        raise PlanError(
            f"There is no device {device!r}. Choose --device {' or '.join(get_args(Device))}."
        )
    if device == "cuda" and (why := why_no_gpu()):
        raise PlanError(f"{why} Or choose --device cpu.")


def _named(kind: str, device: str) -> IndexKind:
    kinds = _CUDA_KINDS if device == "cuda" else _CPU_KINDS
    for known in kinds:
        if kind == known:
            return known
    if kind in get_args(IndexKind):
        other = "cpu" if device == "cuda" else "cuda"
        raise PlanError(
            f"The index {kind} is not made on {device}. Choose --device {other}, or --index auto, "
            f"{', '.join(kinds)}."
        )
    raise PlanError(f"There is no index {kind!r}. Choose --index auto, {', '.join(kinds)}.")


def _problem(kind: IndexKind, n: int, dim: int) -> str | None:
    """Why these vectors cannot have this kind, whatever the memory."""
    if kind in ("ivf-pq", "ivf-rabitq") and n < PQ_MIN:
        return (
            f"{n:,} vectors are too few to train the index {kind}: it needs {PQ_MIN:,} or more. "
            "Choose --index flat or hnsw."
        )
    if kind == "ivf-pq" and dim % 2:
        return (
            f"The index ivf-pq cuts a vector into pairs of numbers, but {dim} is odd. "
            "Choose --index ivf-rabitq or hnsw."
        )
    return None


def _budget_mb(memory_mb: float | None, device: str) -> float:
    if memory_mb is not None:
        return memory_mb
    return MEMORY_PART * (gpu_memory_mb() if device == "cuda" else machine_memory_mb())


def _peak(plan: Plan) -> float:
    return max(plan.memory_mb, plan.build_memory_mb)


def _fits(plan: Plan, budget: float) -> bool:
    return _peak(plan) <= budget


def _too_big(plan: Plan, budget: float) -> str:
    smaller = "" if plan.kind == "ivf-rabitq" else ", choose a smaller one with --index"
    return (
        f"The index {plan.kind} for {plan.n:,} vectors of length {plan.dim} needs {plan.needs}, "
        f"but there are only {_mb(budget)} of memory. Raise --memory-mb if the machine has "
        f"more{smaller}, or change --device."
    )


def _mb(value: float) -> str:
    return f"{value:,.0f} MB" if value >= 10 else f"{value:.1f} MB"


def _minutes(value: float) -> str:
    return f"about {value:,.0f} min" if value >= 1.5 else f"about {60 * value:,.0f} s"
