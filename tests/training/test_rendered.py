import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, JpegImagePlugin

from embedder.errors import DatasetError
from training.rendered import catalogue
from training.rendered.catalogue import (
    Catalogue,
    class_name,
    describe,
    render_view,
    write_catalogue,
)
from training.rendered.painting import lettering
from training.rendered.shapes import SHAPES

SMALL = Catalogue(products=3, views=2, size_px=48)
UNSEEN = range(70, 90)


def _pixels(product: int, view: int, seed: int = 0) -> bytes:
    return render_view(product, view, size_px=48, seed=seed).tobytes()


def _files(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Note the (product, view) of every later rendering."""
    calls: list[tuple[int, int]] = []

    def counted(product: int, view: int, *, size_px: int, seed: int) -> Image.Image:
        calls.append((product, view))
        return render_view(product, view, size_px=size_px, seed=seed)

    monkeypatch.setattr(catalogue, "render_view", counted)
    return calls


def test_the_same_seed_product_and_view_give_the_same_pixels_in_any_order() -> None:
    forwards = [_pixels(product, view) for product in range(4) for view in range(3)]
    lettering.cache_clear()
    backwards = [_pixels(product, view) for product in (3, 2, 1, 0) for view in (2, 1, 0)]
    assert forwards == backwards[::-1]


def test_views_products_and_seeds_all_give_other_pixels() -> None:
    pictures = [_pixels(p, v, s) for p in range(4) for v in range(4) for s in range(2)]
    assert len(set(pictures)) == len(pictures)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size_px", [32, 33, 200])
def test_every_shape_is_drawn_at_every_size(shape: str, size_px: int) -> None:
    product = next(p for p in range(200) if describe(p).shape == shape)
    for view in range(4):
        image = render_view(product, view, size_px=size_px)
        assert (image.mode, image.size) == ("RGB", (size_px, size_px))
        assert np.asarray(image).std() > 8


def test_the_same_picture_is_drawn_at_another_size() -> None:
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


def test_no_two_of_a_thousand_products_share_shape_colours_and_pattern() -> None:
    items = [describe(product) for product in range(1000)]
    looks = {(item.shape, item.scheme, item.skin.pattern) for item in items}
    assert len(looks) == len(items)


def test_words_have_three_to_seven_letters_and_repeat_only_after_hundreds_of_products() -> None:
    words = [describe(product).skin.word for product in range(400)]
    assert len(set(words)) == 400
    assert {len(word) for word in words} == {3, 4, 5, 6, 7}
    assert all(word.isalpha() and word.isupper() for word in words)


def test_another_word_leaves_other_ink() -> None:
    torvi, korvi = (lettering(word, 1, 0.0, 24) for word in ("TORVI", "KORVI"))
    assert 0.1 < torvi.mean() < 0.7
    assert torvi.shape != korvi.shape or not np.array_equal(torvi, korvi)


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


def test_the_files_are_rgb_jpegs_of_the_asked_size(tmp_path: Path) -> None:
    for path in write_catalogue(tmp_path, SMALL):
        with Image.open(path) as image:
            image.load()
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (48, 48))
            assert JpegImagePlugin.get_sampling(image) == 2  # 4:2:0


def test_class_names_show_number_shape_and_word() -> None:
    item = describe(7)
    assert class_name(7) == f"p007-{item.shape}-{item.skin.word}"


def test_two_folders_of_equal_settings_hold_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_catalogue(tmp_path / name, SMALL)
    assert _files(tmp_path / "a") == _files(tmp_path / "b")


def test_only_missing_and_truncated_views_are_rendered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_catalogue(tmp_path, SMALL)
    before = _files(tmp_path)
    paths[1].unlink()
    paths[4].write_bytes(paths[4].read_bytes()[:-40])
    calls = _counted(monkeypatch)
    seen: list[None] = []
    assert write_catalogue(tmp_path, SMALL, lambda: seen.append(None)) == paths
    assert calls == [(0, 1), (2, 0)]
    assert len(seen) == 6
    assert _files(tmp_path) == before


def _interrupt_after(count: int) -> Callable[[], None]:
    left = iter(range(count))

    def on_image() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return on_image


def test_an_interrupted_catalogue_is_finished_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    write_catalogue(whole, SMALL)
    with pytest.raises(KeyboardInterrupt):
        write_catalogue(broken, SMALL, _interrupt_after(2))
    calls = _counted(monkeypatch)
    write_catalogue(broken, SMALL)
    assert len(calls) == 3
    assert _files(broken) == _files(whole)


def test_what_a_killed_run_left_half_written_is_replaced(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    write_catalogue(whole, SMALL)
    folder = broken / class_name(0)
    broken.mkdir()
    (broken / "catalogue.part").write_text("{")
    write_catalogue(broken, SMALL)
    (folder / "00.jpg").rename(folder / "00.part")
    write_catalogue(broken, SMALL)
    assert _files(broken) == _files(whole)


@pytest.mark.parametrize(
    "other",
    [
        Catalogue(products=4, views=2, size_px=48),
        Catalogue(products=3, views=3, size_px=48),
        Catalogue(products=3, views=2, size_px=64),
        Catalogue(products=3, views=2, size_px=48, seed=1),
    ],
)
def test_a_folder_of_other_settings_is_refused_and_left_alone(
    tmp_path: Path, other: Catalogue
) -> None:
    write_catalogue(tmp_path, SMALL)
    before = _files(tmp_path)
    with pytest.raises(DatasetError, match="another folder") as caught:
        write_catalogue(tmp_path, other)
    assert str(tmp_path) in str(caught.value)
    assert f"'size_px': {other.size_px}" in str(caught.value)
    assert _files(tmp_path) == before


@pytest.mark.parametrize("name", ["holiday.jpg", "catalogue.json"])
def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not ours")
    with pytest.raises(DatasetError, match="not a catalogue of rendered products"):
        write_catalogue(tmp_path, SMALL)
    assert _files(tmp_path) == {name: b"not ours"}


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shop").write_bytes(b"")
    with pytest.raises(DatasetError, match="does not exist"):
        write_catalogue(tmp_path / "shop", SMALL)


@pytest.mark.parametrize(
    ("setting", "value", "limit"),
    [
        ("products", 1, "at least 2"),
        ("views", 0, "at least 1"),
        ("size_px", 31, "32 to 1024"),
        ("size_px", 1025, "32 to 1024"),
        ("seed", -1, "at least 0"),
    ],
)
def test_settings_out_of_range_are_refused_with_value_limit_and_cure(
    setting: str, value: int, limit: str
) -> None:
    with pytest.raises(DatasetError, match=f"{setting} = {value} .* {limit}.*Choose {setting}"):
        Catalogue(**{setting: value})


@pytest.mark.parametrize(
    ("setting", "value"), [("product", -1), ("view", -1), ("size_px", 2000), ("seed", -1)]
)
def test_a_view_out_of_range_is_refused(setting: str, value: int) -> None:
    numbers = {"product": 0, "view": 0, "size_px": 32, "seed": 0, setting: value}
    with pytest.raises(DatasetError, match=f"{setting} = {value} "):
        render_view(**numbers)
