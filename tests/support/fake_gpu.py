"""A GPU that is not there: the classes of FAISS for one, on the CPU, as strict as the real ones.

Each call is checked against the prototypes of the wheel faiss-gpu-cuvs 1.15, memory is counted, and
vectors are rounded to half precision where the GPU would do that. `test_gpu.py` compares the table
with the wheel, wherever that is installed.
"""

# ruff: noqa: N802, N806 (the names are those of FAISS)

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from kinlens.embedder.types import Embeddings
from kinlens.indexer.index import gpu

PROTOTYPES: dict[str, list[tuple[str, ...]]] = {
    "GpuIndexFlatIP": [
        ("GpuResourcesProvider", "IndexFlatIP", "GpuIndexFlatConfig"),
        ("GpuResourcesProvider", "IndexFlatIP"),
        ("GpuResourcesProvider", "int", "GpuIndexFlatConfig"),
        ("GpuResourcesProvider", "int"),
    ],
    "GpuIndexIVFScalarQuantizer": [
        (
            "GpuResourcesProvider",
            "IndexIVFScalarQuantizer",
            "GpuIndexIVFScalarQuantizerConfig",
        ),
        ("GpuResourcesProvider", "IndexIVFScalarQuantizer"),
    ],
    "GpuIndexCagra": [
        ("GpuResourcesProvider", "int", "MetricType", "GpuIndexCagraConfig"),
        ("GpuResourcesProvider", "int", "MetricType"),
        ("GpuResourcesProvider", "int"),
    ],
}
"""The constructors that are used, of all that the wheel has: the types of their arguments."""

SETTINGS: dict[str, dict[str, Any]] = {
    "GpuIndexFlatConfig": {
        "device": 0,
        "memorySpace": 1,
        "storeTransposed": False,
        "useFloat16": False,
        "use_cuvs": False,
    },
    "GpuIndexIVFScalarQuantizerConfig": {
        "allowCpuCoarseQuantizer": False,
        "device": 0,
        "indicesOptions": 3,
        "interleavedLayout": True,
        "memorySpace": 1,
        "use_cuvs": False,
    },
    "GpuIndexCagraConfig": {
        "build_algo": 0,
        "device": 0,
        "graph_degree": 64,
        "guarantee_connectivity": False,
        "intermediate_graph_degree": 128,
        "memorySpace": 1,
        "nn_descent_niter": 20,
        "refine_rate": 2.0,
        "store_dataset": True,
        "use_cuvs": False,
    },
    "SearchParametersCagra": {
        "algo": 100,
        "itopk_size": 64,
        "max_iterations": 0,
        "max_queries": 0,
        "min_iterations": 0,
        "num_random_samplings": 1,
        "search_width": 1,
        "seed": 1213332,
        "sel": None,
        "team_size": 0,
        "thread_block_size": 0,
    },
}
"""The fields of its structures, with their values."""

METHODS: dict[str, tuple[str, ...]] = {
    "GpuIndexFlatIP.add_c": ("idx_t", "float *"),
    "GpuIndexIVFScalarQuantizer.add_with_ids_c": ("idx_t", "float *", "idx_t *"),
    "GpuIndexCagra.train_c": ("idx_t", "float *"),
    "GpuIndexCagra.copyTo": ("IndexHNSWCagra",),
    "GpuIndexCagra.copyFrom": ("IndexHNSWCagra",),
}
"""The methods that are used, apart from `search_c`."""

MOST = 2048
"""More answers, or lists, than this a GPU does not select."""


class Settings:
    """A structure of fields with values; it refuses any other field, which SWIG would take."""

    def __init__(self) -> None:
        self.__dict__.update(SETTINGS[type(self).__name__])

    def __setattr__(self, name: str, value: object) -> None:
        known = SETTINGS[type(self).__name__]
        if name not in known or type(value) is not type(known[name]):
            raise AttributeError(f"{type(self).__name__} has no {name} that could be {value!r}")
        self.__dict__[name] = value


def is_a(value: object, kind: str) -> bool:
    """Whether SWIG takes `value` where a `kind` is asked for."""
    if kind in ("int", "idx_t", "size_t", "MetricType"):
        return isinstance(value, int) and not isinstance(value, bool)
    if kind.endswith("*"):
        return type(value).__name__ == "SwigPyObject" and {
            "float *": "float *",
            "idx_t *": "int64_t *",
        }[kind] in repr(value).replace("long *", "int64_t *")
    return any(one.__name__ == kind for one in type(value).__mro__)


def check(name: str, given: tuple[object, ...], prototypes: list[tuple[str, ...]]) -> None:
    """Raises: TypeError for arguments that no prototype takes."""
    for kinds in prototypes:
        if len(kinds) == len(given) and all(map(is_a, given, kinds)):
            return
    types = [type(value).__name__ for value in given]
    raise TypeError(f"Wrong number or type of arguments for overloaded function {name!r}: {types}")


