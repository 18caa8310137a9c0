"""Galleries on a GPU, from the settings to the answer of `POST /search`."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index import gpu
from tests.support.fake_gpu import Device, fake_gpu
from tests.support.shops import Shop, make_gallery, start_shop
from tests.support.waiting import until


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


def test_searches_use_the_gpu_until_it_fails(device, state, data, closes) -> None:
    shop = closes(start_shop(state, create=False, index_device="cuda"))
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


def test_without_a_gpu_the_cpu_is_used_with_the_reason(
    device, state, data, monkeypatch, closes
) -> None:
    monkeypatch.setattr(gpu, "failed_trial", lambda: "the driver is too old")
    shop = closes(start_shop(state, create=False, device="cuda"))
    assert len(shop.search(data[0], k=5).json()["hits"]) == 5
    reported = ready(shop)
    assert reported["status"] == "ready"
    assert reported["indexes"]["shop"]["device"] == "cpu"
    assert "the driver is too old" in reported["indexes"]["shop"]["reason"]
    assert reported["free_gpu_memory_mb"] is None


def test_a_compaction_frees_the_replaced_index(device, state, data, closes) -> None:
    shop = closes(start_shop(state, create=False, device="cuda"))
    shop.search(data[0], k=5)
    before = device.free
    shop.put({"new": data[1]})
    with closing(Gallery.open(shop.folder)) as gallery:
        gallery.compact(wait=True)
    until(lambda: shop.search(data[2], k=5) and device.free < before)  # for one more item
    until(lambda: device.free > before - 2**20)
