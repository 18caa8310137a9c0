"""What the settings name and the service is put together from: bundles, galleries, the cache."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from embedder.errors import GalleryNotFoundError
from embedder.session import Embedder
from indexer.gallery import Gallery as IndexedGallery
from service.galleries.locations import Bundles, Locations
from service.galleries.migration import bring_over
from service.galleries.registry import Gallery, Registry
from service.search.cache import Cache, LruCache
from service.search.model import Connect, Models
from service.search.redis_cache import RedisStore
from service.settings import Settings

_NO_GALLERIES: dict[str, tuple[str, ...]] = {"galleries": (), "image_roots": ()}


def open_registry(
    settings: Settings,
    connect: Connect,
    on_failure: Callable[[str], None],
    embedder: Embedder | None,
    galleries: Mapping[str, Gallery] | None,
) -> tuple[Registry, Models]:
    """The models and galleries of the settings, or those that are given, opened and checked.

    Given galleries do not keep the managed ones of the state folder from being served too.

    Raises: BundleError, GalleryError.
    """
    bundles = Bundles(settings, embedder)
    primary = bundles.primary()
    models = Models(bundles.open, connect)
    own = settings if galleries is None else settings.model_copy(update=_NO_GALLERIES)
    locations = Locations(own)
    found = locations.list_galleries()
    if settings.state is not None:
        given = [one.path for one in (galleries or {}).values() if isinstance(one, IndexedGallery)]
        bring_over(settings.state, [*given, *(location.path for location in found)])
    elif not galleries and not found:
        raise GalleryNotFoundError(
            "No gallery was given. Name at least one folder with --gallery or KINLENS_GALLERIES, "
            "or a folder for those that are made while the service runs with --state."
        )
    return Registry(locations, models, primary, galleries, on_failure=on_failure), models


def missing_image_roots(galleries: Mapping[str, Gallery]) -> list[str]:
    """What to say about each gallery whose pictures are not where they should be."""
    return [
        f"The images of gallery {name!r} are not shown: {gallery.image_root} is no folder. Name "
        f"the folder that holds them with --image-root {name}=DIR or KINLENS_IMAGE_ROOTS."
        for name, gallery in galleries.items()
        if not _is_folder(gallery.image_root)
    ]


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
