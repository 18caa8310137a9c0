"""Galleries of two models for the tests of adopt, rebuild and compare."""

import hashlib
from pathlib import Path

from embedder.errors import SourceError
from embedder.fake import FakeEmbedder
from indexer.gallery import Gallery
from indexer.types import Entry, Item
from tests.tiny import encoded, picture

OLD = FakeEmbedder(bundle_id="a" * 64)
NEW = FakeEmbedder(bundle_id="b" * 64, dim=OLD.dim * 2)


class Pictures:
    """Contents by sha256, read as a service reads uploads; those in `gone` are missing."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.gone: set[str] = set()

    def entry(self, key: str, seed: int, **attributes: str | int) -> Entry:
        data = encoded(picture(seed))
        digest = hashlib.sha256(data).hexdigest()
        self.data[digest] = data
        vector = OLD.embed(OLD.preprocess(data)[None])[0]
        return Entry(key, vector, digest, attributes, format="PNG")

    def read(self, item: Item) -> bytes:
        if item.key in self.gone:
            raise SourceError(f"The picture of {item.key} is gone.")
        return self.data[item.sha256]


def fill(path: Path, pictures: Pictures, count: int = 40) -> Gallery:
    """A gallery of `count` pictures in classes of four, made with OLD, opened."""
    gallery = Gallery.create(path, name="shop", bundle_id=OLD.bundle_id, dim=OLD.dim)
    names = [f"item {n}" for n in range(count)]
    gallery.add(
        pictures.entry(name, n, **{"class": f"class {n // 4}", "stock": n})
        for n, name in enumerate(names)
    )
    gallery.compact()
    return gallery


def content(path: Path) -> dict[str, tuple[str, dict[str, object]]]:
    """Content and attributes by key; every item is found by its own vector."""
    gallery = Gallery.open(path, verify_hashes=True)
    try:
        found = {}
        for batch in gallery.scan():
            for entry in batch:
                found[entry.key] = (entry.sha256, dict(entry.attributes))
                [hits] = gallery.search(entry.vector[None], 1)
                assert hits[0].score > 0.999
        return found
    finally:
        gallery.close()
