"""A gallery on this machine, opened for reading: nothing here changes it."""

import hashlib
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from embedder.types import Embeddings, Hit, ItemId
from indexer.contents import GalleryContents
from indexer.facts import GalleryFacts
from indexer.ingest.pictures import ItemImage, item_image
from indexer.live import search as searching
from indexer.live.compaction import due
from indexer.live.ranking import check_options, check_search
from indexer.live.state import Reading
from indexer.opening import Opened, opened
from indexer.types import Group, Grouping, Ids, Scores, SearchOptions

_DEFAULTS = SearchOptions()


class GalleryReader(GalleryContents):
    """One generation of a gallery, searched while others change it. Thread safe.

    Item numbers are never given to another content, so they hold as long as the generation.
    """

    def __init__(self, parts: Opened, image_root: Path | None) -> None:
        super().__init__(parts)
        self._folder = parts.folder
        self._image_root = image_root or Path(parts.manifest.source_root)
        self._close = weakref.finalize(self, parts.close)

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        expected_bundle_id: str | None = None,
        image_root: Path | None = None,
        device: str = "cpu",
        verify_hashes: bool | None = None,
    ) -> Self:
        """Open the current generation of the gallery in folder `path`.

        `image_root` replaces the recorded folder of the images. Hashes of the segment are checked
        if `verify_hashes`, never if it is False; by default those of small files, since all others
        would take longer than to open. A segment that is damaged is made again from the catalogue,
        if the gallery can be written.

        Raises: GalleryNotFoundError, GalleryCorruptError, BundleMismatchError, ProviderError.
        """
        return cls(opened(path, expected_bundle_id, device, verify_hashes), image_root)

    @property
    def name(self) -> str:
        """The name in addresses."""
        return self.manifest.name

    @property
    def generation(self) -> str:
        """The name of this generation: 12 hex digits that a rebuild changes."""
        return self.manifest.generation

    @property
    def version(self) -> str:
        """sha256 (hex) that changes with every change."""
        with self._reading() as reading:
            return self._version_at(reading.state.seq)

    @property
    def bundle_id(self) -> str:
        """The bundle that made the vectors."""
        return self.manifest.bundle_id

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.manifest.dim

    @property
    def size(self) -> int:
        """Number of items."""
        with self._reading() as reading:
            return reading.state.size

    @property
    def created_at(self) -> str:
        """When this generation was built: ISO 8601, UTC."""
        return self.manifest.created_at

    @property
    def image_root(self) -> Path:
        """The folder that the images are read from; it may be missing."""
        return self._image_root

    def facts(self) -> GalleryFacts:
        """What is in the gallery now."""
        with self._reading() as reading:
            snapshot, state = reading.snapshot, reading.state
            segment = None if snapshot.segment is None else snapshot.segment.manifest
            known = self.manifest.model_dump(
                include={"name", "bundle_id", "dim", "created_at", "source", "source_root"}
            )
            return GalleryFacts(
                **known,
                version=self._version_at(state.seq),
                generation=self.generation,
                size=state.size,
                delta=snapshot.delta.size,
                tombstones=snapshot.dead_count,
                compaction_due=compaction_due(reading),
                segment=segment,
            )

    def nearest(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> tuple[Scores, Ids]:
        """Scores and item numbers of the best, shape (Q, at most k); number -1 where fewer.

        Without the rows of the items, so `where`, `exact` and `effort` alone of the options count.
        Raises: InvalidParameterError, FilterError.
        """
        options = options or _DEFAULTS
        queries = check_search(k, options, self.dim, queries)
        if options.where is not None:
            with self._reading() as reading:
                return searching.nearest(reading, queries, k, options)
        snapshot = self._states.newest()
        return snapshot.nearest(queries, k, exact=options.exact, effort=options.effort)

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]:
        """For each query (Q, D) its `k` best items: best first, equal scores by number.

        Raises: InvalidParameterError, FilterError, GalleryCorruptError.
        """
        options = options or _DEFAULTS
        queries = check_search(k, options, self.dim, queries)
        with self._reading() as reading:
            return searching.search(reading, queries, k, options)

    def search_groups(
        self,
        queries: Embeddings,
        k: int,
        grouping: Grouping,
        options: SearchOptions | None = None,
    ) -> list[list[Group]]:
        """For each query its `k` best groups, exactly k if there are as many.

        Raises: as `search`.
        """
        options = options or _DEFAULTS
        queries = check_search(k, options, self.dim, queries)
        with self._reading() as reading:
            return searching.search_groups(reading, queries, k, grouping, options)

    def search_like(
        self,
        liked: Sequence[str],
        disliked: Sequence[str],
        k: int,
        options: SearchOptions | None = None,
    ) -> list[Hit]:
        """The `k` items most like the items with keys `liked` and least like `disliked`, without
        these. Raises: ItemNotFoundError, InvalidParameterError, FilterError.
        """
        options = options or _DEFAULTS
        check_options(k, options)
        with self._reading() as reading:
            return searching.search_like(reading, liked, disliked, k, options)

    def image(self, item_id: ItemId) -> ItemImage:
        """The indexed bytes of an item, read from the image root; BMP and TIFF become JPEG.

        Raises: ItemNotFoundError for an unknown number, or if the file is gone, was changed or lies
            outside the image root; GalleryCorruptError if it cannot be read.
        """
        return item_image(self.image_root, self.item(item_id))

    def close(self) -> None:
        """Let go of the files; the gallery cannot be used afterwards."""
        self._close()

    def _version_at(self, seq: int) -> str:
        return hashlib.sha256(f"{self.manifest.uid}:{seq}".encode()).hexdigest()


def compaction_due(reading: Reading) -> str | None:
    """Why a compaction is due in this state, or None."""
    snapshot = reading.snapshot
    size = 0 if snapshot.segment is None else len(snapshot.segment.ids)
    return due(size, snapshot.dead_count, len(snapshot.delta.alive))
