"""Uploaded pictures of a gallery on Milvus, in a folder or behind fsspec, shared without a lock."""

import hashlib
import threading
from collections.abc import Collection
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from embedder.errors import (
    EngineUnavailableError,
    GalleryCorruptError,
    GalleryWriteError,
    ItemNotFoundError,
)
from tests.support.seams import PictureFiles, SharedPictures

LIMIT_S = 10.0
DATA = b"a picture"
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(params=["folder", "file", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> PictureFiles:
    addresses = {
        "folder": str(tmp_path / "pictures"),
        "file": f"file://{tmp_path}/pictures",
        "memory": f"memory://{tmp_path.name}/pictures",
    }
    return PictureFiles(addresses[request.param], LIMIT_S)


def nobody(_: Collection[str]) -> set[str]:
    return set()


def test_a_picture_is_kept_found_and_removed(files: PictureFiles) -> None:
    assert not files.has(SHA256)
    with pytest.raises(ItemNotFoundError, match="Put the item again"):
        files.read(SHA256)
    files.write(SHA256, DATA)
    assert files.has(SHA256)
    assert files.read(SHA256) == DATA
    files.write(SHA256, b"damaged")
    with pytest.raises(GalleryCorruptError, match="damaged"):
        files.read(SHA256)
    for _ in range(2):
        files.remove(SHA256)
    assert not files.has(SHA256)


def test_pictures_that_some_item_shows_stay(files: PictureFiles) -> None:
    shown = {SHA256}
    pictures = SharedPictures(files, lambda asked: shown & set(asked))
    with pictures.keeping({SHA256: DATA}):
        pass
    pictures.discard([SHA256])
    assert pictures.read(SHA256) == DATA
    shown.clear()
    pictures.discard([SHA256, "0" * 64])
    assert not files.has(SHA256)


def test_a_picture_put_while_another_service_removes_it_is_there_in_the_end(
    files: PictureFiles,
) -> None:
    files.write(SHA256, DATA)
    answers = iter([set(), {SHA256}])  # an item came between the question and the removal
    SharedPictures(files, lambda _: next(answers)).discard([SHA256])
    assert files.has(SHA256)

    with SharedPictures(files, nobody).keeping({SHA256: DATA}):
        SharedPictures(files, nobody).discard([SHA256])  # the item is not there yet
    assert files.has(SHA256)


def test_a_store_that_hangs_or_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    files = PictureFiles("memory://hanging/pictures", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "isfile", lambda *_: gate.wait())
        with pytest.raises(EngineUnavailableError, match=r"longer than 0\.05 s"):
            files.has(SHA256)
        gate.set()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no rights there")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(GalleryWriteError, match="no rights there"):
        PictureFiles("memory://refusing/pictures", LIMIT_S).write(SHA256, DATA)


@pytest.mark.parametrize("address", ["nowhere://bucket/shop", "s3://bucket/shop"])
def test_an_address_that_nothing_here_reaches_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    if address.startswith("s3"):
        monkeypatch.setattr(fsspec, "url_to_fs", missing)
    with pytest.raises(EngineUnavailableError, match="install what it needs"):
        PictureFiles(address, LIMIT_S)
