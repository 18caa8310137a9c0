"""Galleries on a GPU, from the settings to the answer of `POST /search`."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kinlens.embedder.bundle import Bundle
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index import gpu
from kinlens.service.__main__ import app
from tests.support.fake_gpu import Device, fake_gpu
from tests.support.shops import Shop, make_gallery, start_shop
from tests.support.waiting import until
from tests.tiny import TINY_DIM


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return fake_gpu(monkeypatch)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A folder with a gallery."""
    place = tmp_path / "state" / "galleries" / "shop"
    make_gallery(place, "a", count=500)
    with closing(Gallery.open(place)) as gallery:
        gallery.compact(wait=True)
    return tmp_path / "state"


def ready(shop: Shop) -> Any:
    """The answer of /ready."""
    return shop.client.get("/ready").json()


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"index_device": "cuda"}])
def test_the_service_searches_on_the_gpu_and_ready_tells_memory_and_place(
    device: Device,
    state: Path,
    data: list[bytes],
    settings: dict[str, str],
) -> None:
    shop = start_shop(state, create=False, **settings)
    try:
        found = shop.search(data[0], k=5).json()["hits"]
        assert len(found) == 5
        assert device.searches
        reported = ready(shop)
        assert reported["indexes"]["shop"]["device"] == "cuda"
        assert reported["indexes"]["shop"]["gpu_memory_mb"] > 0
        assert reported["free_gpu_memory_mb"] == round(device.free / 2**20)
        assert reported["free_memory_mb"] > 0
        device.breaks = True
        again = shop.search(data[0], k=4).json()["hits"]
        assert [hit["id"] for hit in again] == [hit["id"] for hit in found[:4]]
        until(lambda: ready(shop)["indexes"]["shop"]["device"] == "cpu")  # asked once a second
        reported = ready(shop)
        assert reported["status"] == "ready"
        assert reported["indexes"]["shop"]["reason"] == "CUDA error 719 launch failed"
    finally:
        shop.close()


def test_without_a_gpu_the_service_starts_and_says_why_it_searches_on_the_cpu(
    device: Device, state: Path, data: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "failed_trial", lambda: "the driver is too old")
    shop = start_shop(state, create=False, device="cuda")
    try:
        assert len(shop.search(data[0], k=5).json()["hits"]) == 5
        reported = ready(shop)
        assert reported["status"] == "ready"
        assert reported["indexes"]["shop"]["device"] == "cpu"
        assert "the driver is too old" in reported["indexes"]["shop"]["reason"]
        assert reported["free_gpu_memory_mb"] is None
    finally:
        shop.close()


def test_a_compaction_frees_the_memory_of_the_index_that_it_replaces(
    device: Device, state: Path, data: list[bytes]
) -> None:
    shop = start_shop(state, create=False, device="cuda")
    try:
        shop.search(data[0], k=5)
        before = device.free
        shop.put({"new": data[1]})
        with closing(Gallery.open(shop.folder)) as gallery:
            gallery.compact(wait=True)
        until(lambda: shop.search(data[2], k=5) and device.free < before)  # for one more item
        until(lambda: device.free > before - 2**20)
    finally:
        shop.close()


def test_the_check_says_what_the_gpu_has_free_and_takes_nothing_of_it(
    device: Device, tmp_path: Path, tiny_bundle: Bundle
) -> None:
    make_gallery(tmp_path / "g", "a", bundle_id=tiny_bundle.bundle_id, dim=TINY_DIM)
    with closing(Gallery.open(tmp_path / "g")) as gallery:
        gallery.compact(wait=True)
    words = ["check", "--bundle", str(tiny_bundle.path), "--gallery", f"shop={tmp_path / 'g'}"]
    found = CliRunner().invoke(app, [*words, "--index-device", "cuda", "--port", "0", "--json"])
    reported = {one["subject"]: one["text"] for one in json.loads(found.stdout)["findings"]}
    assert "; index flat, 0 MB of memory" in reported["gallery shop"]
    assert reported["gpu"] == "81,920 of 81,920 MB free for galleries and model"
