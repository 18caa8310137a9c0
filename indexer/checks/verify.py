"""Check a gallery: its files, that every item finds itself, that a search finds its neighbours."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from embedder.errors import ImageError, ItemNotFoundError, SourceError
from embedder.session import Embedder
from embedder.types import Embeddings, Hit
from indexer.checks.integrity import check_files
from indexer.checks.recall import Recall, measured_recall, own_recall
from indexer.folder.layout import GalleryFolder
from indexer.folder.manifest import read_manifest
from indexer.gallery import Gallery
from indexer.ingest.pictures import source_bytes
from indexer.live.ranking import check_search
from indexer.types import Entry, Item, Progress, SearchOptions

EXHAUSTIVE_UP_TO = 10_000
"""Larger galleries are sampled unless another number is asked for."""

_SAMPLE = 1_000
_CHUNK = 64
_SAME_SCORE = 1e-5  # two vectors of one image differ by rounding, on another device a little more
_SAME_IMAGE = 0.999


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """What is checked, and with what.

    sample: number of items; None: all, or 1,000 of many. image_root: where the images are now.
    queries: vectors (Q, D) to measure recall with, in place of stored ones. target_recall: in place
    of the one that the index was made for.
    """

    sample: int | None = None
    image_root: Path | None = None
    queries: Embeddings | None = None
    target_recall: float | None = None


class Problem(BaseModel):
    """An item that failed a check."""

    model_config = ConfigDict(frozen=True)

    key: str
    reason: str


class VerifyReport(BaseModel):
    """What was checked: `from_images` tells whether the images were embedded anew.

    `recall` is the part of the true 10 nearest neighbours that `recall_queries` searches found;
    None if there was nothing to find.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    size: int
    checked: int
    from_images: bool
    problems: tuple[Problem, ...]
    index: str
    recall: float | None
    recall_queries: int
    target_recall: float

    @property
    def is_good(self) -> bool:
        """No problems, and the recall that was asked for."""
        return not self.problems and (self.recall is None or self.recall >= self.target_recall)


def verify_gallery(
    path: Path | str,
    embedder: Embedder | None = None,
    settings: VerifySettings | None = None,
    on_progress: Progress | None = None,
) -> VerifyReport:
    """Check all files, that each item of a sample finds itself or an equal one first, and recall.

    With an `embedder` the images are read and embedded again, so the check covers the whole road
    from the file to the answer. Without, the stored vectors search for themselves: that says
    nothing of vectors that stand under the wrong items, or were made of other images.

    Raises: GalleryCorruptError for a damaged file; GalleryError if the gallery cannot be opened or
        belongs to another bundle; InvalidParameterError for queries that do not fit.
    """
    settings = settings or VerifySettings()
    if settings.queries is not None:  # before the work of hours
        dim = read_manifest(GalleryFolder(path).current()).dim
        check_search(1, SearchOptions(), dim, settings.queries)
    check_files(path)
    expected = None if embedder is None else embedder.bundle_id
    gallery = Gallery.open(path, expected_bundle_id=expected, image_root=settings.image_root)
    try:
        ids = sampled([item.id for item in gallery.items()], settings.sample)
        problems: list[Problem] = []
        checked = 0
        for start in range(0, len(ids), _CHUNK):
            chunk = _live(gallery, ids[start : start + _CHUNK])
            problems += _check(gallery, chunk, embedder)
            checked += len(chunk)
            if on_progress is not None:
                on_progress(len(ids[start : start + _CHUNK]))
        recall = _recall(gallery, ids, settings.queries)
        return _report(gallery, embedder, settings, checked, problems, recall)
    finally:
        gallery.close()


def sampled(ids: Sequence[int], sample: int | None = None) -> list[int]:
    """`sample` of the item numbers, the same ones each time; None: all, or 1,000 of many."""
    count = sample_size(len(ids), sample)
    chosen: list[int] = np.random.default_rng(0).choice(ids, count, replace=False).tolist()
    return sorted(chosen)


def sample_size(size: int, sample: int | None = None) -> int:
    """How many of `size` items are checked."""
    wanted = (size if size <= EXHAUSTIVE_UP_TO else _SAMPLE) if sample is None else sample
    return min(size, wanted)


