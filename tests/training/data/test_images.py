"""Views for training, images as served for evaluation, and the batches of both."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kinlens.embedder.errors import DatasetError
from kinlens.embedder.preprocess import decode, preprocess
from kinlens.training.config.settings import Input, Runtime
from kinlens.training.data.images import (
    EvaluationImages,
    TrainingImages,
    build_loader,
    random_box,
    random_part,
    random_view,
)
from kinlens.training.data.records import LabelledImages, labelled
from kinlens.training.data.samplers import BatchSampler
from tests.tiny import encoded, photo
from tests.training.studies.runs import some_job

SPEC = Input(size_px=16, resize_px=20)


@pytest.fixture
def images(tmp_path: Path) -> LabelledImages:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(encoded(photo(number)))
    return labelled(tmp_path, [(f"{number}.png", "ab"[number % 2]) for number in range(4)])


def test_a_view_depends_on_seed_epoch_image_and_use_alone(images: LabelledImages) -> None:
    first, second = TrainingImages(images, SPEC, 0), TrainingImages(images, SPEC, 0)
    _ = first[(0, 2, 0)]
    view = first[(1, 3, 0)][0]
    assert torch.equal(view, second[(1, 3, 0)][0])
    others = [first[(1, 3, use)][0] for use in (1, 2, 3)]  # of an image used again in its epoch
    others += [first[(2, 3, 0)][0], TrainingImages(images, SPEC, 1)[(1, 3, 0)][0]]
    assert len({one.numpy().tobytes() for one in (view, *others)}) == 6


def test_a_damaged_image_is_named(images: LabelledImages) -> None:
    (images.root / images.paths[0]).write_bytes(b"damaged")
    views, served = TrainingImages(images, SPEC, 0), EvaluationImages(images, SPEC.preprocessing())
    assert views[(0, 1, 0)][0].shape == (3, 16, 16)
    for dataset, index in ((views, (0, 0, 0)), (served, 0)):
        with pytest.raises(DatasetError, match=f"{images.paths[0]}.*not an image"):
            dataset[index]
    (images.root / images.paths[0]).unlink()
    with pytest.raises(DatasetError, match="cannot be read"):
        views[(0, 0, 0)]


SIDEWAYS = Image.Exif()
SIDEWAYS[0x0112] = 6


@pytest.mark.parametrize(
    ("stored", "exif"), [((90, 60), None), ((400, 300), None), ((1201, 903), SIDEWAYS)]
)
def test_jpeg_crops_have_enough_pixels(stored: tuple[int, int], exif: Image.Exif | None) -> None:
    data = encoded(photo(3, stored), "JPEG", exif=exif or Image.Exif())
    spec = Input(size_px=64, min_crop_area=0.01)
    size, whole = decode(data).size, 0
    for seed in range(60):
        image, (left, top, right, bottom) = random_part(data, spec, np.random.default_rng(seed))
        box = random_box(size, 0.01, np.random.default_rng(seed))
        assert 0 <= box[0] < box[2] <= size[0]
        assert 0 <= box[1] < box[3] <= size[1]
        full = min(box[2] - box[0], box[3] - box[1])
        assert min(right - left, bottom - top) >= min(spec.size_px, full) - 1e-9
        expected = [at * image.size[n % 2] / size[n % 2] for n, at in enumerate(box)]
        np.testing.assert_allclose((left, top, right, bottom), expected, rtol=1e-12)
        whole += image.size == size
    # A photo of many pixels is decoded in full for its small crops alone.
    assert whole == 60 if min(size) < 4 * spec.size_px else 0 < whole < 45


def test_fixed_crops_are_cut_at_one_scale_from_anywhere_in_the_image() -> None:
    spec = Input(size_px=48, resize_px=64, crop="fixed", flip=False)
    ramp = np.add.outer(np.arange(64.0), 100 * np.arange(80.0) / 80)[..., None].repeat(3, axis=2)
    data = encoded(Image.fromarray(ramp.astype(np.uint8)))  # 80 x 64: already of resize_px
    corners = set()
    for seed in range(50):
        view = np.asarray(random_view(data, spec, np.random.default_rng(seed))).astype(int)
        assert view.shape == (48, 48, 3)
        # One pixel down is one pixel down in the image: the scale is 1, whatever the place.
        assert 46 <= view[-1, 0, 0] - view[0, 0, 0] <= 48
        corners.add(int(view[0, 0, 0]))
    assert min(corners) < 10
    assert max(corners) > 40


def test_squashed_images_lose_their_shape_in_training_and_evaluation() -> None:
    """Columns and rows of a wide ramp span the same share of a view as of the image."""
    spec = Input(size_px=48, resize_px=64, crop="fixed", aspect="squashed", flip=False)
    wide = np.zeros((64, 256, 3), dtype=np.uint8)
    wide[..., 0], wide[..., 1] = np.arange(256)[None], 4 * np.arange(64)[:, None]
    data = encoded(Image.fromarray(wide))
    served = preprocess(data, spec.preprocessing()).astype(int)
    random = np.asarray(random_view(data, spec, np.random.default_rng(0))).astype(int)
    for red, green in ((served[0], served[1]), (random[..., 0], random[..., 1])):
        assert red[0, -1] - red[0, 0] == pytest.approx(192, abs=6)
        assert green[-1, 0] - green[0, 0] == pytest.approx(192, abs=6)


CPU = torch.device("cpu")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_loader_keeps_its_order(images: LabelledImages, workers: int) -> None:
    views = TrainingImages(images, SPEC, 0)
    order = BatchSampler(some_job(optimizer={"batch_size": 2}), images.labels)
    loader = build_loader(views, order, Runtime(workers=workers), CPU, 0)
    for epoch in range(2):
        order.epoch = epoch
        expected = [[views[index] for index in batch] for batch in order]
        for (pixels, labels), batch in zip(list(loader), expected, strict=True):
            assert torch.equal(pixels, torch.stack([view for view, _ in batch]))
            assert labels.tolist() == [int(label) for _, label in batch]


def test_an_evaluation_loader_sees_all_that_the_service_sees(images: LabelledImages) -> None:
    dataset, before = EvaluationImages(images, SPEC.preprocessing()), torch.random.get_rng_state()
    batches = list(build_loader(dataset, 3, Runtime(workers=0), CPU, 0))
    assert [len(labels) for _, labels in batches] == [3, 1]
    assert torch.cat([labels for _, labels in batches]).tolist() == images.labels.tolist()
    for view, path in zip(torch.cat([x for x, _ in batches]), images.paths, strict=True):
        served = preprocess((images.root / path).read_bytes(), SPEC.preprocessing())
        assert np.array_equal(view.numpy(), served)
    assert torch.equal(before, torch.random.get_rng_state())
