"""Uploaded images are stored with their gallery and deleted with the last item that has them."""

import errno
import hashlib
import itertools
import os
import shutil
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
from kinlens.indexer.galleries import stored_contents
from tests.support.seams import JobStore, SharedUploads, UploadFolder, set_fault_hook
from tests.support.servers import WAIT_S
from tests.support.shops import assert_problem, make_gallery, sha256, start_shop
from tests.support.waiting import until

FULL = "The disk of the service is full; nothing was changed."


@pytest.mark.parametrize(
    ("step", "code"), [(0, errno.ENOSPC), (2, errno.EDQUOT), (4, errno.ENOSPC)]
)
def test_a_full_disk_is_named_and_leaves_no_partial_image(shop, data, step: int, code: int) -> None:
    """From the given step of a write on, the disk is full or the quota is used up."""
    shop.put({"old": data[0]})
    before, steps = shop.items(), itertools.count()

    def fail(_: str) -> None:
        if next(steps) >= step:
            raise OSError(code, os.strerror(code))

    set_fault_hook(fail)
    try:
        problem = assert_problem(shop.put_form({"new": data[1]}), 503, "gallery-unavailable")
        assert str(shop.state) not in problem["detail"]
        assert FULL in problem["detail"]
        made = shop.client.post("/galleries", json={"name": "new"})
        assert FULL in assert_problem(made, 503, "gallery-unavailable")["detail"]
        changed = shop.client.patch(f"{shop.url}/items", json={"changes": {"old": {"a": 1}}})
        removed = shop.client.delete(f"{shop.url}/items", params={"key": "old"})
        key = shop.client.post("/keys", json={"name": "till", "scopes": ["search"]})
        for answer in (changed, removed, key):
            assert (answer.status_code, FULL in answer.text) == (503, True), answer.text
        assert shop.search(data[0]).json()["hits"][0]["key"] == "old"
        assert shop.client.get("/ready").status_code == 200
    finally:
        set_fault_hook(None)
    assert shop.items() == before
    assert shop.put({"new": data[1]})["added"] == 1
    assert shop.client.get(shop.link("new")).content == data[1]


def test_an_image_that_is_about_to_be_named_is_not_removed(tmp_path) -> None:
    """Without the lock, a delete that started before the write would remove the image."""
    make_gallery(tmp_path / "given", "", count=0)
    photos, orphan = UploadFolder(tmp_path / "given"), sha256(b"one")
    with photos.storing({orphan: b"one"}):
        thread = threading.Thread(target=photos.sweep)
        thread.start()
        thread.join(0.2)
        assert (thread.is_alive(), photos.has(orphan)) == (True, True)
    thread.join(WAIT_S)
    assert not photos.has(orphan)


def test_equal_images_of_two_galleries_are_independent(shop, data) -> None:
    other = shop.create(f"{shop.name}-other")
    shop.put({"a": data[0], "b": data[0], "c": data[1]})
    other.put({"a": data[0], "d": data[2]})
    shop.remove("a")
    assert shop.compacted() == {sha256(data[0]), sha256(data[1])}
    shop.remove("b")
    assert shop.compacted() == {sha256(data[1])}
    assert other.photos() == {sha256(data[0]), sha256(data[2])}
    assert shop.client.get(other.link("a")).content == data[0]
    shop.put({"c": data[3]})
    assert shop.compacted() == {sha256(data[3])}
    shop.client.delete(other.url).raise_for_status()
    assert not other.folder.exists()


def test_orphans_are_deleted_at_the_next_start(tmp_path, data) -> None:
    shop = start_shop(tmp_path)
    shop.put({"a": data[0]})
    orphan = shop.folder / "pictures" / "ab" / f"ab{'0' * 62}"
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"never named by a catalogue")
    (orphan.parent / ".stage-x").write_bytes(b"half")
    other = start_shop(tmp_path, create=False)
    assert other.items()["total"] == 1
    assert orphan.exists(), "the process that sweeps has done so at its start"
    shop.close()
    until(lambda: not orphan.exists())  # the other one continues with it
    assert not (orphan.parent / ".stage-x").exists()
    assert other.photos() == {sha256(data[0])}
    other.close()
    # None is deleted while its gallery cannot be read.
    [catalog] = shop.folder.glob("versions/*/catalog.sqlite")
    catalog.write_bytes(bytes(catalog.stat().st_size))
    UploadFolder(shop.folder).sweep()
    assert shop.photos() == {sha256(data[0])}


