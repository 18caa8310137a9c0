"""Adopt: the state of one gallery becomes the next generation of another, in one step."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from embedder.errors import GalleryBusyError
from indexer.folder.backup import backup
from indexer.folder.durable import sync_tree
from indexer.folder.layout import GalleryFolder, disk_errors_explained
from indexer.folder.manifest import SHORT, GalleryManifest, read_manifest, write_manifest
from indexer.gallery import Gallery
from indexer.types import Progress

CatchUp = Callable[[Path], None]
"""Bring the gallery in this folder up to the one that it will replace."""


def adopt(
    target: Path | str,
    source: Path | str,
    expected_version: str | None = None,
    *,
    image_root: Path | str | None = None,
    catch_up: CatchUp | None = None,
    on_progress: Progress | None = None,
) -> GalleryManifest:
    """Make the state of gallery `source` the current generation of gallery `target`.

    The target keeps its name and, unless another `image_root` is given, its image root; the source
    stays as it is. Everything is copied while both are in use. `catch_up` may then bring the copy
    up to what the target has become: it is called once while the target is in use, and once more
    while nobody can change it. A kill at any moment leaves the old generation or the new one.
    Progress counts bytes.

    Raises: GalleryNotFoundError, GalleryCorruptError; GalleryBusyError if the target is not, or no
        longer, at `expected_version`, or a build runs; GalleryWriteError; what `catch_up` raises.
    """
    folder = GalleryFolder(target)
    with contextlib.ExitStack() as held:
        current = Gallery.open(folder.path, verify_hashes=False)
        held.callback(current.close)
        _refuse_other(folder, current, expected_version)
        held.enter_context(disk_errors_explained(folder.path))
        stage = held.enter_context(folder.aside())
        copy = stage / "copy"
        backup(source, copy, on_progress)
        made = GalleryFolder(copy).current()
        root = current.manifest.source_root if image_root is None else str(image_root)
        manifest = read_manifest(made).model_copy(
            update={"name": current.name, "source_root": root}
        )
        write_manifest(made, manifest)
        if catch_up is not None:
            catch_up(copy)
        sync_tree(made, "adopt")
        with folder.locked():
            _refuse_other(folder, current, expected_version)
            if catch_up is not None:
                catch_up(copy)
            folder.publish(made, manifest.generation)
    return manifest


def _refuse_other(folder: GalleryFolder, current: Gallery, expected_version: str | None) -> None:
    if folder.current_name() != current.generation:
        raise GalleryBusyError(
            f"The gallery {folder.path} was replaced by a build meanwhile; nothing was changed. "
            "Start again from what it is now."
        )
    if expected_version is None:
        return
    version = current.version
    if version != expected_version:
        raise GalleryBusyError(
            f"The gallery {folder.path} is at version {version[:SHORT]}, not at "
            f"{expected_version[:SHORT]}: it was changed meanwhile. Start again from what it is "
            "now."
        )
