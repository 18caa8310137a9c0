"""Where a hit matches its query: how much each image region contributes to the score."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import GalleryConflictError, InvalidParameterError
from kinlens.embedder.explain import shares
from kinlens.embedder.types import SHORT, Embeddings
from kinlens.models import ExplainAnswer, QueryShares
from kinlens.quality.answers import combined_query, weighted_mean
from kinlens.service.concurrency import SearchThreads
from kinlens.service.encoding.model import View
from kinlens.service.galleries.registry import Served
from kinlens.service.galleries.renditions import limits_of_stored, of_stored_image
from kinlens.service.search.pipeline import CancelToken
from kinlens.service.search.query import Query


async def explain(
    search_threads: SearchThreads,
    served: Served,
    query: Query,
    key: str,
    image: bytes,
) -> ExplainAnswer:
    """Explain where `image`, the image of item `key`, matches `query`; runs in a search thread.

    Raises: GalleryConflictError if the bundle has no map, InvalidParameterError for a query without
        an image, ImageError for its images; ItemNotFoundError if `image` cannot be decoded,
        OverloadedError, SearchError, BundleError.
    """
    if not served.model.embedder.has_map:
        raise GalleryConflictError(
            f"The model of gallery {served.name}, bundle {served.model.bundle_id[:SHORT]}, has no "
            "map, which explanations need. Export it with kinlens-train export --map, and rebuild "
            "the gallery with that bundle."
        )
    if query.texts:
        raise InvalidParameterError("Words have no regions to show. Omit texts.")
    if not query.images:
        raise InvalidParameterError(
            "image is missing. Send the query image; to explain a similar-items search, send the "
            "image of that item."
        )
    cancel_token = CancelToken()
    served.acquire()  # until the search thread is done with it
    try:
        return await search_threads.run(
            lambda: _explained(served, query, key, image, cancel_token), after=served.release
        )
    finally:
        cancel_token.cancel()


def _explained(
    served: Served, query: Query, key: str, image: bytes, cancel_token: CancelToken
) -> ExplainAnswer:
    embedder, gallery = served.model.embedder, served.gallery
    cancel_token.check()
    parts = embedder.maps(_decoded(served, image)[np.newaxis])[0]  # (D, h, w)
    hit = parts.sum(axis=(1, 2))
    liked, grids = [], []
    for view in query.images:  # one at a time, since a map is large
        cancel_token.check()
        of_view = embedder.maps(served.model.decode(view)[np.newaxis])[0]
        liked.append(of_view.sum(axis=(1, 2)))
        grids.append(shares(of_view, hit))
    keys = [*query.positives, *query.negatives]
    stored = [entry.vector for entry in gallery.entries(keys)] if keys else []
    others = [view for view in query.views if not isinstance(view, View)]
    liked += [*(view.vector(served.model) for view in others), *stored[: len(query.positives)]]
    weights = [1.0] * len(liked)
    weights[len(grids) : len(grids) + len(others)] = [view.weight for view in others]
    disliked = np.asarray(stored[len(query.positives) :], dtype=np.float32)
    vector, weight = _combined(np.stack(liked), disliked, weights)
    score = float(vector @ hit)
    grids = [grid * np.float32(weight) for grid in grids]
    return ExplainAnswer(
        bundle_id=served.model.bundle_id,
        gallery=served.name,
        gallery_version=gallery.version,
        key=key,
        score=score,
        rest=score - float(sum(grid.sum() for grid in grids)) if keys or others else 0.0,
        square=embedder.preprocessing.crop_px / embedder.preprocessing.resize_px,
        hit=shares(parts, vector).tolist(),
        query=[
            QueryShares(image=view.number, crop=view.box, shares=grid.tolist())
            for view, grid in zip(query.images, grids, strict=True)
        ],
    )


def _combined(
    liked: Embeddings, disliked: Embeddings, weights: Sequence[float]
) -> tuple[NDArray[np.float32], float]:
    """The vector of a query, and the part of a liked vector of weight 1 in it."""
    vector = combined_query(liked, disliked, weights)
    means = [weighted_mean(liked, weights), *([disliked.mean(axis=0)] if len(disliked) else [])]
    parts = np.linalg.lstsq(np.stack(means, axis=1), vector, rcond=None)[0]
    return vector, float(parts[0]) / float(np.abs(weights).sum())


def _decoded(served: Served, image: bytes) -> NDArray[np.uint8]:
    """The pixels of an item's image."""
    embedder = served.model.embedder
    limits = limits_of_stored(embedder.limits)
    with of_stored_image():
        decoded = served.model.workers.decode(image, embedder.preprocessing, limits)
    pixels: NDArray[np.uint8] = decoded[0]
    return pixels
