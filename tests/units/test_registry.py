"""The registry: leases that hold what they gave, and swaps that nobody notices."""

import asyncio
import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedder.errors import (
    BundleMismatchError,
    DeadlineExceededError,
    GalleryError,
    GalleryNotFoundError,
)
from embedder.fake import FakeEmbedder
from indexer.gallery import Gallery
from service.settings import Settings
from tests.support.seams import Failures, GalleryLocation, Locations
from tests.support.shelves import Shelf, entries, make_gallery, serving

WAIT_S = 20.0


def run(test: Callable[[Shelf], Awaitable[None]], settings: Settings, **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * WAIT_S), serving(settings, **options) as shelf:
            await test(shelf)

    asyncio.run(main())


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux tells open files")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def given(*paths: Path, **settings: Any) -> Settings:
    return Settings(galleries=tuple(f"{path.name}={path}" for path in paths), **settings)


def damage(path: Path) -> None:
    """Make CURRENT name a generation that is not there."""
    (path / "CURRENT").write_text("0123456789ab\n")


def test_galleries_of_the_settings_come_first_and_managed_ones_after_them_by_name(
    tmp_path: Path,
) -> None:
    for name in ("zebra", "apple"):
        make_gallery(tmp_path / name, name)
    for name in ("nut", "mint", "apple"):
        make_gallery(tmp_path / "state" / "galleries" / name, f"managed-{name}")
    (tmp_path / "state" / "galleries" / "no-gallery").mkdir()
    (tmp_path / "state" / "galleries" / ".stage-gone").mkdir()
    settings = given(tmp_path / "zebra", tmp_path / "apple", state=tmp_path / "state")

    async def test(shelf: Shelf) -> None:
        registry = shelf.registry
        assert registry.names() == ["zebra", "apple", "mint", "nut"]
        assert registry.default == "zebra"
        assert shelf.keys("apple") == {"apple"}
        with registry.lease("mint") as mint, registry.lease() as zebra:
            assert (mint.managed, zebra.managed) == (True, False)
            assert mint.path == tmp_path / "state" / "galleries" / "mint"
        await registry.refresh()
        assert registry.names() == ["zebra", "apple", "mint", "nut"]

    run(test, settings)


def test_an_unknown_gallery_is_refused_by_name_with_the_known_ones(tmp_path: Path) -> None:
    make_gallery(tmp_path / "shop", "old")

    async def test(shelf: Shelf) -> None:
        with (
            pytest.raises(GalleryNotFoundError, match=r"'shoes' is unknown.*shop"),
            shelf.registry.lease("shoes"),
        ):
            pass

    run(test, given(tmp_path / "shop"))


def test_a_new_generation_is_served_after_the_next_look_and_the_old_one_is_closed(
    tmp_path: Path,
) -> None:
    first = make_gallery(tmp_path / "shop", "old")

    async def test(shelf: Shelf) -> None:
        assert shelf.keys() == {"old"}
        second = make_gallery(tmp_path / "shop", "new")
        await until(lambda: shelf.keys() == {"new"})
        await until(lambda: shelf.closed == [first])
        with shelf.registry.lease() as served:
            assert served.gallery.generation == second

    run(test, given(tmp_path / "shop"), interval_s=0.02)


def test_a_change_of_items_opens_nothing_again(tmp_path: Path) -> None:
    make_gallery(tmp_path / "shop", "old")

    async def test(shelf: Shelf) -> None:
        with shelf.registry.lease() as served:
            served.gallery.add(entries("more", 2))
        await shelf.registry.refresh()
        assert shelf.keys() == {"old", "more"}
        assert len(shelf.opened) == 1

    run(test, given(tmp_path / "shop"))


def test_a_lease_keeps_its_pair_open_through_any_number_of_swaps(tmp_path: Path) -> None:
    make_gallery(tmp_path / "shop", "old")

    async def test(shelf: Shelf) -> None:
        with shelf.registry.lease() as served:
            for number in range(3):
                make_gallery(tmp_path / "shop", f"new{number}")
                await shelf.registry.refresh()
            [hits] = served.gallery.search(served.model.known_vector[np.newaxis], 100)
            assert {hit.key.rsplit("-", 1)[0] for hit in hits} == {"old"}
            assert served.gallery.generation not in shelf.closed
            assert shelf.keys() == {"new2"}
            old = served.gallery
            generation = served.gallery.generation
        await until(lambda: generation in shelf.closed)
        with pytest.raises(GalleryError, match="closed"):
            old.search(served.model.known_vector[np.newaxis], 1)

    run(test, given(tmp_path / "shop"))


