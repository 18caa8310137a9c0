"""Grey, CMYK and tiny pictures train like the others."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tiny import encoded, picture
from training.config.model import Input
from training.data.images import EvaluationImages, TrainingImages
from training.data.records import LabelledImages, labelled

SPEC = Input(size_px=16, resize_px=20)


def deep() -> Image.Image:
    return Image.fromarray((np.arange(48 * 40).reshape(40, 48) * 30).astype(np.uint16))


PICTURES = {
    "grey.jpg": encoded(picture(0).convert("L"), "JPEG"),
    "grey-alpha.png": encoded(picture(1).convert("LA")),
    "cmyk.jpg": encoded(picture(2).convert("CMYK"), "JPEG"),
    "bilevel.png": encoded(picture(3).convert("1")),
    "palette.gif": encoded(picture(4).convert("P"), "GIF"),
    "alpha.png": encoded(picture(5).convert("RGBA")),
    "deep.png": encoded(deep()),
    "dot.png": encoded(Image.new("RGB", (1, 1), "red")),
    "grey-dot.jpg": encoded(Image.new("L", (1, 1), 90), "JPEG"),
    "line.png": encoded(Image.new("RGB", (1, 300), "blue")),
    "row.jpg": encoded(Image.new("CMYK", (300, 1)), "JPEG"),
}


@pytest.fixture(params=PICTURES)
def images(request: pytest.FixtureRequest, tmp_path: Path) -> LabelledImages:
    (tmp_path / request.param).write_bytes(PICTURES[request.param])
    return labelled(tmp_path, [(request.param, "a")])


def training_view(images: LabelledImages, epoch: int) -> torch.Tensor:
    return TrainingImages(images, SPEC, seed=0)[(epoch, 0, 0)][0]


def test_every_mode_gives_a_training_view(images: LabelledImages) -> None:
    for epoch in range(5):
        view = training_view(images, epoch)
        assert (view.shape, view.dtype) == ((3, 16, 16), torch.uint8)


def test_every_mode_gives_an_evaluation_view(images: LabelledImages) -> None:
    view, label = EvaluationImages(images, SPEC.preprocessing())[0]
    assert (view.shape, view.dtype, int(label)) == ((3, 16, 16), torch.uint8, 0)


def test_a_dot_fills_its_views_with_its_colour(tmp_path: Path) -> None:
    (tmp_path / "dot.png").write_bytes(PICTURES["dot.png"])
    images = labelled(tmp_path, [("dot.png", "a")])
    views = (training_view(images, 0), EvaluationImages(images, SPEC.preprocessing())[0][0])
    for view in views:
        assert view.amax((1, 2)).tolist() == view.amin((1, 2)).tolist() == [255, 0, 0]


def test_a_grey_picture_has_three_equal_channels(tmp_path: Path) -> None:
    (tmp_path / "grey.jpg").write_bytes(PICTURES["grey.jpg"])
    images = labelled(tmp_path, [("grey.jpg", "a")])
    view = EvaluationImages(images, SPEC.preprocessing())[0][0]
    assert torch.equal(view[0], view[1])
    assert torch.equal(view[0], view[2])
    assert view.float().std() > 10
