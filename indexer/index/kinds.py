"""The kinds of index, a class each: what one costs, how it is trained, searched, stored and tuned.

A kind finds candidates by its codes; the full-precision vectors, which stay on the disk, mapped
into memory, are compared with them afterwards. A new kind is a class, and its place in `KINDS`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import faiss
import numpy as np
from faiss.class_wrappers import add_to_referenced_objects

from embedder.types import Embeddings
from indexer.bits import Bits
from indexer.index.gpu import GpuIndex, build_cagra
from indexer.types import Ids

IndexKind = Literal["flat", "hnsw", "ivf-pq", "cagra"]
Device = Literal["cpu", "cuda"]

Parameters = Mapping[str, int]
"""What an index is built with, by name."""

TUNED_AT = 10
"""The number of answers that an effort is tuned for."""

FLAT_BYTES = 200e6
GPU_FLAT_BYTES = 2e9
HNSW_MAX = 500_000
"""Lists of codes answer sooner and are smaller: at 200,000 x 128 IVF-PQ took 232 us (p50) and 51
bytes a vector, HNSW 775 us and 400 bytes; at 1 million HNSW was built in 510 s and needed efSearch
352."""

COARSE_HNSW_FROM = 16_384
"""From so many lists on, a graph finds the nearest ones."""
TRAIN_PER_LIST = 64
IVF_POINTS_PER_LIST = 39
"""What FAISS asks for at least to train a centroid."""
PQ_BITS = 4
PQ_MIN = 16 * IVF_POINTS_PER_LIST

_IP = faiss.METRIC_INNER_PRODUCT
_COARSE_M, _KMEANS_M = 32, 16
_KMEANS_ROUNDS = 8
_SQ_SAMPLE = 65_536
_MAX_SEARCH = 4096
_MIB = 2**20

# Seconds of one core, measured on an AMD EPYC of family 26 with AVX-512: CPU time of a build with
# two threads, 50k to 300k clustered vectors of 128 and 512 dimensions; HNSW at m 32, ef 80.
_HNSW_S = 9e-6
_PRODUCTS_PER_S = 45e9
_GRAPH_ASSIGN_S = 40e-6
_ENCODE_S = 4e-6
_CAGRA_S = 5e-5  # of the GPU, not measured yet
_TUNE_QUERIES = 1000


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard an index tries to find 10 answers; for more it tries harder in proportion.

    value: efSearch (hnsw, cagra) or nprobe (ivf); 0 for flat. k_factor: so many times k
    candidates are compared at full precision.
    """

    value: int
    k_factor: int = 1


class Kind(ABC):
    """What differs from one kind of index to another; n vectors of length dim.

    devices: what it is made on. least_recall: known beforehand. is_scan: looks at all vectors, so
    it knows no effort. is_graph: walks a graph, whose steps cost more than comparisons. grows: rows
    can be added to its codes. follows: rows can be taken out of them as well. k_factors: what
    tuning may choose. faiss_class, read_flags, write_flags: of the file of codes.
    """

    name: ClassVar[IndexKind]
    devices: ClassVar[tuple[Device, ...]] = ("cpu",)
    least_recall: ClassVar[float] = 0.0
    is_scan: ClassVar[bool] = False
    is_graph: ClassVar[bool] = False
    grows: ClassVar[bool] = True
    follows: ClassVar[bool] = False
    k_factors: ClassVar[tuple[int, ...]] = (2, 4, 8)
    faiss_class: ClassVar[type | None] = None
    read_flags: ClassVar[int] = faiss.IO_FLAG_MMAP_IFC
    write_flags: ClassVar[int] = 0

    @abstractmethod
    def suits(self, n: int, dim: int, device: str) -> bool:
        """Whether no smaller kind is wanted yet, where memory is plenty."""

    @abstractmethod
    def reason(self, n: int, dim: int) -> str:
        """Why it is chosen where it suits."""

    def problem(self, n: int, dim: int) -> str | None:
        """Why these vectors cannot have this kind, whatever the memory."""
        return None

    def parameters(self, n: int, dim: int) -> dict[str, int]:
        """What the index is built with."""
        return {}

    @abstractmethod
    def code_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        """Of the file of codes."""

    def memory_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        """Resident while searching."""
        return self.code_bytes(n, dim, parameters)

    def build_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        """Resident while building."""
        return self.code_bytes(n, dim, parameters)

    def build_s(self, n: int, dim: int, parameters: Parameters, cores: int) -> float:
        """Seconds of building and tuning, without the writing of vectors."""
        return 0.0

    @abstractmethod
    def codes(self, vectors: Embeddings, rows: Ids, parameters: Parameters) -> faiss.Index:
        """The index of codes, trained for these rows of `vectors` (N, D), empty if it `grows`. Its
        answers are rows.

        Raises: ProviderError.
        """

    def searched(self, codes: faiss.Index, flat: faiss.IndexFlatIP) -> faiss.Index:
        """What is searched: codes whose candidates are compared at full precision."""
        # FAISS wants as many codes as vectors, but some vectors have none.
        size, flat.ntotal = flat.ntotal, codes.ntotal
        found = faiss.IndexRefine(codes, flat)
        flat.ntotal = found.ntotal = size
        return found

    def on_gpu(self, vectors: Embeddings, codes: faiss.Index | None) -> GpuIndex:
        """What is searched on the GPU, of a kind with that device. Raises: ProviderError."""
        raise NotImplementedError

    def efforts(self, size: int, nlist: int) -> list[int]:
        """What tuning tries: doubling, up to the greatest that makes sense."""
        return [0]

    def search_parameters(
        self, nlist: int, size: int, effort: Effort, k: int, allowed: Bits | None = None
    ) -> faiss.SearchParameters:
        """Parameters of one call, so that no index is changed for it."""
        selected = {} if allowed is None else {"sel": faiss.IDSelectorBitmap(allowed)}
        base = self._parameters(nlist, scaled(effort.value, k, size), selected)
        return faiss.IndexRefineSearchParameters(k_factor=effort.k_factor, base_index_params=base)

    def _parameters(
        self, nlist: int, value: int, selected: dict[str, Any]
    ) -> faiss.SearchParameters:
        return faiss.SearchParameters(**selected)


