import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from kinlens.embedder.errors import DatasetError
from kinlens.training.config.settings import RenderedData
from kinlens.training.rendered.catalogue import class_name, describe, render_view, write_catalogue
from kinlens.training.rendered.painting import lettering
from kinlens.training.rendered.shapes import SHAPES

SMALL = RenderedData(kind="rendered", root="unused", products=3, views=2, size_px=48)
UNSEEN = range(70, 90)


def _pixels(product: int, view: int, seed: int = 0) -> bytes:
    return render_view(product, view, size_px=48, seed=seed).tobytes()


def _files(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def test_the_same_seed_product_and_view_give_the_same_pixels_in_any_order() -> None:
    forwards = [_pixels(product, view) for product in range(4) for view in range(3)]
    lettering.cache_clear()
    backwards = [_pixels(product, view) for product in (3, 2, 1, 0) for view in (2, 1, 0)]
    assert forwards == backwards[::-1]


def test_views_products_and_seeds_all_give_other_pixels() -> None:
    photos = [_pixels(p, v, s) for p in range(4) for v in range(4) for s in range(2)]
    assert len(set(photos)) == len(photos)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size_px", [32, 33, 200])
def test_every_shape_is_drawn_at_every_size(shape: str, size_px: int) -> None:
    product = next(p for p in range(200) if describe(p).shape == shape)
    for view in range(4):
        image = render_view(product, view, size_px=size_px)
        assert (image.mode, image.size) == ("RGB", (size_px, size_px))
        assert np.asarray(image).std() > 8


def test_the_same_image_is_drawn_at_another_size() -> None:
    for product in range(10):
        small = np.asarray(render_view(product, 0, size_px=96).resize((12, 12)), float)
        large = np.asarray(render_view(product, 0, size_px=192).resize((12, 12)), float)
        assert abs(small - large).mean() < 8


@pytest.mark.parametrize("products", [range(20), range(30, 50), UNSEEN])
def test_shapes_colours_and_patterns_are_shared_between_products(products: range) -> None:
    items = [describe(product) for product in products]
    for names in (
        [item.shape for item in items],
        [item.scheme for item in items],
        [item.skin.pattern for item in items],
        [item.skin.label for item in items],
    ):
        counts = Counter(names)
        assert len(counts) >= 3
        assert sum(count for count in counts.values() if count > 1) >= len(items) / 2


def test_words_have_three_to_seven_letters_and_repeat_only_after_hundreds_of_products() -> None:
    words = [describe(product).skin.word for product in range(400)]
    assert len(set(words)) == 400
    assert {len(word) for word in words} == {3, 4, 5, 6, 7}
    assert all(word.isalpha() and word.isupper() for word in words)


def test_colour_alone_neither_fails_nor_suffices_to_find_unseen_products() -> None:
    products = np.repeat(UNSEEN, 16)
    histograms = []
    for product in UNSEEN:
        for view in range(16):
            codes = np.asarray(render_view(product, view, size_px=64), np.int64) // 32
            bins = np.bincount((codes @ [64, 8, 1]).ravel(), minlength=512)
            histograms.append(np.sqrt(bins / bins.sum()))
    similarity = np.stack(histograms) @ np.stack(histograms).T
    np.fill_diagonal(similarity, -1)
    recall = (products[similarity.argmax(1)] == products).mean()
    assert 0.25 < recall < 0.75


def test_a_catalogue_is_one_folder_of_jpegs_a_product_and_its_settings(tmp_path: Path) -> None:
    seen: list[None] = []
    paths = write_catalogue(tmp_path / "new" / "shop", SMALL, lambda: seen.append(None))
    root = tmp_path / "new" / "shop"
    names = [f"{class_name(p)}/{v:02d}.jpg" for p in range(3) for v in range(2)]
    assert [str(path.relative_to(root)) for path in paths] == names
    assert set(_files(root)) == {*names, "catalogue.json"}
    assert len(seen) == 6
    settings = json.loads((root / "catalogue.json").read_text())
    assert settings.items() >= {"products": 3, "views": 2, "size_px": 48, "seed": 0}.items()
    with Image.open(paths[0]) as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (48, 48))


def test_an_interrupted_catalogue_is_finished_by_the_next_run(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    write_catalogue(whole, SMALL)
    left = iter(range(2))
    with pytest.raises(StopIteration):
        write_catalogue(broken, SMALL, lambda: next(left) and None)
    kept = broken / class_name(0) / "00.jpg"
    before = kept.stat().st_mtime_ns
    write_catalogue(broken, SMALL)
    assert kept.stat().st_mtime_ns == before
    assert _files(broken) == _files(whole)


@pytest.mark.parametrize("other", [{"products": 4}, {"views": 3}, {"size_px": 64}, {"seed": 1}])
def test_a_folder_of_other_settings_is_kept(tmp_path: Path, other: dict[str, int]) -> None:
    write_catalogue(tmp_path, SMALL)
    before = _files(tmp_path)
    with pytest.raises(DatasetError, match="another folder") as caught:
        write_catalogue(tmp_path, SMALL.model_copy(update=other))
    assert str(tmp_path) in str(caught.value)
    assert _files(tmp_path) == before


@pytest.mark.parametrize("name", ["holiday.jpg", "catalogue.json"])
def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not ours")
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(DatasetError, match="not a catalogue of rendered products"):
            write_catalogue(place, SMALL)
    assert _files(tmp_path) == {name: b"not ours"}


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"products": 1}, {"views": 0}, {"size_px": 31}, {"size_px": 1025}, {"seed": -1}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            RenderedData(kind="rendered", root="unused", **wrong)
