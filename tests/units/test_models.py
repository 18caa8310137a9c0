"""Models: opened once when a gallery needs them, warm before anyone gets them, stopped after it."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from embedder.bundle import Bundle
from embedder.fake import FakeEmbedder
from embedder.types import Embeddings, Images
from service.settings import Settings
from tests.embedder.bundles import CALIBRATION, write_full_bundle
from tests.support.seams import Bundles, embedding_key
from tests.support.shelves import Shelf, make_gallery, serving
from tests.support.waiting import until_async

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
