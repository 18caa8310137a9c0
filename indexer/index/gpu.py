"""Search on an NVIDIA GPU with faiss-gpu-cuvs: flat, and the graph CAGRA."""

import ctypes
import weakref
from collections.abc import Mapping
from functools import partial

import faiss

from embedder.errors import ProviderError
from embedder.types import Embeddings
from indexer.index.errors import reason_of
from indexer.index.gpu_thread import Owner, Search
from indexer.types import Ids, Scores

MAX_K = 512
"""More answers than this come from the CPU."""

_WARP = 32  # CAGRA keeps its intermediate results in multiples of it
_MIB = 2**20


def why_no_gpu() -> str | None:
    """Why FAISS cannot use a GPU here, and what to do; None if it can."""
    if not hasattr(faiss, "StandardGpuResources"):
        return (
            "The installed faiss has no GPU support. Install the GPU packages (make install-gpu) "
            "on a machine with an NVIDIA GPU."
        )
    if "CUVS" not in faiss.get_compile_options():
        return "The installed faiss was built without cuVS. Install faiss-gpu-cuvs in its place."
    if not faiss.get_num_gpus():
        return "faiss finds no NVIDIA GPU. See whether nvidia-smi lists one."
    return None


def require_gpu() -> None:
    """Raises: ProviderError where FAISS cannot use a GPU."""
    if why := why_no_gpu():
        raise ProviderError(f"{why} Or search on the CPU.")


def gpu_memory_mb(device: int = 0) -> float:
    """MiB of memory of a GPU. Raises: ProviderError."""
    require_gpu()
    size, handle = ctypes.c_size_t(), ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    for call in (
        partial(driver.cuInit, 0),
        partial(driver.cuDeviceGet, ctypes.byref(handle), device),
        partial(driver.cuDeviceTotalMem_v2, ctypes.byref(size), handle),
    ):
        if code := call():
            raise ProviderError(
                f"The CUDA driver answers with error {code} when asked for the memory of GPU "
                f"{device}. See whether nvidia-smi lists it."
            )
    return size.value / _MIB


class GpuIndex:
    """An index on the GPU; thread safe, since one thread owns it and batches all searches.

    The memory of the GPU is free again soon after the last reference is gone.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        # Not by joining, since any thread may drop the last reference; and not at exit, when the
        # thread would meet a CUDA that is going away.
        weakref.finalize(self, owner.end).atexit = False

    @classmethod
    def flat(cls, vectors: Embeddings) -> "GpuIndex":
        """Compare with all vectors (N, D). Raises: ProviderError."""
        require_gpu()
        return cls(Owner(partial(_flat_search, vectors)))

    @classmethod
    def cagra(cls, graph: faiss.IndexHNSWCagra) -> "GpuIndex":
        """Search the graph that `build_cagra` made, with its vectors. Raises: ProviderError."""
        require_gpu()
        return cls(Owner(partial(_cagra_search, graph)))

    def search(self, queries: Embeddings, k: int, effort: int) -> tuple[Scores, Ids]:
        """Up to MAX_K answers for each query (Q, D); `effort` is itopk_size.

        Raises: ProviderError if the GPU fails; EngineUnavailableError after `close`.
        """
        try:
            return self._owner.search(queries, k, effort)
        except RuntimeError as error:
            raise ProviderError(
                f"The GPU could not answer: {reason_of(error)}. See nvidia-smi for its memory "
                "and health, or open the gallery on the CPU."
            ) from error

    def close(self) -> None:
        """Free the memory of the GPU, once the searches that wait are answered."""
        self._owner.close()


def build_cagra(vectors: Embeddings, parameters: Mapping[str, int]) -> faiss.IndexHNSWCagra:
    """Build the graph of vectors (N, D) on the GPU and bring it back. Raises: ProviderError."""
    require_gpu()
    config = faiss.GpuIndexCagraConfig()
    config.graph_degree = min(parameters["graph_degree"], len(vectors) - 1)
    config.intermediate_graph_degree = min(
        parameters["intermediate_graph_degree"], len(vectors) - 1
    )
    config.guarantee_connectivity = True
    dim = vectors.shape[1]
    index = faiss.GpuIndexCagra(
        faiss.StandardGpuResources(), dim, faiss.METRIC_INNER_PRODUCT, config
    )
    graph = faiss.IndexHNSWCagra()
    graph.base_level_only = True
    try:
        index.train(vectors)
        index.copyTo(graph)
    except RuntimeError as error:
        raise ProviderError(
            f"The GPU could not build CAGRA over {len(vectors):,} vectors: {reason_of(error)}. "
            "See nvidia-smi for its free memory, or choose --index flat or --device cpu."
        ) from error
    return graph


def _flat_search(vectors: Embeddings) -> Search:
    resources = faiss.StandardGpuResources()
    index = faiss.GpuIndexFlatIP(resources, vectors.shape[1])
    index.add(vectors)

    def search(queries: Embeddings, k: int, _: int) -> tuple[Scores, Ids]:
        found: tuple[Scores, Ids] = index.search(queries, k)
        return found

    return search


def _cagra_search(graph: faiss.IndexHNSWCagra) -> Search:
    resources = faiss.StandardGpuResources()
    index = faiss.GpuIndexCagra(resources, graph.d, faiss.METRIC_INNER_PRODUCT)
    index.copyFrom(graph)

    def search(queries: Embeddings, k: int, effort: int) -> tuple[Scores, Ids]:
        parameters = faiss.SearchParametersCagra()
        parameters.itopk_size = -(-max(effort, 2 * k) // _WARP) * _WARP
        found: tuple[Scores, Ids] = index.search(queries, k, params=parameters)
        return found

    return search
