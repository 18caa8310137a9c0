"""What an index costs: bytes from its layout, time from measurements."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

_MIB = 2**20

HNSW_M = 32
HNSW_EF_CONSTRUCTION = 80
PQ_BITS = 4
COARSE_HNSW_FROM = 16_384
"""From so many lists on, a graph finds the nearest ones."""
COARSE_M = 32
TRAIN_PER_LIST = 64
CAGRA_DEGREE = 64

_BASE_BUILD_MB = 100.0  # batches on their way from the catalogue to the file, held-out queries


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
    sample = 4.0 * dim * min(n, TRAIN_PER_LIST * parameters.get("nlist", 0))
    # The sample is held twice: gathered, and normalised by the k-means.
    build = codes + 2 * sample + (full if kind == "cagra" else 0)
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
        return stored + nlist * (4 * dim + _graph_bytes(COARSE_M))
    return 0.0


def _graph_bytes(m: int) -> float:
    """Of a node: 2 m neighbours below, m on each of the few levels above, offset and level."""
    return 8 * m + 4 * m / (m - 1) + 12


def _build_s(kind: str, n: int, dim: int, parameters: Mapping[str, int], cores: int) -> float:
    copy = 4.0 * n * dim / 200e6
    if kind == "hnsw":
        return copy + n * 2.5e-4 / cores
    if "nlist" in parameters:
        return copy + n * 2e-5 / cores + 1e-3 * parameters["nlist"]
    return copy
