"""Check a gallery: files against their hashes, and every item finds itself."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from embedder.errors import ImageError, SourceError
from embedder.session import Embedder
from embedder.types import Embeddings
from indexer.catalog import Item
from indexer.embed import Progress
from indexer.gallery import Gallery

EXHAUSTIVE_UP_TO = 10_000
"""Larger galleries are sampled unless another number is asked for."""

_SAMPLE = 1_000
_CHUNK = 64
_SAME_SCORE = 1e-5  # two vectors of one image differ by rounding, on another device a little more
_SAME_IMAGE = 0.999


class Problem(BaseModel):
    """An item that failed a check."""

    model_config = ConfigDict(frozen=True)

    key: str
    reason: str


class VerifyReport(BaseModel):
    """What was checked: `from_images` tells whether the images were embedded anew."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    size: int
    checked: int
    from_images: bool
    problems: tuple[Problem, ...]


def verify_gallery(
    path: Path | str,
    embedder: Embedder | None = None,
    sample: int | None = None,
    image_root: Path | None = None,
    on_progress: Progress | None = None,
) -> VerifyReport:
    """Check all hashes, then that each of `sample` items finds itself or an equal one first.

    With an `embedder` the images are read and embedded again, so the check covers the whole road
    from the file to the answer. Without, the stored vectors search for themselves: that says
    nothing of vectors that stand under the wrong items, or were made of other images.

    Raises: GalleryError if the gallery cannot be opened or belongs to another bundle.
    """
    expected = None if embedder is None else embedder.bundle_id
    gallery = Gallery.open(path, expected_bundle_id=expected, image_root=image_root)
    try:
        ids = sampled_ids(gallery.size, sample)
        problems: list[Problem] = []
        for start in range(0, len(ids), _CHUNK):
            chunk = [gallery.item(number) for number in ids[start : start + _CHUNK]]
            problems += _check(gallery, chunk, embedder)
            if on_progress is not None:
                on_progress(len(chunk))
    finally:
        gallery.close()
    return VerifyReport(
        name=gallery.name,
        version=gallery.version,
        size=gallery.size,
        checked=len(ids),
        from_images=embedder is not None,
        problems=tuple(problems),
    )


def sampled_ids(size: int, sample: int | None = None) -> list[int]:
    """`sample` of `size` item numbers, the same ones each time; None: all, or 1,000 of many."""
    count = (size if size <= EXHAUSTIVE_UP_TO else _SAMPLE) if sample is None else sample
    if count >= size:
        return list(range(size))
    chosen: list[int] = np.random.default_rng(0).choice(size, count, replace=False).tolist()
    return sorted(chosen)


def _check(gallery: Gallery, items: Sequence[Item], embedder: Embedder | None) -> list[Problem]:
    if embedder is None:
        queries = gallery.vectors([item.id for item in items])
        return _self_search(gallery, items, queries)
    tensors, readable, problems = [], [], []
    for item in items:
        try:
            tensors.append(embedder.preprocess(gallery.source_bytes(item)))
            readable.append(item)
        except (OSError, SourceError, ImageError) as error:
            problems.append(Problem(key=item.key, reason=f"Its image cannot be used: {error}"))
    if readable:
        problems += _self_search(gallery, readable, embedder.embed(np.stack(tensors)))
    return problems


def _self_search(gallery: Gallery, items: Sequence[Item], queries: Embeddings) -> list[Problem]:
    own_scores = (queries * gallery.vectors([item.id for item in items])).sum(axis=1)
    problems = []
    answers = gallery.search(queries, k=1)
    for item, own_score, [best] in zip(items, own_scores.tolist(), answers, strict=True):
        is_same = item.id == best.id or gallery.item(best.id).sha256 == item.sha256
        if own_score < _SAME_IMAGE:
            reason = f"Its stored vector has cosine {own_score:.4f} to its image, expected 1."
        elif not is_same and own_score < best.score - _SAME_SCORE:
            reason = f"It finds {best.key!r} ({best.score:.6f}) before itself ({own_score:.6f})."
        else:
            continue
        problems.append(Problem(key=item.key, reason=reason))
    return problems
