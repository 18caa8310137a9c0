"""Models: opened once when a gallery needs them, warm before anyone gets them, stopped after it."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedder.bundle import Bundle
from embedder.errors import BundleCorruptError, BundleNotFoundError
from embedder.fake import FakeEmbedder
from embedder.types import Embeddings, Images
from service.settings import Settings
from tests.embedder.bundles import CALIBRATION, write_full_bundle
from tests.support.seams import Bundles, embedding_key
from tests.support.shelves import Shelf, make_gallery, serving

WAIT_S = 20.0


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


def run(test: Callable[[Shelf], Awaitable[None]], settings: Settings, **bundles: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * WAIT_S), serving(settings, **bundles) as shelf:
            await test(shelf)

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def shop(tmp_path: Path) -> Settings:
    make_gallery(tmp_path / "shop", "old", bundle_id="one")
    return Settings(galleries=(f"shop={tmp_path / 'shop'}",))


def running(shelf: Shelf) -> list[str]:
    return [model.bundle_id for model in shelf.models.running()]


def test_a_bundle_is_opened_once_for_all_its_galleries(tmp_path: Path) -> None:
    for name in ("shop", "hats"):
        make_gallery(tmp_path / name, name, bundle_id="one")
    settings = Settings(galleries=tuple(f"{name}={tmp_path / name}" for name in ("shop", "hats")))

    async def test(shelf: Shelf) -> None:
        with shelf.registry.lease("shop") as left, shelf.registry.lease("hats") as right:
            assert left.model is right.model
        assert shelf.found == ["one"]

    run(test, settings, one=FakeEmbedder(bundle_id="one"))


def test_several_bundles_are_served_at_once_each_to_its_own_galleries(tmp_path: Path) -> None:
    for name, bundle_id in (("shop", "one"), ("hats", "two")):
        make_gallery(tmp_path / name, name, bundle_id=bundle_id)
    settings = Settings(galleries=tuple(f"{name}={tmp_path / name}" for name in ("shop", "hats")))

    async def test(shelf: Shelf) -> None:
        for name, bundle_id in (("shop", "one"), ("hats", "two")):
            with shelf.registry.lease(name) as served:
                assert served.model.bundle_id == served.gallery.bundle_id == bundle_id
        assert running(shelf) == ["one", "two"]

    run(test, settings, one=FakeEmbedder(bundle_id="one"), two=FakeEmbedder(bundle_id="two"))


def test_a_swap_to_another_bundle_starts_its_model_and_stops_the_old_one(tmp_path: Path) -> None:
    async def test(shelf: Shelf) -> None:
        with shelf.registry.lease() as served:
            make_gallery(tmp_path / "shop", "new", bundle_id="two")
            await shelf.registry.refresh()
            old = served.model
            assert running(shelf) == ["one", "two"]
            vector = await old.encoder.infer(old.known_image)
            assert np.allclose(vector, old.known_vector)
        await shelf.registry.refresh()
        assert running(shelf) == ["two"]
        assert shelf.keys() == {"new"}

    run(
        test,
        shop(tmp_path),
        one=FakeEmbedder(bundle_id="one"),
        two=FakeEmbedder(bundle_id="two"),
    )


def test_the_memory_of_a_model_is_free_when_its_last_gallery_has_gone(tmp_path: Path) -> None:
    async def test(shelf: Shelf) -> None:
        shelf.bundles["two"] = FakeEmbedder(bundle_id="two")
        make_gallery(tmp_path / "shop", "new", bundle_id="two")
        await shelf.registry.refresh()
        assert running(shelf) == ["two"]
        gone = weakref.ref(shelf.bundles.pop("two"))
        make_gallery(tmp_path / "shop", "newer", bundle_id="one")
        await shelf.registry.refresh()
        await until(lambda: len(shelf.closed) == 2)
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


def test_callers_at_the_same_time_open_a_model_once(tmp_path: Path) -> None:
    async def test(shelf: Shelf) -> None:
        models = await asyncio.gather(*(shelf.models.get("two") for _ in range(5)))
        assert len({id(model) for model in models}) == 1
        assert shelf.found == ["one", "two"]

    run(
        test,
        shop(tmp_path),
        one=FakeEmbedder(bundle_id="one"),
        two=FakeEmbedder(bundle_id="two"),
    )


def test_a_model_that_fails_at_its_warm_up_is_not_kept(tmp_path: Path) -> None:
    class Broken(FakeEmbedder):
        def embed(self, images: Images) -> Embeddings:
            raise BundleCorruptError("broken")

    async def test(shelf: Shelf) -> None:
        for _ in range(2):
            with pytest.raises(BundleCorruptError):
                await shelf.models.get("two")
        assert running(shelf) == ["one"]
        shelf.bundles["two"] = FakeEmbedder(bundle_id="two")
        assert (await shelf.models.get("two")).dim == 32

    run(test, shop(tmp_path), one=FakeEmbedder(bundle_id="one"), two=Broken(bundle_id="two"))


def test_without_a_gallery_the_first_bundle_runs(tmp_path: Path) -> None:
    make_gallery(tmp_path / "galleries" / "shop", "old", bundle_id="two")

    async def test(shelf: Shelf) -> None:
        assert running(shelf) == ["two"]
        (tmp_path / "galleries" / "shop" / "CURRENT").unlink()
        await shelf.registry.refresh()
        await shelf.registry.refresh()
        assert running(shelf) == ["one"]
        assert shelf.registry.model.bundle_id == "one"

    run(
        test,
        Settings(state=tmp_path),
        one=FakeEmbedder(bundle_id="one"),
        two=FakeEmbedder(bundle_id="two"),
    )


def test_bundles_are_found_in_the_settings_and_in_the_state_folder(
    tmp_path: Path, make_tiny_bundle: Callable[..., Bundle]
) -> None:
    primary, stored = make_tiny_bundle(seed=1), make_tiny_bundle(seed=2)
    bundles = Bundles(Settings(bundle=primary.path, state=tmp_path))
    assert bundles.primary() == primary.bundle_id
    with pytest.raises(BundleNotFoundError, match=primary.bundle_id[:12]):
        bundles.open(stored.bundle_id)
    folder = tmp_path / "bundles" / stored.bundle_id[:16]
    folder.parent.mkdir()
    folder.symlink_to(stored.path)
    for bundle in (primary, stored):
        assert bundles.open(bundle.bundle_id).bundle_id == bundle.bundle_id
    assert bundles.open(primary.bundle_id).calibration is None


@pytest.mark.parametrize("bundle_id", ["../../etc", "/etc", "", "0" * 16, "0" * 64])
def test_an_id_that_is_none_finds_no_bundle(tmp_path: Path, bundle_id: str) -> None:
    with pytest.raises(BundleNotFoundError):
        Bundles(Settings(state=tmp_path)).open(bundle_id)
    with pytest.raises(BundleNotFoundError):
        Bundles(Settings(), FakeEmbedder()).open(bundle_id)


def test_a_service_without_a_bundle_is_refused_by_name_of_the_option() -> None:
    with pytest.raises(BundleNotFoundError, match="--bundle"):
        Bundles(Settings()).primary()


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
