"""Opening a gallery: its parts, checked against each other; a damaged segment is made again."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from embedder.errors import BundleMismatchError, GalleryCorruptError, GalleryError
from indexer.catalog.database import Catalog
from indexer.folder.layout import GalleryFolder
from indexer.folder.locks import hold
from indexer.folder.manifest import SHORT, GalleryManifest, read_manifest
from indexer.index.plan import IndexSettings
from indexer.index.segment_manifest import read_manifest as read_segment_manifest
from indexer.live.compaction import CATALOG, SEGMENTS, compact
from indexer.live.state import States


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of an open gallery; `close` lets go of all of them."""

    folder: GalleryFolder
    generation: Path
    manifest: GalleryManifest
    catalog: Catalog
    states: States
    close: Callable[[], None]


def opened(
    path: Path | str, expected_bundle_id: str | None, device: str, verify_hashes: bool | None
) -> Opened:
    """Open the current generation of a gallery and its segment.

    Raises: GalleryNotFoundError, GalleryCorruptError, BundleMismatchError, ProviderError.
    """
    folder = GalleryFolder(path)
    try:
        generation = folder.current()
        with contextlib.ExitStack() as held:
            held.callback(os.close, hold(generation))
            manifest = read_manifest(generation)
            _check_bundle(folder.path, manifest, expected_bundle_id)
            catalog = Catalog.open(generation / CATALOG)
            held.callback(catalog.close)
            _check_dim(generation, manifest, catalog)
            states = States(catalog, generation, device, verify_hashes)
            held.callback(states.forget)
            _load(generation, catalog, states)
            close = held.pop_all().close
    except OSError as error:
        raise GalleryCorruptError(
            f"The gallery {path} cannot be read: {error}. Check its permissions and the disk."
        ) from error
    return Opened(folder, generation, manifest, catalog, states, close)


def _load(generation: Path, catalog: Catalog, states: States) -> None:
    try:
        with states.reading():
            return
    except GalleryCorruptError as damage:
        # The catalogue holds every vector, so a segment can always be made again; of several
        # processes that open the gallery, the first one does it.
        settings = _settings(generation, catalog)
        try:
            compact(generation, settings, wait=True, unless=lambda: _is_readable(states))
        except GalleryError as failure:
            damage.add_note(f"It could not be made again by itself: {failure}")
            raise damage from failure
    with states.reading():
        return


def _is_readable(states: States) -> bool:
    try:
        with states.reading():
            return True
    except GalleryCorruptError:
        return False


def _settings(generation: Path, catalog: Catalog) -> IndexSettings:
    """How the damaged segment was made, if it still tells."""
    with catalog.reading() as view:
        name = view.state().segment
    try:
        return read_segment_manifest(generation / SEGMENTS / str(name)).settings
    except GalleryCorruptError:
        return IndexSettings()


def _check_bundle(path: Path, manifest: GalleryManifest, expected_id: str | None) -> None:
    if expected_id is not None and manifest.bundle_id != expected_id:
        raise BundleMismatchError(
            f"Gallery {manifest.name} was made with bundle {manifest.bundle_id[:SHORT]}, but the "
            f"bundle in use is {expected_id[:SHORT]}: their vectors cannot be compared. Build it "
            f"again from the {manifest.source} with `kinlens-index build ... --bundle BUNDLE --out "
            f"{path}`, or use the bundle that it was made with."
        )


def _check_dim(generation: Path, manifest: GalleryManifest, catalog: Catalog) -> None:
    with catalog.reading() as view:
        found = view.dim
    if found != manifest.dim:
        raise GalleryCorruptError(
            f"{generation} does not fit together: the catalogue holds vectors of length "
            f"{found}, the manifest says {manifest.dim}. Restore a backup: kinlens-index "
            "restore."
        )
