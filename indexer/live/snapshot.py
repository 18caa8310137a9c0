"""Searchable snapshots of a gallery: an index segment, and the rows that came after it.

An item has a row in the file of vectors, in the order of item ids. A snapshot marks the rows that
have an item in a state. An index finds those of the segment, which are the first ones; later rows
are compared one by one.

A snapshot is immutable. A change creates a new one that shares the unchanged parts, while running
searches keep the old one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from kinlens.embedder.errors import GalleryCorruptError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.bits import (
    Bits,
    bits_from,
    count_of,
    empty_bits,
    has_bits,
    numbers_in,
    put_bits,
)
from kinlens.indexer.catalog.earlier import StoredVectors, vectors_in_memory
from kinlens.indexer.catalog.read import CatalogView
from kinlens.indexer.catalog.schema import Base, State
from kinlens.indexer.columns.columns import Columns
from kinlens.indexer.index.copies import Copies, by_owner
from kinlens.indexer.index.faiss import SegmentIndex, range_search
from kinlens.indexer.index.index_types import Effort, full
from kinlens.indexer.index.segment import Segment
from kinlens.indexer.types import REBUILD, Ids, Scores, StoredRows

_OVERFETCH = 2  # extra items to fetch, as a multiple of the expected number of removed hits
_MAX_DROPPED = 0.25  # share of hidden items above which a search with a mask is faster
_TIE_OVERFETCH = 8  # factor by which more items are fetched until a tie at the end is complete
_ROUNDED = np.float32(2e-6)  # rounding differences between scores of the same two vectors
_NONE = empty_bits(0)
_ALL = Effort(0)  # compares all vectors


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows from `start` on that one index finds; positions are counted from there.

    copies: the positions with equal content.
    hidden: marks the `hidden_count` positions that a search must not return: of each content, it
        returns the first position as long as any of its items is there. The index does not have
        `unindexed` of them, but brute force compares with all.
    """

    index: SegmentIndex
    start: int = 0
    effort: Effort = _ALL
    copies: Copies | None = None
    hidden: Bits = field(default_factory=lambda: _NONE)
    hidden_count: int = 0
    unindexed: int = 0

    def hiding(self, hidden: Bits) -> "_Part":
        """This part with other hidden positions."""
        return replace(self, hidden=hidden, hidden_count=count_of(hidden, self.index.size))

    def nearest(
        self, queries: Embeddings, k: int, among: Bits | None, exact: bool, effort: int | None
    ) -> tuple[Scores, Ids]:
        """Scores and rows of the best contents for each query (Q, D); missing hits have row -1.

        among: bitmap of the rows to search; None for all that have an item.
        """
        chosen = self.effort if effort is None else Effort(effort, self.effort.k_factor)
        allowed = None if among is None else bits_from(among, self.start, self.index.size)
        if allowed is not None and self.copies is not None:
            allowed = self.copies.folded(allowed)
        elif allowed is None and self.hidden_count:
            few = self.hidden_count - self.unindexed <= _MAX_DROPPED * self.index.size
            if few and not exact:
                return self._rows(*self._overfetched(queries, k, chosen))
            allowed = ~self.hidden
        if exact:
            return self._rows(*self.index.exact(queries, k, allowed))
        return self._rows(*self.index.search(queries, k, chosen, allowed))

    def _rows(self, scores: Scores, positions: Ids) -> tuple[Scores, Ids]:
        return scores, np.where(positions < 0, -1, positions + self.start)

    def _overfetched(self, queries: Embeddings, k: int, effort: Effort) -> tuple[Scores, Ids]:
        """Over-fetch and drop hidden items: much faster than a FAISS search with a mask."""
        size, hidden = self.index.size, self.hidden_count - self.unindexed
        wanted = k + min(1 + int(_OVERFETCH * k * hidden / size), hidden)
        scores, positions = self.index.search(queries, wanted, effort)
        is_removed = has_bits(self.hidden, positions)
        is_removed |= positions < 0
        if not is_removed.any():
            return scores[:, :k], positions[:, :k]
        order = np.argsort(is_removed, axis=1, kind="stable")[:, :k]
        scores = np.where(is_removed, np.float32(-np.inf), scores)
        scores = np.take_along_axis(scores, order, axis=1)
        positions = np.take_along_axis(np.where(is_removed, -1, positions), order, axis=1)
        short = np.flatnonzero((positions < 0).any(axis=1))
        if len(short) and self.hidden_count < size:
            again = self.index.search(queries[short], k, effort, ~self.hidden)
            width = again[0].shape[1]
            scores[short, :width], positions[short, :width] = again
        return scores, positions

    def rows_like(self, firsts: Ids, rows: Bits, limit: int) -> tuple[Ids, Ids]:
        """The first `limit` rows of a bitmap with the contents that begin with these rows (C,).

        Returns (the index in `firsts` (N,); the row (N,), ascending for each).
        """
        if self.copies is None:
            return np.arange(len(firsts)), firsts
        contents = self.copies.content_of(firsts - self.start)
        alone, copied = np.flatnonzero(contents < 0), np.flatnonzero(contents >= 0)
        bits = bits_from(rows, self.start, self.index.size)
        owners, positions = self.copies.rows_of(contents[copied], bits, limit)
        return by_owner([(alone, firsts[alone]), (copied[owners], positions + self.start)])


