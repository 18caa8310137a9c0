"""The description of a detector for a bundle: the layout of its outputs is recognized, and checked
on images.
"""

import ast
import hashlib
import itertools
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from PIL import Image
from pydantic import ValidationError

from kinlens.embedder.errors import BundleCorruptError, BundleError, ExportError
from kinlens.embedder.manifest import BoxesFile, BoxesLayout
from kinlens.embedder.preprocess import decode
from kinlens.embedder.programs.faults import file_fault
from kinlens.embedder.views.boxes import Detector, Network, Outputs, described, read_outputs

MAX_MB = 512
THRESHOLD = 0.1
"""Low, as a search compares the best few boxes anyway: benchmarks/clutter.py."""

_PROBES: tuple[BoxesLayout, ...] = ("torchvision", "centernet")
"""One layout for white = 1 and one for 255, of which a detector takes one."""

_IN_SHARES = ("centernet", "tensorflow")
_MOST_SHARE = 2.0
"""Boxes as shares go to 1, and hardly beyond it; in pixels to the size of the input."""
_SCALES: dict[BoxesLayout, Literal[1, 255]] = {"centernet": 255, "tensorflow": 255}
_SCORE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Given:
    """What the caller knows of a detector; None for what is to be found out."""

    layout: BoxesLayout | None = None
    size_px: int | None = None
    scale: Literal[1, 255] | None = None
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    stretched: bool = False
    threshold: float = THRESHOLD
    labels: Sequence[str] | None = None
    licence: str | None = None


def describe_detector(file: Path, images: Sequence[bytes], given: Given) -> tuple[BoxesFile, float]:
    """The block of the manifest for the detector in `file`, and the number of boxes that it finds
    per image. `images` are encoded, and needed to recognize and check its outputs.

    Raises: ExportError, BundleError.
    """
    content = _read(file)
    try:
        network, digest = Network(content), hashlib.sha256(content).hexdigest()
    except BundleCorruptError as error:
        raise ExportError(f"The detector {file} is not usable. {error}") from error
    size = _size(network, given.size_px)
    labels = given.labels if given.labels is not None else _names(network.metadata.get("names"))
    uprights = [decode(data) for data in images]

    def detector(layout: BoxesLayout) -> Detector:
        fields: dict[str, Any] = {
            "sha256": digest,
            "layout": layout,
            "width_px": size[0],
            "height_px": size[1],
            "scale": given.scale or _SCALES.get(layout, 1),
            "mean": given.mean,
            "std": given.std,
            "fit": "stretched" if given.stretched else "padded",
            "threshold": given.threshold,
            "labels": tuple(labels or ()),
            "licence": given.licence or network.metadata.get("license") or "unspecified",
        }
        try:
            return Detector(network, BoxesFile(**fields))
        except ValidationError as error:
            raise ExportError(
                f"The detector {file} cannot be described: {file_fault(error)}."
            ) from error

    layout = given.layout
    if layout is None:
        runs = [_on_each(detector(one), uprights) for one in _PROBES]
        layout = _layout([*itertools.chain(*runs)], len(labels or ()))
    chosen = detector(layout)
    for outputs in _on_each(chosen, uprights):
        _check(outputs, chosen.block)
    return chosen.block, sum(len(chosen.find(image)) for image in uprights) / len(uprights)


def known_layout(text: str) -> BoxesLayout | None:
    """A layout by its name; None for auto. Raises: ExportError."""
    names: tuple[BoxesLayout, ...] = get_args(BoxesLayout)
    for name in names:
        if name == text:
            return name
    if text == "auto":
        return None
    raise ExportError(f"--layout {text} is not one of auto, {', '.join(names)}.")


def _read(file: Path) -> bytes:
    try:
        size_mb = file.stat().st_size / 2**20
        if size_mb > MAX_MB:
            raise ExportError(
                f"The detector {file} has {size_mb:,.0f} MiB; the limit is {MAX_MB} MiB, as each "
                "service holds it in memory. Export a smaller one, or with float16 weights."
            )
        return file.read_bytes()
    except OSError as error:
        raise ExportError(f"The detector {file} cannot be read: {error.strerror}.") from error


def _size(network: Network, asked: int | None) -> tuple[int, int]:
    """Width and height of the input: of the file, else as asked, else of its metadata."""
    width, height = network.size
    noted = None
    with suppress(ValueError, TypeError, SyntaxError):
        sides = ast.literal_eval(
            network.metadata.get("imgsz", "")
        )  # of ultralytics: [height, width]
        noted = int(sides[1]), int(sides[0])
    if asked is not None and {width, height} - {None, asked}:
        raise ExportError(
            f"--size {asked} is not the size of the detector's input, {width} x {height} px. Omit "
            "it."
        )
    if width and height:
        return width, height
    if asked is None and noted is None:
        raise ExportError(
            "The input of the detector has no fixed size. Give the side that it was trained for, "
            "such as --size 640."
        )
    if asked is not None:
        return asked, asked
    assert noted is not None
    return noted


