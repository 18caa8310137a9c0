"""Uploaded pictures are the only copies: none goes while a gallery that may have it is away."""

import hashlib
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from embedder.errors import GalleryBusyError, GalleryCorruptError, GalleryNotFoundError
from embedder.fake import FakeEmbedder
from indexer.gallery import Gallery
from service.galleries.claims import Claims
from tests.service.shops import Shop, assert_problem, start_shop
from tests.support.seams import JobStore, adopt
from tests.tiny import encoded, picture


@pytest.fixture(scope="module")
def data() -> list[bytes]:
    return [encoded(picture(seed)) for seed in range(4)]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A disk with a gallery that the settings name."""
    create(tmp_path / "disk" / "given")
    return tmp_path / "disk"


def create(path: Path) -> str:
    """A new generation of a gallery, without items; its name is given back."""
    embedder = FakeEmbedder()
    made = Gallery.create(path, name=path.name, bundle_id=embedder.bundle_id, dim=embedder.dim)
    made.close()
    return made.generation


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def serve(tmp_path: Path, disk: Path | None, **settings: Any) -> Shop:
    galleries = () if disk is None else (f"given={disk / 'given'}",)
    return start_shop(tmp_path / "state", FakeEmbedder(), galleries=galleries, **settings)


def sweep(shop: Shop) -> None:
    """Delete a gallery, after which every upload that nobody has goes."""
    shop.client.post("/galleries", json={"name": "short-lived"}).raise_for_status()
    assert shop.client.delete("/galleries/short-lived").status_code == 204


def orphan(shop: Shop) -> Path:
    """An upload that no item has."""
    path = shop.state / "uploads" / "ab" / f"ab{'0' * 62}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"never named by a catalogue")
    return path


def test_the_uploads_of_a_gallery_whose_disk_is_away_for_a_moment_stay(
    tmp_path, disk, data, until
) -> None:
    shop = serve(tmp_path, disk)
    shop.put({"k": data[0]}, gallery="given")
    shop.put({"own": data[1]})
    away = disk.rename(tmp_path / "away")
    sweep(shop)
    shop.client.delete("/galleries/shop/items", params={"key": "own"}).raise_for_status()
    away.rename(disk)
    [item] = shop.items("given")["items"]
    assert shop.client.get(item["image"]).content == data[0]
    sweep(shop)  # now that all are there, orphans go
    assert shop.uploads() == {sha256(data[0])}
    shop.close()


@pytest.mark.parametrize("later", ["away", "there"])
def test_the_uploads_of_a_gallery_that_is_not_named_any_more_stay(
    tmp_path, disk, data, later, until
) -> None:
    shop = serve(tmp_path, disk)
    shop.put({"k": data[0]}, gallery="given")
    shop.close()
    if later == "away":
        disk.rename(tmp_path / "away")
    shop = serve(tmp_path, None)
    left = orphan(shop)
    sweep(shop)
    if later == "there":
        until(lambda: not left.exists())
    assert left.exists() is (later == "away")
    assert sha256(data[0]) in shop.uploads()
    shop.close()


def test_another_gallery_in_the_place_of_one_does_not_free_its_uploads(
    tmp_path, disk, data
) -> None:
    shop = serve(tmp_path, disk)
    shop.put({"k": data[0]}, gallery="given")
    shop.close()
    disk.rename(tmp_path / "away")
    create(disk / "given")
    shop = serve(tmp_path, disk)
    shop.put({"other": data[1]}, gallery="given")
    sweep(shop)
    assert shop.uploads() == {sha256(data[0]), sha256(data[1])}
    shop.close()


def test_a_gallery_got_its_uploads_from_a_swap_and_keeps_them_while_it_is_away(
    tmp_path, disk, data
) -> None:
    shop = serve(tmp_path, disk)
    shop.put({"own": data[0]})
    adopt(disk / "given", shop.state / "galleries" / "shop")
    shop.client.get("/galleries/unknown")  # a look at the disk
    sweep(shop)
    shop.client.delete("/galleries/shop").raise_for_status()
    shop.close()
    disk.rename(tmp_path / "away")
    shop = serve(tmp_path, None)
    sweep(shop)
    assert shop.uploads() == {sha256(data[0])}
    shop.close()


def test_a_put_leaves_no_upload_without_a_record(tmp_path, data, monkeypatch) -> None:
    shop = serve(tmp_path, None)
    monkeypatch.setattr(Claims, "claim", refuse)
    assert_problem(shop.put_form({"k": data[0]}), 503, "gallery-busy")
    assert shop.uploads() == set()
    shop.close()


def refuse(*_: Any) -> None:
    raise GalleryBusyError("The record cannot be written.")


@pytest.mark.parametrize("role", ["target", "source"])
def test_a_gallery_that_a_job_works_with_cannot_be_deleted(tmp_path, data, role) -> None:
    """The copy that a swap publishes has the pictures that the source had."""
    shop = serve(tmp_path, None, jobs="elsewhere")
    for name in ("a", "b"):
        shop.client.post("/galleries", json={"name": name}).raise_for_status()
    shop.put({"n": data[0]}, gallery="b")
    started = shop.client.post("/galleries/a/swap", json={"with": "b"})
    assert started.status_code == 202, started.text
    name = {"target": "a", "source": "b"}[role]
    problem = assert_problem(shop.client.delete(f"/galleries/{name}"), 409, "gallery-conflict")
    assert started.json()["id"] in problem["detail"]
    left = orphan(shop)
    shop.client.delete("/galleries/b/items", params={"key": "n"}).raise_for_status()
    assert sha256(data[0]) in shop.uploads(), "the copy may have it"
    JobStore(shop.state / "service.sqlite").cancel(started.json()["id"])
    assert shop.client.delete(f"/galleries/{name}").status_code == 204
    assert not left.exists()
    assert shop.uploads() == set()
    shop.close()


def test_what_an_adoption_has_copied_stays_when_its_source_is_deleted(tmp_path, data) -> None:
    shop = serve(tmp_path, None)
    shop.client.post("/galleries", json={"name": "new"}).raise_for_status()
    shop.put({"n": data[0]}, gallery="new")
    galleries = shop.state / "galleries"
    copied: list[Path] = []

    def delete_source(copy: Path) -> None:
        if not copied:
            assert shop.client.delete("/galleries/new").status_code == 204
        copied.append(copy)

    adopt(galleries / "shop", galleries / "new", catch_up=delete_source)
    shop.put({"other": data[1]})  # the new generation is served now
    [item] = [item for item in shop.items()["items"] if item["key"] == "n"]
    assert shop.client.get(item["image"]).content == data[0]
    sweep(shop)
    assert shop.uploads() == {sha256(data[0]), sha256(data[1])}
    shop.close()


@pytest.fixture
def claims(tmp_path: Path) -> Claims:
    return Claims(tmp_path / "state")


def test_a_record_follows_its_gallery_through_rebuilds_and_moves_of_the_state(
    claims, disk, tmp_path
) -> None:
    managed = tmp_path / "state" / "galleries" / "own"
    create(managed)
    for gallery in (disk / "given", managed):
        claims.claim(gallery)
        claims.claim(gallery)
    for _ in range(4):  # older generations go
        create(disk / "given")
        create(managed)
        claims.follow()
    assert sorted(claims.folders()) == sorted([disk / "given", managed])
    (tmp_path / "state").rename(tmp_path / "moved")
    moved = Claims(tmp_path / "moved")
    assert tmp_path / "moved" / "galleries" / "own" in moved.folders()


def test_a_record_goes_with_its_gallery_also_after_a_deletion_that_was_cut_short(
    claims, tmp_path
) -> None:
    managed = tmp_path / "state" / "galleries" / "own"
    create(managed)
    claims.claim(managed)
    with pytest.raises(KeyError):
        claims.end(managed, lambda: {}["killed"])
    assert claims.folders() == [managed]
    shutil.rmtree(managed)
    with pytest.raises(GalleryNotFoundError, match="remove"):
        claims.folders()  # not by the service: the disk may be away
    create(managed)
    with pytest.raises(KeyError):
        claims.end(managed, lambda: [shutil.rmtree(managed), {}["killed"]])
    assert claims.folders() == []
    create(managed)
    claims.claim(managed)
    claims.end(managed, lambda: shutil.rmtree(managed))
    assert claims.folders() == []
    with pytest.raises(GalleryBusyError):
        claims.claim(managed)


def test_a_record_that_cannot_be_read_counts_as_a_gallery_that_has_everything(
    claims, disk, tmp_path
) -> None:
    claims.claim(disk / "given")
    [file] = (tmp_path / "state" / "claims").glob("*.json")
    file.write_text("{")
    with pytest.raises(GalleryCorruptError):
        claims.folders()


def test_many_claims_at_once_lose_none(claims, tmp_path) -> None:
    galleries = [tmp_path / "disk" / str(number) for number in range(12)]
    for gallery in galleries:
        create(gallery)
    threads = [threading.Thread(target=claims.claim, args=(gallery,)) for gallery in galleries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claims.folders()) == sorted(galleries)
