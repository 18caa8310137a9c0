"""A folder of photographs means the same classes to training, gallery and demo."""

from importlib import import_module
from pathlib import Path

import pytest

from embedder.bundle import Bundle
from embedder.session import OnnxEmbedder
from indexer.gallery import Gallery
from indexer.ingest.build import BuildSettings, build_gallery
from indexer.ingest.sources import SUFFIXES, folder_source
from tests.tiny import encoded, picture
from training.config.settings import FolderData
from training.data.doctor import examine
from training.data.load import load_split
from training.data.records import IMAGE_SUFFIXES

PRODUCTS = ("Women/Dress", "Women/Coat", "Men/Coat", "Hats", "Bags/Small/Red")


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Flat and nested product folders; two categories have a product of the same name."""
    root = tmp_path / "shop"
    for number, product in enumerate(PRODUCTS):
        (root / product).mkdir(parents=True)
        for view in range(3):
            data = encoded(picture(10 * number + view))
            (root / product / f"{view}.png").write_bytes(data)
    (root / "loose.png").write_bytes(encoded(picture(99)))
    (root / "Hats" / ".hidden.png").write_bytes(encoded(picture(98)))
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
    files, classes = import_module("demo").photographs(shop)

    assert set(trained.values()) == classes == set(PRODUCTS)
    assert stored == {**trained, "loose.png": None}
    assert {path.relative_to(shop).as_posix() for path in files} == set(stored)
    assert examine(shop).parts["all"] == (15, 5)


def test_training_and_gallery_take_the_same_files_for_images() -> None:
    assert set(SUFFIXES) == IMAGE_SUFFIXES
