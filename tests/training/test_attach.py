"""kinlens-train attach: a detector of somebody else becomes a file of a bundle."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import KinlensError
from kinlens.embedder.manifest import BoxesLayout
from kinlens.embedder.preprocess import decode
from kinlens.embedder.views.boxes import Detector
from tests.support.detectors import LABELS, LAYOUTS, SIDE, WHITE, bright_photo, write_detector
from tests.training.jobs import called


def attached(bundle: Bundle, file: Path, *more: object) -> Bundle:
    out = file.with_suffix("")
    called("attach", bundle.path, "--boxes", file, "--out", out, *more)
    return Bundle.open(out)


def refused(bundle: Bundle, file: Path, message: str, *more: object) -> None:
    with pytest.raises(KinlensError, match=message):
        attached(bundle, file, *more)
    assert not file.with_suffix("").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_a_detector_is_recognized(
    tiny_bundle: Bundle, tmp_path: Path, layout: BoxesLayout
) -> None:
    made = attached(tiny_bundle, write_detector(tmp_path / "boxes.onnx", layout))
    block = made.manifest.boxes
    assert block is not None
    assert (block.layout, block.width_px, block.height_px) == (layout, SIDE, SIDE)
    assert (block.labels, block.scale) == (LABELS, WHITE.get(layout, 1))
    assert made.bundle_id == tiny_bundle.bundle_id
    best = Detector.open(made).find(decode(bright_photo((1, 1))))[0]
    assert best.box == pytest.approx((0.2375, 0.475, 0.275, 0.525), abs=1e-4)


def test_what_the_file_says_can_be_replaced(tiny_bundle: Bundle, tmp_path: Path) -> None:
    metadata = {
        "names": "{0: 'person', 1: 'shoe'}",
        "imgsz": "[32, 32]",
        "license": "AGPL-3.0",
    }
    file = write_detector(tmp_path / "yolo.onnx", "yolo", metadata=metadata, open_size=True)
    block = attached(tiny_bundle, file).manifest.boxes
    assert block is not None
    assert (block.labels, block.licence) == (("person", "shoe"), "AGPL-3.0")
    assert (block.width_px, block.threshold, block.fit) == (32, 0.1, "padded")
    labels = tmp_path / "labels.txt"
    labels.write_text("Mensch\nSchuh\n")
    more = ["--labels", labels, "--licence", "MIT", "--threshold", 0.3, "--stretch"]
    more += ["--mean", 0.1, 0.1, 0.1, "--std", 2, 2, 2, "--scale", 1]
    again = attached(tiny_bundle, file.rename(tmp_path / "again.onnx"), *more).manifest.boxes
    assert again is not None
    assert (again.labels, again.licence) == (("Mensch", "Schuh"), "MIT")
    assert (again.threshold, again.fit) == (0.3, "stretched")
    assert (again.mean, again.std) == ((0.1, 0.1, 0.1), (2, 2, 2))


@pytest.mark.parametrize(
    ("more", "options", "message"),
    [
        ({"plus": float("nan")}, [], "numbers that are not finite"),
        ({"times": 20.0}, [], "Scores of the detector go from .* they must be from 0 to 1"),
        ({}, ["--layout", "yolo"], "do not have the layout yolo"),
        ({}, ["--layout", "torchvision"], "lie within 1 px .* give --layout centernet"),
        ({"layout": "torchvision"}, ["--layout", "centernet"], "in pixels, give --layout torchv"),
        ({"layout": "yolo"}, ["--layout", "yolo-nms"], "do not have the layout yolo-nms"),
        ({}, ["--layout", "ssd"], "--layout ssd is not one of auto, torchvision, centernet"),
        ({}, ["--size", "64"], "--size 64 is not the size of the detector's input, 32 x 32 px"),
        ({"open_size": True}, [], "has no fixed size. Give the side"),
        ({"open_size": True}, ["--size", "4096"], "width_px.*2,048"),
        ({}, ["--scale", "2"], "--scale 2 is not 1 or 255"),
        ({}, ["--threshold", "2"], "threshold"),
        ({}, ["--std", "0", "1", "1"], "std"),
    ],
)
def test_a_detector_that_does_not_fit_is_refused_with_the_reason(
    tiny_bundle: Bundle, tmp_path: Path, more: dict[str, Any], options: list[str], message: str
) -> None:
    refused(tiny_bundle, write_detector(tmp_path / "boxes.onnx", **more), message, *options)


def test_other_files_are_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "boxes.onnx"
    refused(tiny_bundle, file, "cannot be read: No such file")
    file.write_bytes(b"<html>not found</html>")
    refused(tiny_bundle, file, "cannot be loaded")
    file.write_bytes(tiny_bundle.model_path.read_bytes())  # 8 numbers of unit norm
    refused(tiny_bundle, file, r"outputs of the detector are embeddings float32 \(1, 8\)")
    with file.open("wb") as large:
        large.truncate(513 * 2**20)
    refused(tiny_bundle, file, "has 513 MiB; the limit is 512 MiB")
    with pytest.raises(KinlensError, match="exists already"):
        called("attach", tiny_bundle.path, "--boxes", file, "--out", tiny_bundle.path)


def test_a_detector_must_be_one_file_that_takes_one_image(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    file = write_detector(tmp_path / "boxes.onnx")
    model = onnx.load(file)
    for weights in model.graph.initializer:
        value = numpy_helper.to_array(weights)
        if value.dtype == np.float32 and value.size > 1:
            weights.CopyFrom(numpy_helper.from_array(np.resize(value, (1, 400, 4)), weights.name))
    onnx.save(model, file, save_as_external_data=True, location="boxes.data", size_threshold=0)
    refused(tiny_bundle, file, "cannot be loaded")
    extra = helper.make_tensor_value_info("shape", TensorProto.FLOAT, [1, 2])
    model = onnx.load(write_detector(file))
    model.graph.input.append(extra)
    onnx.save(model, file)
    refused(tiny_bundle, file, r"takes images .*, shape .*; it must take one RGB image")


def test_outputs_of_a_detector_must_be_tensors(tiny_bundle: Bundle, tmp_path: Path) -> None:
    file = write_detector(tmp_path / "boxes.onnx")
    model = onnx.load(file)
    model.graph.node.append(helper.make_node("SequenceConstruct", ["scores"], ["all"]))
    shape = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    kind = helper.make_sequence_type_proto(shape)
    model.graph.output.append(helper.make_value_info("all", kind))
    onnx.save(model, file)
    refused(tiny_bundle, file, r"output all of the detector is seq\(tensor\(float\)\)")


def test_a_detector_without_evidence_needs_its_layout(tiny_bundle: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "boxes.onnx"
    write_detector(file, "torchvision", copies=1)
    model = onnx.load(file)
    for weights in model.graph.initializer:
        if numpy_helper.to_array(weights).shape == (16, 4):
            weights.CopyFrom(numpy_helper.from_array(np.zeros((16, 4), np.float32), weights.name))
    onnx.save(model, file)
    refused(tiny_bundle, file, "finds nothing on the golden images.*Give --layout torchvision")


def test_the_manifest_is_that_of_the_base_with_a_block(tiny_bundle: Bundle, tmp_path: Path) -> None:
    made = attached(tiny_bundle, write_detector(tmp_path / "boxes.onnx"))
    plain, with_block = (
        json.loads((one.path / "manifest.json").read_text()) for one in (tiny_bundle, made)
    )
    assert with_block.pop("boxes")["sha256"]
    assert with_block.pop("base_id") == plain["bundle_id"]
    assert with_block.pop("bundle_id") != plain.pop("bundle_id")
    assert with_block == plain


@pytest.mark.filterwarnings("ignore")
def test_a_detector_that_torchvision_exported_is_recognized(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    from torchvision.models import detection  # here, since its import takes a second

    file, names = tmp_path / "ssd.onnx", ["boxes", "scores", "labels"]
    network = detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=5
    )
    rows = {name: {0: "rows"} for name in names}
    options: dict[str, Any] = {"output_names": names, "dynamic_axes": rows, "dynamo": False}
    images = ([torch.rand(3, 320, 320)],)
    torch.onnx.export(network.eval(), images, file, opset_version=17, **options)
    made = attached(tiny_bundle, file)
    block = made.manifest.boxes
    assert block is not None
    assert (block.layout, block.width_px, block.scale) == ("torchvision", 320, 1)
    assert Detector.open(made).find(decode(bright_photo((1, 1))))
