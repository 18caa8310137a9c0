"""The manifest of a model bundle: frozen, versioned, an unknown key is an error."""

import hashlib
import json
from operator import not_
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kinlens.embedder.calibration import Calibration

Interpolation = Literal["bilinear", "bicubic", "lanczos"]
Precision = Literal["fp32", "bf16", "int8", "fp16"]
OtherPrecision = Literal["bf16", "int8", "fp16"]
FilePrecision = Literal["int8", "fp16"]
"""Those with an ONNX file of their own; bf16 is computed from the file in fp32."""
AskedPrecision = Literal["auto", "fp32", "bf16", "int8", "fp16"]
"""What a setting may ask for; auto is one of the others, by the machine that runs it."""

Engine = Literal["onnxruntime", "openvino"]
AskedEngine = Literal["auto", "onnxruntime", "openvino"]
"""What a setting may ask for; auto is the faster one that the export measured."""


class Mode(NamedTuple):
    """How a network is run: the engine, and the precision that it computes in."""

    engine: Engine
    precision: Precision

    def __str__(self) -> str:
        return f"{self.precision} with {self.engine}"

    @property
    def key(self) -> str:
        """Its name in files and manifests, such as `openvino-bf16`."""
        return f"{self.engine}-{self.precision}"


FP32 = Mode("onnxruntime", "fp32")
"""What every other mode is compared with."""


HeldOutSplit = Literal["validation", "test"]


def _is_none(value: object) -> bool:
    return value is None


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Preprocessing(_Frozen):
    """Resize the shorter side to `resize_px`, cut the central square of `crop_px`."""

    resize_px: int = Field(ge=8, le=4096)
    crop_px: int = Field(ge=8, le=4096)
    interpolation: Interpolation = "bilinear"

    @model_validator(mode="after")
    def _crop_fits(self) -> "Preprocessing":
        if self.crop_px > self.resize_px:
            raise ValueError(
                f"crop_px = {self.crop_px} is larger than resize_px = {self.resize_px}; "
                "make the crop at most as large as the resized shorter side"
            )
        return self


class Parity(_Frozen):
    """How far the ONNX file is from the network that it was exported from."""

    max_abs_difference: float
    batch_sizes: tuple[int, ...]
    recall_at_1_torch: float | None = None
    recall_at_1_onnx: float | None = None


class HeldOut(_Frozen):
    """Images on which the precisions were compared: never trained on.

    `split` is "test" where the job keeps no validation classes. `recall` is that of `model.onnx`.
    `no_calibration` is why the scores were not calibrated.
    """

    split: HeldOutSplit
    images: int = Field(ge=1)
    recall: dict[str, float]
    no_calibration: str | None = None


class Baseline(_Frozen):
    """What the training began with on the test images of the model: `recall` over `queries`.

    `model` says what that was: the untrained trunk, or the model that it went on from.
    """

    model: str = "the untrained trunk"
    queries: int = Field(ge=1)
    recall: dict[str, float]


class Comparison(_Frozen):
    """A mode compared with fp32 in onnxruntime at export.

    `recall` on the held-out images, `recall_at_1_loss` in points below `model.onnx` there, with its
    paired 95 % interval. `mixed_recall_at_1_loss`: points lost where queries in this mode search a
    gallery in fp32; `gallery_recall_at_1_loss`: where queries in fp32 search one in this mode.
    `held_out_cosine`: the mean cosine to fp32 of the held-out images. `min_cosine`, `mean_cosine`:
    of the golden images.
    """

    recall: dict[str, float]
    recall_at_1_loss: float
    recall_at_1_interval: tuple[float, float] | None = Field(default=None, exclude_if=_is_none)
    mixed_recall_at_1_loss: float
    gallery_recall_at_1_loss: float | None = Field(default=None, exclude_if=_is_none)
    held_out_cosine: float | None = Field(default=None, exclude_if=_is_none)
    min_cosine: float
    mean_cosine: float


class Variant(Comparison):
    """The same network as another ONNX file, compared in onnxruntime."""

    sha256: str


class MapFile(_Frozen):
    """`model.map.onnx`: what each position of an image adds to its embedding.

    `sum_difference` is the largest between the sums over positions and the embeddings, `difference`
    the mean one between the maps of ONNX and torch, as a part of their mean size; golden images.
    """

    sha256: str = ""
    sum_difference: float
    difference: float


class GoldenHashes(_Frozen):
    """sha256 of each file under `golden/`."""

    files: dict[str, str]


class BundleManifest(_Frozen):
    """All that is known about an exported model. `bundle_id` covers the model and this page.

    `variants` are the other files, `modes` other ways to run a file, by `Mode.key`. Keys that a
    manifest of schema 1 may lack are left out of page and id while they are empty.
    """

    schema_version: Literal[1] = 1
    name: str
    created_at: str
    dim: int = Field(ge=1)
    preprocessing: Preprocessing
    model_sha256: str
    golden: GoldenHashes
    backbone: str
    job: dict[str, Any] = Field(default_factory=dict)
    data_sha256: str | None = None
    split_sha256: str | None = None
    recall: dict[str, float] = Field(default_factory=dict)
    baseline: Baseline | None = Field(default=None, exclude_if=not_)
    parity: Parity | None = None
    held_out: HeldOut | None = Field(default=None, exclude_if=not_)
    variants: dict[FilePrecision, Variant] = Field(default_factory=dict, exclude_if=not_)
    modes: dict[str, Comparison] = Field(default_factory=dict, exclude_if=not_)
    calibration: Calibration | None = Field(default=None, exclude_if=not_)
    map: MapFile | None = Field(default=None, exclude_if=not_)
    licence: str = "unspecified"
    versions: dict[str, str] = Field(default_factory=dict)
    bundle_id: str = ""

    def comparison(self, mode: Mode) -> Comparison | None:
        """How `mode` compares with fp32; None if nobody measured it."""
        for precision, variant in self.variants.items():
            if mode == ("onnxruntime", precision):
                return variant
        return self.modes.get(mode.key)

    def no_calibration(self) -> str | None:
        """Why there is no calibration; None with one."""
        if self.calibration is not None:
            return None
        reason = None if self.held_out is None else self.held_out.no_calibration
        return reason or "It was exported without held-out images."

    def computed_id(self) -> str:
        """sha256 over this manifest without its id; `model_sha256` ties in the model file."""
        content = self.model_dump(mode="json", exclude={"bundle_id"})
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def with_id(self) -> "BundleManifest":
        """The same manifest, stamped with its own id."""
        return self.model_copy(update={"bundle_id": self.computed_id()})
