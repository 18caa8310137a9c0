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

from kinlens.embedder.types import Embeddings
from kinlens.indexer.bits import Bits
from kinlens.indexer.index.gpu import TEMP_BYTES, Search
from kinlens.indexer.types import Ids, Scores, StoredRows

IndexKind = Literal["flat", "hnsw", "ivf-pq"]
Device = Literal["cpu", "cuda"]

Parameters = Mapping[str, int]
"""The build parameters of an index, by name."""

TUNED_AT = 10
"""The number of hits that an effort is tuned for."""

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


@dataclass(frozen=True, slots=True)
class Effort:
    """Search parameters of an index, tuned for 10 hits and scaled up for more.

    value: efSearch (hnsw) or nprobe (ivf); 0 for flat.
    k_factor: candidates to rescore at full precision, as a multiple of k.
    gpu: nprobe (ivf) on the GPU; 0 means the same as `value`.
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
    """The devices for which it is planned; every type can be searched on both."""

    is_scan: ClassVar[bool] = False
    """Compares with all vectors: it has no codes and no effort to tune."""

    is_graph: ClassVar[bool] = False
    """Walks a graph, whose steps cost more than comparisons."""

    is_updatable: ClassVar[bool] = False
    """Rows can be removed from its codes."""

    k_factors: ClassVar[tuple[int, ...]] = (2, 4, 8)
    """The values of k_factor that tuning tries."""

    gpu_max_effort: ClassVar[float] = math.inf
    """The highest effort on the GPU; above it, the CPU searches."""

    faiss_class: ClassVar[type | None] = None
    read_flags: ClassVar[int] = faiss.IO_FLAG_MMAP_IFC
    """FAISS flags to read the file of codes."""

    def problem(self, n: int) -> str | None:
        """Why this type cannot index `n` vectors; None if it can."""
        return None

    def parameters(self, n: int, dim: int) -> dict[str, int]:
        """The build parameters."""
        return {}

    @abstractmethod
    def code_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        """Size of the file of codes."""

    def build_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        """Resident memory while building."""
        return self.code_bytes(n, dim, parameters)

    @abstractmethod
    def codes(self, vectors: StoredRows, rows: Ids, parameters: Parameters) -> faiss.Index:
        """An empty FAISS index of codes, trained on these rows of `vectors` (N, D).

        The caller adds the rows; searches return them. Not for `is_scan`.
        """

    @abstractmethod
    def gpu_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        """GPU memory while searching there."""

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
    is_scan = True
    k_factors = (1,)

    def code_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return 0.0

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

    name = "hnsw"
    is_graph = True
    faiss_class = faiss.IndexHNSWSQ

    def parameters(self, n: int, dim: int) -> dict[str, int]:
        return {"m": 32, "ef_construction": 80}

    def code_bytes(self, n: int, dim: int, parameters: Parameters) -> float:
        return n * (dim + _graph_bytes(parameters["m"]))

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

    def problem(self, n: int) -> str | None:
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


INDEX_TYPES: Mapping[IndexKind, IndexType] = {one.name: one for one in (Flat(), Hnsw(), IvfPq())}
"""Every index type, ordered from few vectors to many."""


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
