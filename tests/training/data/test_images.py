"""Views for training, images as served for evaluation, and the batches of both."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kinlens.embedder.errors import DatasetError
from kinlens.embedder.preprocess import decode, preprocess, resize_box, to_chw
from kinlens.training.config.settings import Input, Runtime
from kinlens.training.data.images import (
    EvaluationImages,
    TrainingImages,
    build_loader,
    random_box,
    random_part,
    random_view,
    worker_count,
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


def test_evaluation_sees_what_the_service_sees(images: LabelledImages) -> None:
    view, label = EvaluationImages(images, SPEC.preprocessing())[1]
    data = (images.root / images.paths[1]).read_bytes()
    assert np.array_equal(view.numpy(), preprocess(data, SPEC.preprocessing()))
    assert int(label) == images.labels[1]


def test_a_damaged_image_is_named(images: LabelledImages) -> None:
    (images.root / images.paths[0]).write_bytes(b"damaged")
    assert TrainingImages(images, SPEC, 0)[(0, 1, 0)][0].shape == (3, 16, 16)
    with pytest.raises(DatasetError, match=f"{images.paths[0]}.*not an image"):
        TrainingImages(images, SPEC, 0)[(0, 0, 0)]
    with pytest.raises(DatasetError, match=f"{images.paths[0]}.*not an image"):
        EvaluationImages(images, SPEC.preprocessing())[0]
    (images.root / images.paths[0]).unlink()
    with pytest.raises(DatasetError, match="cannot be read"):
        TrainingImages(images, SPEC, 0)[(0, 0, 0)]


def test_boxes_lie_inside_the_image_and_keep_enough_of_it() -> None:
    rng = np.random.default_rng(0)
    for size in ((64, 48), (10, 300), (300, 10)):
        for _ in range(100):
            left, top, right, bottom = random_box(size, 0.3, rng)
            assert 0 <= left < right <= size[0]
            assert 0 <= top < bottom <= size[1]
            if min(size) > 20:
                assert (right - left) * (bottom - top) >= 0.299 * size[0] * size[1]


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
        full = min(box[2] - box[0], box[3] - box[1])
        assert min(right - left, bottom - top) >= min(spec.size_px, full) - 1e-9
        expected = [at * image.size[n % 2] / size[n % 2] for n, at in enumerate(box)]
        np.testing.assert_allclose((left, top, right, bottom), expected, rtol=1e-12)
        whole += image.size == size
    # A photo of many pixels is decoded in full for its small crops alone.
    assert whole == 60 if min(size) < 4 * spec.size_px else 0 < whole < 45


def test_a_view_of_a_jpeg_that_needs_no_reduced_scale_is_cut_from_all_its_pixels() -> None:
    data = encoded(photo(4, (90, 60)), "JPEG")
    spec = Input(size_px=32, flip=False)
    for seed in range(20):
        box = random_box((90, 60), spec.min_crop_area, np.random.default_rng(seed))
        view = random_view(data, spec, np.random.default_rng(seed))
        assert np.array_equal(to_chw(view), to_chw(resize_box(decode(data), box, 32)))


def test_fixed_crops_are_cut_at_one_scale_from_anywhere_in_the_image() -> None:
    spec = Input(size_px=48, resize_px=64, crop="fixed", flip=False)
    ramp = np.add.outer(np.arange(64.0), 100 * np.arange(80.0) / 80)[..., None].repeat(3, axis=2)
    image = Image.fromarray(ramp.astype(np.uint8))  # 80 x 64: already of resize_px
    corners = set()
    for seed in range(50):
        view = np.asarray(random_view(encoded(image), spec, np.random.default_rng(seed))).astype(
            int
        )
        assert view.shape == (48, 48, 3)
        # One pixel down is one pixel down in the image: the scale is 1, whatever the place.
        assert 46 <= view[-1, 0, 0] - view[0, 0, 0] <= 48
        corners.add(int(view[0, 0, 0]))
    assert min(corners) < 10
    assert max(corners) > 40


DEEP = Image.fromarray((np.arange(48 * 40).reshape(40, 48) * 30).astype(np.uint16))
PHOTOS = {
    "grey.jpg": encoded(photo(0).convert("L"), "JPEG"),
    "grey-alpha.png": encoded(photo(1).convert("LA")),
    "cmyk.jpg": encoded(photo(2).convert("CMYK"), "JPEG"),
    "bilevel.png": encoded(photo(3).convert("1")),
    "palette.gif": encoded(photo(4).convert("P"), "GIF"),
    "alpha.png": encoded(photo(5).convert("RGBA")),
    "deep.png": encoded(DEEP),
    "dot.png": encoded(Image.new("RGB", (1, 1), "red")),
    "grey-dot.jpg": encoded(Image.new("L", (1, 1), 90), "JPEG"),
    "line.png": encoded(Image.new("RGB", (1, 300), "blue")),
    "row.jpg": encoded(Image.new("CMYK", (300, 1)), "JPEG"),
}


@pytest.mark.parametrize("name", PHOTOS)
def test_every_mode_is_read_for_training_and_evaluation(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(PHOTOS[name])
    uncommon = labelled(tmp_path, [(name, "a")])
    for epoch in range(5):
        view = TrainingImages(uncommon, SPEC, seed=0)[(epoch, 0, 0)][0]
        assert (view.shape, view.dtype) == ((3, 16, 16), torch.uint8)
    view, label = EvaluationImages(uncommon, SPEC.preprocessing())[0]
    assert (view.shape, view.dtype, int(label)) == ((3, 16, 16), torch.uint8, 0)


def test_the_workers_of_a_loader_fit_device_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for workers, device, cores, processes, expected in (
        ("auto", "cpu", 64, 1, 2),
        ("auto", "cuda", 8, 1, 7),
        ("auto", "cuda", 64, 1, 16),
        ("auto", "cuda", 16, 4, 3),
        ("auto", "cuda", 1, 1, 1),
        (0, "cuda", 64, 1, 0),
        (5, "cpu", 2, 8, 5),
    ):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        runtime = Runtime.model_validate({"workers": workers})
        assert worker_count(runtime, torch.device(device), processes) == expected


CPU = torch.device("cpu")


def order_of(images: LabelledImages) -> BatchSampler:
    return BatchSampler(some_job(optimizer={"batch_size": 2}), images.labels)


def test_a_loader_for_a_gpu_reads_ahead_into_pinned_memory(images: LabelledImages) -> None:
    views = TrainingImages(images, SPEC, 0)
    order = order_of(images)
    near = build_loader(views, order, Runtime(), CPU, 0)
    assert (near.num_workers, near.prefetch_factor, near.pin_memory) == (2, 2, False)
    far = build_loader(views, order, Runtime(workers=1), torch.device("cuda"), 0)
    assert (far.num_workers, far.prefetch_factor, far.pin_memory) == (1, 2, True)
    assert far.persistent_workers
    assert not build_loader(views, 2, Runtime(), CPU, 0).persistent_workers
    assert not build_loader(views, order, Runtime(workers=0), CPU, 0).persistent_workers


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_loader_keeps_its_order(images: LabelledImages, workers: int) -> None:
    views, order = TrainingImages(images, SPEC, 0), order_of(images)
    loader = build_loader(views, order, Runtime(workers=workers), CPU, 0)
    for epoch in range(2):
        order.epoch = epoch
        found = list(loader)
        expected = [[views[index] for index in batch] for batch in order]
        for (pixels, labels), batch in zip(found, expected, strict=True):
            assert torch.equal(pixels, torch.stack([view for view, _ in batch]))
            assert labels.tolist() == [int(label) for _, label in batch]


def test_an_evaluation_loader_keeps_the_last_incomplete_batch(images: LabelledImages) -> None:
    dataset = EvaluationImages(images, SPEC.preprocessing())
    before = torch.random.get_rng_state()
    batches = list(build_loader(dataset, 3, Runtime(workers=0), CPU, 0))
    assert [len(labels) for _, labels in batches] == [3, 1]
    assert torch.equal(torch.cat([x for x, _ in batches]), torch.stack([x for x, _ in dataset]))
    assert torch.equal(before, torch.random.get_rng_state())
