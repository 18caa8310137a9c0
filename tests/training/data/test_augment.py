"""Views as photos of customers have them."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from kinlens.training.config.job import load_job
from kinlens.training.config.settings import Input
from kinlens.training.data.images import photographed, random_view
from tests.tiny import encoded, photo

SETTINGS: list[dict[str, Any]] = [
    {"colour": 0.4},
    {"blur_px": 2.0},
    {"jpeg_quality": 30},
    {"erase": 0.2},
    {"colour": 0.4, "blur_px": 2.0, "jpeg_quality": 30, "erase": 0.2},
]
DATA = encoded(photo(3, (64, 64)))


def views(seed: int, **settings: Any) -> list[np.ndarray]:
    spec = Input(size_px=48, resize_px=48, **settings)
    return [np.asarray(random_view(DATA, spec, np.random.default_rng((seed, n)))) for n in range(6)]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_same_seed_gives_the_same_pictures_and_another_one_others(
    settings: dict[str, Any],
) -> None:
    found = views(0, **settings)
    np.testing.assert_array_equal(found, views(0, **settings))
    assert not np.array_equal(found, views(1, **settings))
    assert not np.array_equal(found, views(0))
    assert {view.shape for view in found} == {(48, 48, 3)}


def test_without_changes_a_view_and_its_random_numbers_stay_as_they_are() -> None:
    rng, view = np.random.default_rng(0), Image.new("RGB", (48, 48))
    assert photographed(view, Input(size_px=48, resize_px=48), rng) is view
    assert rng.random() == np.random.default_rng(0).random()


def test_a_covered_part_is_at_most_as_large_as_said_and_the_rest_unchanged() -> None:
    spec, before = Input(erase=0.2), np.asarray(Image.new("RGB", (100, 100), (1, 2, 3)))
    changed = [
        (np.asarray(photographed(Image.fromarray(before), spec, rng)) != before).any(2).mean()
        for rng in map(np.random.default_rng, range(60))
    ]
    assert 15 < sum(share == 0 for share in changed) < 45
    assert 0.1 < max(changed) <= 0.22


def test_the_job_for_phones_changes_only_the_views_of_the_shop() -> None:
    phone, shop = load_job("phone-photos"), load_job("shop")
    assert phone.input != shop.input
    same = {"input": shop.input, "name": shop.name, "description": shop.description}
    assert phone.model_copy(update=same) == shop
