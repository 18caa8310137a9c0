"""Compressed indexes as files, which are mapped into memory when they are read."""

from pathlib import Path

import faiss

from embedder.errors import GalleryCorruptError
from embedder.types import Embeddings
from indexer.folder.hashed_file import FileFacts, HashedFile
from indexer.index.errors import reason_of
from indexer.index.plan import IndexKind

_BLOCK = 65_536  # bytes; FAISS hands over 1 MiB by default, which is half as fast
_CURE = "Make the index again from the catalogue: kinlens-index compact GALLERY --rebuild."
_CLASSES = {
    "fp16": faiss.IndexScalarQuantizer,
    "hnsw": faiss.IndexHNSWSQ,
    "ivf-pq": faiss.IndexIVFPQFastScan,
    "ivf-rabitq": faiss.IndexIVFRaBitQFastScan,
    "cagra": faiss.IndexHNSWCagra,
}


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
