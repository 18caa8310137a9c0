"""What the settings name and the service is put together from: bundles, galleries, the cache."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from embedder.session import Embedder
from service.galleries.bundles import Bundles, OneBundle
from service.galleries.failures import Failures
from service.galleries.loading import Loader, refuse_nothing
from service.galleries.locations import Sources, open_place
from service.galleries.registry import Registry
from service.galleries.types import Gallery
from service.search.cache import Cache, LruCache
from service.search.model import Encoder, Models
from service.search.redis_cache import RedisStore
from service.settings import Settings

_NO_GALLERIES: dict[str, tuple[str, ...]] = {"galleries": (), "image_roots": ()}


def open_registry(
    settings: Settings,
    connect: Callable[[Embedder], Encoder],
    failures: Failures,
    embedder: Embedder | None,
    galleries: Mapping[str, Gallery] | None,
) -> tuple[Registry, Models]:
    """The models and galleries of the settings, or those that are given, opened and checked.

    Given galleries do not keep the managed ones of the state folder from being served too.

    Raises: BundleError, GalleryError.
    """
    bundles = Bundles(settings) if embedder is None else OneBundle(embedder)
    primary = bundles.primary()
    models = Models(bundles.open, connect)
    own = settings if galleries is None else settings.model_copy(update=_NO_GALLERIES)
    sources = Sources(own)
    places = sources.look()
    given = galleries or {}
    if settings.state is None:
        refuse_nothing([*given, *places])
    opened = Loader(models, primary, open_place).load(given, places, failures)
    return Registry(sources, models, primary, open_place, opened, failures), models


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
    )
    return Cache(local, remote)