class Device:
    """The GPU: its memory, and what can happen to it."""

    def __init__(self, total: int = 80 * 2**30) -> None:
        self.total = self.free = total
        self.breaks = False
        self.gate = threading.Event()  # closed, it never answers
        self.gate.set()
        self.searches = 0
        self.rows: list[int] = []  # queries in each search

    def take(self, owner: object, size: int) -> None:
        """Allocate memory that is free again when its owner is gone."""
        if size > self.free:
            raise RuntimeError(
                "Error in virtual void* faiss::gpu::StandardGpuResourcesImpl::allocMemory(const "
                "faiss::gpu::AllocRequest&) at StandardGpuResources.cpp:624: Error: 'err == "
                "cudaSuccess' failed: StandardGpuResources: alloc fail type FlatData dev 0 space "
                f"Device size {size} bytes (cudaMalloc error out of memory [2])"
            )
        self.free -= size
        weakref.finalize(owner, self.give_back, size).atexit = False

    def give_back(self, size: int) -> None:
        self.free += size

    def search(self, rows: int) -> None:
        """What each search meets."""
        self.gate.wait()
        if self.breaks:
            raise RuntimeError(
                "Error in search at GpuIndex.cu:1: Error: CUDA error 719 launch failed"
            )
        self.searches += 1
        self.rows.append(rows)


def floats(pointer: object, rows: int, dim: int) -> Embeddings:
    """The array that SWIG was given."""
    found: NDArray[np.float32] = faiss.rev_swig_ptr(pointer, rows * dim)
    return found.reshape(rows, dim).copy()


def halved(vectors: Embeddings) -> Embeddings:
    """As a GPU keeps them in half precision."""
    return vectors.astype(np.float16).astype(np.float32)


