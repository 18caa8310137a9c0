"""Compressed FAISS indexes over vectors that stay where they are: made, grown, stored, mapped."""

from pathlib import Path

import faiss
import numpy as np
from faiss.class_wrappers import add_to_referenced_objects

from embedder.durable import FileFacts, HashedFile
from embedder.errors import GalleryCorruptError
from embedder.machine import core_count
from embedder.types import Embeddings
from indexer.index.gpu import build_cagra, reason_of
from indexer.index.plan import (
    COARSE_HNSW_FROM,
    COARSE_M,
    KMEANS_ROUNDS,
    PQ_BITS,
    TRAIN_PER_LIST,
    IndexKind,
    Plan,
)
from indexer.types import Progress

_BLOCK = 65_536  # bytes; FAISS hands over 1 MiB by default, which is half as fast
_CURE = "Make the index again from the catalogue: kinlens-index compact GALLERY --rebuild."
_CLASSES = {
    "fp16": faiss.IndexScalarQuantizer,
    "hnsw": faiss.IndexHNSWSQ,
    "ivf-pq": faiss.IndexIVFPQFastScan,
    "ivf-rabitq": faiss.IndexIVFRaBitQFastScan,
    "cagra": faiss.IndexHNSWCagra,
}

_BATCH = 65_536
_LARGE = 20_000
_SQ_SAMPLE = 65_536
_KMEANS_M = 16
_IP = faiss.METRIC_INNER_PRODUCT


def write_codes(path: Path, kind: IndexKind, codes: faiss.Index) -> FileFacts:
    """Write an index to the new file `path`; of a graph of CAGRA without its vectors.

    Raises: OSError.
    """
    flags = faiss.IO_FLAG_SKIP_STORAGE if kind == "cagra" else 0
    with HashedFile(path) as file:
        faiss.write_index(codes, faiss.PyCallbackIOWriter(file.write, _BLOCK), flags)
    return file.facts


def read_codes(path: Path, kind: IndexKind, vectors: Embeddings) -> faiss.Index:
    """Map an index over `vectors` (N, D). FAISS trusts the file. Raises: GalleryCorruptError."""
    # FAISS copies the lists of an IVF into memory of its own; mapped, they would be there twice.
    flags = 0 if kind in ("ivf-pq", "ivf-rabitq") else faiss.IO_FLAG_MMAP_IFC
    if kind == "cagra":
        flags |= faiss.IO_FLAG_SKIP_STORAGE
    try:
        codes = faiss.read_index(str(path), flags)
    except (RuntimeError, MemoryError) as error:
        raise GalleryCorruptError(
            f"{path} is not a readable index: it is missing, truncated or damaged "
            f"({reason_of(error)}). {_CURE}"
        ) from error
    found = (type(codes), codes.metric_type, codes.ntotal, codes.d)
    expected = (_CLASSES[kind], faiss.METRIC_INNER_PRODUCT, *vectors.shape)
    if found != expected:
        raise GalleryCorruptError(
            f"{path} holds {codes.ntotal:,} vectors of length {codes.d} in a "
            f"{type(codes).__name__}, but the segment has {len(vectors):,} of length "
            f"{vectors.shape[1]} in an index of kind {kind}. {_CURE}"
        )
    return codes


def flat_over(vectors: Embeddings) -> faiss.IndexFlatIP:
    """A flat index that reads `vectors` (N, D) in place; it lives no longer than they do."""
    index = faiss.IndexFlatIP(vectors.shape[1])
    if len(vectors):
        nobody = faiss.MaybeOwnedVectorUInt8().owner
        pointer = faiss.swig_ptr(vectors.reshape(-1).view(np.uint8))
        index.codes = faiss.MaybeOwnedVectorUInt8.create_view(pointer, vectors.nbytes, nobody)
        index.ntotal = len(vectors)
    add_to_referenced_objects(index, vectors)
    return index


def searched_by(kind: IndexKind, codes: faiss.Index | None, flat: faiss.IndexFlatIP) -> faiss.Index:
    """What is searched: codes whose candidates are compared at full precision."""
    if codes is None:
        return flat
    if kind == "cagra":
        _give_storage(codes, flat)
        return codes
    return faiss.IndexRefine(codes, flat)


