"""Bundles and galleries in the caller's process, without a service."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kinlens.installs import missing_package

if TYPE_CHECKING:
    from kinlens.embedder.session import OnnxEmbedder
    from kinlens.indexer.gallery import Gallery

Device = Literal["cpu", "cuda"]


def load_bundle(path: Path | str, *, device: Device = "cpu") -> "OnnxEmbedder":
    """Load the model of a bundle and check it against the golden vectors in the bundle.

    Args:
        path: a folder that `kinlens-train export` or `adapt` wrote.
        device: "cuda" needs `kinlens[gpu]` and an NVIDIA GPU.

    Returns:
        An embedder. `embed_files(paths)` and `embed_images(contents)` return vectors (N, D) of unit
        norm as float32; `bundle_id` names the model.

    Raises:
        BundleError: the bundle is missing, damaged, or fails its golden vectors.

    Examples:
        >>> bundle = kinlens.load_bundle("bundles/shop")
        >>> bundle.embed_files(["photo.jpg"]).shape == (1, bundle.dim)
        True
    """
    try:
        from kinlens.embedder.engines.models import SessionSettings
        from kinlens.embedder.errors import BundleNotFoundError
        from kinlens.embedder.session import OnnxEmbedder
    except ModuleNotFoundError as missing:
        raise _needs("kinlens.load_bundle", missing) from None
    _check_folder(path, BundleNotFoundError)
    return OnnxEmbedder.open(path, SessionSettings(device=device))


def open_gallery(
    path: Path | str, bundle: "OnnxEmbedder | None" = None, *, device: Device = "cpu"
) -> "Gallery":
    """Open a gallery for searches and changes; close it with `close()`.

    Args:
        path: a folder that `kinlens-index build` wrote.
        bundle: the model for queries. A gallery that was built with another bundle is refused. One
            that was built with `--dims 64` is searched with vectors of `bundle.first(64)`.
        device: "cuda" searches on an NVIDIA GPU and needs `kinlens[gpu]`.

    Returns:
        A gallery. `search(vectors, k)` returns the best hits of each vector.

    Raises:
        GalleryNotFoundError: the folder holds no gallery.
        GalleryCorruptError: a file of the gallery is missing or damaged.
        BundleMismatchError: the gallery was built with another bundle.

    Examples:
        >>> gallery = kinlens.open_gallery("galleries/shop", bundle)
        >>> [hits] = gallery.search(bundle.embed_files(["photo.jpg"]), k=3)
        >>> [hit.key for hit in hits]
        ['photo.jpg', 'second.jpg', 'third.jpg']
    """
    try:
        from kinlens.embedder.errors import GalleryNotFoundError, InvalidParameterError
        from kinlens.embedder.session import fitted
        from kinlens.indexer.gallery import Gallery
    except ModuleNotFoundError as missing:
        raise _needs("kinlens.open_gallery", missing) from None
    if str(path).startswith("milvus://"):
        raise InvalidParameterError(
            f"path = {path} is a gallery in Milvus; open it with kinlens.indexer.galleries."
            "open_remote, or give the folder of a gallery."
        )
    _check_folder(path, GalleryNotFoundError)
    expected = None if bundle is None else bundle.bundle_id
    gallery = Gallery.open(path, expected_bundle_id=expected, device=device)
    if bundle is not None:
        fitted(gallery, bundle)
    return gallery


def _check_folder(path: Path | str, kind: type[Exception]) -> None:
    """Raises: `kind` for a path that is a file or cannot be read; others name a missing one."""
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)  # noqa: PTH116 (Path hides a zero byte)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it has a zero byte"
        raise kind(f"path = {str(path)!r} cannot be read: {reason}. Use another path.") from error
    if not is_folder:
        raise kind(f"path = {str(path)!r} is a file. Use the folder that the file is in.")


def _needs(function: str, missing: ModuleNotFoundError) -> ModuleNotFoundError:
    return ModuleNotFoundError(missing_package(function, missing, "cpu", "gpu"), name=missing.name)