def _live(gallery: Gallery, ids: Sequence[int]) -> list[tuple[Item, Entry]]:
    """Items and their vectors, without those that were removed or replaced meanwhile."""
    found = []
    for number in ids:
        with contextlib.suppress(ItemNotFoundError):
            item = gallery.item(number)
            [entry] = gallery.entries([item.key])
            if entry.sha256 == item.sha256:
                found.append((item, entry))
    return found


def _check(
    gallery: Gallery, stored: Sequence[tuple[Item, Entry]], embedder: Embedder | None
) -> list[Problem]:
    if embedder is None:
        return _self_search(gallery, stored, [entry.vector for _, entry in stored])
    tensors, readable, problems = [], [], []
    for item, entry in stored:
        try:
            tensors.append(embedder.preprocess(source_bytes(gallery.image_root, item)))
            readable.append((item, entry))
        except (OSError, SourceError, ImageError) as error:
            problems.append(Problem(key=item.key, reason=f"Its image cannot be used: {error}"))
    if readable:
        problems += _self_search(gallery, readable, list(embedder.embed(np.stack(tensors))))
    return problems


def _self_search(
    gallery: Gallery,
    stored: Sequence[tuple[Item, Entry]],
    queries: Sequence[NDArray[np.float32]],
) -> list[Problem]:
    if not stored:
        return []
    vectors = np.stack([entry.vector for _, entry in stored])
    own_scores = (np.stack(queries) * vectors).sum(axis=1).tolist()
    answers = gallery.search(np.stack(queries), k=1)
    problems = []
    for (item, _), query, own_score, hits in zip(stored, queries, own_scores, answers, strict=True):
        reason = _fault(gallery, item, query, own_score, hits)
        if reason is not None and own_score >= _SAME_IMAGE:
            # An approximate index may miss a few; only one that an exact search misses is wrong.
            [hits] = gallery.search(query[None], k=1, options=SearchOptions(exact=True))
            reason = _fault(gallery, item, query, own_score, hits)
        if reason is not None:
            problems.append(Problem(key=item.key, reason=reason))
    return problems


def _fault(
    gallery: Gallery,
    item: Item,
    query: NDArray[np.float32],
    own_score: float,
    hits: Sequence[Hit],
) -> str | None:
    if own_score < _SAME_IMAGE:
        return f"Its stored vector has cosine {own_score:.4f} to its image, expected 1."
    if not hits:
        return "It finds nothing."
    [best] = hits
    stored = _live(gallery, [best.id])
    if not stored:
        return None  # removed or replaced meanwhile
    [(found, entry)] = stored
    expected = float(query @ entry.vector)
    if abs(best.score - expected) > _SAME_SCORE:
        return (
            f"The index compares it with {best.key!r} as {best.score:.6f}, but the stored vectors "
            f"give {expected:.6f}. Make the index again: kinlens-index compact GALLERY --rebuild."
        )
    if abs(best.score - own_score) <= _SAME_SCORE or found.sha256 == item.sha256:
        return None  # itself, a copy, or one with an equal vector
    return f"It finds {best.key!r} ({best.score:.6f}) in place of itself ({own_score:.6f})."


def _recall(gallery: Gallery, ids: Sequence[int], queries: Embeddings | None) -> Recall:
    if queries is not None:
        return measured_recall(gallery, queries)
    own = _live(gallery, ids[:_SAMPLE])
    if not own:
        return Recall(1.0, 0, 0)
    vectors = np.stack([entry.vector for _, entry in own])
    return own_recall(gallery, [item.id for item, _ in own], vectors)


def _report(
    gallery: Gallery,
    embedder: Embedder | None,
    settings: VerifySettings,
    checked: int,
    problems: Sequence[Problem],
    recall: Recall,
) -> VerifyReport:
    facts = gallery.facts()
    segment = facts.segment
    made_for = 1.0 if segment is None else segment.target_recall
    return VerifyReport(
        name=facts.name,
        version=facts.version,
        size=facts.size,
        checked=checked,
        from_images=embedder is not None,
        problems=tuple(problems),
        index="" if segment is None else segment.kind,
        recall=recall.value if recall.k else None,
        recall_queries=recall.queries,
        target_recall=settings.target_recall or made_for,
    )