class Flat(Kind):
    """No codes: all vectors are compared with."""

    name = "flat"
    devices = ("cpu", "cuda")
    least_recall = 1.0
    is_scan = True
    grows = False
    k_factors = (1,)

    def suits(self, n: int, dim: int, device: str) -> bool:
        return 4.0 * n * dim <= (GPU_FLAT_BYTES if device == "cuda" else FLAT_BYTES)

    def reason(self, n: int, dim: int) -> str:
        return f"{_size(n, dim)} of vectors are few enough to compare with all"

    def code_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return 0.0

    def memory_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return 4.0 * n * dim

    def codes(self, vectors: Embeddings, rows: Ids, parameters: Parameters) -> faiss.Index:
        raise NotImplementedError

    def on_gpu(self, vectors: Embeddings, codes: faiss.Index | None) -> GpuIndex:
        return GpuIndex.flat(vectors)

    def search_parameters(
        self, nlist: int, size: int, effort: Effort, k: int, allowed: Bits | None = None
    ) -> faiss.SearchParameters:
        return faiss.SearchParameters()


class Hnsw(Kind):
    """A graph over 8-bit codes (Malkov and Yashunin 2016, https://arxiv.org/abs/1603.09320)."""

    name: ClassVar[IndexKind] = "hnsw"
    is_graph = True
    faiss_class = faiss.IndexHNSWSQ

    def suits(self, n: int, dim: int, device: str) -> bool:
        return n <= HNSW_MAX

    def reason(self, n: int, dim: int) -> str:
        return f"{n:,} vectors are too many for a scan of all, and few enough for a graph"

    def parameters(self, n: int, dim: int) -> dict[str, int]:
        return {"m": 32, "ef_construction": 80}

    def code_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return n * (dim + _graph_bytes(parameters["m"]))

    def build_s(self, n: int, dim: int, parameters: Parameters, cores: int) -> float:
        effort = parameters["m"] * parameters["ef_construction"] / (32 * 80)
        inserted = n * _HNSW_S * math.log2(n + 1) * _wider(dim) * effort
        return (_truth_s(n, dim) + inserted) / cores

    def codes(self, vectors: Embeddings, rows: Ids, parameters: Parameters) -> faiss.Index:
        dim, m = vectors.shape[1], parameters["m"]
        codes = faiss.IndexHNSWSQ(dim, faiss.ScalarQuantizer.QT_8bit, m, _IP)
        codes.hnsw.efConstruction = parameters["ef_construction"]
        codes.train(sample_of(vectors, rows, _SQ_SAMPLE))
        return _by_row(codes)

    def efforts(self, size: int, nlist: int) -> list[int]:
        return list(_doubling(16, min(_MAX_SEARCH, max(16, size))))

    def _parameters(
        self, nlist: int, value: int, selected: dict[str, Any]
    ) -> faiss.SearchParameters:
        return faiss.SearchParametersHNSW(efSearch=value, **selected)