def test_a_call_that_nobody_waits_for_any_more_harms_nobody(tmp_path: Path) -> None:
    """A search that ran into its time limit goes on in its thread, after the lease has ended."""
    first = make_gallery(tmp_path / "shop", "old")

    async def test(shelf: Shelf) -> None:
        query = FakeEmbedder().embed(np.zeros((1, 3, 32, 32), np.uint8))
        over = threading.Event()

        def search(gallery: Any) -> None:
            while not over.is_set():
                with contextlib.suppress(GalleryError):
                    [hits] = gallery.search(query, 100)
                    assert len(hits) == 5

        with shelf.registry.lease() as served:
            calls = [
                asyncio.create_task(asyncio.to_thread(search, served.gallery)) for _ in range(4)
            ]
        make_gallery(tmp_path / "shop", "new")
        await shelf.registry.refresh()
        await until(lambda: first in shelf.closed)
        assert shelf.keys() == {"new"}
        over.set()
        await asyncio.gather(*calls)

    run(test, given(tmp_path / "shop"))


def test_leases_of_many_threads_hold_through_swaps(tmp_path: Path) -> None:
    make_gallery(tmp_path / "shop", "old")

    async def test(shelf: Shelf) -> None:
        over = threading.Event()

        def search() -> set[str]:
            found: set[str] = set()
            while not over.is_set():
                found |= shelf.keys()
            return found

        calls = [asyncio.create_task(asyncio.to_thread(search)) for _ in range(3)]
        for number in range(5):
            make_gallery(tmp_path / "shop", f"new{number}")
            await shelf.registry.refresh()
        over.set()
        assert "old" in set.union(*await asyncio.gather(*calls))
        await until(lambda: len(shelf.closed) == 5)

    run(test, given(tmp_path / "shop"))


@needs_proc
def test_many_swaps_leave_no_file_open(tmp_path: Path) -> None:
    make_gallery(tmp_path / "shop", "old")

    def open_generations() -> set[str]:
        """Names of folders in `versions` that hold a file this process has open."""
        found = set()
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                target = link.readlink()
                if target.is_relative_to(tmp_path / "shop" / "versions"):
                    found.add(target.relative_to(tmp_path / "shop" / "versions").parts[0])
        return found

    async def test(shelf: Shelf) -> None:
        for number in range(20):
            current = make_gallery(tmp_path / "shop", f"new{number}")
            await shelf.registry.refresh()
            assert shelf.keys() == {f"new{number}"}
        await until(lambda: open_generations() == {current})

    run(test, given(tmp_path / "shop"))


def test_a_generation_that_cannot_be_opened_leaves_the_old_one_served(tmp_path: Path) -> None:
    make_gallery(tmp_path / "shop", "old")

    async def test(shelf: Shelf) -> None:
        counted = shelf.failed
        damage(tmp_path / "shop")
        await shelf.registry.refresh()
        assert shelf.keys() == {"old"}
        assert shelf.failures.verdicts() == {
            "shop": "generation 0123456789ab failed with GalleryCorruptError"
        }
        assert counted == ["shop"]
        await shelf.registry.refresh()  # it failed a moment ago
        assert counted == ["shop"]
        make_gallery(tmp_path / "shop", "new")
        await shelf.registry.refresh()
        assert shelf.keys() == {"new"}
        assert shelf.failures.verdicts() == {}

    run(test, given(tmp_path / "shop"))


@pytest.mark.parametrize(
    ("bundle_id", "dim", "name"),
    [("unknown", 32, "BundleNotFoundError"), ("fake", 7, "BundleMismatchError")],
)
def test_a_generation_of_an_unknown_bundle_or_length_leaves_the_old_one_served(
    tmp_path: Path, bundle_id: str, dim: int, name: str
) -> None:
    make_gallery(tmp_path / "shop", "old")

    async def test(shelf: Shelf) -> None:
        generation = make_gallery(tmp_path / "shop", "new", bundle_id=bundle_id, dim=dim)
        await shelf.registry.refresh()
        assert shelf.keys() == {"old"}
        assert shelf.failures.verdicts() == {"shop": f"generation {generation} failed with {name}"}
        await until(lambda: generation in shelf.closed)

    run(test, given(tmp_path / "shop"))


