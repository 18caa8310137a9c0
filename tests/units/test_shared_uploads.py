"""Uploaded images of a gallery on Milvus, in a folder or behind fsspec, shared without a lock."""

import hashlib
import threading
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kinlens.embedder.errors import (
    EngineUnavailableError,
    GalleryCorruptError,
    GalleryWriteError,
    ItemNotFoundError,
)
from tests.support.seams import SharedUploads

LIMIT_S = 10.0
DATA = b"a picture"
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(params=["file", "memory"])
def photos(request: pytest.FixtureRequest, tmp_path: Path) -> SharedUploads:
    place = tmp_path if request.param == "file" else tmp_path.name
    return SharedUploads(f"{request.param}://{place}/pictures", LIMIT_S)


def test_an_image_exists_while_an_item_shows_it(photos) -> None:
    with pytest.raises(ItemNotFoundError, match="Put the item again"):
        photos.read(SHA256)
    with photos.storing({SHA256: DATA, "0" * 64: b"damaged"}):
        assert photos.read(SHA256) == DATA
    photos.discard([SHA256, "1" * 64], lambda asked: {SHA256} & set(asked))
    assert photos.read(SHA256) == DATA
    photos.discard([SHA256, "1" * 64], lambda _: set())
    with pytest.raises(ItemNotFoundError):
        photos.read(SHA256)
    with pytest.raises(GalleryCorruptError, match="damaged"):
        photos.read("0" * 64)


def test_an_image_put_during_its_removal_exists(photos) -> None:
    with photos.storing({SHA256: DATA}):
        photos.discard([SHA256], lambda _: set())  # the item is not there yet
    assert photos.read(SHA256) == DATA
    answers = iter([set(), {SHA256}])  # an item came between the question and the removal
    photos.discard([SHA256], lambda _: next(answers))
    assert photos.read(SHA256) == DATA


def test_a_store_that_hangs_fails_or_is_unknown_is_an_error(monkeypatch) -> None:
    gate = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", lambda *_: gate.wait())
        with pytest.raises(EngineUnavailableError, match=r"longer than 0\.05 s"):
            SharedUploads("memory://hanging/pictures", 0.05).read(SHA256)
        gate.set()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no rights there")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    refusing = SharedUploads("memory://refusing/pictures", LIMIT_S)
    with pytest.raises(GalleryWriteError, match="no rights"), refusing.storing({SHA256: DATA}):
        pass
    with pytest.raises(EngineUnavailableError, match="install the package for its protocol"):
        SharedUploads("nowhere://bucket/shop", LIMIT_S)