class IvfPq(Kind):
    """Inverted lists, whose centroids come from spherical k-means, of 4-bit product codes of pairs
    of numbers, compared in registers (FastScan).
    """

    name = "ivf-pq"
    follows = True
    k_factors = (4, 8, 16, 32, 64)
    faiss_class = faiss.IndexIVFPQFastScan
    # FAISS copies the lists of an IVF into memory of its own; mapped, they would be there twice.
    read_flags = 0

    def suits(self, n: int, dim: int, device: str) -> bool:
        return True

    def reason(self, n: int, dim: int) -> str:
        return f"{n:,} vectors are too many for a graph"

    def problem(self, n: int, dim: int) -> str | None:
        if n >= PQ_MIN:
            return None
        return (
            f"{n:,} vectors are too few to train the index {self.name}: it needs {PQ_MIN:,} or "
            "more. Choose --index flat or hnsw."
        )

    def parameters(self, n: int, dim: int) -> dict[str, int]:
        return {"nlist": lists_for(n), "pq_m": dim if dim % 2 else dim // 2}

    def code_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        nlist = parameters["nlist"]
        # FastScan keeps codes in blocks of 32, so half a block a list is empty.
        stored = (n + 16 * nlist) * parameters["pq_m"] * PQ_BITS / 8 + 8 * n
        graph = _graph_bytes(_COARSE_M) if nlist >= COARSE_HNSW_FROM else 0
        return stored + nlist * (4 * dim + graph)

    def build_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        sample = 4.0 * dim * min(n, TRAIN_PER_LIST * parameters["nlist"])
        return self.code_bytes(n, dim, parameters) + sample

    def build_s(self, n: int, dim: int, parameters: Parameters, cores: int) -> float:
        nlist = parameters["nlist"]
        assign = 2.0 * nlist * dim / _PRODUCTS_PER_S
        if nlist >= COARSE_HNSW_FROM:
            assign = _GRAPH_ASSIGN_S * _wider(dim)
        train = min(n, TRAIN_PER_LIST * nlist) * assign * _KMEANS_ROUNDS
        return (_truth_s(n, dim) + train + n * (assign + _ENCODE_S)) / cores

    def codes(self, vectors: Embeddings, rows: Ids, parameters: Parameters) -> faiss.Index:
        """From many lists on, each round of k-means finds the nearest one through a graph."""
        dim, nlist = vectors.shape[1], parameters["nlist"]
        has_graph = nlist >= COARSE_HNSW_FROM
        coarse = f"_HNSW{_COARSE_M}" if has_graph else ""
        code = f"PQ{parameters['pq_m']}x{PQ_BITS}fs"
        codes = faiss.index_factory(dim, f"IVF{nlist}{coarse},{code}", _IP)
        codes.cp.spherical = True
        codes.cp.niter = _KMEANS_ROUNDS
        codes.cp.min_points_per_centroid = 1  # the plan has seen to it; else FAISS warns
        codes.cp.max_points_per_centroid = TRAIN_PER_LIST
        assigner = faiss.IndexHNSWFlat(dim, _KMEANS_M, _IP) if has_graph else faiss.IndexFlatIP(dim)
        codes.clustering_index = assigner
        codes.train(sample_of(vectors, rows, TRAIN_PER_LIST * nlist))
        codes.clustering_index = None  # it does not own it
        return codes

    def efforts(self, size: int, nlist: int) -> list[int]:
        return list(_doubling(1, nlist))

    def _parameters(
        self, nlist: int, value: int, selected: dict[str, Any]
    ) -> faiss.SearchParameters:
        nprobe = max(1, min(value, nlist))
        if nlist >= COARSE_HNSW_FROM:
            coarse = faiss.SearchParametersHNSW(efSearch=2 * nprobe)
            selected = {**selected, "quantizer_params": coarse}
        return faiss.SearchParametersIVF(nprobe=nprobe, **selected)


class Cagra(Hnsw):
    """A graph that is built and searched on the GPU, on a CPU as an HNSW of one level."""

    name = "cagra"
    devices = ("cuda",)
    grows = False
    k_factors = (1,)
    faiss_class = faiss.IndexHNSWCagra
    read_flags = faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_SKIP_STORAGE
    write_flags = faiss.IO_FLAG_SKIP_STORAGE

    def suits(self, n: int, dim: int, device: str) -> bool:
        return True

    def reason(self, n: int, dim: int) -> str:
        return f"{_size(n, dim)} of vectors are too many to compare with all"

    def parameters(self, n: int, dim: int) -> dict[str, int]:
        return {"graph_degree": 64, "intermediate_graph_degree": 128}

    def code_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return n * (4.0 * parameters["graph_degree"] + 12)

    def memory_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return self.code_bytes(n, dim, parameters) + 4.0 * n * dim

    def build_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return self.memory_bytes(n, dim, parameters)

    def build_s(self, n: int, dim: int, parameters: Parameters, cores: int) -> float:
        return n * _CAGRA_S

    def codes(self, vectors: Embeddings, rows: Ids, parameters: Parameters) -> faiss.Index:
        return build_cagra(vectors, parameters)

    def searched(self, codes: faiss.Index, flat: faiss.IndexFlatIP) -> faiss.Index:
        """The graph reads the mapped vectors, in place of its own copy, which is freed."""
        own = codes.storage
        codes.storage = flat
        codes.own_fields = False
        add_to_referenced_objects(codes, flat)
        if own is not None:
            own.this.own(True)
        return codes

    def on_gpu(self, vectors: Embeddings, codes: faiss.Index | None) -> GpuIndex:
        return GpuIndex.cagra(codes)

    def search_parameters(
        self, nlist: int, size: int, effort: Effort, k: int, allowed: Bits | None = None
    ) -> faiss.SearchParameters:
        selected = {} if allowed is None else {"sel": faiss.IDSelectorBitmap(allowed)}
        return self._parameters(nlist, scaled(effort.value, k, size), selected)


KINDS: Mapping[IndexKind, Kind] = {kind.name: kind for kind in (Flat(), Hnsw(), IvfPq(), Cagra())}
"""Every kind; on each device from the one for few vectors to that for most."""


def kinds_on(device: str) -> list[Kind]:
    """The kinds that are made on a device."""
    return [kind for kind in KINDS.values() if device in kind.devices]


def lists_for(n: int) -> int:
    """Inverted lists: 4 sqrt(n) to the next power of two, few enough to train; then in steps."""
    if n > 10_000_000:
        return 65_536
    if n >= 1_000_000:
        return 16_384
    return int(min(2 ** round(math.log2(4 * math.sqrt(n))), max(1, n // IVF_POINTS_PER_LIST)))


def scaled(value: int, k: int, size: int) -> int:
    """The value for `k` answers of `size` vectors: with that for 10, fewer of more are found.

    In proportion to k while it is small; a great value already looks beyond the first 10. Measured
    on galleries from easy (18) to hard (72): with this, recall at 30 to 1000 is that at 10 or more.
    """
    return min(value + min(value, 2 * TUNED_AT) * max(0, k - TUNED_AT) // TUNED_AT, size)


def sample_of(vectors: Embeddings, rows: Ids, count: int) -> Embeddings:
    """Up to `count` of these rows, drawn evenly; always the same ones."""
    if count < len(rows):
        drawn = np.random.default_rng(0).choice(len(rows), count, replace=False, shuffle=False)
        rows = rows[np.sort(drawn)]
    # All of them are read where they are mapped.
    return np.ascontiguousarray(vectors) if len(rows) == len(vectors) else vectors[rows]


def _by_row(codes: faiss.Index) -> faiss.Index:
    """Codes that answer with the rows they were added under, in place of their own count."""
    found = faiss.IndexIDMap(codes)
    found.own_fields = True
    codes.this.own(False)
    return found


def _doubling(first: int, last: int) -> Iterator[int]:
    while first < last:
        yield first
        first *= 2
    yield last


def _graph_bytes(m: int) -> float:
    """Of a node: 2 m neighbours below, m on each of the few levels above, offset and level."""
    return 8 * m + 4 * m / (m - 1) + 12


def _truth_s(n: int, dim: int) -> float:
    """Of the exact answers that tuning compares with."""
    return 2.0 * n * dim * _TUNE_QUERIES / _PRODUCTS_PER_S


def _wider(dim: int) -> float:
    return 1 + dim / 1500


def _size(n: int, dim: int) -> str:
    size = 4.0 * n * dim / _MIB
    return f"{size:,.0f} MB" if size >= 10 else f"{size:.1f} MB"