def test_a_gallery_whose_folder_is_away_is_served_from_what_is_open(tmp_path: Path) -> None:
    make_gallery(tmp_path / "shop", "old")

    async def test(shelf: Shelf) -> None:
        (tmp_path / "shop" / "CURRENT").rename(tmp_path / "CURRENT")
        await shelf.registry.refresh()
        assert shelf.keys() == {"old"}
        assert "GalleryNotFoundError" in shelf.failures.verdicts()["shop"]
        (tmp_path / "CURRENT").rename(tmp_path / "shop" / "CURRENT")
        await shelf.registry.refresh()
        assert shelf.failures.verdicts() == {}
        assert len(shelf.opened) == 1

    run(test, given(tmp_path / "shop"))


def test_managed_galleries_come_and_go_while_the_service_runs(tmp_path: Path) -> None:
    managed = tmp_path / "state" / "galleries"

    async def test(shelf: Shelf) -> None:
        with pytest.raises(GalleryNotFoundError, match="POST /galleries"):
            _ = shelf.registry.default
        make_gallery(managed / "shop", "first")
        await shelf.registry.refresh()
        assert shelf.registry.names() == ["shop"]
        assert shelf.keys("shop") == {"first"}
        make_gallery(managed / "hats", "hats", count=0)
        await shelf.registry.refresh()
        assert shelf.registry.names() == ["hats", "shop"]
        assert shelf.keys("hats") == set()
        shutil.rmtree(managed / "shop")
        await shelf.registry.refresh()
        assert shelf.registry.names() == ["hats"]
        await until(lambda: len(shelf.closed) == 1)

    run(test, Settings(state=tmp_path / "state"))


def test_a_damaged_managed_gallery_does_not_stop_the_others_at_the_start(tmp_path: Path) -> None:
    managed = tmp_path / "state" / "galleries"
    for name in ("good", "bad"):
        make_gallery(managed / name, name)
    damage(managed / "bad")

    async def test(shelf: Shelf) -> None:
        assert shelf.registry.names() == ["good"]
        assert list(shelf.failures.verdicts()) == ["bad"]
        make_gallery(managed / "bad", "mended")
        await shelf.registry.refresh()
        assert shelf.keys("bad") == {"mended"}
        assert shelf.failures.verdicts() == {}

    run(test, Settings(state=tmp_path / "state"))


def test_a_managed_gallery_compacts_itself_and_a_given_one_does_not(tmp_path: Path) -> None:
    folders = {
        "given": tmp_path / "given",
        "managed": tmp_path / "state" / "galleries" / "managed",
    }
    for name, folder in folders.items():
        make_gallery(folder, name, count=20)
        with closing(Gallery.open(folder)) as gallery:
            gallery.compact()

    async def test(shelf: Shelf) -> None:
        def removed(name: str) -> int:
            with shelf.registry.lease(name) as served:
                return served.gallery.facts().tombstones

        for name in folders:
            with shelf.registry.lease(name) as served:
                served.gallery.remove([f"{name}-{n}" for n in range(10)])
        await until(lambda: removed("managed") == 0)
        assert removed("given") == 10

    run(test, given(folders["given"], state=tmp_path / "state"))


@pytest.mark.parametrize("line", range(14))
def test_a_gallery_may_close_at_any_moment_of_a_stop(tmp_path: Path, line: int) -> None:
    make_gallery(tmp_path / "shop", "old")
    go_on = threading.Event()
    lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        """Let the gallery close between two lines of `Registry.stop`, and wait until it has."""
        nonlocal lines
        if event == "call":
            is_stop = frame.f_code.co_qualname == "Registry.stop"
            return trace if is_stop else None
        if event == "line":
            lines += 1
            if lines == line:
                go_on.set()
                for thread in threading.enumerate():
                    if thread is not threading.current_thread() and "close" in thread.name:
                        thread.join(0.2)
        return trace

    async def main() -> None:
        shelf = Shelf(given(tmp_path / "shop"))
        close = shelf.opened[0].close
        shelf.opened[0].close = lambda: [go_on.wait(WAIT_S), close()]  # type: ignore[assignment]
        await shelf.lanes.start()
        await shelf.registry.start(3600.0)
        threading.Timer(0.5, go_on.set).start()
        sys.settrace(trace)
        try:
            await shelf.registry.stop()
        finally:
            sys.settrace(None)
        await shelf.lanes.close()
        assert len(shelf.closed) == 1

    asyncio.run(main())


