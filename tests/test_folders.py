"""A folder of photos means the same classes to training, gallery and demo."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import BuildSettings, build_gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.training.config.settings import FolderData
from kinlens.training.data.doctor import examine
from kinlens.training.data.load import load_split
from tests.tiny import encoded, photo

PRODUCTS = ("Women/Dress", "Women/Coat", "Men/Coat", "Hats", "Bags/Small/Red")

FILES = {"PNG": ".png", "AVIF": ".AVIF", "HEIF": ".heic"}


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Flat and nested product folders; two categories have a product of the same name."""
    root = tmp_path / "shop"
    for number, product in enumerate(PRODUCTS):
        (root / product).mkdir(parents=True)
        for view, (kind, suffix) in enumerate(FILES.items()):
            data = encoded(photo(10 * number + view), kind)
            (root / product / f"{view}{suffix}").write_bytes(data)
    (root / "loose.png").write_bytes(encoded(photo(99)))
    (root / "Hats" / ".hidden.png").write_bytes(encoded(photo(98)))
    return root


def test_training_gallery_and_demo_find_the_same_classes(
    shop: Path, tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = load_split(FolderData(kind="folder", root=str(shop)))
    trained = {
        path: images.class_names[label]
        for images in (split.train, split.test)
        for path, label in zip(images.paths, images.labels, strict=True)
    }
    place = tmp_path / "gallery"
    build_gallery(folder_source(shop), OnnxEmbedder.open(tiny_bundle), place, BuildSettings("shop"))
    gallery = Gallery.open(place)
    stored = {item.key: item.attributes.get("class") for item in gallery.items()}
    gallery.close()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    classes = import_module("demo").trainable(shop)

    assert set(trained.values()) == classes == set(PRODUCTS)
    assert stored == {**trained, "loose.png": None}
    assert examine(shop).parts["all"] == (15, 5)


def test_without_its_extra_each_heic_is_left_out_with_the_cure(
    shop: Path, tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    embedder = OnnxEmbedder.open(tiny_bundle)
    report = build_gallery(folder_source(shop), embedder, tmp_path / "gallery")
    assert len(report.failures) == len(PRODUCTS)
    for failure in report.failures:
        assert failure.key.endswith(".heic")
        assert "pip install 'kinlens[heif]'" in failure.reason
