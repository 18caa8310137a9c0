"""Query vectors for a command: from a .npy file, or of an image."""

from pathlib import Path

import numpy as np
from numpy.lib.format import read_array

from embedder.errors import ImageError, InvalidParameterError, SourceError
from embedder.session import Embedder
from embedder.types import Embeddings
from indexer.ingest.sources import ANY_SIZE, read_image


def read_vectors(file: Path) -> Embeddings:
    """The vectors in a .npy file: (Q, D), or one (D,). Raises: InvalidParameterError."""
    try:
        with file.open("rb") as stream:
            vectors = read_array(stream, allow_pickle=False)
    except OSError as error:
        reason = error.strerror or error
        raise InvalidParameterError(f"Cannot read the vectors in {file}: {reason}.") from error
    except (ValueError, EOFError) as error:
        raise InvalidParameterError(
            f"{file} is not a .npy file of numbers. Write it with numpy.save(file, vectors)."
        ) from error
    if vectors.dtype.kind not in "fiu" or vectors.ndim not in (1, 2):
        raise InvalidParameterError(
            f"{file} holds {vectors.dtype} {vectors.shape}; expected float32 vectors of shape (D,) "
            "or (Q, D)."
        )
    if not vectors.size:
        raise InvalidParameterError(f"{file} holds no vectors: its shape is {vectors.shape}.")
    return np.atleast_2d(vectors).astype(np.float32)


def vector_of(image: Path, embedder: Embedder) -> Embeddings:
    """The vector (1, D) of an image file. Raises: SourceError if it cannot be used."""
    try:
        data = read_image(image.resolve().parent, image.name, ANY_SIZE.max_bytes)
        pixels = embedder.preprocess(data)
    except (ImageError, OSError) as error:
        raise SourceError(f"The image {image} cannot be used: {error}") from error
    return embedder.embed(pixels[None])