def _names(text: str | None) -> list[str] | None:
    """Labels in the metadata of a file: a JSON list, or a dict as ultralytics writes it."""
    if not text:
        return None
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            found = parse(text)
            if isinstance(found, dict):
                found = [found.get(n, found.get(str(n), "")) for n in range(len(found))]
            if isinstance(found, list):
                return [str(name) for name in found]
    return None


def _on_each(detector: Detector, images: Sequence[Image.Image]) -> list[Outputs]:
    return [detector.outputs(detector.fitted(image)[0]) for image in images]


def _layout(runs: Sequence[Outputs], labels: int) -> BoxesLayout:
    """The layout of the outputs for some images. Raises: ExportError if it is none of the known."""
    outputs = runs[0]
    if len(outputs) == 1:
        return _layout_of_table(runs, labels)
    if any("detection_boxes" in name for name in outputs):
        return "tensorflow"
    corners = []
    for one in runs:
        with suppress(BundleError):
            corners.append(read_outputs(one, "centernet", (1, 1)).corners)
    if not corners:
        raise _unknown(outputs)
    most = max((abs(each).max() for each in corners if each.size), default=0.0)
    if not most:
        raise ExportError(
            "The detector finds nothing on the golden images of the bundle, so the unit of its "
            "boxes is unknown. Give --layout torchvision (pixels) or centernet (shares)."
        )
    return "centernet" if most <= _MOST_SHARE else "torchvision"


def _layout_of_table(runs: Sequence[Outputs], labels: int) -> BoxesLayout:
    outputs = runs[0]
    [table] = outputs.values()
    if table.dtype.kind != "f" or table.ndim not in (2, 3) or (table.ndim == 3 and len(table) > 1):
        raise _unknown(outputs)
    rows, columns = table.shape[-2:]
    tables = [next(iter(one.values())).reshape(-1, 6) for one in runs if columns == 6]
    if tables and all((one[:, 5] == one[:, 5].round()).all() for one in tables):
        return "yolo-nms"
    wide = min(rows, columns)
    if labels and wide in (4 + labels, 5 + labels):
        return "yolo" if wide == 4 + labels else "yolo-objectness"
    if wide < 5:
        raise _unknown(outputs)
    return "yolo" if rows < columns else "yolo-objectness"


def _unknown(outputs: Outputs) -> ExportError:
    return ExportError(
        f"The outputs of the detector are {described(outputs)}. They must be boxes (N, 4) and "
        "scores (N), perhaps with classes (N), or one table of YOLO; export it in one of these "
        "forms, or give --layout if it is one."
    )


def _check(outputs: Outputs, block: BoxesFile) -> None:
    """Raises: BundleError, ExportError if the outputs for an image do not fit the block."""
    shown, size = described(outputs), (block.width_px, block.height_px)
    rows = read_outputs(outputs, block.layout, size)
    if not (np.isfinite(rows.corners).all() and np.isfinite(rows.scores).all()):
        raise ExportError(
            f"The detector gives numbers that are not finite ({shown}). Export it again in fp32, "
            "and check --mean and --std."
        )
    if not len(rows.scores):
        return
    most = float(abs(rows.corners).max())
    if block.layout in _IN_SHARES and most > _MOST_SHARE:
        raise ExportError(
            f"Boxes of the detector reach {most:.3g} times the size of its input in the layout "
            f"{block.layout} ({shown}). If they are in pixels, give --layout torchvision."
        )
    if block.layout not in _IN_SHARES and most * max(size) <= _MOST_SHARE:
        raise ExportError(
            f"Boxes of the detector lie within {most * max(size):.3g} px in the layout "
            f"{block.layout} ({shown}). If they are shares of the image, give --layout centernet."
        )
    low, high = float(rows.scores.min()), float(rows.scores.max())
    if low < -_SCORE_TOLERANCE or high > 1 + _SCORE_TOLERANCE:
        raise ExportError(
            f"Scores of the detector go from {low:.3g} to {high:.3g} in the layout {block.layout} "
            f"({shown}); they must be from 0 to 1. Export it with its last sigmoid or softmax, or "
            "give another --layout."
        )
    if (rows.corners[:, 2:] < rows.corners[:, :2]).mean() > 0.5:
        raise ExportError(
            f"Most boxes of the detector end before they begin in the layout {block.layout} "
            f"({shown}). Give another --layout."
        )
