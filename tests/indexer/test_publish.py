"""A copy that follows published snapshots is the original at one of them, whatever happens."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from unittest.mock import Mock

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
from kinlens.indexer.entries import Entry
from kinlens.indexer.exchange.follow import Follower
from kinlens.indexer.exchange.published import snapshot_at
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.live.backup import restore_backup
from kinlens.indexer.types import SearchOptions
from kinlens.quality.calibrator import Calibrator
from tests.indexer import crasher
from tests.indexer.conftest import Run, failure, faults, printed, stops_at
from tests.indexer.crasher import forks
from tests.indexer.oracle import BUNDLE, entry, units
from tests.support.seams import ObjectFolder, publish, write_backup

DIM = 16
QUERIES = units(5, seed=99)


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    return Gallery.create(tmp_path / "shop", name="shop", bundle_id=BUNDLE, dim=DIM)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "published")


@pytest.fixture
def follower(address, tmp_path: Path) -> Follower:
    return Follower(address, tmp_path / "copy")


@pytest.fixture
def original(gallery: Gallery, address: str) -> Gallery:
    """A gallery with an index that is published."""
    gallery.add(entries(range(300)))
    gallery.compact()
    Calibrator(gallery).fit()
    publish(gallery.path, address)
    return gallery


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


def version_of(copy: Path) -> str:
    with contextlib.closing(Gallery.open(copy, verify_hashes=True)) as opened:
        assert len(opened.search(QUERIES[:1], 1000)[0]) == opened.size
        return opened.version


def check_same(original: Gallery, copy: Path) -> None:
    """Items, vectors, filters and answers are those of the original, and so is the version."""
    with contextlib.closing(Gallery.open(copy, verify_hashes=True)) as opened:
        assert opened.version == original.version
        assert opened.generation == original.generation
        assert [*opened.items()] == [*original.items()]
        assert opened.schema() == original.schema()
        ids, queries = original.ids().tolist(), units(5, seed=99, dim=original.dim)
        assert np.array_equal(opened.vectors(ids), original.vectors(ids))
        for options in (
            SearchOptions(),
            SearchOptions(exact=True),
            SearchOptions(where=parse_filter("stock < 4")) if ids else SearchOptions(),
        ):
            assert opened.search(queries, 7, options) == original.search(queries, 7, options)
        assert Calibrator(opened).stored() == Calibrator(original).stored()


def test_copies_are_the_original_after_any_changes_however_often_they_look(
    tmp_path: Path, address: str
) -> None:
    path = tmp_path / "shop"
    Gallery.create(path, name="shop", bundle_id=BUNDLE, dim=crasher.DIM).close()
    rng = np.random.default_rng(0)
    eager, lazy = (Follower(address, tmp_path / name) for name in ("eager", "lazy"))
    with contextlib.closing(Gallery.open(path)) as original:
        original.add([crasher.entry("first", "first", 1)])
        for number, operation in zip(range(60), crasher.operations(0), strict=False):
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
        publish(path, address)
        late = Follower(address, tmp_path / "late")
        for follower in (eager, lazy, late):
            follower.update()
            assert not follower.update()
            assert crasher.contents(follower.folder) == crasher.stored(original)


@pytest.mark.parametrize("was_sent", [False, True])
@pytest.mark.parametrize("keep_removed_s", [0.0, 86_400.0])
def test_a_copy_finds_an_item_whose_equal_ones_were_removed_after_the_compaction(
    original: Gallery, follower: Follower, address: str, was_sent: bool, keep_removed_s: float
) -> None:
    """The index has only the first of equal images, whose vector the copy may not have."""
    follower.update()
    equal = [entry(f"equal {n}", QUERIES[0], {"stock": n}, "one image") for n in range(3)]
    original.add(equal)
    if was_sent:
        publish(original.path, address)
        follower.update()
    original.remove(["k0", "k1"])
    original.compact(keep_removed_s=keep_removed_s)
    original.remove(["equal 0", "equal 1"])
    publish(original.path, address)
    follower.update()
    with contextlib.closing(Gallery.open(follower.folder)) as copy:
        assert copy.search(QUERIES[:1], 1)[0][0].key == "equal 2"
    check_same(original, follower.folder)


@pytest.mark.parametrize(
    ("kind", "vector_type", "store"),
    [("flat", "fp32", "memory"), ("hnsw", "fp16", "file"), ("ivf-pq", "fp32", "file")],
)
def test_a_copy_has_the_index_of_the_original(
    tmp_path: Path, kind: str, vector_type: str, store: str
) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    path, address = tmp_path / "shop", f"{store}://{tmp_path}/published"
    follower = Follower(address, tmp_path / "copy")
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
    again = Gallery.create(path, name="shop", bundle_id=BUNDLE, dim=DIM)  # by a new build
    again.add(entries(range(30), seed=3))
    publish(path, address)
    assert follower.update()
    check_same(again, follower.folder)
    fsspec.filesystem("memory").store.clear()


def test_only_what_changed_is_uploaded_and_old_objects_go(
    gallery: Gallery, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gallery.path
    gallery.add(entries(range(2000)))
    gallery.compact()
    first = publish(path, address).uploaded_bytes
    assert publish(path, address).uploaded_bytes == 0
    gallery.add(entries(range(6000, 6010)))
    gallery.update({f"k{key}": {"stock": 100} for key in range(20)})
    second = publish(path, address)
    assert second.changed_items == 30
    assert second.uploaded_bytes < first / 10
    for number in range(7000, 7020):
        gallery.add(entries(range(number, number + 1)))
        publish(path, address)
    store, snapshot = ObjectFolder(address), snapshot_at(address)
    assert len(snapshot.deltas) < 8
    assert [delta.until for delta in snapshot.deltas[:-1]] == [
        delta.since for delta in snapshot.deltas[1:]
    ]
    assert store.names("objects") == snapshot.objects() | snapshot.retired.keys()
    monkeypatch.setattr("kinlens.indexer.exchange.published.RETIRED_S", -1)
    publish(path, address)
    assert store.names("objects") == snapshot_at(address).objects()


def test_an_erased_item_costs_neither_side_the_gallery(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the files of the index, which a flat one does not have."""
    path, loaded, download = tmp_path / "shop", [], ObjectFolder.download

    def noted(store: ObjectFolder, files: Mapping[str, Path]) -> None:
        download(store, files)
        loaded.extend(file.stat().st_size for file in files.values())

    monkeypatch.setattr(ObjectFolder, "download", noted)
    gallery = Gallery.create(path, name="shop", bundle_id=BUNDLE, dim=256)
    vectors = units(20_000, dim=256)
    gallery.add(entry(f"k{n}", row, {"stock": n % 9}, str(n)) for n, row in enumerate(vectors[1:]))
    gallery.compact(IndexSettings(kind="flat"))
    base = publish(path, address).uploaded_bytes
    follower = Follower(address, tmp_path / "copy")
    follower.update()
    assert sum(loaded) > 0.99 * base
    gallery.remove(["k6003"])
    publish(path, address)  # so that the compaction erases what the store has as removed
    gallery.compact(keep_removed_s=0)
    gallery.add([entry("new", vectors[0], {"stock": 1}, "new")])
    loaded.clear()
    report = publish(path, address)
    assert report.changed_items == 1
    follower.update()
    segment = sum(facts.bytes for facts in snapshot_at(address).segment_files.values())
    assert report.uploaded_bytes - segment < 1.2 * 2**20 < base / 20
    assert sum(loaded) - segment < 100_000
    check_same(gallery, follower.folder)
    late = Follower(address, tmp_path / "late")
    late.update()
    check_same(gallery, late.folder)


