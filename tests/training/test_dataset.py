from pathlib import Path

import numpy as np
import pytest
import torch

from embedder.errors import DatasetError
from embedder.preprocess import preprocess
from tests.tiny import encoded, picture
from training.config.model import Input
from training.data.augment import random_box
from training.data.dataset import EvaluationImages, RandomBatches, TrainingImages
from training.data.records import LabelledImages, labelled

SPEC = Input(size_px=16, resize_px=20)


@pytest.fixture
def images(tmp_path: Path) -> LabelledImages:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(number)))
    return labelled(tmp_path, [(f"{number}.png", "ab"[number % 2]) for number in range(4)])


def test_a_view_depends_on_seed_epoch_and_image_alone(images: LabelledImages) -> None:
    first, second = TrainingImages(images, SPEC, 0), TrainingImages(images, SPEC, 0)
    _ = first[(0, 2)]
    assert torch.equal(first[(1, 3)][0], second[(1, 3)][0])
    assert not torch.equal(first[(1, 3)][0], first[(2, 3)][0])
    assert not torch.equal(first[(1, 3)][0], TrainingImages(images, SPEC, 1)[(1, 3)][0])


def test_evaluation_sees_what_the_service_sees(images: LabelledImages) -> None:
    view, label = EvaluationImages(images, SPEC.preprocessing())[1]
    data = (images.root / images.paths[1]).read_bytes()
    assert np.array_equal(view.numpy(), preprocess(data, SPEC.preprocessing()))
    assert int(label) == images.labels[1]


def test_a_damaged_image_is_named(images: LabelledImages) -> None:
    (images.root / images.paths[0]).write_bytes(b"damaged")
    for one in (TrainingImages(images, SPEC, 0)[(0, 1)],):
        assert one[0].shape == (3, 16, 16)
    with pytest.raises(DatasetError, match=f"{images.paths[0]}.*not an image"):
        TrainingImages(images, SPEC, 0)[(0, 0)]
    with pytest.raises(DatasetError, match=f"{images.paths[0]}.*not an image"):
        EvaluationImages(images, SPEC.preprocessing())[0]
    (images.root / images.paths[0]).unlink()
    with pytest.raises(DatasetError, match="cannot be read"):
        TrainingImages(images, SPEC, 0)[(0, 0)]


def test_batches_cover_every_image_once_and_differ_between_epochs() -> None:
    batches = RandomBatches(10, 5, seed=0)
    first = list(batches)
    batches.epoch = 1
    second = list(batches)
    assert sorted(number for batch in first for _, number in batch) == list(range(10))
    assert [[n for _, n in b] for b in first] != [[n for _, n in b] for b in second]
    assert {epoch for batch in second for epoch, _ in batch} == {1}


def test_an_incomplete_batch_is_left_out_unless_it_is_the_only_one() -> None:
    assert [len(batch) for batch in RandomBatches(11, 5, seed=0)] == [5, 5]
    assert [len(batch) for batch in RandomBatches(3, 5, seed=0)] == [3]


def test_boxes_lie_inside_the_image_and_keep_enough_of_it() -> None:
    rng = np.random.default_rng(0)
    for size in ((64, 48), (10, 300), (300, 10)):
        for _ in range(100):
            left, top, right, bottom = random_box(size, 0.3, rng)
            assert 0 <= left < right <= size[0]
            assert 0 <= top < bottom <= size[1]
            if min(size) > 20:
                assert (right - left) * (bottom - top) >= 0.299 * size[0] * size[1]
