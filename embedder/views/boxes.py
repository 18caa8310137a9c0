"""Boxes of the objects in a photo, found by the detector of a bundle: `boxes.onnx`.

    image ─► scaled into the input ─► network ─► rows of one of the layouts
          ─► best score first, without near copies, with a margin ─► boxes

A detector only proposes parts of an image to search with, so its classes are labels and nothing
more. Output that makes no sense gives no boxes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kinlens.embedder.bundle import BOXES, Bundle
from kinlens.embedder.engines.models import SessionSettings, create_session
from kinlens.embedder.errors import BundleCorruptError, BundleError
from kinlens.embedder.manifest import BoxesFile, BoxesLayout, Colour
from kinlens.embedder.preprocess import Box, ImageLimits, ImageParts, windows

Numbers = NDArray[np.float64]
Outputs = Mapping[str, NDArray[Any]]
"""The outputs of the network by name."""

MOST_BOXES = 16
"""Number of boxes that an image has at most."""

AUTO_BOXES = len(windows()) - 1
"""Boxes that a search with `auto` uses: as many as windows, so its cost is known before the image
is decoded.
"""

_SAME_OVERLAP = 0.6
"""Two boxes with more in common (intersection over union) are of one object."""
_MARGIN = 0.05
"""Added on each side, as a share of the box: detectors cut objects tightly."""
_LEAST_AREA = 0.005
_LEAST_PX = 8
_MOST_CANDIDATES = 300
_DIGITS = 4
_PIXELS: Mapping[str, Any] = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8}
_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class FoundBox:
    """The box of an object, with its score from 0 to 1 and the number of its class."""

    box: Box
    score: float
    kind: int = 0


class Network:
    """The network of a detector, as its file has it.

    Attributes:
        size: width and height of its input; None for what it leaves open.
        pixels: the type of its input, float32 or uint8.
    """

    def __init__(self, file: Path | bytes) -> None:
        """Raises: BundleCorruptError if it cannot be loaded, takes no image, or has an output that
        is not a tensor.
        """
        self._session = create_session(file, SessionSettings())
        inputs = self._session.get_inputs()
        shape: list[Any] = inputs[0].shape
        self._has_batch = len(shape) == 4
        sides = shape[1:] if self._has_batch else shape
        self._is_last = len(sides) == 3 and sides[0] != _CHANNELS and sides[2] == _CHANNELS
        if len(inputs) != 1 or len(sides) != 3 or inputs[0].type not in _PIXELS:
            taken = ", ".join(f"{one.name} {one.type} {one.shape}" for one in inputs)
            raise BundleCorruptError(
                f"The detector takes {taken}; it must take one RGB image, float32 or uint8, as "
                "(batch, 3, height, width) or (batch, height, width, 3)."
            )
        height, width = sides[:2] if self._is_last else sides[1:]
        self.size = _known(width), _known(height)
        self.pixels: Any = _PIXELS[inputs[0].type]
        self._input = str(inputs[0].name)
        outputs = self._session.get_outputs()
        if others := [one for one in outputs if not one.type.startswith("tensor(")]:
            raise BundleCorruptError(
                f"The output {others[0].name} of the detector is {others[0].type}; all must be "
                "tensors. Remove it from the file, or export the detector without it."
            )
        self._names = [str(one.name) for one in outputs]
        self.metadata: Mapping[str, str] = self._session.get_modelmeta().custom_metadata_map

    def run(self, image: NDArray[Any]) -> Outputs:
        """The outputs for an image (height, width, 3). Raises: BundleError."""
        given = np.ascontiguousarray(image if self._is_last else image.transpose(2, 0, 1))
        given = given[None] if self._has_batch else given
        try:
            outputs = self._session.run(None, {self._input: given})
        except Exception as error:
            # onnxruntime raises exceptions without a common base class.
            raise BundleError(
                f"The detector failed on an image of {image.shape[1]} x {image.shape[0]} px: "
                f"{error}. Attach another one, or the same with another --size."
            ) from error
        return dict(zip(self._names, outputs, strict=True))


class Detector:
    """A detector with the description of its input and output."""

    def __init__(self, network: Network, block: BoxesFile) -> None:
        self.block = block
        self._network = network

    @classmethod
    def open(cls, bundle: Bundle) -> "Detector":
        """The detector of a bundle. Raises: BundleError if it has none or it cannot be loaded."""
        block = bundle.manifest.boxes
        if block is None:
            raise BundleError(
                f"The bundle {bundle.path} has no detector. Attach one with kinlens-train attach "
                f"{bundle.path} --boxes detector.onnx."
            )
        return cls(Network(bundle.path / BOXES), block)

    @property
    def side_px(self) -> int:
        """The side of an image that is large enough for the input."""
        return max(self.block.width_px, self.block.height_px)

    def find(self, image: Image.Image, most: int = MOST_BOXES) -> list[FoundBox]:
        """The boxes of up to `most` objects in an upright RGB image, best first.

        Raises: BundleError.
        """
        block = self.block
        canvas, used = self.fitted(image)
        rows = read_outputs(self.outputs(canvas), block.layout, (block.width_px, block.height_px))
        return rows.best(used, image.size, block.threshold, most)

    def fitted(self, image: Image.Image) -> tuple[Image.Image, tuple[float, float]]:
        """The image in the size of the input, and the shares of that which it fills."""
        size = self.block.width_px, self.block.height_px
        if self.block.fit == "stretched":
            return image.resize(size, Image.Resampling.BILINEAR), (1.0, 1.0)
        scale = min(size[0] / image.width, size[1] / image.height)
        width = min(size[0], max(1, round(image.width * scale)))
        height = min(size[1], max(1, round(image.height * scale)))
        canvas = Image.new("RGB", size)
        canvas.paste(image.resize((width, height), Image.Resampling.BILINEAR), (0, 0))
        return canvas, (width / size[0], height / size[1])

    def outputs(self, canvas: Image.Image) -> Outputs:
        """The outputs of the network for an image of the size of its input. Raises: BundleError."""
        block = self.block
        values: NDArray[Any] = np.asarray(canvas)
        if self._network.pixels is not np.uint8:
            scaled = values * np.float32(block.scale / 255)
            values = (scaled - np.array(block.mean, np.float32)) / np.array(block.std, np.float32)
        return self._network.run(values)


def auto_parts(
    data: bytes, limits: ImageLimits, colour: Colour, detector: Detector | None
) -> list[Box | None]:
    """The parts of an encoded image to search with: the whole image, and the best boxes that a
    detector finds; windows at fixed places without one, or if it fails on the image.

    Raises: ImageError.
    """
    if detector is None:
        return windows()
    upright = ImageParts(data, limits, colour).part(min_side_px=detector.side_px)
    try:
        return [None, *(one.box for one in detector.find(upright, AUTO_BOXES))]
    except BundleError:  # which does not end a search in the service either
        return windows()


@dataclass(frozen=True, slots=True)
class Rows:
    """What a network found: `corners` (M, 4) are left, top, right, bottom as shares of its input,
    `scores` (M,) and `kinds` (M,) belong to them.
    """

    corners: Numbers
    scores: Numbers
    kinds: Numbers

    def best(
        self,
        used: tuple[float, float],
        size_px: tuple[int, int],
        threshold: float,
        most: int = MOST_BOXES,
    ) -> list[FoundBox]:
        """The best boxes without near copies, as shares of an image of `size_px` that fills the
        share `used` of the width and height of the input.
        """
        is_number = np.isfinite(self.corners).all(1) & np.isfinite(self.scores)
        corners = np.clip(np.where(is_number[:, None], self.corners, 0) / (*used, *used), 0, 1)
        sides = corners[:, 2:] - corners[:, :2]
        is_large = (sides * size_px >= _LEAST_PX).all(1) & (sides.prod(1) >= _LEAST_AREA)
        usable = np.flatnonzero(is_number & is_large & (self.scores >= threshold))
        order = usable[np.argsort(-self.scores[usable], kind="stable")][:_MOST_CANDIDATES]
        kept: list[int] = []
        for number in order:
            if len(kept) == most:
                break
            if not kept or _overlaps(corners[number], corners[kept]).max() <= _SAME_OVERLAP:
                kept.append(int(number))
        return [
            FoundBox(_with_margin(corners[number]), min(1.0, score), int(kind))
            for number, score, kind in zip(
                kept, self.scores[kept].tolist(), _plain(self.kinds)[kept], strict=True
            )
        ]


def read_outputs(outputs: Outputs, layout: BoxesLayout, size_px: tuple[int, int]) -> Rows:
    """What the outputs of a network with an input of `size_px` = (width, height) mean.

    Raises: BundleError if they do not have the layout.
    """
    try:
        with np.errstate(all="ignore"):
            return _READERS[layout](outputs, np.array([*size_px, *size_px], dtype=np.float64))
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise BundleError(
            f"The outputs of the detector, {described(outputs)}, do not have the layout {layout}. "
            "Attach it with another --layout."
        ) from error


def described(outputs: Outputs) -> str:
    """The names, types and shapes of outputs, for messages."""
    return ", ".join(f"{name} {value.dtype} {value.shape}" for name, value in outputs.items())


def _listed(unit: str, outputs: Outputs, size: Numbers) -> Rows:
    """Boxes, scores and classes in an output each, recognized by their names or shapes."""
    left = dict(outputs)

    def taken(words: tuple[str, ...], fits: Any) -> NDArray[Any]:
        by_name = [n for n in left if any(word in n.lower() for word in words)]
        by_shape = [n for n, value in left.items() if fits(value)]
        name = next((n for n in by_name if n in by_shape), (by_name or by_shape)[0])
        return left.pop(name)

    corners = taken(("box",), lambda value: value.ndim > 1 and value.shape[-1] == 4)
    corners = corners.reshape(-1, 4).astype(np.float64)
    is_row = partial(_is_row, len(corners))
    scores = taken(("score", "conf"), lambda v: is_row(v) and v.dtype.kind == "f").reshape(-1)
    left = {name: value for name, value in left.items() if is_row(value)}
    words = ("class", "label", "categor")
    kinds = taken(words, is_row).reshape(-1) if left else np.zeros(len(corners))
    if len(scores) != len(corners):
        raise ValueError
    if unit == "yx":
        corners = corners[:, [1, 0, 3, 2]]
    elif unit == "pixels":
        corners = corners / size
    return Rows(corners, scores.astype(np.float64), kinds.astype(np.float64))


def _is_row(count: int, value: NDArray[Any]) -> bool:
    return value.size == count and (value.ndim == 1 or value.shape[-1] == count)


def _yolo(has_objectness: bool, outputs: Outputs, size: Numbers) -> Rows:
    """One output: centre, width, height and a score of each class, for each of many places."""
    rows, least = _table(outputs), 6 if has_objectness else 5
    if rows.shape[0] < rows.shape[1] or rows.shape[1] < least:  # (4 + classes, places)
        rows = rows.T
    if not len(rows):
        return Rows(np.zeros((0, 4)), np.zeros(0), np.zeros(0))
    scores = rows[:, 5:] * rows[:, 4:5] if has_objectness else rows[:, 4:]
    half = rows[:, 2:4] / 2
    corners = np.concatenate([rows[:, :2] - half, rows[:, :2] + half], axis=1) / size
    return Rows(corners, scores.max(1), scores.argmax(1).astype(np.float64))


def _nms(outputs: Outputs, size: Numbers) -> Rows:
    """One output with rows of left, top, right, bottom, score, class."""
    rows = _table(outputs)
    if rows.shape[1] != 6:
        raise ValueError
    return Rows(rows[:, :4] / size, rows[:, 4], rows[:, 5])


_READERS: Mapping[BoxesLayout, Callable[[Outputs, Numbers], Rows]] = {
    "torchvision": partial(_listed, "pixels"),
    "centernet": partial(_listed, "shares"),
    "tensorflow": partial(_listed, "yx"),
    "yolo": partial(_yolo, False),
    "yolo-objectness": partial(_yolo, True),
    "yolo-nms": _nms,
}


def _table(outputs: Outputs) -> Numbers:
    [table] = outputs.values()
    if table.ndim == 3 and table.shape[0] == 1:
        table = table[0]
    if table.ndim != 2 or table.dtype.kind != "f":
        raise ValueError
    return table.astype(np.float64)


def _overlaps(corner: Numbers, others: Numbers) -> Numbers:
    """Intersection over union of a box (4,) with others (K, 4), (K,)."""
    low, high = np.maximum(corner[:2], others[:, :2]), np.minimum(corner[2:], others[:, 2:])
    shared: Numbers = np.clip(high - low, 0, None).prod(1)
    areas: Numbers = (others[:, 2:] - others[:, :2]).prod(1)
    overlaps: Numbers = shared / (areas + (corner[2:] - corner[:2]).prod() - shared)
    return overlaps


def _with_margin(corner: Numbers) -> Box:
    """Rounded, so that machines that round differently find the same boxes."""
    margin = _MARGIN * (corner[2:] - corner[:2])
    low = np.round(np.clip(corner[:2] - margin, 0, 1), _DIGITS).tolist()
    high = np.round(np.clip(corner[2:] + margin, 0, 1), _DIGITS).tolist()
    left, top = low
    return left, top, round(high[0] - left, _DIGITS), round(high[1] - top, _DIGITS)


def _plain(kinds: Numbers) -> NDArray[np.int64]:
    """Numbers of classes as integers; 0 for what is none."""
    is_number = np.isfinite(kinds) & (kinds >= 0) & (kinds < 2**31)
    return np.where(is_number, kinds, 0).astype(np.int64)


def _known(side: Any) -> int | None:
    return side if isinstance(side, int) and side > 0 else None
