"""Galleries in the caller's process, without a service."""

from pathlib import Path

from kinlens.embedder.errors import GalleryNotFoundError, InvalidParameterError
from kinlens.embedder.session import OnnxEmbedder, fitted
from kinlens.indexer.gallery import Gallery
from kinlens.library.bundles import Device, check_folder


def open_gallery(
    path: Path | str, bundle: OnnxEmbedder | None = None, *, device: Device = "cpu"
) -> Gallery:
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
    if str(path).startswith("milvus://"):
        raise InvalidParameterError(
            f"path = {path} is a gallery in Milvus; open it with kinlens.indexer.galleries."
            "open_remote, or give the folder of a gallery."
        )
    check_folder(path, GalleryNotFoundError)
    expected = None if bundle is None else bundle.bundle_id
    gallery = Gallery.open(path, expected_bundle_id=expected, device=device)
    if bundle is not None:
        fitted(gallery, bundle)
    return gallery