def classes_of(device: Device) -> dict[str, Any]:
    """The names that the wheel for a GPU has beyond that for the CPU."""

    class GpuResourcesProvider: ...

    class StandardGpuResources(GpuResourcesProvider):
        def setTempMemory(self, size: int) -> None:
            check("setTempMemory", (size,), [("size_t",)])
            device.take(self, size)

        def setPinnedMemory(self, size: int) -> None:
            check("setPinnedMemory", (size,), [("size_t",)])

    class OneThread:
        """FAISS: an index on a GPU belongs to one thread at a time."""

        resources: StandardGpuResources
        d: int

        def __init__(self, *given: Any) -> None:
            check(type(self).__name__, given, PROTOTYPES[type(self).__name__])
            self.resources = given[0]
            self._users = 0

        def called(self, name: str, *given: object) -> None:
            check(name, given, [METHODS[f"{type(self).__name__}.{name}"]])

        def answer(
            self, index: faiss.Index, asked: object, found: tuple[Any, ...], is_half: bool
        ) -> None:
            rows, queries, k, scores, labels, _ = found
            check("search", found[:5], [("idx_t", "float *", "idx_t", "float *", "idx_t *")])
            if k > MOST:
                raise RuntimeError(f"Error: 'k <= 2048' failed: k of {k} is too large")
            self._users += 1
            try:
                if self._users > 1:
                    raise AssertionError("two threads search an index on the GPU at once")
                device.search(rows)
                vectors = floats(queries, rows, self.d)
                vectors = halved(vectors) if is_half else vectors
                pointer = faiss.swig_ptr(vectors)
                index.search_c(rows, pointer, k, scores, labels, asked)
            finally:
                self._users -= 1

    class GpuIndexFlatIP(OneThread):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            assert isinstance(given[1], int), "the tests know no copy of an IndexFlatIP"
            self.d = given[1]
            self._half = len(given) > 2 and given[2].useFloat16
            self._index = faiss.IndexFlatIP(self.d)

        def add_c(self, rows: int, pointer: object) -> None:
            self.called("add_c", rows, pointer)
            device.take(self, rows * self.d * (2 if self._half else 4))
            vectors = floats(pointer, rows, self.d)
            self._index.add(halved(vectors) if self._half else vectors)

        def search_c(self, *found: Any) -> None:
            assert found[5] is None, "flat knows no parameters"
            self.answer(self._index, None, found, self._half)

    class GpuIndexIVFScalarQuantizer(OneThread):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            source = given[1]
            if not isinstance(faiss.downcast_index(source.quantizer), faiss.IndexFlat):
                raise RuntimeError("Error: This index type is not implemented on GPU.")
            if not source.is_trained or source.quantizer.ntotal != source.nlist:
                raise RuntimeError("Error: 'this->is_trained' failed: Index not trained")
            self.d = source.d
            self._index = faiss.clone_index(source)
            device.take(self, source.nlist * self.d * 4)

        def reserveMemory(self, rows: int) -> None:
            check("reserveMemory", (rows,), [("size_t",)])
            device.take(self, rows * self.d * 2)

        def add_with_ids_c(self, rows: int, pointer: object, ids: object) -> None:
            self.called("add_with_ids_c", rows, pointer, ids)
            self._index.add_with_ids_c(rows, pointer, ids)

        def reclaimMemory(self) -> int:
            return 0

        def search_c(self, *found: Any) -> None:
            asked = found[5]
            assert isinstance(asked, faiss.SearchParametersIVF)
            if asked.nprobe > MOST or asked.sel is not None:
                raise RuntimeError("Error: 'nprobe <= 2048' failed: or a selector")
            self.answer(self._index, asked, found, True)

    class GpuIndexCagra(OneThread):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.d = given[1]
            assert given[2] == faiss.METRIC_INNER_PRODUCT
            self._degree = given[3].graph_degree if len(given) > 3 else 64
            self._graph: Any = None

        def train_c(self, rows: int, pointer: object) -> None:
            self.called("train_c", rows, pointer)
            try:
                device.take(self, rows * (4 * self.d + 8 * self._degree))
            except RuntimeError as error:  # what cuVS throws, FAISS makes another one of
                raise MemoryError("std::bad_alloc: out_of_memory: CUDA error") from error
            self._graph = faiss.IndexHNSWCagra(
                self.d, max(2, self._degree // 2), faiss.METRIC_INNER_PRODUCT
            )
            self._graph.add(floats(pointer, rows, self.d))

        def copyTo(self, graph: faiss.IndexHNSWCagra) -> None:
            self.called("copyTo", graph)
            made = self._graph
            graph.d, graph.ntotal, graph.metric_type = made.d, made.ntotal, made.metric_type
            graph.is_trained, graph.hnsw = True, made.hnsw
            graph.storage = faiss.clone_index(made.storage)
            graph.storage.this.own(False)
            graph.own_fields = True

        def copyFrom(self, graph: faiss.IndexHNSWCagra) -> None:
            self.called("copyFrom", graph)
            if not isinstance(faiss.downcast_index(graph.storage), faiss.IndexFlat):
                raise RuntimeError("Error: 'flat_storage' failed")
            device.take(self, graph.ntotal * (4 * self.d + 8 * self._degree))
            self._graph = graph

        def search_c(self, *found: Any) -> None:
            asked = found[5]
            assert isinstance(asked, SearchParametersCagra)
            if asked.itopk_size < found[2] or asked.itopk_size % 32:
                raise RuntimeError(f"Error: itopk_size of {asked.itopk_size} for k = {found[2]}")
            on_cpu = faiss.SearchParametersHNSW(efSearch=asked.itopk_size)
            self.answer(self._graph, on_cpu, found, False)

    structures = {name: type(name, (Settings,), {}) for name in SETTINGS}
    SearchParametersCagra: type = structures["SearchParametersCagra"]
    found = (StandardGpuResources, GpuIndexFlatIP, GpuIndexIVFScalarQuantizer, GpuIndexCagra)
    return {one.__name__: one for one in found} | structures


def fake_gpu(monkeypatch: pytest.MonkeyPatch, total: int = 80 * 2**30) -> Device:
    """Give FAISS a GPU with `total` bytes of memory."""
    device = Device(total)
    for name, one in classes_of(device).items():
        monkeypatch.setattr(faiss, name, one, raising=False)
    monkeypatch.setattr(faiss, "get_compile_options", lambda: "OPTIMIZE DD AVX2 GPU NVIDIA_CUVS ")
    monkeypatch.setattr("kinlens.indexer.index.faiss.LEAST_BYTES", 0)
    monkeypatch.setattr(gpu, "failed_trial", lambda: None)
    monkeypatch.setattr(gpu, "cuda_memory", lambda: (device.free, device.total))
    return device


def real_prototypes(name: str) -> Iterator[tuple[str, ...]]:
    """The signature in the error of the installed wheel when it is given other arguments."""
    try:
        getattr(faiss, name)("something else")
    except TypeError as error:
        for line in str(error).splitlines():
            if "shared_ptr" not in line and "::" in line and line.endswith(")"):
                kinds = line.rpartition("(")[2][:-1].split(",")
                yield tuple(
                    kind.split("::")[-1].removesuffix(" const *").rstrip(" *") for kind in kinds
                )


def real_argument(name: str) -> str:
    """The error of the installed wheel when the first argument of a method has another type."""
    owner, _, method = name.partition(".")
    try:
        getattr(getattr(faiss, owner), method)(None, *["x"] * len(METHODS[name]))
    except TypeError as error:
        return str(error)
    return f"{name} takes anything"