@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
def test_no_file_has_a_trace_of_erased_items_after_the_publication_and_its_adoption(
    gallery: Gallery,
    address: str,
    follower: Follower,
    is_large: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither of items that came and went between the publications of other changes."""
    if is_large:  # so that SQLite files are not vacuumed
        monkeypatch.setattr("kinlens.indexer.catalog.database._LARGE_BYTES", 0)
    rng, secrets = np.random.default_rng(1), []

    def publish_to_follower() -> None:
        publish(gallery.path, address)
        follower.update()

    for seed in range(4):
        lengths = rng.integers(1, 3000, 80)
        gallery.add(
            entry(f"secret-{seed}-{n}", row, {"note": "secret " + "x" * length}, f"{n} {seed}")
            for n, (row, length) in enumerate(zip(units(80, seed=seed), lengths, strict=True))
        )
        gallery.add(entries(range(1000 * seed, 1000 * seed + 80), seed=seed))
        if seed == 2:
            gallery.compact()
        publish_to_follower()
        secrets = [item.key for item in gallery.items() if item.key.startswith("secret")]
        gallery.update({key: {"note": f"secret {seed}"} for key in secrets[::2]})
        gallery.remove([key for key in secrets if rng.random() < 0.5])
        publish_to_follower()
    with contextlib.closing(Gallery.open(follower.folder)) as copy:
        copy.search(QUERIES, 5, SearchOptions(where=parse_filter("note = 'secret 3'")))
        gallery.remove([key for key in secrets if key in gallery.stored(secrets)])
        gallery.compact()
        publish_to_follower()
        copy.refresh()
    for folder in (follower.folder, Path(address)):
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert not [file for file in files if b"secret" in file.read_bytes()]
    check_same(gallery, follower.folder)


def test_an_index_of_a_later_version_leaves_the_copy_and_names_the_cure(
    original: Gallery, address: str, follower: Follower
) -> None:
    follower.update()
    before = version_of(follower.folder)
    original.add(entries(range(400, 410)))
    original.compact()
    publish(original.path, address)
    file = Path(address, "snapshot.json")
    content = json.loads(file.read_text())
    manifest = Path(address, "objects", content["segment_files"]["segment.json"]["sha256"])
    data = json.dumps(json.loads(manifest.read_text()) | {"schema_version": 99}).encode()
    digest = hashlib.sha256(data).hexdigest()
    manifest.with_name(digest).write_bytes(data)
    content["segment_files"]["segment.json"] = {"bytes": len(data), "sha256": digest}
    file.write_text(json.dumps(content))
    for _ in range(2):
        with pytest.raises(GalleryCorruptError, match="Update Kinlens on this host"):
            follower.update()
    assert version_of(follower.folder) == before


def test_a_store_of_an_earlier_version_is_published_anew_by_its_owner_alone(
    original: Gallery, address: str, follower: Follower, tmp_path: Path
) -> None:
    file = Path(address, "snapshot.json")
    content = json.loads(file.read_text())
    for name in ("live", "deltas"):
        del content[name]
    file.write_text(json.dumps(content | {"schema_version": 1}))
    with pytest.raises(GalleryCorruptError, match="publish the gallery again with this version"):
        follower.update()
    other = Gallery.create(tmp_path / "other", name="shop", bundle_id=BUNDLE, dim=DIM)
    with pytest.raises(GalleryConflictError, match="belongs to another folder"):
        publish(other.path, address)
    publish(original.path, address)
    follower.update()
    check_same(original, follower.folder)


def test_images_are_listed_once_and_all_files_but_the_last_are_transferred_many_at_a_time(
    gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    from fsspec.asyn import AsyncFileSystem
    from fsspec.implementations.memory import MemoryFileSystem

    requests: Counter[str] = Counter()
    written: list[str] = []
    running: set[str] = set()
    most = [0]
    memory = MemoryFileSystem()

    class Store(AsyncFileSystem):
        """A store in memory, whose requests wait for each other."""

        protocol = ("counted", "memory")
        cachable = False

        async def _pipe_file(self, path, value, mode="overwrite", **_):
            requests["put"] += 1
            running.add(path)
            most[0] = max(most[0], len(running))
            await asyncio.sleep(0)
            memory.pipe_file(path, value)
            written.append(path)
            running.remove(path)

        async def _put_file(self, lpath, rpath, **_):
            await self._pipe_file(rpath, Path(lpath).read_bytes())

        async def _cat_file(self, path, **_):
            requests["get"] += 1
            return memory.cat_file(path)

        async def _get_file(self, rpath, lpath, **_):
            requests["get"] += 1
            running.add(rpath)
            most[0] = max(most[0], len(running))
            await asyncio.sleep(0)
            Path(lpath).write_bytes(memory.cat_file(rpath))
            running.remove(rpath)

        async def _info(self, path, **_):
            requests["info"] += 1
            return memory.info(path)

        async def _find(self, path, **_):
            requests["list"] += 1
            return memory.find(path)

        async def _ls(self, path, detail=True, **_):
            requests["list"] += 1
            return memory.ls(path, detail=detail)

    fsspec.register_implementation("counted", Store, clobber=True)
    images = tmp_path / "images"
    images.mkdir()
    rows = []
    for number, vector in enumerate(units(300)):
        data = f"image {number}".encode()
        (images / f"{number}.jpg").write_bytes(data)
        rows.append(
            Entry(
                f"k{number}", vector, hashlib.sha256(data).hexdigest(), {}, f"{number}.jpg", "jpeg"
            )
        )
    gallery.add(rows)
    address = f"counted://{tmp_path}/published"
    publish(gallery.path, address)
    assert most[0] > 2
    assert [path.endswith("snapshot.json") for path in written].index(True) == len(written) - 1
    report = publish(gallery.path, address, with_images=True, image_root=images)
    assert (report.pictures, report.missing_pictures) == (300, 0)
    assert most[0] > 30
    assert sum(requests.values()) < 320
    requests.clear()
    gallery.update({"k1": {"stock": 1}})
    assert publish(gallery.path, address).pictures == 0
    assert sum(requests.values()) < 20
    assert publish(gallery.path, address, with_images=True).pictures == 0
    gallery.compact()
    publish(gallery.path, address)
    requests.clear()
    most[0] = 0
    assert Follower(address, tmp_path / "copy").update()
    assert most[0] > 1
    assert requests["get"] == len(snapshot_at(address).objects()) + 1
    check_same(gallery, tmp_path / "copy")
    memory.store.clear()


def points_of(work: Callable[[], object]) -> list[str]:
    """Where it may be killed; a kill does not tell apart a file before and after its sync."""
    points: list[str] = []
    with faults(points.append):
        work()
    return sorted({crasher.named(point) for point in points if "after sync" not in point})


@pytest.mark.timeout(120)
def test_kills_of_the_writer_and_of_a_follower_leave_the_snapshot_before_or_the_new_one(
    original: Gallery, address: str, follower: Follower
) -> None:
    """Both die at each of their fault points in turn, and are begun again, as are first copies."""
    copy, numbers = follower.folder, count(1)
    follower.update()

    def change() -> None:
        number = next(numbers)
        original.remove([f"k{number}"])
        original.add(entries(range(1000 + number, 1002 + number), seed=number))
        original.compact(keep_removed_s=0)

    change()
    writing = points_of(lambda: publish(original.path, address))
    following = [point for point in points_of(follower.update) if point.startswith("follow")]
    assert min(len(writing), len(following)) > 6
    for point in some(writing):
        change()
        before = version_of(copy)
        assert killed_at(crasher.publish_shop, original.path, address, copy, point), point
        follower.update()
        assert version_of(copy) in (before, original.version)
    for point in some(following):
        change()
        publish(original.path, address)
        before = version_of(copy)
        assert killed_at(crasher.follow_shop, original.path, address, copy, point), point
        assert version_of(copy) in (before, original.version)
    follower.update()
    check_same(original, copy)
    for number, point in enumerate(some(FIRST)):
        first = Follower(address, copy.with_name(f"first {number}"))
        assert killed_at(crasher.follow_shop, original.path, address, first.folder, point), point
        first.update()
        check_same(original, first.folder)
        assert {file.name for file in (first.folder / "downloads").iterdir()} == {"LOCK", "CHECKED"}


def some(points: list[str]) -> list[str]:
    """Every third point, and the last one; all of them in the long form."""
    return points if os.environ.get("KINLENS_LONG_TESTS") else [*points[:-1:3], points[-1]]


FIRST = [
    "generation: before sync of segment.json",
    "generation: before rename",
    "generation: after rename",
    "copy: before rename",
    "current: before rename",
    "follow: after commit",
]
"""Where a follower may be killed that makes its first copy."""


def test_a_copy_refuses_changes_with_the_address_of_its_original(
    gallery: Gallery, address: str, follower: Follower
) -> None:
    gallery.add(entries(range(20)))
    publish(gallery.path, address)
    follower.update()
    with contextlib.closing(Gallery.open(follower.folder)) as copy:
        for change in (
            lambda: copy.add(entries(range(30, 31))),
            lambda: copy.remove(["k1"]),
            lambda: copy.update({"k1": {"stock": 5}}),
            copy.compact,
            Calibrator(copy).fit,
            lambda: Gallery.create(copy.path, name="x", bundle_id=BUNDLE, dim=DIM),
            lambda: publish(copy.path, address),
        ):
            with pytest.raises(GalleryConflictError, match=r"is a copy of .*published"):
                change()
        assert copy.needs_compaction() is None
    check_same(gallery, follower.folder)


def test_wrong_addresses_and_folders_are_named(gallery, address, tmp_path) -> None:
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
    gallery.update({"k5": {"stock": 77}})
    write_backup(first.folder, tmp_path / "saved")
    restore_backup(tmp_path / "saved", tmp_path / "own")
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


def test_names_in_a_snapshot_cannot_leave_the_folder(original, address, tmp_path) -> None:
    file = Path(address, "snapshot.json")
    content = json.loads(file.read_text())
    files = {"../x": content["row_numbers"]}
    for field, bad in (("segment", "../../x"), ("vectors", "../../x"), ("segment_files", files)):
        file.write_text(json.dumps(content | {field: bad}))
        with pytest.raises(GalleryCorruptError, match=f"{field}.*does not have the right form"):
            Follower(address, tmp_path / "copy").update()


def test_what_was_downloaded_before_an_interruption_is_not_downloaded_again(
    original: Gallery, address: str, follower: Follower
) -> None:
    with faults(stops_at("follow: before commit")), pytest.raises(KeyboardInterrupt):
        follower.update()
    left = {file.name for file in (follower.folder / "downloads").iterdir()}
    downloaded: list[str] = []
    with faults(lambda point: downloaded.append(point) if "download" in point else None):
        follower.update()
    needed = snapshot_at(address).objects()
    assert len(left & needed) > 1
    assert len(downloaded) == len(needed - left)


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

    with monkeypatch.context() as patched:
        full = Mock(side_effect=OSError(28, "No space left on device"))
        patched.setattr(ObjectFolder, "write_all", full)
        with pytest.raises(GalleryError, match=r"not written.*No space"):
            publish(gallery.path, address)
    assert snapshot_at(address) == before
    with faults(second):
        publish(gallery.path, address)


def test_the_command_publishes_images_once_each_and_refuses_odd_times(
    address: str, run: Run, built: Path, shop: Path, tmp_path: Path
) -> None:
    assert "6 items, 6 changed" in run("publish", built, address).stdout
    assert "every = 'soon'" in failure(run("publish", built, address, "--every", "soon"))
    moved = shop.rename(tmp_path / "moved")
    (moved / "f.gif").unlink()
    ask = ("publish", built, address, "--pictures", "--image-root", moved, "--json")
    reports = [printed(run(*ask)) for _ in range(2)]
    assert [(one["pictures"], one["missing_pictures"]) for one in reports] == [(5, 1), (0, 1)]
    assert len([*Path(address, "pictures").glob("??/*")]) == 5
