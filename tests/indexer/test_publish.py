"""A copy that follows published snapshots is the original at one of them, whatever happens."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.errors import (
    GalleryBusyError,
    GalleryConflictError,
    GalleryCorruptError,
    GalleryError,
    GalleryNotFoundError,
    InvalidParameterError,
)
from kinlens.indexer.exchange.follow import Follower
from kinlens.indexer.exchange.publish import Snapshot, read_snapshot
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.live.backup import restore
from kinlens.indexer.types import Entry, SearchOptions
from tests.indexer import crasher
from tests.indexer.conftest import Run, failure, faults
from tests.indexer.crasher import forks
from tests.indexer.oracle import BUNDLE, entry, units
from tests.support.seams import ObjectFolder, backup, publish
from tests.tiny import encoded, photo

DIM = 16
QUERIES = units(5, seed=99)


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    return Gallery.create(tmp_path / "shop", name="shop", bundle_id=BUNDLE, dim=DIM)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "published")


@pytest.fixture
def follower(address: str, tmp_path: Path) -> Follower:
    return Follower(address, tmp_path / "copy")


def snapshot_at(address: str) -> Snapshot | None:
    return read_snapshot(ObjectFolder(address))


def killed_at(work: Callable[..., None], *arguments: object) -> bool:
    """Whether a process that does this was killed at its crash point."""
    process = forks.Process(target=work, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == -signal.SIGKILL


def entries(keys: range, seed: int = 0) -> list[Entry]:
    vectors = units(len(keys), seed=seed + 1)
    return [
        entry(f"k{key}", vector, {"stock": key % 9, "tags": ("a", f"t{key % 3}")}, f"{key} {seed}")
        for key, vector in zip(keys, vectors, strict=True)
    ]


def check_same(original: Gallery, copy: Path) -> None:
    """Items, vectors, filters and answers are those of the original, and so is the version."""
    with contextlib.closing(Gallery.open(copy, verify_hashes=True)) as opened:
        assert opened.version == original.version
        assert opened.generation == original.generation
        assert [*opened.items()] == [*original.items()]
        assert opened.schema() == original.schema()
        ids = original.ids().tolist()
        assert np.array_equal(opened.vectors(ids), original.vectors(ids))
        for options in (
            SearchOptions(),
            SearchOptions(exact=True),
            SearchOptions(where=parse_filter("stock < 4")) if ids else SearchOptions(),
        ):
            assert opened.search(QUERIES, 7, options) == original.search(QUERIES, 7, options)
        assert opened.calibration() == original.calibration()


@pytest.mark.parametrize("seed", range(3))
def test_copies_are_the_original_after_any_changes_however_often_they_look(
    tmp_path: Path, address: str, seed: int
) -> None:
    path = tmp_path / "shop"
    Gallery.create(path, name="shop", bundle_id=BUNDLE, dim=crasher.DIM).close()
    rng = np.random.default_rng(seed)
    eager, lazy = (Follower(address, tmp_path / name) for name in ("eager", "lazy"))
    with contextlib.closing(Gallery.open(path)) as original:
        original.add([crasher.entry("first", "first", 1)])
        for number, operation in zip(range(60), crasher.operations(seed), strict=False):
            operation.run(original)
            if rng.random() < 0.5:
                continue
            publish(path, address)
            eager.update()
            if number % 11 == 0:
                lazy.update()
            stored = crasher.stored(original)
            for follower in (eager,) if number % 11 else (eager, lazy):
                assert crasher.contents(follower.folder) == stored
                with contextlib.closing(Gallery.open(follower.folder)) as copy:
                    assert copy.version == original.version
        publish(path, address)
        late = Follower(address, tmp_path / "late")
        for follower in (eager, lazy, late):
            follower.update()
            assert not follower.update()
            assert crasher.contents(follower.folder) == crasher.stored(original)


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf-pq"])
@pytest.mark.parametrize("vector_type", ["fp32", "fp16"])
def test_a_copy_has_the_index_of_the_original(
    tmp_path: Path, follower: Follower, address: str, kind: str, vector_type: str
) -> None:
    path = tmp_path / "shop"
    original = Gallery.create(path, name="shop", bundle_id=BUNDLE, dim=DIM, vector_type=vector_type)
    settings = IndexSettings(kind=kind, target_recall=0.5)
    original.add(entries(range(1500)))
    original.compact(settings)
    publish(path, address)
    follower.update()
    check_same(original, follower.folder)
    # Rows of removed items go from the file of vectors, which gets another name.
    original.remove([f"k{key}" for key in range(300, 900)])
    original.add(entries(range(200, 400), seed=7))
    original.compact(settings)
    original.add(entries(range(5000, 5010)))
    original.remove(["k5003", "k1", "k250"])
    publish(path, address)
    follower.update()
    check_same(original, follower.folder)
    original.close()


def test_only_what_changed_is_uploaded_and_old_objects_go(
    gallery: Gallery, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gallery.path
    gallery.add(entries(range(5000)))
    gallery.compact()
    first = publish(path, address).uploaded_bytes
    assert publish(path, address).uploaded_bytes == 0
    gallery.add(entries(range(6000, 6010)))
    gallery.update({f"k{key}": {"stock": 100} for key in range(20)})
    second = publish(path, address)
    assert second.changed_items == 30
    assert second.uploaded_bytes < first / 20
    for number in range(40):
        gallery.add(entries(range(7000 + number, 7001 + number)))
        publish(path, address)
    store, snapshot = ObjectFolder(address), snapshot_at(address)
    assert len(snapshot.deltas) < 8
    assert [delta.until for delta in snapshot.deltas[:-1]] == [
        delta.since for delta in snapshot.deltas[1:]
    ]
    assert store.names("objects") == snapshot.objects() | snapshot.retired.keys()
    monkeypatch.setattr("kinlens.indexer.exchange.publish.RETIRED_S", -1)
    gallery.remove(["k1"])
    publish(path, address)
    assert store.names("objects") == snapshot_at(address).objects()


def test_an_open_copy_answers_from_one_snapshot_and_never_waits_for_a_segment(
    gallery: Gallery, address: str, follower: Follower
) -> None:
    """Every snapshot has another value in all items, so a mixture would show two of them."""
    gallery.add(entries(range(400)))
    gallery.update_where(parse_filter("stock >= 0"), {"round": 0})
    gallery.compact()
    publish(gallery.path, address)
    follower.update()
    seen: set[object] = set()
    points: list[str] = []
    with contextlib.closing(Gallery.open(follower.folder)) as copy:

        def look(point: str) -> None:
            points.append(point)
            [hits] = copy.search(QUERIES[:1], 400)
            rounds = {hit.attributes["round"] for hit in hits}
            assert len(rounds) == 1
            assert len(hits) == 400 - 10 * next(iter(rounds))
            seen.update(rounds)

        for number in range(1, 4):
            gallery.remove([f"k{key}" for key in range(10 * number, 10 * number + 10)])
            gallery.update_where(parse_filter("stock >= 0"), {"round": number})
            if number > 1:
                gallery.compact()
            publish(gallery.path, address)
            with faults(look):
                follower.update()
            look("after")
    assert seen == {0, 1, 2, 3}
    assert {"follow: before commit", "follow: before adoption"} <= set(points)


def test_the_generation_of_a_new_build_takes_over(
    gallery: Gallery, address: str, follower: Follower
) -> None:
    gallery.add(entries(range(50)))
    publish(gallery.path, address)
    follower.update()
    again = Gallery.create(gallery.path, name="shop", bundle_id=BUNDLE, dim=DIM)
    again.add(entries(range(30), seed=3))
    publish(gallery.path, address)
    assert follower.update()
    check_same(again, follower.folder)


@pytest.mark.timeout(120)
def test_kills_of_the_writer_and_of_a_follower_leave_the_snapshot_before_or_the_new_one(
    gallery: Gallery, address: str, tmp_path: Path
) -> None:
    """Both die at each of their fault points in turn, and are begun again."""
    copy = tmp_path / "copy"
    gallery.add(entries(range(300)))
    gallery.compact()
    publish(gallery.path, address)
    Follower(address, copy).update()
    points: list[str] = []
    number = 0

    def change() -> None:
        nonlocal number
        number += 1
        gallery.remove([f"k{number}"])
        gallery.add(entries(range(1000 + number, 1002 + number), seed=number))
        gallery.compact(keep_removed_s=0)

    change()
    with faults(points.append):
        publish(gallery.path, address)
        Follower(address, copy).update()
    names = sorted({crasher.named(point) for point in points})
    assert len(names) > 15
    kills = 0
    for name in names:
        change()
        before, newest = version_of(copy), gallery.version
        for work in (crasher.publish_shop, crasher.follow_shop):
            kills += killed_at(work, gallery.path, address, copy, name)
            assert version_of(copy) in (before, newest)
        publish(gallery.path, address)
        Follower(address, copy).update()
        check_same(gallery, copy)
    assert kills >= len(names)


def version_of(copy: Path) -> str:
    with contextlib.closing(Gallery.open(copy, verify_hashes=True)) as opened:
        assert len(opened.search(QUERIES[:1], 1000)[0]) == opened.size
        return opened.version


def test_what_was_downloaded_before_an_interruption_is_not_downloaded_again(
    gallery: Gallery, address: str, tmp_path: Path
) -> None:
    gallery.add(entries(range(200)))
    gallery.compact()
    publish(gallery.path, address)
    copy, point = tmp_path / "copy", "follow: before commit"
    assert killed_at(crasher.follow_shop, gallery.path, address, copy, point)
    left = {file.name for file in (copy / "downloads").iterdir()}
    downloaded: list[str] = []
    with faults(lambda point: downloaded.append(point) if "download" in point else None):
        Follower(address, copy).update()
    snapshot = snapshot_at(address)
    assert len(left & snapshot.objects()) > 1
    assert len(downloaded) == len(snapshot.objects() - left)


def test_a_copy_refuses_changes_with_the_address_of_its_original(
    gallery: Gallery, address: str, follower: Follower
) -> None:
    gallery.add(entries(range(20)))
    publish(gallery.path, address)
    follower.update()
    changes: list[Callable[[Gallery], object]] = [
        lambda copy: copy.add(entries(range(30, 31))),
        lambda copy: copy.remove(["k1"]),
        lambda copy: copy.update({"k1": {"stock": 5}}),
        lambda copy: copy.compact(),
        lambda copy: copy.calibrate(),
        lambda copy: Gallery.create(copy.path, name="x", bundle_id=BUNDLE, dim=DIM),
    ]
    with contextlib.closing(Gallery.open(follower.folder)) as copy:
        for change in changes:
            with pytest.raises(GalleryConflictError, match=r"is a copy of .*published"):
                change(copy)
        assert copy.needs_compaction() is None
    check_same(gallery, follower.folder)


def test_wrong_addresses_and_folders_are_named(
    gallery: Gallery, address: str, tmp_path: Path
) -> None:
    with pytest.raises(GalleryNotFoundError, match=r"No snapshot at .*published"):
        Follower(address, tmp_path / "copy").update()
    publish(gallery.path, address)
    with pytest.raises(GalleryError, match="has a gallery that is not a copy"):
        Follower(address, gallery.path).update()
    other = Gallery.create(tmp_path / "other", name="other", bundle_id=BUNDLE, dim=DIM)
    with pytest.raises(GalleryConflictError, match="belongs to another folder"):
        publish(other.path, address)
    with pytest.raises(GalleryError, match="has the gallery 'shop'"):
        publish(other.path, address, take_over=True)
    with pytest.raises(GalleryNotFoundError, match=r"Follow it: .*file:///"):
        Gallery.open(address)
    with pytest.raises(InvalidParameterError, match=r"sftp://\.\.\.@host contains a password"):
        Follower("sftp://user:secret@host/shop", tmp_path / "copy")
    with pytest.raises(GalleryNotFoundError):
        publish(tmp_path / "nothing", address)
    Path(address, "snapshot.json").write_text('{"schema_version": 2}')
    with pytest.raises(GalleryCorruptError, match="not a snapshot that this version"):
        Follower(address, tmp_path / "copy").update()


def test_a_copy_becomes_the_writer_by_backup_and_the_old_one_cannot_come_back(
    gallery: Gallery, address: str, tmp_path: Path
) -> None:
    """The old writer is ahead of what it has published, so equal writes differ."""
    first, second = (Follower(address, tmp_path / name) for name in ("first", "second"))
    gallery.add(entries(range(50)))
    publish(gallery.path, address)
    for follower in (first, second):
        follower.update()
    with pytest.raises(GalleryConflictError, match="is a copy of"):
        publish(first.folder, address)
    gallery.update({"k5": {"stock": 77}})
    backup(first.folder, tmp_path / "saved")
    restore(tmp_path / "saved", tmp_path / "own")
    with pytest.raises(GalleryConflictError, match="belongs to another folder"):
        publish(tmp_path / "own", address)
    with contextlib.closing(Gallery.open(tmp_path / "own")) as own:
        own.update({"k6": {"stock": 1}})
        own.update({"k7": {"stock": 1}})
        publish(own.path, address, take_over=True)
        with pytest.raises(GalleryConflictError, match="belongs to another folder"):
            publish(gallery.path, address)
        second.update()
        check_same(own, second.folder)


def test_what_a_compaction_has_erased_is_in_no_object_of_the_snapshot(
    gallery: Gallery, address: str, follower: Follower
) -> None:
    gallery.add(entries(range(300)))
    publish(gallery.path, address)
    follower.update()
    gallery.remove(["k123"])
    gallery.compact()
    publish(gallery.path, address)
    snapshot = snapshot_at(address)
    for sha256 in snapshot.objects():
        assert b"k123" not in Path(address, "objects", sha256).read_bytes()
    follower.update()
    check_same(gallery, follower.folder)


@pytest.mark.parametrize("field", ["segment", "vectors", "segment_files"])
def test_names_in_a_snapshot_cannot_leave_the_folder(
    gallery: Gallery, address: str, tmp_path: Path, field: str
) -> None:
    gallery.add(entries(range(300)))
    gallery.compact()
    publish(gallery.path, address)
    file = Path(address, "snapshot.json")
    content = json.loads(file.read_text())
    facts = content["row_numbers"]
    content[field] = {"../x": facts} if field == "segment_files" else "../../../x"
    file.write_text(json.dumps(content))
    with pytest.raises(GalleryCorruptError, match=f"{field}.*should match pattern"):
        Follower(address, tmp_path / "copy").update()


@pytest.mark.timeout(60)
def test_a_first_copy_that_is_killed_anywhere_can_be_begun_again(
    gallery: Gallery, address: str, tmp_path: Path
) -> None:
    gallery.add(entries(range(300)))
    gallery.compact()
    publish(gallery.path, address)
    points: list[str] = []
    with faults(points.append):
        Follower(address, tmp_path / "whole").update()
    names = sorted({crasher.named(point) for point in points if "generation" in point})
    assert len(names) > 3
    for number, name in enumerate([*names, "current: before rename", "follow: after commit"]):
        copy = tmp_path / f"copy{number}"
        assert killed_at(crasher.follow_shop, gallery.path, address, copy, name), name
        Follower(address, copy).update()
        check_same(gallery, copy)
        assert {file.name for file in (copy / "downloads").iterdir()} == {"LOCK", "CHECKED"}


def test_a_damaged_or_missing_object_is_named_and_leaves_the_copy_as_it_was(
    gallery: Gallery, address: str, follower: Follower
) -> None:
    gallery.add(entries(range(20)))
    publish(gallery.path, address)
    follower.update()
    before = version_of(follower.folder)
    gallery.add(entries(range(20, 30)))
    publish(gallery.path, address)
    snapshot = snapshot_at(address)
    newest = Path(address, "objects", snapshot.deltas[-1].parts[0].sha256)
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-1] + b"x")
    with pytest.raises(GalleryCorruptError, match=r"objects/\w+ is damaged"):
        follower.update()
    newest.unlink()
    with pytest.raises(GalleryCorruptError, match="names a missing file"):
        follower.update()
    assert version_of(follower.folder) == before
    newest.write_bytes(whole)
    assert follower.update()
    check_same(gallery, follower.folder)


def test_one_process_publishes_at_a_time_and_a_full_store_keeps_the_snapshot_before(
    gallery: Gallery, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery.add(entries(range(20)))
    publish(gallery.path, address)
    before = snapshot_at(address)
    gallery.add(entries(range(20, 30)))

    def second(point: str) -> None:
        if point == "publish: before upload":
            with pytest.raises(GalleryBusyError, match=rf"process \({os.getpid()}\)"):
                publish(gallery.path, address)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectFolder, "upload", full)
        with pytest.raises(GalleryError, match=r"not written.*No space"):
            publish(gallery.path, address)
    assert snapshot_at(address) == before
    with faults(second):
        publish(gallery.path, address)


def test_a_gallery_is_published_to_a_store_in_memory(gallery: Gallery, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    address = f"memory://shops/{tmp_path.name}"
    gallery.add(entries(range(300)))
    gallery.compact()
    publish(gallery.path, address)
    follower = Follower(address, tmp_path / "copy")
    follower.update()
    check_same(gallery, follower.folder)
    fsspec.filesystem("memory").store.clear()


def test_images_are_published_once_each_with_those_that_were_uploaded(
    tmp_path: Path, address: str, run: Run, shop: Path
) -> None:
    run("build", shop, "--bundle", "b", "--out", tmp_path / "g")
    uploaded = encoded(photo(77))
    sha256 = hashlib.sha256(uploaded).hexdigest()
    place = tmp_path / "g" / "pictures" / sha256[:2] / sha256
    place.parent.mkdir(parents=True)
    place.write_bytes(uploaded)
    with contextlib.closing(Gallery.open(tmp_path / "g")) as gallery:
        vector = units(1, dim=gallery.dim)[0]
        gallery.add([Entry("uploaded", vector, sha256, {}), Entry("bare", vector, "0" * 64, {})])
        size = gallery.size
        contents = {item.sha256 for item in gallery.items()}
    shutil.move(shop, tmp_path / "moved")
    arguments = ("publish", tmp_path / "g", address)
    result = run(*arguments, "--pictures", "--image-root", tmp_path / "moved", "--json")
    assert f'"pictures": {size - 1}' in result.stdout
    assert '"missing_pictures": 1' in result.stdout
    found = {file.name for file in Path(address, "pictures").glob("??/*")}
    assert found == contents - {"0" * 64}
    assert '"pictures": 0' in run(*arguments, "--json").stdout


def test_the_command_says_what_it_did_and_refuses_odd_times(
    gallery: Gallery, address: str, run: Run
) -> None:
    gallery.add(entries(range(20)))
    result = run("publish", gallery.path, address)
    assert "20 items, 20 changed" in result.stdout
    assert "every = 'soon'" in failure(run("publish", gallery.path, address, "--every", "soon"))
