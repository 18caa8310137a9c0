"""Galleries of random vectors on the disk, and a registry over fake models without HTTP."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from embedder.errors import BundleNotFoundError
from embedder.fake import FakeEmbedder
from embedder.session import Embedder
from indexer.gallery import Gallery
from indexer.types import Entry
from service.search.model import Encoder, Models
from service.settings import Settings
from tests.support.seams import (
    Cache,
    GalleryLocation,
    InlineDecoder,
    Lanes,
    Locations,
    LruCache,
    Registry,
)

DIM = 32


def entries(tag: str, count: int, dim: int = DIM) -> list[Entry]:
    """`count` random unit vectors with keys `tag-0` .. ."""
    seed = int(hashlib.sha256(tag.encode()).hexdigest()[:8], 16)
    vectors = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return [
        Entry(f"{tag}-{n}", vector, hashlib.sha256(vector.tobytes()).hexdigest())
        for n, vector in enumerate(vectors)
    ]


def make_gallery(
    path: Path, tag: str, *, count: int = 5, bundle_id: str = "fake", dim: int = DIM
) -> str:
    """A new generation of the gallery in `path`; its name is given back."""
    name = path.name
    with_items = Gallery.create(path, name=name, bundle_id=bundle_id, dim=dim)
    with_items.add(entries(tag, count, dim))
    generation = with_items.generation
    with_items.close()
    return generation


class Shelf:
    """A registry over the galleries of `settings`, and what it opened."""

    def __init__(self, settings: Settings, **bundles: Embedder) -> None:
        self.opened: list[Gallery] = []
        self.closed: list[str] = []
        self.found: list[str] = []
        self.lanes = Lanes([InlineDecoder(), InlineDecoder()], 64)
        self.failed: list[str] = []
        self.bundles: dict[str, Embedder] = bundles or {"fake": FakeEmbedder()}
        self.models = Models(self._find, self._connect)
        self.cache = Cache(LruCache(100, 2**20))
        primary = next(iter(self.bundles))
        self.locations = Locations(settings)
        self.registry = Registry(
            self.locations,
            self.models,
            primary,
            open_gallery=self._open,
            on_failure=self.failed.append,
        )
        self.failures = self.registry.failures

    def keys(self, name: str | None = None) -> set[str]:
        """The tags of the items that a search in the gallery finds."""
        with self.registry.lease(name) as served:
            [hits] = served.gallery.search(served.model.known_vector[np.newaxis], 100)
            return {hit.key.rsplit("-", 1)[0] for hit in hits}

    def _find(self, bundle_id: str) -> Embedder:
        self.found.append(bundle_id)
        if bundle_id not in self.bundles:
            raise BundleNotFoundError(f"no bundle {bundle_id}")
        return self.bundles[bundle_id]

    def _connect(self, embedder: Embedder) -> Encoder:
        return Encoder(embedder, self.cache, self.lanes, 4, 1, lambda _: None)

    def _open(self, location: GalleryLocation) -> Gallery:
        gallery = Gallery.open(location.path, image_root=location.image_root)
        close = gallery.close

        def closing() -> None:
            self.closed.append(gallery.generation)
            close()

        gallery.close = closing  # type: ignore[method-assign]
        self.opened.append(gallery)
        return gallery


@asynccontextmanager
async def serving(
    settings: Settings, interval_s: float = 3600.0, **bundles: Any
) -> AsyncIterator[Shelf]:
    """A shelf that is served until the end of the block; by default it looks only when told."""
    shelf = Shelf(settings, **bundles)
    await shelf.lanes.start()
    await shelf.registry.start(interval_s)
    try:
        yield shelf
    finally:
        await shelf.registry.stop()
        await shelf.lanes.close()
        assert sorted(shelf.closed) == sorted(one.generation for one in shelf.opened)
