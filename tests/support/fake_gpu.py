"""A GPU that is not there: the classes of FAISS for one, on the CPU, as strict as the real ones.

Memory is counted, and vectors are rounded to half precision where the GPU would do that.
`test_gpu.py` compares the fields with the wheel, wherever that is installed.
"""

# ruff: noqa: N802 (the names are those of FAISS)

import threading
import weakref
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from kinlens.embedder.types import Embeddings
from kinlens.indexer.index import gpu

SETTINGS: dict[str, dict[str, Any]] = {
    "GpuIndexFlatConfig": {"useFloat16": False},
}
"""The fields that are used of its structures, with their values."""

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

    class StandardGpuResources:
        def setTempMemory(self, size: int) -> None:
            device.take(self, size)

        def setPinnedMemory(self, size: int) -> None:
            pass

    class OneThread:
        """FAISS: an index on a GPU belongs to one thread at a time."""

        d: int

        def __init__(self, *given: Any) -> None:
            assert isinstance(given[0], StandardGpuResources)
            self.resources = given[0]
            self._users = 0

        def answer(
            self, index: faiss.Index, asked: object, found: tuple[Any, ...], is_half: bool
        ) -> None:
            rows, queries, k, scores, labels, _ = found
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
            self.d = given[1]
            self._half = given[2].useFloat16
            self._index = faiss.IndexFlatIP(self.d)

        def add_c(self, rows: int, pointer: object) -> None:
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
            device.take(self, rows * self.d * 2)

        def add_with_ids_c(self, rows: int, pointer: object, ids: object) -> None:
            self._index.add_with_ids_c(rows, pointer, ids)

        def reclaimMemory(self) -> int:
            return 0

        def search_c(self, *found: Any) -> None:
            asked = found[5]
            assert isinstance(asked, faiss.SearchParametersIVF)
            if asked.nprobe > MOST or asked.sel is not None:
                raise RuntimeError("Error: 'nprobe <= 2048' failed: or a selector")
            self.answer(self._index, asked, found, True)

    structures = {name: type(name, (Settings,), {}) for name in SETTINGS}
    found = (StandardGpuResources, GpuIndexFlatIP, GpuIndexIVFScalarQuantizer)
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
