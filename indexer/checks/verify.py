"""Check a gallery: files, whether items find themselves, and the recall of searches."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from kinlens.embedder.errors import GalleryCorruptError, ImageError, SourceError
from kinlens.embedder.session import Embedder, fitted
from kinlens.embedder.types import SHORT, Embeddings
from kinlens.indexer.addresses import ImageRoot
from kinlens.indexer.catalog.database import catalog_view
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.columns.checkpoint import load_columns
from kinlens.indexer.entries import Item, normalised, norms_of
from kinlens.indexer.folder.layout import GalleryFolder
from kinlens.indexer.folder.manifest import read_manifest
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.images import source_bytes
from kinlens.indexer.live.compaction import CATALOG, with_state
from kinlens.indexer.live.keeper import open_segment
from kinlens.indexer.live.ranking import check_search
from kinlens.indexer.types import REBUILD, SAME_SCORE, Ids, Progress, Scores, SearchOptions
from kinlens.reports import Report
from kinlens.values import values_in

_K = 10  # neighbours with which recall is measured

_EXACT = SearchOptions(exact=True)

EXHAUSTIVE_UP_TO = 10_000
"""Up to this size all items are checked by default; of larger galleries a sample is."""

_SAMPLE = 1_000
CHUNK = 4_096
"""Items per batch of searches."""

_IMAGES = 64  # per batch of the embedder
_SAME_IMAGE = 0.999
_SHOWN = 10  # problems in the text of a report


def check_files(path: Path | str) -> None:
    """Check all hashes of the index, and the integrity of the catalogue.

    Raises: GalleryCorruptError.
    """
    generation = GalleryFolder(path).current()

    def check(view: CatalogView, segment: Path | None) -> None:
        view.check()
        if segment is not None:
            open_segment(segment, "cpu", verify_hashes=True)
            _check_columns(generation, view)

    with_state(generation, check)


def _check_columns(generation: Path, view: CatalogView) -> None:
    """Compare the stored attribute columns with the catalogue."""
    columns = load_columns(generation, view)
    for ids, attributes in view.attributes():
        rows = columns.row_ids.rows_of(ids)
        for name, column in columns.columns.items():
            found = column.values_at(rows)
            for number, some, values in zip(ids.tolist(), attributes, found, strict=True):
                if {*values} != {*values_in(some.get(name))}:
                    raise GalleryCorruptError(
                        f"The column {name!r} of the index has {values!r:.80} for item {number}, "
                        f"which has {some.get(name)!r:.80}. {REBUILD}"
                    )
        for name in {name for some in attributes for name in some} - columns.columns.keys():
            raise GalleryCorruptError(f"The index has no column {name!r}. {REBUILD}")


def size_of(path: Path | str) -> int:
    """Number of items, read without opening the index. Raises: GalleryError."""
    with catalog_view(GalleryFolder(path).current() / CATALOG) as view:
        return view.state().size


def measured_recall(
    gallery: Gallery, queries: Embeddings, own: Sequence[int] | None = None
) -> float | None:
    """Fraction of the true 10 nearest neighbours of `queries` (Q, D) that a search finds; None if
    there are none.

    own: the item of each query, which does not count; None if they belong to no items.

    Raises: InvalidParameterError.
    """
    truth, found = (_scores(gallery, queries, own, options) for options in (_EXACT, None))
    if not truth.size:
        return None
    worst = np.where(np.isfinite(truth), truth, np.inf).min(axis=1, keepdims=True)
    hits = int(((found >= worst - SAME_SCORE) & np.isfinite(found)).sum())
    return min(1.0, hits / int(np.isfinite(truth).sum()))


def _scores(
    gallery: Gallery, queries: Embeddings, own: Sequence[int] | None, options: SearchOptions | None
) -> Scores:
    """Scores (Q, k) of other items. If an item did not find itself, its worst hit is dropped."""
    if own is None:
        return gallery.nearest(queries, _K, options)[0]
    scores, ids = gallery.nearest(queries, _K + 1, options)
    others = np.where((ids == np.array(own)[:, None]) | (ids < 0), -np.inf, scores)
    return -np.sort(-others, axis=1)[:, :-1]


class Problem(BaseModel, frozen=True):
    """An item that failed a check."""

    key: str
    reason: str


class VerifyReport(Report, BaseModel, frozen=True):
    """Result of a check.

    Attributes:
        from_images: whether the images were embedded again.
        recall: fraction of the true 10 nearest neighbours that `recall_queries` searches found;
            None if there were no neighbours.
    """

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
        """Whether there are no problems and recall reaches the target."""
        return not self.problems and (self.recall is None or self.recall >= self.target_recall)

    def lines(self) -> Iterator[str]:
        """The first problems, and the result."""
        for problem in self.problems[:_SHOWN]:
            yield f"{problem.key}: {problem.reason}"
        yield (
            f"Gallery {self.name}, version {self.version[:SHORT]}: files are intact, "
            f"{self.checked - len(self.problems):,} of {self.checked:,} checked items "
            f"({self.size:,} in all) find themselves."
        )
        if self.recall is not None:
            yield (
                f"recall@10 {self.recall:.4f} of {self.recall_queries:,} queries, "
                f"target {self.target_recall} (index {self.index or 'none'})."
            )


def verify_gallery(
    path: Path | str,
    embedder: Embedder | None = None,
    *,
    sample: int | None = None,
    image_root: ImageRoot | str | None = None,
    queries: Embeddings | None = None,
    target_recall: float | None = None,
    on_progress: Progress = lambda _: None,
) -> VerifyReport:
    """Check all files, whether each item of a sample finds itself or an equal item, and recall.

    With an `embedder` the images are read and embedded again, so the check covers the whole path
    from the file to the result. Otherwise the stored vectors are the queries, which does not detect
    vectors that belong to other items or images.

    Args:
        sample: number of items; None for all, or 1,000 of a large gallery.
        image_root: current folder or address of the images; None for that of the gallery.
        queries: vectors (Q, D) to measure recall with; None for stored vectors.
        target_recall: None for the target of the index.

    Raises: GalleryCorruptError for a damaged file; GalleryError if the gallery cannot be opened or
        belongs to another bundle; InvalidParameterError for queries of the wrong shape.
    """
    if queries is not None:  # fail before the work, which may take hours
        dim = read_manifest(GalleryFolder(path).current()).dim
        check_search(1, SearchOptions(), dim, queries)
    check_files(path)
    expected = None if embedder is None else embedder.bundle_id
    with contextlib.closing(
        Gallery.open(path, expected_bundle_id=expected, image_root=image_root)
    ) as gallery:
        if embedder is not None:
            embedder = fitted(gallery, embedder)
        ids = sampled(gallery.ids(), sample)
        problems: list[Problem] = []
        checked, own = 0, None
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK].tolist()
            items, vectors = gallery.items_at(chunk)
            problems += _check(gallery, items, vectors, embedder)
            checked += len(items)
            on_progress(len(chunk))
        if queries is None:
            items, queries = gallery.items_at(ids[:_SAMPLE].tolist())
            own = [item.id for item in items]
        recall, facts = measured_recall(gallery, queries, own), gallery.facts()
    segment = facts.segment
    return VerifyReport(
        name=facts.name,
        version=facts.version,
        size=facts.size,
        checked=checked,
        from_images=embedder is not None,
        problems=tuple(problems),
        index="" if segment is None else segment.kind,
        recall=recall,
        recall_queries=len(queries),
        target_recall=target_recall or (1.0 if segment is None else segment.target_recall),
    )


def sampled(ids: Ids, sample: int | None = None) -> Ids:
    """A fixed sample of item ids; `sample` = None takes all, or 1,000 of a large gallery."""
    count = sample_size(len(ids), sample)
    return np.sort(np.random.default_rng(0).choice(ids, count, replace=False))


def sample_size(size: int, sample: int | None = None) -> int:
    """The number of items to check of `size` items."""
    wanted = (size if size <= EXHAUSTIVE_UP_TO else _SAMPLE) if sample is None else sample
    return min(size, wanted)


def _check(
    gallery: Gallery, items: Sequence[Item], vectors: Embeddings, embedder: Embedder | None
) -> list[Problem]:
    if embedder is None:
        return _self_search(gallery, items, vectors, vectors)
    tensors, readable, problems = [], [], []
    for row, item in enumerate(items):
        try:
            tensors.append(embedder.preprocess(source_bytes(gallery.image_root, item)))
            readable.append(row)
        except (OSError, SourceError, ImageError) as error:
            problems.append(Problem(key=item.key, reason=f"Its image cannot be used: {error}"))
    for start in range(0, len(readable), _IMAGES):
        rows = readable[start : start + _IMAGES]
        queries = embedder.embed(np.stack(tensors[start : start + _IMAGES]))
        problems += _self_search(gallery, [items[row] for row in rows], vectors[rows], queries)
    return problems


def _self_search(
    gallery: Gallery, items: Sequence[Item], vectors: Embeddings, queries: Embeddings
) -> list[Problem]:
    """Search for each item (N) with its query (N, D) and compare with the stored `vectors` (N, D).

    Returns the problems that were found.
    """
    queries = normalised(queries, norms_of(queries))  # as in a search
    own_scores = (queries * vectors).sum(axis=1)
    faults = {
        row: f"Its stored vector has cosine {own_scores[row]:.4f} to its image, expected 1."
        for row in np.flatnonzero(own_scores < _SAME_IMAGE).tolist()
    }
    rows = [row for row in range(len(items)) if row not in faults]
    # An approximate index may miss a few items: only misses of an exact search are problems.
    for exact in (False, True):
        found = _not_first(
            gallery, [items[n] for n in rows], queries[rows], own_scores[rows], exact
        )
        rows, reasons = [rows[n] for n in found], [*found.values()]
    faults |= dict(zip(rows, reasons, strict=True))
    return [Problem(key=items[row].key, reason=faults[row]) for row in sorted(faults)]


def _not_first(
    gallery: Gallery,
    items: Sequence[Item],
    queries: Embeddings,
    own_scores: NDArray[np.float32],
    exact: bool,
) -> dict[int, str]:
    """The rows of items (N) that a search for their query (N, D) does not find first, and why."""
    if not items:
        return {}
    answers = gallery.search(queries, 1, SearchOptions(exact=exact))
    best, vectors = gallery.items_at({hits[0].id for hits in answers if hits})
    stored = {item.id: (item, vector) for item, vector in zip(best, vectors, strict=True)}
    faults = {}
    for row, (item, hits) in enumerate(zip(items, answers, strict=True)):
        if not hits:
            faults[row] = "Its search finds nothing."
        elif hits[0].id in stored:  # otherwise it was removed or replaced since the search
            score, own_score = hits[0].score, float(own_scores[row])
            found, vector = stored[hits[0].id]
            expected = min(1.0, float(queries[row] @ vector))
            if abs(score - expected) > SAME_SCORE:
                faults[row] = (
                    f"The index gives it the score {score:.6f} with {found.key!r}, but the stored "
                    f"vectors give {expected:.6f}. {REBUILD}"
                )
            elif abs(score - own_score) > SAME_SCORE and found.sha256 != item.sha256:
                # not itself, a copy, or an item with an equal vector
                faults[row] = (
                    f"Its search finds {found.key!r} ({score:.6f}) instead of itself "
                    f"({own_score:.6f})."
                )
    return faults
