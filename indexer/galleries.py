"""Galleries by their folder or address: what is known of them without opening the index."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from kinlens.embedder.durable import discard
from kinlens.embedder.errors import GalleryNotFoundError, GalleryWriteError
from kinlens.indexer.catalog.database import catalog_view
from kinlens.indexer.catalog.vectors import NUMBERS, VECTORS
from kinlens.indexer.exchange.follow import Follower as Follower
from kinlens.indexer.exchange.follow import checked_s as checked_s
from kinlens.indexer.exchange.milvus import MilvusStore as MilvusStore
from kinlens.indexer.exchange.published import snapshot_at as snapshot_at
from kinlens.indexer.folder.layout import CURRENT as CURRENT
from kinlens.indexer.folder.layout import UPLOADS, GalleryFolder
from kinlens.indexer.folder.manifest import GalleryFacts as GalleryFacts
from kinlens.indexer.folder.manifest import GalleryManifest, read_manifest
from kinlens.indexer.index.gpu import gpu_memory as gpu_memory
from kinlens.indexer.index.segment import SEGMENTS
from kinlens.indexer.live.backup import BackupReport as BackupReport
from kinlens.indexer.live.backup import check_backup as check_backup
from kinlens.indexer.live.backup import restore_backup as restore_backup
from kinlens.indexer.live.backup import write_backup as write_backup
from kinlens.indexer.live.compaction import CATALOG
from kinlens.indexer.live.compaction import KEEP_REMOVED_S as KEEP_REMOVED_S


def stored_contents(folder: Path | str, sha256s: Sequence[str]) -> set[str]:
    """The given contents of which an item of the gallery in `folder`, or one that it can restore,
    has the image; the index is not opened.

    Raises: GalleryNotFoundError, GalleryCorruptError.
    """
    with catalog_view(GalleryFolder(folder).current() / CATALOG) as view:
        return view.kept_contents(sha256s)


def current_generation(folder: Path | str) -> str | None:
    """The name of the current generation in `folder`; None if there is no gallery."""
    return GalleryFolder(folder).current_name()


def current_manifest(folder: Path | str) -> GalleryManifest:
    """The manifest of the gallery in `folder`; the index is not opened.

    Raises: GalleryNotFoundError, GalleryCorruptError.
    """
    return read_manifest(GalleryFolder(folder).current())


def uploads_folder(folder: Path | str) -> Path:
    """The folder of the images uploaded for the gallery in `folder`.

    It belongs to the service; generations, builds and backups do not contain it.
    """
    return Path(folder) / UPLOADS


def delete_gallery(folder: Path | str) -> None:
    """Delete a gallery and everything else in its folder.

    Raises: GalleryNotFoundError; GalleryBusyError while a build runs in it; GalleryWriteError.
    """
    gallery = GalleryFolder(folder)
    if gallery.current_name() is None:
        raise GalleryNotFoundError(f"Gallery {gallery.path.name!r} has just been deleted.")
    with gallery.locked():
        discard(gallery.path)
    if gallery.path.exists():
        raise GalleryWriteError(
            f"Gallery {gallery.path.name!r} cannot be deleted. Check the permissions of its folder."
        )


def copy_bytes(folder: Path | str) -> int:
    """The size in bytes of a copy of the gallery in its current state.

    Raises: GalleryNotFoundError, GalleryCorruptError.
    """
    generation = GalleryFolder(folder).current()
    with catalog_view(generation / CATALOG) as view:
        segment, _, name = view.state().base
        size = 0
        if view.file is not None:
            size += view.file.bytes_of(view.file.row_ids.rows_up_to(view.last_given()))
        # Not the size of the file: the latest pages may be in the log only.
        pages, page_bytes = (
            int(view.connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "page_size")
        )
    size += pages * page_bytes
    files = [] if segment is None else (generation / SEGMENTS / segment).glob("*")
    with contextlib.suppress(FileNotFoundError):  # a compaction may just have replaced it
        size += sum(file.stat().st_size for file in files)
    with contextlib.suppress(FileNotFoundError):
        size += (generation / VECTORS / str(name) / NUMBERS).stat().st_size
    return size