@pytest.mark.parametrize("hangs", [False, True])
def test_a_gallery_that_cannot_be_swept_keeps_its_images_and_others_are_swept(
    tmp_path, monkeypatch, closes, hangs: bool
) -> None:
    monkeypatch.setattr("kinlens.service.galleries.uploads._HANGS_S", 0.2)
    orphans, answers = {}, threading.Event()
    for name in ("bad", "good"):
        folder = tmp_path / "state" / "galleries" / name
        make_gallery(folder, name)
        orphans[name] = folder / "pictures" / "ab" / f"ab{'0' * 62}"
        orphans[name].parent.mkdir(parents=True)
        orphans[name].write_bytes(b"never named by a catalogue")

    def stored(folder: Path, sha256s: list[str]) -> set[str]:
        if folder.name == "bad":
            assert not hangs or answers.wait()
            raise ValueError("a fault that nobody expects")
        return stored_contents(folder, sha256s)

    monkeypatch.setattr("kinlens.indexer.uploads.stored_contents", stored)
    shop = closes(start_shop(tmp_path / "state", create=False))
    try:
        until(lambda: not orphans["good"].exists())
    finally:
        answers.set()
    assert orphans["bad"].exists()
    assert shop.client.get("/ready").status_code == 200


def test_images_move_with_the_folder_of_their_gallery(tmp_path, data, closes) -> None:
    """Copies have the same generation and ids, but must not share cached small images."""
    make_gallery(tmp_path / "disk" / "given", "", count=0)
    galleries = (f"given={tmp_path / 'disk' / 'given'}",)
    shop = start_shop(tmp_path / "state", create=False, galleries=galleries)
    shop.put({"k": data[0]}, gallery="given")
    [item] = shop.items("given")["items"]
    shop.close()
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "disk" / "given").rename(tmp_path / "given")
    shutil.copytree(tmp_path / "given", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "pictures")
    galleries = tuple(f"{name}={tmp_path / name}" for name in ("given", "copy"))
    shop = closes(start_shop(tmp_path / "state", create=False, galleries=galleries))
    assert shop.client.get(item["image"]).content == data[0]
    for name, status in (("given", 200), ("copy", 404)):
        [item] = shop.items(name)["items"]
        for size in ("", "&size=160"):
            assert shop.client.get(item["image"] + size).status_code == status, (name, size)


def test_a_gallery_of_an_active_job_cannot_be_deleted(tmp_path, closes) -> None:
    shop = closes(start_shop(tmp_path / "state", create=False, jobs="elsewhere"))
    galleries = [shop.create(name) for name in ("a", "b")]
    started = shop.client.post("/galleries/a/swap", json={"with": "b"})
    assert started.status_code == 202, started.text
    for one in galleries:
        problem = assert_problem(shop.client.delete(one.url), 409, "gallery-conflict")
        assert started.json()["id"] in problem["detail"]
    JobStore(shop.state / "service.sqlite").cancel(started.json()["id"])
    for one in galleries:
        assert shop.client.delete(one.url).status_code == 204


def test_a_swap_moves_the_images(shop, data) -> None:
    new = shop.create(f"{shop.name}-new")
    shop.put({"old": data[0], "both": data[1]})
    new.put({"both": data[1], "new": data[2]})
    started = shop.client.post(f"{shop.url}/swap", json={"with": new.name}).json()
    until(lambda: shop.client.get(f"/jobs/{started['id']}").json()["state"] == "succeeded")
    assert shop.photos() == {sha256(data[1]), sha256(data[2])}
    shop.client.delete(new.url).raise_for_status()
    shop.put({"other": data[3]})  # the new generation is served now
    shown = {item["key"]: shop.client.get(item["image"]).content for item in shop.items()["items"]}
    assert shown == {"both": data[1], "new": data[2], "other": data[3]}


LIMIT_S = 10.0
DATA = b"a picture"
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(params=["file", "memory"])
def uploads(request: pytest.FixtureRequest, tmp_path: Path) -> SharedUploads:
    """Of a gallery on Milvus, in a folder or behind fsspec, shared without a lock."""
    place = tmp_path if request.param == "file" else tmp_path.name
    return SharedUploads(f"{request.param}://{place}/pictures", LIMIT_S)


def test_an_image_exists_while_an_item_shows_it(uploads) -> None:
    with pytest.raises(ItemNotFoundError, match="Put the item again"):
        uploads.read(SHA256)
    with uploads.storing({SHA256: DATA, "0" * 64: b"damaged"}):
        assert uploads.read(SHA256) == DATA
    uploads.discard([SHA256, "1" * 64], lambda asked: {SHA256} & set(asked))
    assert uploads.read(SHA256) == DATA
    uploads.discard([SHA256, "1" * 64], lambda _: set())
    with pytest.raises(ItemNotFoundError):
        uploads.read(SHA256)
    with pytest.raises(GalleryCorruptError, match="damaged"):
        uploads.read("0" * 64)


def test_an_image_put_during_its_removal_exists(uploads) -> None:
    with uploads.storing({SHA256: DATA}):
        uploads.discard([SHA256], lambda _: set())  # the item is not there yet
    assert uploads.read(SHA256) == DATA
    answers = iter([set(), {SHA256}])  # an item came between the question and the removal
    uploads.discard([SHA256], lambda _: next(answers))
    assert uploads.read(SHA256) == DATA


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
