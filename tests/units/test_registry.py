"""Galleries and their models: leases that hold what they gave, and swaps that nobody notices."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedder.bundle import Bundle
from embedder.errors import (
    GalleryError,
)
from embedder.fake import FakeEmbedder
from embedder.types import Embeddings, Images
from indexer.gallery import Gallery
from service.settings import Settings
from tests.embedder.bundles import CALIBRATION, write_full_bundle
from tests.support.seams import Bundles, Failures, GalleryLocation, embedding_key
from tests.support.shelves import Shelf, make_gallery, serving
from tests.support.waiting import until_async

WAIT_S = 20.0


def run(test: Callable[[Shelf], Awaitable[None]], settings: Settings, **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * WAIT_S), serving(settings, **options) as shelf:
            await test(shelf)

    asyncio.run(main())


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux tells open files")


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


def test_a_new_generation_is_served_after_the_next_look_and_the_old_one_is_closed(
    tmp_path: Path,
) -> None:
    first = make_gallery(tmp_path / "shop", "old")

    async def test(shelf: Shelf) -> None:
        assert shelf.keys() == {"old"}
        second = make_gallery(tmp_path / "shop", "new")
        await until_async(lambda: shelf.keys() == {"new"})
        await until_async(lambda: shelf.closed == [first])
        with shelf.registry.lease() as served:
            assert served.gallery.generation == second

    run(test, given(tmp_path / "shop"), interval_s=0.02)


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
        await until_async(lambda: generation in shelf.closed)
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
        await until_async(lambda: first in shelf.closed)
        assert shelf.keys() == {"new"}
        over.set()
        await asyncio.gather(*calls)

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
        await until_async(lambda: open_generations() == {current})

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
        await until_async(lambda: removed("managed") == 0)
        assert removed("given") == 10

    run(test, given(folders["given"], state=tmp_path / "state"))


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
        await until_async(lambda: shelf.keys() == {"new"})

    run(test, given(tmp_path / "shop"), interval_s=0.01)


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


class Gated(FakeEmbedder):
    """Waits in its first call until it may go on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.calls = 0

    def embed(self, images: Images) -> Embeddings:
        self.calls += 1
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        return super().embed(images)


def shop(tmp_path: Path) -> Settings:
    make_gallery(tmp_path / "shop", "old", bundle_id="one")
    return Settings(galleries=(f"shop={tmp_path / 'shop'}",))


def running(shelf: Shelf) -> list[str]:
    return [model.bundle_id for model in shelf.models.running()]


def test_the_memory_of_a_model_is_free_when_its_last_gallery_has_gone(tmp_path: Path) -> None:
    async def test(shelf: Shelf) -> None:
        shelf.bundles["two"] = FakeEmbedder(bundle_id="two")
        make_gallery(tmp_path / "shop", "new", bundle_id="two")
        await shelf.registry.refresh()
        assert running(shelf) == ["two"]
        gone = weakref.ref(shelf.bundles.pop("two"))
        make_gallery(tmp_path / "shop", "newer", bundle_id="one")
        await shelf.registry.refresh()
        await until_async(lambda: len(shelf.closed) == 2)
        gc.collect()
        assert gone() is None

    run(test, shop(tmp_path), one=FakeEmbedder(bundle_id="one"))


def test_a_model_is_warm_before_its_gallery_is_served(tmp_path: Path) -> None:
    slow = Gated(bundle_id="two")

    async def test(shelf: Shelf) -> None:
        make_gallery(tmp_path / "shop", "new", bundle_id="two")
        refreshing = asyncio.create_task(shelf.registry.refresh())
        assert await asyncio.to_thread(slow.entered.wait, WAIT_S)
        assert shelf.keys() == {"old"}
        slow.gate.set()
        await refreshing
        assert shelf.keys() == {"new"}
        assert slow.calls == 1

    run(test, shop(tmp_path), one=FakeEmbedder(bundle_id="one"), two=slow)


def test_the_precision_of_the_settings_runs(
    tmp_path: Path, make_tiny_bundle: Callable[..., Bundle]
) -> None:
    bundle = write_full_bundle(make_tiny_bundle(seed=3), tmp_path, seed=3.05)
    embedder = Bundles(Settings(bundle=bundle.path, precision="int8")).open(bundle.bundle_id)
    assert embedder.precision == "int8"
    assert embedder.calibration == CALIBRATION


def test_what_auto_takes_is_in_the_keys_of_the_cache(
    tmp_path: Path, make_tiny_bundle: Callable[..., Bundle]
) -> None:
    bundle = write_full_bundle(make_tiny_bundle(seed=3), tmp_path, seed=3.5)  # far from fp32
    embedder = Bundles(Settings(bundle=bundle.path, precision="auto")).open(bundle.bundle_id)
    assert embedder.precision == "fp32"
    assert "mean cosine to fp32" in embedder.precision_reason
    assert ":fp32:" in embedding_key(bundle.bundle_id, embedder.precision, "digest", None)
