"""Where a hit matches its query: the shares of their score that regions of the pictures have."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import (
    DeadlineExceededError,
    GalleryConflictError,
    ImageCostError,
    ImageError,
    InvalidParameterError,
    ItemNotFoundError,
)
from kinlens.embedder.explain import Grid, shares
from kinlens.embedder.types import SHORT, Embeddings
from kinlens.indexer.images import ANY_SIZE
from kinlens.indexer.types import combined_query
from kinlens.service.concurrency import within
from kinlens.service.encoding.decoders import Decoder
from kinlens.service.encoding.model import View
from kinlens.service.encoding.threads import SearchThreads
from kinlens.service.galleries.registry import Served
from kinlens.service.search.pipeline import Abandoned
from kinlens.service.search.query import Query


@dataclass(frozen=True, slots=True)
class Explanation:
    """`hit` sums to `score`; all of `query`, one for each view, sum to it with `rest`, the part of
    liked and disliked items.

    square: the grids cover the central square of a picture, or of its crop, whose side is this part
        of the shorter one.
    """

    score: float
    rest: float
    square: float
    hit: Grid
    query: Sequence[tuple[View, Grid]]


async def explain(
    search_threads: SearchThreads, served: Served, query: Query, picture: bytes, limit_s: float
) -> Explanation:
    """Where `picture`, that of an item, matches `query`; computed in a search thread.

    Raises: GalleryConflictError if the bundle has no map, InvalidParameterError for a query without
        an image, ImageError for its images; ItemNotFoundError if `picture` cannot be shown,
        OverloadedError, DeadlineExceededError, SearchError, BundleError.
    """
    if not served.model.embedder.has_map:
        raise GalleryConflictError(
            f"The model of gallery {served.name}, bundle {served.model.bundle_id[:SHORT]}, has no "
            "map of its images, which tells where they match. Export it with kinlens-train export "
            "--map, and rebuild the gallery with that bundle."
        )
    if not query.views:
        raise InvalidParameterError(
            "image is missing; send the image of the search, of an item its own picture."
        )
    abandoned = Abandoned()
    served.take()  # until the search thread is done with it
    try:
        cure = "Send fewer images and crops, or try again in a second."
        async with within(limit_s, "The explanation", cure):
            return await search_threads.run(
                lambda decoder: _explained(decoder, served, query, picture, abandoned),
                after=served.give_back,
            )
    finally:
        abandoned.end()


def _explained(
    decoder: Decoder, served: Served, query: Query, picture: bytes, abandoned: Abandoned
) -> Explanation:
    embedder, gallery = served.model.embedder, served.gallery
    abandoned.check()
    parts = embedder.maps(_decoded(decoder, served, picture)[np.newaxis])[0]  # (D, h, w)
    hit = parts.sum(axis=(1, 2))
    liked, grids = [], []
    for view in query.views:  # one at a time: a map is large
        abandoned.check()
        of_view = embedder.maps(served.model.encoder.decode(decoder, view)[np.newaxis])[0]
        liked.append(of_view.sum(axis=(1, 2)))
        grids.append(shares(of_view, hit))
    keys = [*query.positives, *query.negatives]
    stored = [entry.vector for entry in gallery.entries(keys)] if keys else []
    liked += stored[: len(query.positives)]
    disliked = np.asarray(stored[len(query.positives) :], dtype=np.float32)
    vector, weight = _combined(np.stack(liked), disliked)
    score = float(vector @ hit)
    grids = [grid * np.float32(weight) for grid in grids]
    return Explanation(
        score=score,
        rest=score - float(sum(grid.sum() for grid in grids)) if keys else 0.0,
        square=embedder.preprocessing.crop_px / embedder.preprocessing.resize_px,
        hit=shares(parts, vector),
        query=list(zip(query.views, grids, strict=True)),
    )


def _combined(liked: Embeddings, disliked: Embeddings) -> tuple[NDArray[np.float32], float]:
    """The vector of a query, and how often each of the liked ones is in it."""
    vector = combined_query(liked, disliked)
    means = [liked.mean(axis=0), *([disliked.mean(axis=0)] if len(disliked) else [])]
    weights = np.linalg.lstsq(np.stack(means, axis=1), vector, rcond=None)[0]
    return vector, float(weights[0]) / len(liked)


def _decoded(decoder: Decoder, served: Served, picture: bytes) -> NDArray[np.uint8]:
    """The pixels of an item's picture; its bytes do not count, since it is here already."""
    embedder = served.model.embedder
    limits = replace(embedder.limits, max_bytes=ANY_SIZE.max_bytes)
    try:
        return decoder.decode(picture, embedder.preprocessing, limits)
    except ImageCostError as error:
        raise DeadlineExceededError(
            "Decoding the picture of the item took more time or memory than an image may take. "
            "Put a smaller image in its place."
        ) from error
    except ImageError as error:
        raise ItemNotFoundError(f"The picture of this item cannot be read: {error}") from error