def _give_storage(graph: faiss.IndexHNSWCagra, flat: faiss.IndexFlatIP) -> None:
    """Let the graph read the mapped vectors, in place of its own copy, which is freed."""
    own = graph.storage
    graph.storage = flat
    graph.own_fields = False
    add_to_referenced_objects(graph, flat)
    if own is not None:
        own.this.own(True)


def build_codes(plan: Plan, vectors: Embeddings, on_progress: Progress | None) -> faiss.Index:
    """The compressed index of the plan, over all of `vectors`; not for the kind flat.

    Raises: ProviderError.
    """
    if plan.kind == "cagra":
        codes = build_cagra(vectors, plan.parameters)
        _report(on_progress, len(vectors))
        return codes
    _set_threads(len(vectors))
    codes = _trained(plan, vectors)
    grow(codes, vectors, on_progress)
    return codes


def grow(codes: faiss.Index, vectors: Embeddings, on_progress: Progress | None = None) -> None:
    """Add the rows of `vectors` that `codes` does not have yet."""
    _set_threads(len(vectors))
    for start in range(codes.ntotal, len(vectors), _BATCH):
        batch = vectors[start : start + _BATCH]
        codes.add(batch)
        _report(on_progress, len(batch))


def _trained(plan: Plan, vectors: Embeddings) -> faiss.Index:
    if plan.kind == "fp16":
        codes = faiss.IndexScalarQuantizer(plan.dim, faiss.ScalarQuantizer.QT_fp16, _IP)
        codes.train(vectors[:1])
    elif plan.kind == "hnsw":
        m = plan.parameters["m"]
        codes = faiss.IndexHNSWSQ(plan.dim, faiss.ScalarQuantizer.QT_8bit, m, _IP)
        codes.hnsw.efConstruction = plan.parameters["ef_construction"]
        codes.train(_sample(vectors, _SQ_SAMPLE))
    else:
        codes = _lists(plan)
        sample = _sample(vectors, TRAIN_PER_LIST * codes.nlist)
        codes.quantizer.add(_centroids(sample, codes.nlist))
        codes.train(sample)
    return codes


def _lists(plan: Plan) -> faiss.IndexIVF:
    nlist = plan.parameters["nlist"]
    code = "RaBitQfs" if plan.kind == "ivf-rabitq" else f"PQ{plan.parameters['pq_m']}x{PQ_BITS}fs"
    coarse = f"_HNSW{COARSE_M}" if nlist >= COARSE_HNSW_FROM else ""
    return faiss.index_factory(plan.dim, f"IVF{nlist}{coarse},{code}", _IP)


def _centroids(sample: Embeddings, nlist: int) -> Embeddings:
    """Spherical k-means; from many lists on, each round finds the nearest one through a graph."""
    dim = sample.shape[1]
    clustering = faiss.Clustering(dim, nlist)
    clustering.niter = KMEANS_ROUNDS
    clustering.spherical = True
    clustering.min_points_per_centroid = 1  # the plan has seen to it; else FAISS warns
    clustering.max_points_per_centroid = TRAIN_PER_LIST
    if nlist >= COARSE_HNSW_FROM:
        assigner = faiss.IndexHNSWFlat(dim, _KMEANS_M, _IP)
    else:
        assigner = faiss.IndexFlatIP(dim)
    clustering.train(sample, assigner)
    centroids: Embeddings = faiss.vector_float_to_array(clustering.centroids)
    return centroids.reshape(nlist, dim)


def _sample(vectors: Embeddings, count: int) -> Embeddings:
    """Up to `count` rows, drawn evenly; always the same ones."""
    if count >= len(vectors):
        return np.ascontiguousarray(vectors)
    rows = np.random.default_rng(0).choice(len(vectors), count, replace=False, shuffle=False)
    return vectors[np.sort(rows)]


def _set_threads(count: int) -> None:
    """All cores for a large build; on a busy machine they only wait for each other in a small."""
    faiss.omp_set_num_threads(core_count() if count >= _LARGE else 1)


def _report(on_progress: Progress | None, count: int) -> None:
    if on_progress is not None:
        on_progress(count)
