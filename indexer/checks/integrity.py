"""The files of a gallery against their hashes, without mending anything."""

from pathlib import Path

from embedder.errors import GalleryCorruptError
from indexer.catalog.database import Catalog
from indexer.folder.layout import GalleryFolder
from indexer.live.compaction import CATALOG, SEGMENTS
from indexer.live.snapshot import open_segment


def check_files(path: Path | str) -> None:
    """Every hash of the index, and the integrity of the catalogue. Raises: GalleryCorruptError."""
    generation = GalleryFolder(path).current()
    catalog = Catalog.open(generation / CATALOG)
    try:
        with catalog.reading() as view:
            view.check()
        missing: str | None = None
        while segment := _current_segment(catalog):
            if segment == missing:
                raise GalleryCorruptError(
                    f"The segment {segment} is missing in {generation / SEGMENTS}. Make it again "
                    "from the catalogue: kinlens-index compact GALLERY --rebuild."
                )
            try:
                open_segment(generation / SEGMENTS / segment, "cpu", verify_hashes=True)
                break
            except FileNotFoundError:
                missing = segment  # unless a compaction has replaced it meanwhile
    finally:
        catalog.close()


def size_of(path: Path | str) -> int:
    """Number of items, whatever the state of the index. Raises: GalleryError."""
    catalog = Catalog.open(GalleryFolder(path).current() / CATALOG)
    try:
        with catalog.reading() as view:
            return view.state().size
    finally:
        catalog.close()


def _current_segment(catalog: Catalog) -> str | None:
    with catalog.reading() as view:
        return view.state().segment
