"""Opens what the settings name: the model, its galleries, the cache. Refuses what does not fit."""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from embedder.errors import BundleMismatchError, BundleNotFoundError, GalleryNotFoundError
from embedder.session import Embedder, OnnxEmbedder, SessionSettings
from indexer.gallery import Gallery as IndexedGallery
from indexer.layout import GalleryFolder
from indexer.manifest import read_manifest
from service.cache import Cache, LruCache
from service.remote import RedisStore
from service.settings import Settings, split_gallery
from service.types import Gallery


def open_embedder(settings: Settings) -> Embedder:
    """The bundle of the settings in a session. Raises: BundleError."""
    if settings.bundle is None:
        raise BundleNotFoundError(
            "No model bundle was given. Name its folder with --bundle or KINLENS_BUNDLE."
        )
    session = SessionSettings(settings.device, settings.threads, settings.allow_cpu_fallback)
    return OnnxEmbedder.open(settings.bundle, session, settings.image_limits())


def open_galleries(settings: Settings, bundle_id: str) -> dict[str, Gallery]:
    """The galleries of the settings, by name, in their order. Raises: GalleryError."""
    roots = dict(split_gallery(entry) for entry in settings.image_roots)
    galleries: dict[str, Gallery] = {}
    try:
        for entry in settings.galleries:
            name, path = split_gallery(entry)
            name = name or read_manifest(GalleryFolder(path).current()).name
            if name in galleries:
                raise GalleryNotFoundError(
                    f"Two galleries are called {name!r}. Give one of them another name: "
                    f"--gallery NAME={path}."
                )
            galleries[name] = IndexedGallery.open(
                path, expected_bundle_id=bundle_id, image_root=roots.get(name)
            )
        _check_names(roots, galleries)
    except BaseException:
        close_all(galleries.values())
        raise
    return galleries


def close_all(galleries: Iterable[Gallery]) -> None:
    """Close every gallery."""
    for gallery in galleries:
        gallery.close()


def missing_image_roots(galleries: Mapping[str, Gallery]) -> list[str]:
    """What to say about each gallery whose pictures are not where they should be."""
    return [
        f"The images of gallery {name!r} are not shown: {gallery.image_root} is no folder. Name "
        f"the folder that holds them with --image-root {name}=DIR or KINLENS_IMAGE_ROOTS."
        for name, gallery in galleries.items()
        if not _is_folder(gallery.image_root)
    ]


def check_galleries(galleries: Mapping[str, Gallery], embedder: Embedder) -> None:
    """Refuse to serve nothing, or vectors of another model.

    Raises: GalleryNotFoundError, BundleMismatchError.
    """
    if not galleries:
        raise GalleryNotFoundError(
            "No gallery was given. Name at least one folder with --gallery or KINLENS_GALLERIES."
        )
    for name, gallery in galleries.items():
        if gallery.bundle_id != embedder.bundle_id:
            raise BundleMismatchError(
                f"Gallery {name!r} was made with bundle {gallery.bundle_id}, the service runs "
                f"{embedder.bundle_id}. Serve the bundle it was made with, or build it again: "
                "kinlens-index build."
            )


def _check_names(roots: Iterable[str | None], galleries: Mapping[str, Gallery]) -> None:
    for name in roots:
        if name not in galleries:
            raise GalleryNotFoundError(
                f"--image-root names the gallery {name!r}, which is not served. Known are: "
                f"{', '.join(galleries) or 'none'}."
            )


def _is_folder(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.is_dir()
    return False


def create_cache(settings: Settings) -> Cache:
    """The cache of the settings; with a second level if there is a Redis address."""
    local = LruCache(settings.cache_max_entries, settings.cache_max_bytes)
    if settings.redis_url is None:
        return Cache(local)
    remote = RedisStore(
        settings.redis_url.get_secret_value(),
        timeout_s=settings.redis_timeout_ms / 1e3,
        retry_s=settings.redis_retry_ms / 1e3,
        ttl_s=settings.redis_ttl_s,
        max_value_bytes=settings.redis_max_value_bytes,
        connections=settings.redis_connections,
    )
    return Cache(local, remote)
