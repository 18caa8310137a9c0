"""Local galleries: a FAISS segment with a delta, and a catalogue in SQLite.

Items are read from the catalogue only; the index is only used for searches.
"""

import contextlib
import json
import logging
import os
import weakref
from pathlib import Path

from kinlens.embedder.durable import lock_folder
from kinlens.embedder.errors import BundleMismatchError, GalleryCorruptError, KinlensError
from kinlens.embedder.types import SHORT
from kinlens.indexer.addresses import ImageRoot
from kinlens.indexer.catalog.database import Catalog
from kinlens.indexer.folder.layout import GalleryFolder, disk_errors_explained
from kinlens.indexer.folder.manifest import REPORT, GalleryManifest, read_manifest, write_manifest
from kinlens.indexer.index.segment import HASHED_BELOW, SEGMENTS
from kinlens.indexer.live.compaction import CATALOG, KEEP_REMOVED_S, compact
from kinlens.indexer.live.keeper import SnapshotKeeper
from kinlens.indexer.live.writer import GalleryWriter
from kinlens.indexer.types import RESTORE, VectorType, mismatch


class Gallery(GalleryWriter):
    """One generation of a gallery. Several processes can search and change it at the same time.

    Item ids are never reused, so they stay valid for the whole generation.
    """

    def __init__(
        self,
        folder: GalleryFolder,
        generation: Path,
        image_root: ImageRoot | str | None,
        device: str,
        verify_hashes: bool | None,
        expected_bundle_id: str | None,
    ) -> None:
        """Use `open` or `create`."""
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(os.close, lock_folder(generation))
            manifest = read_manifest(generation)
            _check_bundle(folder.path, manifest, expected_bundle_id)
            catalog = Catalog.open(generation / CATALOG)
            cleanup.callback(catalog.close)
            _check_dim(generation, manifest, catalog)
            snapshots = SnapshotKeeper(catalog, generation, device, verify_hashes)
            cleanup.callback(snapshots.close)
            self._close = weakref.finalize(self, cleanup.pop_all().close)
        super().__init__(folder, generation, manifest, catalog, snapshots, image_root)

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        name: str,
        bundle_id: str,
        dim: int,
        precision: str = "fp32",
        vector_type: VectorType = "fp32",
        source: str = "",
        source_root: Path | str = "",
        shortened: bool = False,
    ) -> "Gallery":
        """Create an empty gallery in folder `path` and open it; replaces an existing gallery.

        Raises: GalleryBusyError, GalleryWriteError; GalleryError for a folder with other files.
        """
        folder = GalleryFolder(path)
        manifest = GalleryManifest(
            name=name,
            bundle_id=bundle_id,
            precision=precision,
            vector_type=vector_type,
            dim=dim,
            shortened=shortened,
            source=source,
            source_root=str(source_root),
        )
        with folder.locked(), disk_errors_explained(folder.path), folder.stage() as stage:
            (stage / SEGMENTS).mkdir()
            (stage / REPORT).write_text("{}\n", encoding="utf-8")
            write_manifest(stage, manifest)
            Catalog.create(stage / CATALOG, dim, vector_type)
            folder.publish(stage, manifest.generation)
        return cls.open(path)

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        expected_bundle_id: str | None = None,
        image_root: ImageRoot | str | None = None,
        device: str = "cpu",
        verify_hashes: bool | None = None,
        load_index: bool = True,
        check_vectors: bool = True,
    ) -> "Gallery":
        """Open the current generation of the gallery in folder `path`.

        A damaged segment is rebuilt from the catalogue if the gallery is writable.

        expected_bundle_id: refuse a gallery that was built with another bundle.
        image_root: replaces the recorded folder or address of the images.
        device: with `cuda`, a GPU with enough memory searches; otherwise the CPU.
        verify_hashes: check the hashes of the segment. None checks small files only, since hashing
            large files takes longer than opening them.
        load_index: if False, the index is opened by the first search.
        check_vectors: if False, the caller calls `check_vectors` later, which may take a second.

        Raises: GalleryNotFoundError, GalleryCorruptError, BundleMismatchError.
        """
        folder = GalleryFolder(path)
        try:
            gallery = cls(
                folder, folder.current(), image_root, device, verify_hashes, expected_bundle_id
            )
            if load_index:
                gallery._load()
                if check_vectors:
                    gallery.check_vectors(verify_hashes)
            return gallery
        except OSError as error:
            raise GalleryCorruptError(
                f"The gallery {path} cannot be read: {error}. Check its permissions and the disk."
            ) from error

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def path(self) -> Path:
        """The folder of the gallery."""
        return self._folder.path

    @property
    def bundle_id(self) -> str:
        return self.manifest.bundle_id

    @property
    def vector_type(self) -> VectorType:
        """The type of the stored vectors."""
        return self.manifest.vector_type

    @property
    def dim(self) -> int:
        return self.manifest.dim

    @property
    def size(self) -> int:
        return self._catalog.state().size

    @property
    def created_at(self) -> str:
        return self.manifest.created_at

    def built_with(self) -> Path | None:
        """The folder of the bundle that built this generation; None if it was not recorded."""
        try:
            path = json.loads((self.generation_folder / REPORT).read_bytes()).get("bundle", "")
        except (OSError, ValueError):
            return None
        return Path(path) if path else None

    def close(self) -> None:
        if self._background is not None:
            self._background.close()
        self._close()
        if "_writable" in self.__dict__:
            self._writable.close()  # last: only a writable connection can checkpoint the log

    def _load(self) -> None:
        """Open the segment. The first process to open a damaged one rebuilds it."""
        try:
            with self._snapshots.reading():
                return
        except GalleryCorruptError as damage:
            if self.copy_of is not None:
                self.close()
                raise GalleryCorruptError(
                    f"The copy {self.path} of {self.copy_of} is damaged. Delete its folder: the "
                    f"next start copies it again. The damage: {damage}"
                ) from damage
            logging.getLogger(__name__).warning("the index is being rebuilt: %s", damage)
            try:
                compact(
                    self.generation_folder,
                    self.index_settings(),
                    wait=True,
                    keep_removed_s=KEEP_REMOVED_S,
                    from_scratch=True,
                    skip_if=self._is_readable,
                )
            except KinlensError as failure:
                damage.add_note(f"Rebuilding it automatically failed: {failure}")
                self.close()
                raise damage from failure
        with self._snapshots.reading():
            return

    def _is_readable(self) -> bool:
        try:
            with self._snapshots.reading():
                return True
        except GalleryCorruptError:
            return False

    def check_vectors(self, verify_hashes: bool | None = None) -> None:
        """Verify the checksums of the vectors, unless that would take too long.

        A damaged vector is only logged, so that all others can be searched.

        Raises: GalleryCorruptError if `verify_hashes`.
        """
        with self._catalog.reading() as view:
            is_small = 4 * self.dim * view.state().size < HASHED_BELOW
            if verify_hashes or (verify_hashes is None and is_small):
                try:
                    for _ in view.iter_vectors():
                        pass
                except GalleryCorruptError as damage:
                    if verify_hashes:
                        raise
                    logging.getLogger(__name__).error("%s", damage)


def _check_bundle(path: Path, manifest: GalleryManifest, expected_id: str | None) -> None:
    if expected_id is not None and manifest.bundle_id != expected_id:
        why = mismatch(
            manifest.bundle_id,
            f"It was built with bundle {manifest.bundle_id[:SHORT]}, but the bundle in use is "
            f"{expected_id[:SHORT]}: their vectors cannot be compared. Rebuild it from the "
            f"{manifest.source} with `kinlens-index build ... --bundle BUNDLE --out {path}`, or "
            "use the bundle that it was built with.",
        )
        raise BundleMismatchError(f"Gallery {manifest.name} cannot be used here. {why}")


def _check_dim(generation: Path, manifest: GalleryManifest, catalog: Catalog) -> None:
    with catalog.reading() as view:
        found = view.dim
    if found != manifest.dim:
        raise GalleryCorruptError(
            f"{generation} is damaged: the catalogue has vectors of length {found}, the manifest "
            f"{manifest.dim}. {RESTORE}"
        )
