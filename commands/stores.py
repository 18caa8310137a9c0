"""Where commands find the galleries of the library."""

from collections.abc import Callable

from kinlens.embedder.session import Embedder
from kinlens.library.gallery import Gallery
from kinlens.library.hits import built_bundle
from kinlens.library.stores import Store, keep_up, note, open_store, refuse_milvus


def gallery_at(
    text: str,
    bundle: Embedder | None = None,
    *,
    image_root: str | None = None,
    device: str = "cpu",
    open_bundle: Callable[[Store], Embedder] = built_bundle,
    lack: str = "",
) -> Gallery:
    """The gallery in a folder or at milvus://HOST:PORT/NAME, for a command that prints what was
    skipped. With `lack`, Milvus is refused, since it has a lack.

    Raises: GalleryError, InvalidParameterError.
    """
    if lack:
        refuse_milvus(text, lack)
    expected = None if bundle is None else bundle.bundle_id
    store = open_store(text, bundle_id=expected, image_root=image_root, device=device)
    gallery = Gallery(store, bundle, open_bundle)
    gallery.shown, gallery.warn = True, _omit
    return gallery


def compact_if_due(store: Store, no_compact: bool) -> None:
    """As `keep_up`, noting on stderr what is done."""
    keep_up(store, compacts=not no_compact, say=note, warn=note, shown=True)


def _omit(text: str) -> None:
    """For warnings of what the report of a command lists."""