def test_a_disk_that_hangs_holds_up_no_lease_and_is_told_in_time(tmp_path: Path) -> None:
    make_gallery(tmp_path / "shop", "old")

    async def test(shelf: Shelf) -> None:
        gate, begun = threading.Event(), threading.Event()
        list_galleries = shelf.locations.list_galleries

        def hang() -> Any:
            begun.set()
            gate.wait(WAIT_S)
            return list_galleries()

        shelf.locations.list_galleries = hang  # type: ignore[method-assign]
        refreshing = asyncio.create_task(shelf.registry.refresh())
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        assert shelf.keys() == {"old"}
        tasks = []
        for _ in range(5):
            with pytest.raises(DeadlineExceededError):
                await shelf.registry.read_from_disk(0.01)
            tasks.append(len(asyncio.all_tasks()))
        assert tasks[0] == tasks[-1], "nothing piles up"
        gate.set()
        await refreshing

    run(test, given(tmp_path / "shop"))


def test_reads_of_the_disk_begin_after_they_were_asked_for_and_are_shared(tmp_path: Path) -> None:
    make_gallery(tmp_path / "shop", "old")

    async def test(shelf: Shelf) -> None:
        registry, reads = shelf.registry, 0
        list_galleries = shelf.locations.list_galleries

        def counted() -> Any:
            nonlocal reads
            reads += 1
            return list_galleries()

        shelf.locations.list_galleries = counted  # type: ignore[method-assign]
        begun = time.monotonic()
        while time.monotonic() < begun + 0.5:
            await asyncio.gather(*(registry.refresh_if_unknown("nowhere") for _ in range(50)))
        assert 2 <= reads <= 5, "unknown names cannot load the disk"
        make_gallery(tmp_path / "shop", "new")
        await registry.read_from_disk()
        assert shelf.keys() == {"new"}
        shelf.locations.list_galleries = lambda: Path("/nowhere").stat()  # type: ignore
        with pytest.raises(GalleryError, match="No such file"):
            await registry.read_from_disk()

    run(test, given(tmp_path / "shop"))


def test_polling_goes_on_after_a_look_that_failed(tmp_path: Path) -> None:
    make_gallery(tmp_path / "shop", "old")

    async def test(shelf: Shelf) -> None:
        look = shelf.locations.list_galleries
        fails = iter([OSError("stale handle"), OSError("stale handle")])

        def look_again() -> Any:
            for error in fails:
                raise error
            return look()

        shelf.locations.list_galleries = look_again  # type: ignore[method-assign]
        make_gallery(tmp_path / "shop", "new")
        await until(lambda: shelf.keys() == {"new"})

    run(test, given(tmp_path / "shop"), interval_s=0.01)


def test_a_given_gallery_of_an_unknown_bundle_is_refused_at_the_start_by_both_ids(
    tmp_path: Path,
) -> None:
    make_gallery(tmp_path / "shop", "old", bundle_id="other")
    with pytest.raises(BundleMismatchError, match=r"(?s)shop.*other.*fake"):
        Shelf(given(tmp_path / "shop"))


def test_two_galleries_of_one_name_and_a_root_of_none_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        make_gallery(tmp_path / folder / "shop", "old")
    with pytest.raises(GalleryNotFoundError, match="Two galleries are called 'shop'"):
        Locations(given(tmp_path / "a" / "shop", tmp_path / "b" / "shop"))
    with pytest.raises(GalleryNotFoundError, match=r"'hats', which is not served.*shop"):
        Locations(given(tmp_path / "a" / "shop", image_roots=(f"hats={tmp_path}",)))


def test_what_fails_again_is_tried_after_a_pause_that_doubles_up_to_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("service.galleries.registry.time.monotonic", lambda: now[0])
    failures = Failures(lambda _: None)
    location = GalleryLocation("shop", Path("shop"), managed=False, generation="a" * 12)
    pauses = []
    for _ in range(8):
        failures.add(location, OSError("gone"))
        start = now[0]
        while failures.is_waiting(location):
            now[0] += 1.0
        pauses.append(now[0] - start)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert not failures.is_waiting(replace(location, generation="b" * 12))
