"""What a search does in a gallery: blocking calls, run in a thread."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from embedder.errors import ItemNotFoundError
from embedder.types import Embeddings, Hit
from indexer.types import Group, SearchOptions, combined_query, go_on
from service.galleries.registry import Gallery
from service.search.payloads import Shown, encode_results
from service.search.query import Query
from service.search.thresholds import UNREACHABLE

_SHOWN_DIGITS = 12
_NOTHING: Embeddings = np.empty((0, 0), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Found:
    """The results of a query as JSON, and the version of the gallery when it was over.

    vector, options, hits: what was asked for and found, for who wants to ask again; `hits` are
    None for a search for groups.
    """

    payload: bytes
    version: str
    vector: NDArray[np.float32]
    options: SearchOptions
    hits: Sequence[Hit] | None


@dataclass(frozen=True, slots=True)
class _Target:
    """The vector (1, D) to search with, and the items that are no answer."""

    vector: Embeddings
    exclude: frozenset[int]


def find(
    gallery: Gallery,
    query: Query,
    vectors: Sequence[NDArray[np.float32]],
    min_score: float | None,
    shown: Shown,
    checkpoint: Callable[[], None] = go_on,
) -> Found:
    """The results of `query`, whose views have these `vectors`, with at least `min_score`.

    Of these, the ones as likely as `query.min_probability`: further down it needs more than
    `min_score`, which is that of the best hit.

    `checkpoint` is called between pieces of the work; what it raises ends it.

    Raises: GalleryError, ItemNotFoundError, InvalidParameterError, FilterError.
    """
    checkpoint()
    target = _target(gallery, query, vectors)
    options = SearchOptions(
        where=query.where,
        min_score=min_score,
        offset=query.offset,
        distinct=query.distinct,
        exclude=target.exclude,
        exact=query.exact,
    )
    if min_score == UNREACHABLE:
        groups: list[Group] | None = None if query.grouping is None else []
        payload = encode_results(shown, [], groups, match=False)
        return Found(payload, gallery.version, target.vector[0], options, None)
    asked = replace(options, checkpoint=checkpoint)  # not kept: it ends with this search
    ranked, groups = _search(gallery, query, target.vector, query.k, asked)
    hits = ranked
    if query.min_probability is not None:
        hits = shown.likely(hits, query.min_probability)
        groups = groups and shown.likely_groups(groups, query.min_probability)
    match = bool(hits or groups)
    if not match and query.offset:  # past the end of what matches?
        match = any(_search(gallery, query, target.vector, 1, replace(asked, offset=0)))
    payload = encode_results(shown, hits, groups, match=match)
    sample = ranked if groups is None else None
    return Found(payload, gallery.version, target.vector[0], options, sample)


def _search(
    gallery: Gallery, query: Query, vector: Embeddings, k: int, options: SearchOptions
) -> tuple[list[Hit], list[Group] | None]:
    if query.grouping is None:
        [hits] = gallery.search(vector, k, options)
        return hits, None
    [groups] = gallery.search_groups(vector, k, query.grouping, options)
    return [], groups


def _target(gallery: Gallery, query: Query, vectors: Sequence[NDArray[np.float32]]) -> _Target:
    positives = query.positives
    if query.like is not None:
        _check_generation(gallery, query.generation)
        positives = (gallery.item(query.like).key, *positives)
    if not positives and not query.negatives:
        if len(vectors) == 1:
            return _Target(np.ascontiguousarray(vectors[0][np.newaxis]), frozenset())
        return _Target(combined_query(np.stack(vectors), _NOTHING)[np.newaxis], frozenset())
    keys = [*positives, *query.negatives]
    stored = [entry.vector for entry in gallery.entries(keys)]
    liked = np.stack([*vectors, *stored[: len(positives)]])
    disliked = np.asarray(stored[len(positives) :], dtype=np.float32)
    exclude = frozenset(item.id for item in gallery.stored(keys).values())
    return _Target(combined_query(liked, disliked)[np.newaxis], exclude)


def _check_generation(gallery: Gallery, generation: str | None) -> None:
    if generation is not None and not gallery.generation.startswith(generation):
        raise ItemNotFoundError(
            f"This number is from version {generation[:_SHOWN_DIGITS]} of the gallery, which was "
            f"built again and is at version {gallery.generation[:_SHOWN_DIGITS]} now. "
            "Search again."
        )
