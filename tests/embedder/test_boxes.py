import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kinlens.embedder.bundle import BOXES, Bundle, attach
from kinlens.embedder.errors import BundleCorruptError, BundleError
from kinlens.embedder.manifest import BoxesLayout
from kinlens.embedder.preprocess import check_box, decode
from kinlens.embedder.views.boxes import MOST_BOXES, Detector, Network, Rows, read_outputs
from tests.support.detectors import (
    LAYOUTS,
    block_of,
    bright_photo,
    with_detector,
    write_detector,
)

PHOTO = bright_photo((1, 1))
FOUND = (0.2375, 0.475, 0.275, 0.525)
"""The white place of PHOTO with its margin, which ends at the border."""


def rows(*corners: tuple[float, float, float, float], scores: Any = None) -> Rows:
    count = len(corners)
    values = np.linspace(0.9, 0.5, count) if scores is None else np.array(scores)
    return Rows(np.array(corners, dtype=np.float64), values, np.zeros(count))


def best(found: Rows, size: tuple[int, int] = (1000, 1000), **more: Any) -> list[Any]:
    used = more.pop("used", (1.0, 1.0))
    return found.best(used, size, more.pop("threshold", 0.1), **more)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_finds_a_white_place(layout: BoxesLayout, tmp_path: Path) -> None:
    file = write_detector(tmp_path / "boxes.onnx", layout)
    detector = Detector(Network(file), block_of(file, layout))
    [found] = detector.find(decode(PHOTO))
    assert found.box == pytest.approx(FOUND, abs=1e-4)
    assert found.score > 0.9
    assert detector.block.label(found.kind) == "thing"
    assert detector.find(decode(bright_photo())) == []
    several = detector.find(decode(bright_photo((0, 0), (3, 1), (2, 0))))
    assert len(several) == 3
    assert len(detector.find(decode(bright_photo((0, 0), (3, 1), (2, 0))), 2)) == 2


def test_an_image_is_stretched_if_its_detector_wants_that(tmp_path: Path) -> None:
    file = write_detector(tmp_path / "boxes.onnx")
    detector = Detector(Network(file), block_of(file, "centernet", fit="stretched"))
    found = detector.find(decode(bright_photo((1, 1), size=(128, 128))))
    assert found[0].box == pytest.approx((0.2375, 0.2375, 0.275, 0.275), abs=1e-4)
    [wide] = detector.find(decode(bright_photo((1, 0), (1, 1))))[:1]
    assert wide.box[0] == pytest.approx(0.2375, abs=1e-4)


def test_near_copies_are_dropped_and_a_margin_is_added() -> None:
    found = best(rows((0.2, 0.2, 0.4, 0.4), (0.2, 0.21, 0.4, 0.41), (0.3, 0.2, 0.5, 0.4)))
    assert [one.score for one in found] == [0.9, 0.5]
    assert found[0].box == pytest.approx((0.19, 0.19, 0.22, 0.22))
    assert best(rows((0, 0, 1, 0.5)))[0].box == (0.0, 0.0, 1.0, 0.525)


def test_boxes_are_shares_of_the_image_and_not_of_the_input() -> None:
    [found] = best(rows((0.25, 0.125, 0.5, 0.25)), used=(1.0, 0.5))
    assert found.box == pytest.approx((0.2375, 0.2375, 0.275, 0.275))


@pytest.mark.parametrize(
    "corner",
    [
        (np.nan, 0, 1, 1),
        (0, 0, np.inf, 1),
        (-5, -5, -1, -1),
        (2, 2, 3, 3),
        (0.5, 0.5, 0.2, 0.2),
        (0.5, 0.5, 0.5, 0.9),
        (0.1, 0.1, 0.11, 0.11),
    ],
)
def test_a_box_that_shows_nothing_is_dropped(corner: Any) -> None:
    assert best(rows(corner, (0.1, 0.1, 0.6, 0.6)))[0].score == 0.5
    assert best(rows(corner)) == []


def test_scores_must_be_numbers_above_the_threshold() -> None:
    corner = (0.1, 0.1, 0.6, 0.6)
    assert best(rows(corner, scores=[np.nan])) == []
    assert best(rows(corner, scores=[0.29]), threshold=0.3) == []
    assert best(rows(corner, scores=[7.0]))[0].score == 1.0
    assert best(rows(corner), size=(12, 12)) == [], "smaller than 8 px"


