"""A service that keeps things in a folder and lets everybody write, for tests of galleries."""

import base64
import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from kinlens.embedder.fake import FakeEmbedder
from kinlens.embedder.session import Embedder
from kinlens.indexer.entries import Entry
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.uploads import UploadFolder
from tests.support.seams import GalleryExport, import_gallery
from tests.support.servers import DEFAULTS, Running, create_app, run, settings_of

PROBLEM = "application/problem+json"


class Shop:
    """A running service with a managed gallery."""

    def __init__(self, running: Running, state: Path, name: str = "shop") -> None:
        self.running = running
        self.client = running.client
        self.state = state
        self.name = name
        self.url = f"/galleries/{name}"
        self.folder = state / "galleries" / name

    def compacted(self) -> set[str]:
        """The uploaded images that are left after a compaction: no removal can be undone then."""
        with contextlib.closing(Gallery.open(self.folder)) as gallery:
            gallery.compact(wait=True)
        UploadFolder(self.folder).sweep()
        return self.photos()

    def create(self, name: str) -> "Shop":
        """A new gallery of the same service."""
        self.client.post("/galleries", json={"name": name}).raise_for_status()
        return Shop(self.running, self.state, name)

    def put(self, items: Mapping[str, bytes], gallery: str = "", **attributes: Any) -> Any:
        """Put items as a form, all with the same attributes; the checked answer."""
        response = self.put_form(items, [json.dumps(attributes)] * len(items), gallery)
        assert response.status_code == 200, response.text
        return response.json()

    def put_form(
        self, items: Mapping[str, bytes], attributes: Sequence[str] = (), gallery: str = ""
    ) -> httpx.Response:
        parts: list[Any] = [("image", ("x.png", data, "image/png")) for data in items.values()]
        parts += [("key", (None, key)) for key in items]
        parts += [("attributes", (None, text)) for text in attributes]
        return self.client.put(f"/galleries/{gallery or self.name}/items", files=parts)

    def put_json(self, items: Sequence[Mapping[str, Any]]) -> httpx.Response:
        return self.client.put(f"{self.url}/items", json={"items": items})

    def remove(self, *keys: str) -> int:
        """How many of these items were there."""
        response = self.client.delete(f"{self.url}/items", params={"key": keys})
        assert response.status_code == 200, response.text
        return int(response.json()["removed"])

    def search(self, data: bytes, **fields: Any) -> httpx.Response:
        return self.running.search(data, gallery=self.name, **fields)

    def items(self, gallery: str = "", **query: Any) -> Any:
        response = self.client.get(f"/galleries/{gallery or self.name}/items", params=query)
        assert response.status_code == 200, response.text
        return response.json()

    def link(self, key: str) -> str:
        """The address of the image of an item."""
        [link] = [item["image"] for item in self.items()["items"] if item["key"] == key]
        return str(link)

    def gallery(self, name: str = "") -> Any:
        response = self.client.get(f"/galleries/{name or self.name}")
        assert response.status_code == 200, response.text
        return response.json()

    def photos(self, gallery: str = "") -> set[str]:
        """The contents of the uploaded images that lie in a managed gallery."""
        files = (self.folder.with_name(gallery or self.name) / "pictures").glob("*/*")
        return {file.name for file in files if len(file.name) == 64}

    def close(self) -> None:
        self.running.close()


def start_shop(
    state: Path, embedder: Embedder | None = None, *, create: bool = True, **settings: Any
) -> Shop:
    """Serve the folder `state`; with a new gallery `shop` if there is none."""
    given = DEFAULTS | {"state": state, "anonymous_scopes": ("admin",)} | settings
    running = run(create_app(settings_of(**given), embedder or FakeEmbedder()))
    shop = Shop(running, state)
    if create and shop.client.get("/galleries/shop").status_code == 404:
        shop.create("shop")
    return shop


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_gallery(
    path: Path, tag: str, *, count: int = 5, bundle_id: str = "fake", dim: int = 32
) -> str:
    """A new generation of the gallery in `path`, of random unit vectors with keys `tag-0` .. ; its
    name is returned.
    """
    seed = int(sha256(tag.encode())[:8], 16)
    vectors = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    gallery = Gallery.create(path, name=path.name, bundle_id=bundle_id, dim=dim)
    gallery.add(
        Entry(f"{tag}-{n}", vector, sha256(vector.tobytes())) for n, vector in enumerate(vectors)
    )
    gallery.close()
    return gallery.generation


def publish_photos(
    folder: Path, embedder: Embedder, photos: Sequence[bytes], **attributes: Any
) -> str:
    """A new generation of the gallery in `folder`, of images 0.png .. with these attributes; its
    name is returned.
    """
    vectors = embedder.embed(np.stack([embedder.preprocess(data) for data in photos]))
    entries = [
        Entry(f"{n}.png", vector, sha256(data), attributes)
        for n, (vector, data) in enumerate(zip(vectors, photos, strict=True))
    ]
    facts = {"name": folder.name, "bundle_id": embedder.bundle_id, "source": "", "source_root": ""}
    dump = GalleryExport(facts, embedder.dim, len(entries), lambda: iter(entries))
    return import_gallery(dump, folder).generation


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def assert_problem(response: httpx.Response, status: int, slug: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM
    problem: dict[str, Any] = response.json()
    assert problem["type"] == f"urn:kinlens:problem:{slug}"
    assert problem["status"] == status
    assert problem["request_id"] == response.headers["x-request-id"]
    return problem
