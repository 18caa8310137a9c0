"""A gallery replaces another, or is rebuilt with another model while it is changed."""

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.errors import GalleryBusyError, SourceError
from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.entries import Entry, Item
from kinlens.indexer.galleries import current_generation
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.rebuild import CatchUp, adopt, rebuild, swap_in
from tests.support.seams import EmbedSettings
from tests.tiny import encoded, photo

OLD = FakeEmbedder(bundle_id="a" * 64)
NEW = FakeEmbedder(bundle_id="b" * 64, dim=OLD.dim * 2)


@functools.cache
def drawn(seed: int) -> tuple[bytes, str, np.ndarray]:
    """An image, its sha256, its vector by OLD."""
    data = encoded(photo(seed))
    return data, hashlib.sha256(data).hexdigest(), OLD.embed(OLD.preprocess(data)[None])[0]


class Photos:
    """Contents by sha256, read as a service reads uploads; those in `gone` are missing."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.gone: set[str] = set()

    def entry(self, key: str, seed: int, **attributes: str | int) -> Entry:
        data, digest, vector = drawn(seed)
        self.data[digest] = data
        return Entry(key, vector, digest, attributes, format="PNG")

    def read(self, item: Item) -> bytes:
        if item.key in self.gone:
            raise SourceError(f"The image of {item.key} was removed.")
        return self.data[item.sha256]


@pytest.fixture
def photos() -> Photos:
    return Photos()


@pytest.fixture
def shop(tmp_path, photos) -> Iterator[Gallery]:
    """A gallery of 40 images in classes of four, made with OLD, opened."""
    path = tmp_path / "shop"
    gallery = Gallery.create(path, name="shop", bundle_id=OLD.bundle_id, dim=OLD.dim)
    gallery.add(
        photos.entry(f"item {n}", n, **{"class": f"class {n // 4}", "stock": n}) for n in range(40)
    )
    gallery.compact()
    yield gallery
    gallery.close()


@pytest.fixture
def made(tmp_path) -> Path:
    return tmp_path / "made"


@pytest.fixture
def other(tmp_path, photos) -> Path:
    """A gallery that has nothing in common with it."""
    path = tmp_path / "other"
    facts = {"name": "other", "bundle_id": "b" * 64, "source_root": "/elsewhere"}
    with closing(Gallery.create(path, dim=OLD.dim, **facts)) as gallery:
        gallery.add([photos.entry(f"new {n}", 100 + n) for n in range(12)])
        gallery.compact()
        gallery.add([photos.entry("later", 200)])
    return path


@pytest.fixture
def follower(shop, photos) -> Iterator[CatchUp]:
    with closing(CatchUp(shop.path, NEW, photos.read, EmbedSettings(4, 2))) as one:
        yield one


def content(path: Path) -> dict[str, tuple[str, dict[str, object]]]:
    """Content and attributes by key; every item is found by its own vector."""
    found = {}
    with closing(Gallery.open(path, verify_hashes=True)) as gallery:
        for batch in gallery.scan():
            for entry in batch:
                found[entry.key] = (entry.sha256, dict(entry.attributes))
                [hits] = gallery.search(entry.vector[None], 1)
                assert hits[0].score > 0.999
    return found


def test_the_target_takes_state_and_bundle_but_keeps_its_name_and_image_root(
    shop, other, photos
) -> None:
    before = content(other)
    manifest = adopt(shop.path, other)
    assert content(shop.path) == content(other) == before
    with closing(Gallery.open(shop.path, expected_bundle_id="b" * 64)) as opened:
        assert (opened.name, opened.manifest.source_root) == ("shop", "")
        assert opened.generation == manifest.generation != current_generation(other)
        opened.add([photos.entry("after", 300)])  # the source does not see it
    assert len(content(shop.path)) == len(before) + 1
    assert content(other) == before
    assert adopt(shop.path, other, image_root="/pictures").source_root == "/pictures"


def test_writes_are_refused_while_the_last_changes_are_replayed(shop, other) -> None:
    refused = []

    def change(_: Path) -> None:
        try:
            shop.update({"item 1": {"stock": 1000 + len(refused)}})
            refused.append(False)
        except GalleryBusyError:
            refused.append(True)

    adopt(shop.path, other, before_lock=change, under_lock=change)
    assert refused == [False, True]
    assert content(shop.path) == content(other)
    with pytest.raises(GalleryBusyError, match="replaced"):
        shop.remove(["item 1"])  # the old generation takes no change that would be lost


def test_every_item_gets_a_vector_of_the_new_model_and_keeps_the_rest(
    shop, follower, made, photos
) -> None:
    """An image that is gone or was changed is listed as missing."""
    photos.gone = {"item 3"}
    _, second, third, *_ = photos.data
    photos.data[second] = photos.data[third]
    reported: list[int] = []
    report = rebuild(follower, made, max_missing=0.05, on_progress=reported.append)
    assert (report.found, report.items, report.embedded, report.missing) == (40, 38, 38, 2)
    assert sum(reported) == 40
    reasons = {failure.key: failure.reason for failure in report.failures}
    assert "changed" in reasons["item 1"]
    assert "was removed" in reasons["item 3"]
    kept = {key: one for key, one in content(shop.path).items() if key not in reasons}
    assert content(made) == kept
    with closing(Gallery.open(made, expected_bundle_id=NEW.bundle_id)) as gallery:
        assert gallery.dim == NEW.dim != OLD.dim


def test_changes_during_a_rebuild_and_an_interrupted_swap_are_in_the_new_generation(
    shop, follower, made, photos
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: shop.add([photos.entry("added", 500, stock=1)]),
        lambda: shop.update({"item 0": {"stock": 777}, "item 39": {"stock": None, "new": True}}),
        lambda: shop.remove(["item 1", "item 38"]),
        lambda: shop.add([photos.entry("item 2", 501, stock=5)]),  # other content, old key
        lambda: shop.compact(),
        lambda: shop.add([photos.entry("item 1", 502)]),  # a removed key comes back
    ]

    def change(_: int) -> None:
        if calls:
            calls.pop(0)()

    def interrupt() -> None:
        raise KeyboardInterrupt

    rebuild(follower, made, on_progress=change)
    assert not calls
    shop.update({"item 5": {"stock": 999}})
    with pytest.raises(KeyboardInterrupt):
        swap_in(follower, made, before_publish=interrupt)
    swap_in(follower, made)
    found = content(shop.path)
    with closing(Gallery.open(shop.path)) as gallery:
        assert gallery.bundle_id == NEW.bundle_id
    assert found == {item.key: (item.sha256, dict(item.attributes)) for item in shop.items()}
    assert found["added"][1] == {"stock": 1}
    assert found["item 39"][1]["new"] is True
    assert "item 38" not in found


def test_no_acknowledged_change_is_lost_under_steady_writes(shop, follower, made, photos) -> None:
    entries = [photos.entry(f"steady {n}", 1000 + n) for n in range(200)]
    acknowledged: set[str] = set()
    done = threading.Event()

    def write() -> None:
        for entry in entries:
            if done.is_set():
                return
            with contextlib.suppress(GalleryBusyError):  # the client gets the error and retries
                shop.add([entry])
                acknowledged.add(entry.key)

    writer = threading.Thread(target=write)
    rebuild(follower, made)
    writer.start()
    try:
        swap_in(follower, made)
    finally:
        done.set()
        writer.join()
    found = content(shop.path)
    assert acknowledged
    assert acknowledged <= found.keys()
    assert len(found) == 40 + len(acknowledged)


def test_a_gallery_that_a_build_replaced_meanwhile_is_left_alone(
    shop, follower, made, photos
) -> None:
    rebuild(follower, made)
    with closing(
        Gallery.create(shop.path, name="shop", bundle_id=OLD.bundle_id, dim=OLD.dim)
    ) as other:
        other.add([photos.entry("the only one", 9)])
    with pytest.raises(GalleryBusyError, match="replaced"):
        swap_in(follower, made)
    assert content(shop.path).keys() == {"the only one"}