def test_of_ten_thousand_boxes_the_best_are_crops_inside_the_image() -> None:
    rng = np.random.default_rng(0)
    corners = rng.normal(0.5, 1.0, (10_000, 4))
    corners[::7] *= 1e9
    corners[::11] = np.nan
    many = Rows(corners, rng.random(10_000), rng.normal(0, 1e12, 10_000))
    found = best(many)
    assert len(found) == MOST_BOXES
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    for one in found:
        assert check_box(one.box) == pytest.approx(one.box)
        assert one.kind >= 0
    assert best(Rows(np.zeros((0, 4)), np.zeros(0), np.zeros(0))) == []


def test_outputs_of_another_layout_are_refused_by_their_names(tmp_path: Path) -> None:
    outputs = {
        layout: Network(write_detector(tmp_path / f"{layout}.onnx", layout)).run(
            np.zeros((32, 32, 3), np.uint8 if layout == "tensorflow" else np.float32)
        )
        for layout in LAYOUTS
    }
    for layout, asked in (("yolo", "centernet"), ("centernet", "yolo"), ("yolo", "yolo-nms")):
        shown = "output0 float32" if layout == "yolo" else r"boxes float32 \(1, 16, 4\)"
        with pytest.raises(BundleError, match=f"{shown}.*do not have the layout {asked}"):
            read_outputs(outputs[layout], asked, (32, 32))


def test_a_detector_must_take_one_image(tiny_bundle: Bundle, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(b"not ONNX")
    with pytest.raises(BundleCorruptError, match="cannot be loaded"):
        Network(damaged)
    network = Network(tiny_bundle.model_path)
    with pytest.raises(BundleError, match="The detector failed on an image of 7 x 5 px"):
        network.run(np.zeros((5, 7, 3), np.uint8))


def test_a_bundle_keeps_its_id_for_galleries(tiny_bundle: Bundle, tmp_path: Path) -> None:
    made = with_detector(tiny_bundle, tmp_path / "one")
    assert made.bundle_id == tiny_bundle.bundle_id == made.manifest.base_id
    assert made.manifest.bundle_id != tiny_bundle.bundle_id
    assert made.manifest.computed_id() == made.manifest.bundle_id
    assert Detector.open(made).block == made.manifest.boxes
    with pytest.raises(BundleError, match=r"has no detector\. Attach one with kinlens-train"):
        Detector.open(tiny_bundle)
    other = with_detector(made, tmp_path / "two", "yolo")
    assert other.bundle_id == tiny_bundle.bundle_id
    assert other.manifest.bundle_id != made.manifest.bundle_id
    for name in ("model.onnx", "golden/vectors.npy"):
        assert (other.path / name).read_bytes() == (tiny_bundle.path / name).read_bytes()
    plain = json.loads((tiny_bundle.path / "manifest.json").read_text())
    assert not {"boxes", "base_id"} & plain.keys()
    with pytest.raises(BundleError, match="exists already"):
        attach(tiny_bundle, tmp_path / "one", {})


def test_an_edited_or_damaged_detector_is_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    path = with_detector(tiny_bundle, tmp_path / "one").path
    manifest = path / "manifest.json"
    text = manifest.read_text()
    for old, new in (
        ('"threshold": 0.5', '"threshold": 0.6'),
        (tiny_bundle.bundle_id, tiny_bundle.bundle_id[::-1]),
    ):
        manifest.write_text(text.replace(old, new))
        with pytest.raises(BundleCorruptError, match="was edited after the export"):
            Bundle.open(path)
    manifest.write_text(text)
    (path / BOXES).write_bytes((path / BOXES).read_bytes() + b"x")
    with pytest.raises(BundleCorruptError, match=r"boxes\.onnx has sha256"):
        Bundle.open(path)


def test_a_real_detector_boxes_a_pasted_car(shared_data: Path) -> None:
    file = shared_data / "weights/centernet-mobilenetv3/boxes.onnx"
    if not file.is_file():
        pytest.skip("the detector is absent")
    block = block_of(file, "centernet", width_px=512, height_px=512, threshold=0.2, labels=())
    detector = Detector(Network(file), block)
    cars = sorted((shared_data / "data/cars196-half/car_ims").glob("*.jpg"))[:12]
    right = 0
    for path in cars:
        scene = Image.new("RGB", (480, 360), (90, 110, 80))
        with Image.open(path) as image:
            car = image.convert("RGB").resize((240, 180))
        scene.paste(car, (200, 150))
        truth = np.array([200, 150, 440, 330]) / (480, 360, 480, 360)
        right += any(_overlap(one.box, truth) > 0.5 for one in detector.find(scene, 5))
    assert right >= 9


def _overlap(box: Any, truth: Any) -> float:
    low = np.maximum(truth[:2], box[:2])
    high = np.minimum(truth[2:], np.add(box[:2], box[2:]))
    shared = np.prod(np.clip(high - low, 0, None))
    return float(shared / (np.prod(truth[2:] - truth[:2]) + np.prod(box[2:]) - shared))
