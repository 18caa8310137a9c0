"""The index types, one class each: cost, training, search, storage and tuning.

An index finds candidates by compressed codes. They are then rescored with the full-precision
vectors, which are memory-mapped from disk. To add an index type, write a class and add it to
`INDEX_TYPES`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import faiss
import numpy as np
from faiss.class_wrappers import add_to_referenced_objects

from kinlens.embedder.errors import ProviderError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.bits import Bits
from kinlens.indexer.index.gpu import TEMP_BYTES, Search, reason_of, require_gpu
from kinlens.indexer.types import Ids, Scores, StoredRows, VectorType

IndexKind = Literal["flat", "hnsw", "ivf-pq", "cagra"]
Device = Literal["cpu", "cuda"]

Parameters = Mapping[str, int]
"""The build parameters of an index, by name."""

TUNED_AT = 10
"""The number of hits that an effort is tuned for."""

FLAT_BYTES = 200e6
GPU_FLAT_BYTES = 2e9
HNSW_MAX = 500_000
"""IVF-PQ is faster and smaller for many vectors: at 200,000 x 128 it took 232 us (p50) and 51 bytes
per vector, HNSW 775 us and 400 bytes. At 1 million, HNSW took 510 s to build and needed efSearch
352."""

COARSE_HNSW_FROM = 16_384
"""Number of lists from which on a graph finds the nearest ones."""
TRAIN_PER_LIST = 64
IVF_POINTS_PER_LIST = 39
"""The minimum number of vectors per centroid that FAISS requires for training."""
PQ_BITS = 4
PQ_MIN = 16 * IVF_POINTS_PER_LIST

_IP = faiss.METRIC_INNER_PRODUCT
_COARSE_M, _KMEANS_M = 32, 16
_KMEANS_ROUNDS = 8
_SQ_SAMPLE = 65_536
_MAX_SEARCH = 4096
_GPU_BATCH = 262_144  # vectors copied to a GPU at a time
_WARP = 32  # CAGRA's itopk_size must be a multiple of it
_MIB = 2**20

# Seconds of one core, measured on an AMD EPYC of family 26 with AVX-512: CPU time of builds with
# two threads, 50k to 300k clustered vectors of 128 and 512 dimensions; HNSW with m 32, ef 80.
_HNSW_S = 9e-6
_PRODUCTS_PER_S = 45e9
_GRAPH_ASSIGN_S = 40e-6
_ENCODE_S = 4e-6
_CAGRA_S = 5e-5  # GPU seconds, not measured yet
_TUNE_QUERIES = 1000


@dataclass(frozen=True, slots=True)
class Effort:
    """Search parameters of an index, tuned for 10 hits and scaled up for more.

    value: efSearch (hnsw, cagra) or nprobe (ivf); 0 for flat.
    k_factor: candidates to rescore at full precision, as a multiple of k.
    gpu: itopk_size (cagra) or nprobe (ivf) on the GPU; 0 means the same as `value`.
    """

    value: int
    k_factor: int = 1
    gpu: int = 0

    @property
    def on_gpu(self) -> int:
        """The value on the GPU."""
        return self.gpu or self.value


class IndexType(ABC):
    """An index type. In all methods, n is the number of vectors and dim their length."""

    name: ClassVar[IndexKind]

    devices: ClassVar[tuple[Device, ...]] = ("cpu",)
    """The devices that can build it; every type can be searched on both."""

    least_recall: ClassVar[float] = 0.0
    """The recall that is guaranteed without measuring."""

    is_scan: ClassVar[bool] = False
    """Compares with all vectors, so it has no effort to tune."""

    is_graph: ClassVar[bool] = False
    """Walks a graph, whose steps cost more than comparisons."""

    is_extensible: ClassVar[bool] = True
    """Rows can be added to its codes."""

    is_updatable: ClassVar[bool] = False
    """Rows can also be removed from its codes."""

    needs_all_rows: ClassVar[bool] = False
    """Cannot skip rows of removed items."""

    k_factors: ClassVar[tuple[int, ...]] = (2, 4, 8)
    """The values of k_factor that tuning tries."""

    gpu_factor: ClassVar[int] = 2
    """Hits of the GPU (half precision) to rescore, as a multiple of k."""

    gpu_max_effort: ClassVar[float] = math.inf
    """The highest effort on the GPU; above it, the CPU searches."""

    gpu_builds: ClassVar[bool] = False
    """Built on the GPU, which then needs memory for the new and the current index."""

    faiss_class: ClassVar[type | None] = None
    read_flags: ClassVar[int] = faiss.IO_FLAG_MMAP_IFC
    write_flags: ClassVar[int] = 0
    """FAISS flags for the file of codes."""

    @abstractmethod
    def is_preferred(self, n: int, dim: int, device: str) -> bool:
        """Whether to prefer this type to later ones in `INDEX_TYPES`, given enough memory."""

    @abstractmethod
    def reason(self, n: int, dim: int) -> str:
        """Why it is chosen if it is preferred."""

    def problem(self, n: int, dim: int, vector_type: VectorType) -> str | None:
        """Why this type cannot index these vectors; None if it can."""
        return None

    def parameters(self, n: int, dim: int) -> dict[str, int]:
        """The build parameters."""
        return {}

    @abstractmethod
    def code_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        """Size of the file of codes."""

    def memory_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        """Resident memory while searching."""
        return self.code_bytes(n, dim, parameters)

    def build_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        """Resident memory while building."""
        return self.code_bytes(n, dim, parameters)

    def build_s(self, n: int, dim: int, parameters: Parameters, cores: int) -> float:
        """Seconds to build and tune the index, without writing vectors."""
        return 0.0

    @abstractmethod
    def codes(self, vectors: StoredRows, rows: Ids, parameters: Parameters) -> faiss.Index:
        """A FAISS index of codes, trained on these rows of `vectors` (N, D). It returns rows.

        If `is_extensible`, it is empty: the caller adds the rows.

        Raises: ProviderError.
        """

    def searched(self, codes: faiss.Index, flat: faiss.IndexFlatCodes) -> faiss.Index:
        """The FAISS index to search: `codes` with rescoring at full precision."""
        # FAISS requires as many codes as vectors, but removed items have no code.
        size, flat.ntotal = flat.ntotal, codes.ntotal
        found = faiss.IndexRefine(codes, flat)
        flat.ntotal = found.ntotal = size
        return found

    @abstractmethod
    def gpu_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        """GPU memory while searching there."""

    def host_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        """Resident host memory while the GPU searches, so that the CPU can take over."""
        return self.code_bytes(n, dim, parameters)

    @abstractmethod
    def on_gpu(self, vectors: StoredRows, codes: faiss.Index | None) -> Callable[[], Search]:
        """A function that copies the index to the GPU and returns its search.

        Both must be called in the same thread.
        """

    def efforts(self, size: int, nlist: int) -> list[int]:
        """The values that tuning tries: doubled up to the highest useful one."""
        return [0]

    def search_parameters(
        self, nlist: int, size: int, effort: Effort, k: int, allowed: Bits | None = None
    ) -> faiss.SearchParameters:
        """The FAISS parameters of one search; the index itself is not modified."""
        selected = {} if allowed is None else {"sel": faiss.IDSelectorBitmap(allowed)}
        base = self._parameters(nlist, scaled(effort.value, k, size), selected)
        return faiss.IndexRefineSearchParameters(k_factor=effort.k_factor, base_index_params=base)

    def _parameters(
        self, nlist: int, value: int, selected: dict[str, Any]
    ) -> faiss.SearchParameters:
        return faiss.SearchParameters(**selected)


class Flat(IndexType):
    """Brute force: no codes; compares with all vectors."""

    name = "flat"
    devices = ("cpu", "cuda")
    least_recall = 1.0
    is_scan = True
    is_extensible = False
    k_factors = (1,)

    def is_preferred(self, n: int, dim: int, device: str) -> bool:
        return 4.0 * n * dim <= (GPU_FLAT_BYTES if device == "cuda" else FLAT_BYTES)

    def reason(self, n: int, dim: int) -> str:
        return f"{_size(n, dim)} of vectors are few enough for brute force"

    def code_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return 0.0

    def memory_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return 4.0 * n * dim

    def codes(self, vectors: StoredRows, rows: Ids, parameters: Parameters) -> faiss.Index:
        raise NotImplementedError

    def gpu_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return _flat_gpu_bytes(n, dim)

    def on_gpu(self, vectors: StoredRows, codes: faiss.Index | None) -> Callable[[], Search]:
        return lambda: _flat_search(vectors, None)

    def search_parameters(
        self, nlist: int, size: int, effort: Effort, k: int, allowed: Bits | None = None
    ) -> faiss.SearchParameters:
        return faiss.SearchParameters()


class Hnsw(IndexType):
    """A graph over 8-bit codes (Malkov and Yashunin 2016, https://arxiv.org/abs/1603.09320)."""

    name: ClassVar[IndexKind] = "hnsw"
    is_graph = True
    faiss_class = faiss.IndexHNSWSQ

    def is_preferred(self, n: int, dim: int, device: str) -> bool:
        return n <= HNSW_MAX

    def reason(self, n: int, dim: int) -> str:
        return f"{n:,} vectors are too many for brute force, and few enough for a graph"

    def parameters(self, n: int, dim: int) -> dict[str, int]:
        return {"m": 32, "ef_construction": 80}

    def code_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return n * (dim + _graph_bytes(parameters["m"]))

    def build_s(self, n: int, dim: int, parameters: Parameters, cores: int) -> float:
        effort = parameters["m"] * parameters["ef_construction"] / (32 * 80)
        inserted = n * _HNSW_S * math.log2(n + 1) * _dim_factor(dim) * effort
        return (_ground_truth_s(n, dim) + inserted) / cores

    def codes(self, vectors: StoredRows, rows: Ids, parameters: Parameters) -> faiss.Index:
        dim, m = vectors.shape[1], parameters["m"]
        codes = faiss.IndexHNSWSQ(dim, faiss.ScalarQuantizer.QT_8bit, m, _IP)
        codes.hnsw.efConstruction = parameters["ef_construction"]
        codes.train(sample_of(vectors, rows, _SQ_SAMPLE))
        return _by_row(codes)

    def gpu_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return _flat_gpu_bytes(n, dim)

    def on_gpu(self, vectors: StoredRows, codes: faiss.Index | None) -> Callable[[], Search]:
        """Brute force: on a GPU it is faster than this graph."""
        assert codes is not None
        rows: Ids = faiss.vector_to_array(codes.id_map)
        return lambda: _flat_search(vectors, rows)

    def efforts(self, size: int, nlist: int) -> list[int]:
        return list(_doubling(16, min(_MAX_SEARCH, max(16, size))))

    def _parameters(
        self, nlist: int, value: int, selected: dict[str, Any]
    ) -> faiss.SearchParameters:
        return faiss.SearchParametersHNSW(efSearch=value, **selected)


class IvfPq(IndexType):
    """Inverted lists of 4-bit product quantisation codes, compared in registers (FastScan).

    The centroids come from spherical k-means; each code represents a pair of components.
    """

    name = "ivf-pq"
    devices = ("cpu", "cuda")
    is_updatable = True
    gpu_max_effort = 2048  # lists that FAISS probes on a GPU
    k_factors = (4, 8, 16, 32, 64)
    faiss_class = faiss.IndexIVFPQFastScan
    # FAISS copies the lists of an IVF to the heap; with mmap they would be in memory twice.
    read_flags = 0

    def is_preferred(self, n: int, dim: int, device: str) -> bool:
        return True

    def reason(self, n: int, dim: int) -> str:
        return f"{n:,} vectors are too many for a graph"

    def problem(self, n: int, dim: int, vector_type: VectorType) -> str | None:
        if n >= PQ_MIN:
            return None
        return (
            f"{n:,} vectors are too few to train the index {self.name}: it needs at least "
            f"{PQ_MIN:,}. Choose --index flat or hnsw."
        )

    def parameters(self, n: int, dim: int) -> dict[str, int]:
        return {"nlist": lists_for(n), "pq_m": dim if dim % 2 else dim // 2}

    def code_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        nlist = parameters["nlist"]
        # FastScan stores codes in blocks of 32, so on average half a block per list is empty.
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
            assign = _GRAPH_ASSIGN_S * _dim_factor(dim)
        train = min(n, TRAIN_PER_LIST * nlist) * assign * _KMEANS_ROUNDS
        return (_ground_truth_s(n, dim) + train + n * (assign + _ENCODE_S)) / cores

    def codes(self, vectors: StoredRows, rows: Ids, parameters: Parameters) -> faiss.Index:
        """Train the lists. With many lists, k-means finds the nearest centroid with a graph."""
        dim, nlist = vectors.shape[1], parameters["nlist"]
        has_graph = nlist >= COARSE_HNSW_FROM
        coarse = f"_HNSW{_COARSE_M}" if has_graph else ""
        code = f"PQ{parameters['pq_m']}x{PQ_BITS}fs"
        codes = faiss.index_factory(dim, f"IVF{nlist}{coarse},{code}", _IP)
        codes.cp.spherical = True
        codes.cp.niter = _KMEANS_ROUNDS
        codes.cp.min_points_per_centroid = 1  # checked by `problem`; avoids a warning of FAISS
        codes.cp.max_points_per_centroid = TRAIN_PER_LIST
        assigner = faiss.IndexHNSWFlat(dim, _KMEANS_M, _IP) if has_graph else faiss.IndexFlatIP(dim)
        codes.clustering_index = assigner
        codes.train(sample_of(vectors, rows, TRAIN_PER_LIST * nlist))
        codes.clustering_index = None  # FAISS does not own it
        return codes

    def gpu_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        # Lists double as they grow, and are trimmed at the end.
        return 1.5 * 2.0 * n * dim + 8.0 * n + 4.0 * parameters["nlist"] * dim + TEMP_BYTES

    def on_gpu(self, vectors: StoredRows, codes: faiss.Index | None) -> Callable[[], Search]:
        """The same lists with half-precision vectors instead of codes."""
        assert codes is not None
        return lambda: _lists_search(vectors, codes)

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
    """A graph built and searched on the GPU; a CPU searches it as an HNSW with one level."""

    name = "cagra"
    devices = ("cuda",)
    is_extensible = False
    k_factors = (1,)
    gpu_factor = 1
    gpu_builds = True
    needs_all_rows = True

    faiss_class = faiss.IndexHNSWCagra
    read_flags = faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_SKIP_STORAGE
    write_flags = faiss.IO_FLAG_SKIP_STORAGE

    def problem(self, n: int, dim: int, vector_type: VectorType) -> str | None:
        if vector_type == "fp32":
            return None
        return (
            "The index cagra needs vectors in fp32, but this gallery stores them in fp16. Choose "
            "--index flat or ivf-pq."
        )

    def is_preferred(self, n: int, dim: int, device: str) -> bool:
        return True

    def reason(self, n: int, dim: int) -> str:
        return f"{_size(n, dim)} of vectors are too many for brute force"

    def parameters(self, n: int, dim: int) -> dict[str, int]:
        return {"graph_degree": 64, "intermediate_graph_degree": 128}

    def code_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return n * (4.0 * parameters["graph_degree"] + 12)

    def memory_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return self.code_bytes(n, dim, parameters) + 4.0 * n * dim

    def build_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        """The vectors without held-out queries, FAISS' copy of them, and the graph in 64 bits."""
        wide = 8.0 * parameters["graph_degree"] * n
        return self.code_bytes(n, dim, parameters) + 8.0 * n * dim + wide

    def gpu_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return 4.0 * n * dim + 8.0 * parameters["graph_degree"] * n + TEMP_BYTES

    def host_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        """The graph and, during the copy, FAISS' copies of it with 32 and 64 bits."""
        degree = parameters["graph_degree"]
        return self.code_bytes(n, dim, parameters) + (4.0 + 8.0) * degree * n

    def build_s(self, n: int, dim: int, parameters: Parameters, cores: int) -> float:
        return n * _CAGRA_S

    def codes(self, vectors: StoredRows, rows: Ids, parameters: Parameters) -> faiss.Index:
        return _cagra_graph(full(vectors), parameters)

    def searched(self, codes: faiss.Index, flat: faiss.IndexFlatIP) -> faiss.Index:
        """Make the graph read the mapped vectors, and free its own copy."""
        own = codes.storage
        codes.storage = flat
        codes.own_fields = False
        add_to_referenced_objects(codes, flat)
        if own is not None:
            own.this.own(True)
        return codes

    def on_gpu(self, vectors: StoredRows, codes: faiss.Index | None) -> Callable[[], Search]:
        return lambda: _cagra_search(codes)

    def search_parameters(
        self, nlist: int, size: int, effort: Effort, k: int, allowed: Bits | None = None
    ) -> faiss.SearchParameters:
        selected = {} if allowed is None else {"sel": faiss.IDSelectorBitmap(allowed)}
        return self._parameters(nlist, scaled(effort.value, k, size), selected)


INDEX_TYPES: Mapping[IndexKind, IndexType] = {
    one.name: one for one in (Flat(), Hnsw(), Cagra(), IvfPq())
}
"""Every index type, ordered from few vectors to many."""


def index_types_on(device: str) -> list[IndexType]:
    """The index types that a device can build."""
    return [one for one in INDEX_TYPES.values() if device in one.devices]


def found_by(
    index: faiss.Index, queries: Embeddings, k: int, parameters: object = None
) -> tuple[Scores, Ids]:
    """Scores and positions (Q, k) from FAISS' C++ API.

    Bypasses FAISS' Python `search`: `faiss.contrib.torch_utils`, which metric learning libraries
    import, replaces it with one that takes no parameters.
    """
    rows = len(queries)
    scores, positions = np.empty((rows, k), np.float32), np.empty((rows, k), np.int64)
    pointers = [faiss.swig_ptr(array) for array in (queries, scores, positions)]
    index.search_c(rows, pointers[0], k, pointers[1], pointers[2], parameters)
    return scores, positions


def _rows_in_lists(codes: faiss.Index) -> Ids:
    """The rows in the inverted lists, ascending."""
    lists = codes.invlists
    sizes = [lists.list_size(number) for number in range(codes.nlist)]
    found = [
        faiss.rev_swig_ptr(lists.get_ids(number), size).copy()
        for number, size in enumerate(sizes)
        if size
    ]
    return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)


def _gpu_resources() -> "faiss.StandardGpuResources":
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(TEMP_BYTES)
    resources.setPinnedMemory(0)  # only useful for batches above a quarter of a gigabyte
    return resources


def _flat_gpu_bytes(n: int, dim: int) -> float:
    return 2.0 * n * dim + TEMP_BYTES


def _flat_search(stored: StoredRows, rows: Ids | None) -> Search:
    """Brute force over vectors (N, D) in half precision; only over `rows`, if given."""
    rows = None if rows is None or len(rows) == len(stored) else rows
    vectors = full(stored if rows is None else stored[rows])
    resources = _gpu_resources()
    config = faiss.GpuIndexFlatConfig()
    config.useFloat16 = True
    index = faiss.GpuIndexFlatIP(resources, vectors.shape[1], config)
    # In one call: FAISS copies all existing vectors at each call.
    index.add_c(len(vectors), faiss.swig_ptr(vectors))

    def search(queries: Embeddings, k: int, _: int) -> tuple[Scores, Ids]:
        scores, positions = found_by(index, queries, k)
        if rows is not None:
            positions = np.where(positions < 0, -1, rows[positions])
        return scores, positions

    return search


def _lists_search(vectors: StoredRows, codes: faiss.Index) -> Search:
    """Inverted lists on the GPU, with half-precision vectors instead of codes."""
    dim, nlist = vectors.shape[1], codes.nlist
    centroids = faiss.IndexFlatIP(dim)
    centroids.add(codes.quantizer.reconstruct_n(0, nlist))
    half = faiss.ScalarQuantizer.QT_fp16
    empty = faiss.IndexIVFScalarQuantizer(centroids, dim, nlist, half, _IP, False)
    empty.is_trained = True  # the centroids exist, and half precision needs no training
    resources = _gpu_resources()
    index = faiss.GpuIndexIVFScalarQuantizer(resources, empty)
    rows = _rows_in_lists(codes)
    index.reserveMemory(len(rows))
    for start in range(0, len(rows), _GPU_BATCH):
        some = rows[start : start + _GPU_BATCH]
        batch = full(vectors[some])
        index.add_with_ids_c(len(some), faiss.swig_ptr(batch), faiss.swig_ptr(some))
    index.reclaimMemory()

    def search(queries: Embeddings, k: int, value: int) -> tuple[Scores, Ids]:
        probed = max(1, min(value, nlist))
        return found_by(index, queries, k, faiss.SearchParametersIVF(nprobe=probed))

    return search


def _cagra_graph(vectors: Embeddings, parameters: Parameters) -> faiss.IndexHNSWCagra:
    """Build the graph of vectors (N, D) on the GPU and copy it back. Raises: ProviderError."""
    require_gpu()
    config = faiss.GpuIndexCagraConfig()
    config.graph_degree = min(parameters["graph_degree"], len(vectors) - 1)
    config.intermediate_graph_degree = min(
        parameters["intermediate_graph_degree"], len(vectors) - 1
    )
    config.guarantee_connectivity = True
    graph = faiss.IndexHNSWCagra()
    graph.base_level_only = True
    try:
        resources = _gpu_resources()
        index = faiss.GpuIndexCagra(resources, vectors.shape[1], _IP, config)
        index.train_c(len(vectors), faiss.swig_ptr(vectors))
        index.copyTo(graph)
    except (RuntimeError, MemoryError) as error:
        raise ProviderError(
            f"The GPU could not build CAGRA over {len(vectors):,} vectors: {reason_of(error)}. "
            "See nvidia-smi for its free memory, or choose --index flat or --index-device cpu."
        ) from error
    return graph


def _cagra_search(graph: faiss.IndexHNSWCagra) -> Search:
    resources = _gpu_resources()
    index = faiss.GpuIndexCagra(resources, graph.d, _IP)
    index.copyFrom(graph)
    add_to_referenced_objects(index, graph)  # the index reads the vectors of the graph

    def search(queries: Embeddings, k: int, value: int) -> tuple[Scores, Ids]:
        parameters = faiss.SearchParametersCagra()
        parameters.itopk_size = -(-max(value, 2 * k) // _WARP) * _WARP
        return found_by(index, queries, k, parameters)

    return search


def lists_for(n: int) -> int:
    """Number of inverted lists: 4 sqrt(n), rounded to a power of two; fixed from 1 million on.

    Limited to the number that n vectors can train.
    """
    if n > 10_000_000:
        return 65_536
    if n >= 1_000_000:
        return 16_384
    return int(min(2 ** round(math.log2(4 * math.sqrt(n))), max(1, n // IVF_POINTS_PER_LIST)))


def scaled(value: int, k: int, size: int) -> int:
    """Scale an effort tuned for 10 hits to `k` hits of `size` vectors, to keep the recall.

    Small values grow in proportion to k; large ones grow less, since they already find more than
    10. Measured on galleries from easy (effort 18) to hard (72): recall at 30 to 1000 is then at
    least the recall at 10.
    """
    return min(value + min(value, 2 * TUNED_AT) * max(0, k - TUNED_AT) // TUNED_AT, size)


def full(vectors: StoredRows) -> Embeddings:
    """Vectors (N, D) in single precision; half-precision vectors are copied."""
    return np.asarray(vectors, np.float32)


def sample_of(vectors: StoredRows, rows: Ids, count: int) -> Embeddings:
    """The vectors of up to `count` random rows of `rows`; always the same sample."""
    if count < len(rows):
        drawn = np.random.default_rng(0).choice(len(rows), count, replace=False, shuffle=False)
        rows = rows[np.sort(drawn)]
    # All rows can be read from the memory map without a copy.
    return np.ascontiguousarray(full(vectors if len(rows) == len(vectors) else vectors[rows]))


def _by_row(codes: faiss.Index) -> faiss.Index:
    """Wrap codes to return the rows they were added with, instead of consecutive numbers."""
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
    """Bytes per node: 2 m neighbours on the base level, m on each level above, offset and level."""
    return 8 * m + 4 * m / (m - 1) + 12


def _ground_truth_s(n: int, dim: int) -> float:
    """Seconds of one core to compute the exact results for tuning."""
    return 2.0 * n * dim * _TUNE_QUERIES / _PRODUCTS_PER_S


def _dim_factor(dim: int) -> float:
    return 1 + dim / 1500


def _size(n: int, dim: int) -> str:
    size = 4.0 * n * dim / _MIB
    return f"{size:,.0f} MB" if size >= 10 else f"{size:.1f} MB"