class _Contents:
    """The contents of the rows after a segment. All snapshots share it, since it only grows.

    copies: (the first position with the same content, position) of each that has a copy.
    """

    def __init__(self) -> None:
        self.copies: list[tuple[int, int]] = []
        self._firsts: dict[int, int] = {}
        self._copied: set[int] = set()
        self._size = 0

    def add(self, positions: Ids, vectors: Embeddings, images: Sequence[bytes]) -> None:
        """Add positions with their vectors (N, D) and the hashes of their images."""
        for position, vector, image in zip(positions.tolist(), vectors, images, strict=True):
            if position < self._size:
                continue  # an attempt to load the state has failed after this
            first = self._firsts.setdefault(hash(image + vector.tobytes()), position)
            if first != position:
                if first not in self._copied:
                    self._copied.add(first)
                    self.copies.append((first, first))
                self.copies.append((first, position))
            self._size = position + 1


@dataclass(frozen=True)
class Snapshot:
    """The items of a state: `live` marks the rows of its `size` items in the file of vectors.

    segment: finds the first rows; None if there were no items. That of an earlier version, whose
        positions are no rows, finds none.
    copied: how many of the copies in `contents` the state has.
    appended: the vectors (N, D) of the last rows, which `file` does not have: a compaction has
        rewritten it before they were added. None if it has all.
    known: the attributes of this state or of an earlier one: see `SnapshotKeeper.columns_of`.
    """

    state: State
    base: Base
    file: StoredVectors
    segment: Segment | None
    live: Bits
    row_count: int
    size: int
    contents: _Contents
    copied: int = 0
    indexed: _Part | None = None
    appended: StoredRows | None = None
    known: "Known" = field(default_factory=lambda: Known())

    @classmethod
    def load(cls, view: CatalogView, state: State, segment: Segment | None) -> "Snapshot":
        """Load the snapshot of a state: its open segment and all later changes."""
        file, since, live = view.file or vectors_in_memory(view), state.segment_seq, _NONE
        indexed, start = None, 0
        if segment is not None and segment.index is not None:
            gone, copies, start = segment.removed, segment.copies, segment.index.size
            live = ~gone
            live[-1] &= 0xFF >> -start % 8
            indexed = _Part(segment.index, 0, segment.tuned, copies, unindexed=segment.unindexed)
            indexed = indexed.hiding(gone if copies is None else ~copies.folded(~gone))
        elif segment is not None:
            since = 0
        size, at = count_of(live, start), state._replace(seq=since)
        loaded = cls(at, state.base, file, segment, live, start, size, _Contents(), 0, indexed)
        return loaded.advanced(view, state)

    def advanced(self, view: CatalogView, state: State) -> "Snapshot":
        """The snapshot of a later state with the same segment, even if a newer segment exists."""
        row_ids, start = self.file.row_ids, self.segment_size
        ids, vectors, images = view.added_since(self.state.seq)
        added, removed = row_ids.rows_of(ids), row_ids.rows_of(view.removed_since(self.state.seq))
        removed = removed[removed >= 0]
        count = max(self.row_count, row_ids.rows_up_to(view.last_given()))
        live = np.concatenate([self.live, np.zeros((count + 7) // 8 - len(self.live), np.uint8)])
        size = self.size + len(added) - int(has_bits(live, removed).sum())
        put_bits(live, added, True)
        put_bits(live, removed, False)
        self.contents.add(added - start, vectors, images)
        appended = self.appended
        if state.vectors != self.base[2] and count > self.row_count:
            new = np.zeros((count - self.row_count, view.dim), self._stored.dtype)
            new[added - self.row_count] = vectors
            appended = new if appended is None else np.concatenate([appended, new])
        later = replace(
            self,
            state=state,
            live=live,
            row_count=count,
            size=size,
            copied=len(self.contents.copies),
            appended=appended,
            known=Known(self.known.columns),
        )
        removed = removed[removed < start]
        if self.indexed is None or not len(removed):
            return later
        hidden, copies = self.indexed.hidden.copy(), self.indexed.copies
        put_bits(hidden, removed if copies is None else copies.hidden_by(removed, ~live), True)
        return replace(later, indexed=self.indexed.hiding(hidden))

    @property
    def segment_size(self) -> int:
        """Number of rows that the segment finds, including those of removed items."""
        return 0 if self.indexed is None else self.indexed.index.size

    @property
    def later_count(self) -> int:
        """Number of items that the segment does not find."""
        return self.size - count_of(self.live, self.segment_size)

    @property
    def _stored(self) -> StoredRows:
        """The rows that the file has."""
        return self.file.rows(self.row_count - (0 if self.appended is None else len(self.appended)))

    @cached_property
    def _parts(self) -> list[_Part]:
        """The rows of the segment, and all later ones."""
        parts, start = [] if self.indexed is None else [self.indexed], self.segment_size
        if self.row_count > start:
            copies = None
            bits = bits_from(self.live, start, self.row_count - start)
            if self.copied:
                pairs = np.array(self.contents.copies[: self.copied], np.int64).T
                copies = Copies.from_array(pairs, self.row_count - start)
                bits = copies.folded(bits)
            rows = self._stored[start:]
            if self.appended is not None:
                rows = np.concatenate([rows, self.appended])
            index = SegmentIndex("flat", rows, None)
            parts.append(_Part(index, start, copies=copies).hiding(~bits))
        return parts

    def rows_of(self, ids: Ids) -> Ids:
        """The row of each of these items. Raises: GalleryCorruptError if one is not there."""
        rows = self.file.row_ids.rows_of(ids)
        if not ((rows >= 0) & (rows < self.row_count)).all() or not has_bits(self.live, rows).all():
            raise GalleryCorruptError(
                f"An item of the catalogue is missing from the index. {REBUILD}"
            )
        return rows

    def bits_of(self, rows: Ids) -> Bits:
        """The bitmap of these rows."""
        bits = empty_bits(self.row_count)
        put_bits(bits, rows, True)
        return bits

    def vectors(self, rows: Ids) -> Embeddings:
        """The vectors (N, D) of these rows."""
        stored, appended = self._stored, self.appended
        if appended is None:
            return full(stored[rows])
        vectors = np.empty((len(rows), appended.shape[1]), np.float32)
        is_stored = rows < len(stored)
        vectors[is_stored] = stored[rows[is_stored]]
        vectors[~is_stored] = appended[rows[~is_stored] - len(stored)]
        return vectors

    def range_search(self, query: Embeddings, least: float, among: Bits | None) -> Ids:
        """The rows of all items with a score of at least `least` for the query (1, D).

        Compares the query with every item of `among`; None for all.
        """
        allowed = self.live if among is None else among
        found = range_search(self._stored, query, least, allowed)
        if self.appended is None:
            return found
        start = self.row_count - len(self.appended)
        later = bits_from(allowed, start, len(self.appended))
        return np.append(found, range_search(self.appended, query, least, later) + start)

    def nearest(
        self,
        queries: Embeddings,
        k: int,
        among: Bits | None = None,
        *,
        exact: bool = False,
        effort: int | None = None,
        copies: int | None = None,
    ) -> tuple[Scores, Ids]:
        """Scores and ids of the best items for each query (Q, D), best first, ties by id.

        Both have the shape (Q, at most k); missing hits have id -1.

        among: bitmap of the rows to search, which have an item; None for all of them.
        effort: efSearch or nprobe; None for the tuned one.
        copies: at most this number of items with equal content, those with the lowest ids; None
            for all.
        """
        k = min(k, self.size)
        if k < 1:
            return np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)

        n, copies = min(k + 1, self.size), copies or k
        scores, rows = self._nearest(queries, k, n, among, exact, effort, copies)
        return scores, np.where(rows < 0, -1, self.file.row_ids.of(rows))

    def _nearest(
        self,
        queries: Embeddings,
        k: int,
        n: int,
        among: Bits | None,
        exact: bool,
        effort: int | None,
        copies: int,
    ) -> tuple[Scores, Ids]:
        """Scores and rows of the best `k` items, from the best `n` contents, or from more."""
        hits = [part.nearest(queries, n, among, exact, effort) for part in self._parts]
        scores, rows = hits[0]
        if len(hits) > 1:
            scores, rows = (np.concatenate(one, axis=1) for one in zip(*hits, strict=True))
            scores, rows = _sorted(scores, rows, n)
        if len(queries) > 1:
            scores, rows = self._with_exact_ties(queries, scores, rows)
        lowest, furthest = scores[:, -1], rows[:, n - 1 :]
        if any(part.copies is not None for part in self._parts):
            scores, rows = self._with_copies(scores, rows, k, among, copies)
        scores, rows = scores[:, :k], rows[:, :k]
        # Contents that were not found may have the score of the last hit and lower ids.
        is_unsure = scores[:, -1] <= lowest
        if n < self.size and is_unsure.any():
            unsure = np.flatnonzero(is_unsure & (furthest >= 0).any(axis=1))
            n = min(_TIE_OVERFETCH * n, self.size)
            if len(unsure):
                again = self._nearest(queries[unsure], k, n, among, exact, effort, copies)
                scores[unsure], rows[unsure] = again
        return scores, rows

    def _with_copies(
        self, best: Scores, firsts: Ids, k: int, among: Bits | None, limit: int
    ) -> tuple[Scores, Ids]:
        """The `k` best rows of the contents that begin with `firsts`, at most `limit` of each."""
        is_hit = firsts >= 0
        content = np.zeros(is_hit.shape, np.int64)
        distinct, content[is_hit] = np.unique(firsts[is_hit], return_inverse=True)
        owners, rows = self._rows_like(distinct, self.live if among is None else among, limit)
        if np.array_equal(rows, distinct):
            return best, firsts
        counts = np.bincount(owners, minlength=len(distinct))
        sizes = np.where(is_hit, counts[content], 0)
        # Contents whose items follow the k-th item are omitted, unless their score ties with it.
        is_full = np.cumsum(sizes, axis=1) >= k
        last = np.take_along_axis(best, is_full.argmax(axis=1)[:, None], axis=1)
        is_kept = is_hit & (~is_full.any(axis=1, keepdims=True) | (best >= last))
        sizes, content = sizes[is_kept], content[is_kept]
        queries = np.repeat(np.nonzero(is_kept)[0], sizes)
        given = np.repeat(best[is_kept], sizes)
        found = rows[numbers_in((np.cumsum(counts) - counts)[content], sizes)]
        order = np.lexsort((found, -given, queries))
        queries, given, found = queries[order], given[order], found[order]
        places = np.arange(len(order)) - np.searchsorted(queries, queries)
        shown = places < k
        scores = np.full((len(is_hit), k), -1, np.float32)
        hits = np.full(scores.shape, -1, np.int64)
        scores[queries[shown], places[shown]] = given[shown]
        hits[queries[shown], places[shown]] = found[shown]
        return scores, hits

    def _rows_like(self, firsts: Ids, rows: Bits, limit: int) -> tuple[Ids, Ids]:
        """As `_Part.rows_like`, for all parts; `firsts` are ascending, as are the indices."""
        cut, found = int(np.searchsorted(firsts, self.segment_size)), []
        for part in self._parts:
            own = slice(cut, None) if part.start == self.segment_size else slice(cut)
            owners, positions = part.rows_like(firsts[own], rows, limit)
            found.append((owners + (own.start or 0), positions))
        return by_owner(found)

    def _with_exact_ties(
        self, queries: Embeddings, scores: Scores, rows: Ids
    ) -> tuple[Scores, Ids]:
        """Recompute nearly equal scores, so that equal vectors have equal scores.

        For batches of queries, FAISS rounds the score of a pair differently in a block of vectors,
        and in a list of candidates.
        """
        with np.errstate(invalid="ignore"):  # the gap between two missing hits is NaN
            gaps = scores[:, :-1] - scores[:, 1:]
        for query in np.flatnonzero(((gaps > 0) & (gaps < _ROUNDED)).any(axis=1)).tolist():
            found = rows[query][rows[query] >= 0]
            exact = np.einsum("nd,d->n", self.vectors(found), queries[query])
            order = np.lexsort((found, -exact))
            scores[query, : len(order)] = np.clip(exact[order], -1, 1)
            rows[query, : len(order)] = found[order]
        return scores, rows


@dataclass(slots=True)
class Known:
    """The newest columns that are known for a snapshot; None if no filter needed any."""

    columns: Columns | None = None


def _sorted(scores: Scores, ids: Ids, k: int) -> tuple[Scores, Ids]:
    """Sort hits by descending score, ties by id, missing hits last."""
    if np.count_nonzero(scores[:, 1:] >= scores[:, :-1]):
        scores = np.where(ids < 0, np.float32(-np.inf), scores)
        order = np.lexsort((ids, -scores), axis=1)
        scores = np.take_along_axis(scores, order, axis=1)
        ids = np.take_along_axis(ids, order, axis=1)
    return scores[:, :k], ids[:, :k]
