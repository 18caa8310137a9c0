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
KMEANS_ROUNDS = 8
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


# Seconds of one core, measured on an AMD EPYC of family 26 with AVX-512: CPU time of a build with
# two threads, 50k to 300k clustered vectors of 128 and 512 dimensions; HNSW at m 32, ef 80.
_HNSW_S = 9e-6
_PRODUCTS_PER_S = 45e9
_GRAPH_ASSIGN_S = 40e-6
_ENCODE_S = 4e-6
_WRITE_BYTES_PER_S = 200e6
_CAGRA_S = 5e-5  # of the GPU, not measured yet
_TUNE_QUERIES = 1000


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
