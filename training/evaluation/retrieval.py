"""Recall at K and MAP@R: the same test for a torch network and for an ONNX file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from embedder.errors import DatasetError, EvaluationError
from training.evaluation.arrays import Labels, Vectors, check
from training.evaluation.ranking import Queries, Ranks, SortedGallery, rank

Duplicates = Literal["keep", "ignore"]
OnRows = Callable[[int], None]

DUPLICATE = 1e-5
"""Unit vectors whose score is at least 1 - DUPLICATE are the same picture."""

_CHUNK_ROWS = 1024
_CHUNK_COLUMNS = 2048
_NORM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Recall:
    """Recall at each K, in percent, over `queries`; `without_positive` queries were left out."""

    at: dict[int, float]
    queries: int
    without_positive: int

    def as_dict(self) -> dict[str, float]:
        """{"R@1": ..., ...}"""
        return {f"R@{k}": value for k, value in self.at.items()}


@dataclass(frozen=True)
class Retrieval:
    """Recall at each K and MAP@R, in percent, over `queries`; the others had no positive."""

    recall: dict[int, float]
    map_at_r: float
    queries: int
    without_positive: int

    def __post_init__(self) -> None:
        if self.queries < 1 or self.without_positive < 0:
            raise ValueError(f"{self.queries} queries, {self.without_positive} without positive.")
        if not all(0 <= value <= 100 for value in (*self.recall.values(), self.map_at_r)):
            raise ValueError(f"Not percentages: {self.recall}, {self.map_at_r}.")
        in_order = [self.recall[k] for k in sorted(self.recall)]
        if in_order != sorted(in_order):
            raise ValueError(f"Recall falls as K grows: {self.recall}.")

    def as_dict(self) -> dict[str, float]:
        """{"R@1": ..., ..., "MAP@R": ...}"""
        return {f"R@{k}": value for k, value in self.recall.items()} | {"MAP@R": self.map_at_r}


def recall_at(
    embeddings: Vectors,
    labels: Labels,
    ks: Sequence[int] = (1, 2, 4, 8),
    chunk_rows: int = _CHUNK_ROWS,
) -> Recall:
    """Recall at K by self-retrieval: `retrieval` without its MAP@R."""
    found = retrieval(embeddings, labels, ks=ks, chunk_rows=chunk_rows)
    return Recall(found.recall, found.queries, found.without_positive)


def retrieval(
    queries: Vectors,
    query_labels: Labels,
    gallery: Vectors | None = None,
    gallery_labels: Labels | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    duplicates: Duplicates = "keep",
    rows: int | None = None,
    chunk_rows: int = _CHUNK_ROWS,
    chunk_columns: int = _CHUNK_COLUMNS,
    on_rows: OnRows | None = None,
) -> Retrieval:
    r"""Recall at K and MAP@R of queries in a gallery, or of each image among all the others.

    A query with R positives in the gallery succeeds at K if one of them is among the K most similar
    images. With P(i) the precision of the i most similar ones,

    .. math:: \text{MAP@R} = \operatorname{mean}_{queries} \frac{1}{R}
        \sum_{i = 1}^{R} P(i) \, [\text{image } i \text{ is a positive}]

    **Ties** count against us: a negative ranks before a positive unless it is worse by more than
    1e-5, so that rounding decides nothing, not even for the same photograph in two classes.
    **Duplicates**: without a gallery, the query itself is left out by its number, never by its
    score. Under "keep", another copy of the same picture counts as any other image. Under "ignore",
    every gallery image whose score is at least 1 - 1e-5 is the query once more and is left out,
    whatever its label. A query without a positive is left out and counted.

    Memory beside the embeddings is a few blocks of chunk_rows x chunk_columns, whatever N and R: of
    very large classes, fewer queries are taken at a time.

    Args:
        queries: (N, D), unit norm.
        query_labels: (N,).
        gallery: (M, D), unit norm; None for self-retrieval among the queries.
        gallery_labels: (M,), with a gallery.
        ks: values of K; a K beyond the gallery is reached by all queries.
        duplicates: "keep" or "ignore".
        rows: only the first so many queries ask; in self-retrieval all remain in the gallery.
        chunk_rows: queries of a block of scores.
        chunk_columns: gallery images of a block of scores.
        on_rows: called with the number of queries that were just answered.

    Raises: DatasetError if no query has a positive; EvaluationError if an embedding is not finite
        or, under "ignore", has another norm than 1.

    References:
        A Metric Learning Reality Check (MAP@R), https://arxiv.org/abs/2003.08505
    """
    if min(*ks, chunk_rows, chunk_columns) < 1:
        raise ValueError(f"K and the sizes of a chunk start at 1, found {ks}, {chunk_rows}.")
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("A gallery and its labels go together.")
    check(queries, query_labels)
    if duplicates == "ignore":
        _check_norms(queries)
    asking = slice(0, rows)
    if gallery is None or gallery_labels is None:
        known = SortedGallery.sort(queries, query_labels, query_labels[asking])
        own = known.places()[asking]
    else:
        check(gallery, gallery_labels)
        if duplicates == "ignore":
            _check_norms(gallery)
        known = SortedGallery.sort(gallery, gallery_labels, query_labels[asking])
        own = np.full(len(queries[asking]), -1)
    chunks = _chunks(queries, query_labels[asking], own, known, chunk_rows, chunk_columns)
    limit = 1 - DUPLICATE if duplicates == "ignore" else np.inf
    answers = []
    for chunk in chunks:
        answers.append(rank(chunk, known, chunk_columns, limit))
        if on_rows is not None:
            on_rows(len(chunk.vectors))
    return _summary(answers, ks)


def _chunks(
    vectors: Vectors,
    labels: Labels,
    own: Labels,
    gallery: SortedGallery,
    rows: int,
    columns: int,
) -> Iterator[Queries]:
    """The queries in the order of their classes, so many at a time as memory allows."""
    order = np.argsort(labels, kind="stable")
    first, last = gallery.positives(labels[order])
    largest = int((last - first).max(initial=1))
    rows = max(1, min(rows, rows * columns // largest))
    for start in range(0, len(order), rows):
        chunk = slice(start, start + rows)
        yield Queries(
            torch.from_numpy(vectors[order[chunk]].astype(np.float32, copy=False)),
            torch.from_numpy(first[chunk]),
            torch.from_numpy(last[chunk]),
            torch.from_numpy(own[order[chunk]]),
        )


def _summary(answers: Sequence[Ranks], ks: Sequence[int]) -> Retrieval:
    best = torch.cat([answer.best for answer in answers]) if answers else torch.empty(0)
    answered = best >= 0
    if not answered.any():
        raise DatasetError(
            "No test image has another one of its class, so recall is not defined. "
            "Give test classes with at least 2 images each, not copies of one if duplicates are "
            "ignored, and a gallery that holds the classes of the queries."
        )
    precision = torch.cat([answer.precision for answer in answers])[answered]
    recall = {k: 100.0 * float((best[answered] < k).double().mean()) for k in ks}
    queries = len(precision)
    return Retrieval(recall, 100.0 * float(precision.mean()), queries, len(best) - queries)


def _check_norms(embeddings: Vectors) -> None:
    norms = np.sqrt(np.einsum("nd,nd->n", embeddings, embeddings))
    wrong = np.abs(norms - 1) > _NORM_TOLERANCE
    if wrong.any():
        raise EvaluationError(
            f"{int(wrong.sum()):,} of {len(norms):,} embeddings have another norm than 1, such as "
            f"{norms[wrong][0]:.3f}; copies are found by their cosine. Normalise them, or keep "
            "duplicates."
        )
