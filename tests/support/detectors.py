"""Detectors small enough for every test: they find the bright ones of 4 x 4 places of an image."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from kinlens.embedder.bundle import BOXES, Bundle, attach, sha256_of
from kinlens.embedder.manifest import BoxesFile, BoxesLayout
from tests.tiny import encoded

SIDE, PLACES = 32, 16
LABELS = ("nothing", "thing")
LAYOUTS: tuple[BoxesLayout, ...] = (
    "torchvision", "centernet", "tensorflow", "yolo", "yolo-objectness", "yolo-nms",
)  # fmt: skip
WHITE: dict[str, int] = {"centernet": 255, "tensorflow": 255}
"""The value of white in the input of a layout; 1 in others."""


def bright_photo(*places: tuple[int, int], size: tuple[int, int] = (128, 64)) -> bytes:
    """A black image (width, height) that is white in some places of a grid of 32 px."""
    image = Image.new("RGB", size)
    for column, row in places:
        image.paste((255, 255, 255), (32 * column, 32 * row, 32 * column + 32, 32 * row + 32))
    return encoded(image)


def write_detector(path: Path, layout: BoxesLayout = "centernet", **more: Any) -> Path:
    """Write a detector of this layout.

    Args:
        more: `times` and `plus` change the scores, `moved` adds to the corners in pixels, `copies`
            repeats the boxes, `metadata` is stored in the file, `open_size` leaves its input open.
            `fails_above`: the graph fails on an input of which a larger share is white.
    """
    graph = _Graph(layout, **more)
    model = helper.make_model(
        graph.made(), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    helper.set_model_props(model, more.get("metadata", {"names": json.dumps(LABELS)}))
    onnx.save(model, path)
    return path


def with_detector(
    bundle: Bundle, out: Path, layout: BoxesLayout = "centernet", **more: Any
) -> Bundle:
    """A copy of a bundle in the folder `out` with a detector, unchecked."""
    file = write_detector(out.with_suffix(".onnx"), layout, **more)
    block = block_of(file, layout)
    return attach(bundle, out, {BOXES: file}, boxes=block)


def block_of(file: Path, layout: BoxesLayout, **more: Any) -> BoxesFile:
    known = {"width_px": SIDE, "height_px": SIDE, "threshold": 0.5, "labels": LABELS}
    scale = 255 if WHITE.get(layout) else 1
    fields = {**known, "scale": scale, "sha256": sha256_of(file), **more}
    return BoxesFile(layout=layout, **fields)


class _Graph:
    def __init__(
        self,
        layout: BoxesLayout,
        times: float = 1.0,
        plus: float = 0.0,
        moved: float = 0.0,
        copies: int = 1,
        open_size: bool = False,
        fails_above: float | None = None,
        **_: Any,
    ) -> None:
        self.layout, self.count = layout, PLACES * copies
        sides = ["h", "w"] if open_size else [SIDE, SIDE]
        corners = [
            (8 * x + moved, 8 * y + moved, 8 * x + 8 + moved, 8 * y + 8 + moved)
            for y in range(4)
            for x in range(4)
        ]
        self.corners = np.tile(np.array(corners, dtype=np.float32), (copies, 1))
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}
        self.outputs: list[Any] = []
        image = self.input(sides)
        grey = self.add("ReduceMean", [image], axes=[1], keepdims=1)
        pooled = self.add("AveragePool", [grey], kernel_shape=[8, 8], strides=[8, 8])
        places = self.add("Reshape", [pooled, self.constant(np.array([1, PLACES]))])
        share = self.constant(np.float32(times / WHITE.get(layout, 1)))
        scaled = self.add("Mul", [places, share])
        shifted = self.add("Add", [scaled, self.constant(np.float32(plus))])
        if fails_above is not None:
            mean = self.add("ReduceMean", [scaled], keepdims=0)
            is_above = self.add("Greater", [mean, self.constant(np.float32(fails_above))])
            index = self.add("Cast", [is_above], to=TensorProto.INT64)
            nothing = self.constant(np.zeros(1, np.float32))  # it has no number 1
            shifted = self.add("Add", [shifted, self.add("Gather", [nothing, index])])
        self.scores = self.add("Tile", [shifted, self.constant(np.array([1, copies]))])
        getattr(self, layout.replace("-", "_"))()

    def add(self, kind: str, inputs: list[str], name: str = "", **options: Any) -> str:
        name = name or f"{kind}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **options))
        return name

    def constant(self, value: Any) -> str:
        name = f"constant{len(self.constants)}"
        self.constants[name] = np.asarray(value)
        return name

    def output(self, name: str, value: str, kind: int = TensorProto.FLOAT) -> None:
        self.add("Identity", [value], name)
        self.outputs.append(helper.make_tensor_value_info(name, kind, None))

    def input(self, sides: list[Any]) -> str:
        """The name of the image as float32 (1, 3, height, width)."""
        if self.layout == "tensorflow":
            self.taken = helper.make_tensor_value_info(
                "input_tensor", TensorProto.UINT8, [1, *sides, 3]
            )
            number = self.add("Cast", ["input_tensor"], to=TensorProto.FLOAT)
            return self.add("Transpose", [number], perm=[0, 3, 1, 2])
        shape = [3, *sides] if self.layout == "torchvision" else ["n", 3, *sides]
        self.taken = helper.make_tensor_value_info("images", TensorProto.FLOAT, shape)
        if self.layout != "torchvision":
            return "images"
        return self.add("Unsqueeze", ["images", self.constant(np.array([0]))])

    def torchvision(self) -> None:
        self.output("boxes", self.constant(self.corners))
        self.output("labels", self.constant(np.ones(self.count, np.int64)), TensorProto.INT64)
        flat = self.add("Reshape", [self.scores, self.constant(np.array([-1]))])
        self.output("scores", flat)

    def centernet(self) -> None:
        self.output("boxes", self.constant(self.corners[None] / SIDE))
        self.output("scores", self.scores)
        kinds = self.constant(np.ones((1, self.count), np.int64))
        self.output("classes", kinds, TensorProto.INT64)

    def tensorflow(self) -> None:
        self.output("num_detections", self.constant(np.array([self.count], np.float32)))
        turned = self.corners[None][..., [1, 0, 3, 2]] / SIDE
        self.output("detection_boxes", self.constant(turned))
        self.output("detection_scores", self.scores)
        self.output("detection_classes", self.constant(np.ones((1, self.count), np.float32)))

    def yolo(self) -> None:
        rows = self._column(self.scores, 1)
        none = self.constant(np.zeros((1, 1, self.count), np.float32))
        centred = self.constant(self._centred().T[None])
        self.output("output0", self.add("Concat", [centred, none, rows], axis=1))

    def yolo_objectness(self) -> None:
        kinds = self.constant(np.tile(np.array([0, 1], np.float32), (1, self.count, 1)))
        parts = [self.constant(self._centred()[None]), self._column(self.scores, 2), kinds]
        self.output("output", self.add("Concat", parts, axis=2))

    def yolo_nms(self) -> None:
        kinds = self.constant(np.ones((1, self.count, 1), np.float32))
        parts = [self.constant(self.corners[None]), self._column(self.scores, 2), kinds]
        self.output("output0", self.add("Concat", parts, axis=2))

    def made(self) -> Any:
        constants = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        return helper.make_graph(self.nodes, "places", [self.taken], self.outputs, constants)

    def _column(self, name: str, axis: int) -> str:
        return self.add("Unsqueeze", [name, self.constant(np.array([axis]))])

    def _centred(self) -> Any:
        low, high = self.corners[:, :2], self.corners[:, 2:]
        return np.concatenate([(low + high) / 2, high - low], axis=1)
