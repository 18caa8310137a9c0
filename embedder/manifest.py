"""The manifest of a model bundle: frozen and versioned. Unknown keys are errors."""

import hashlib
import json
from functools import partial
from operator import eq, is_, not_
from typing import Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    field_validator,
    model_validator,
)

from kinlens.embedder.calibration import Calibration

Interpolation = Literal["bilinear", "bicubic", "lanczos"]
Colour = Literal["srgb", "stored"]
Aspect = Literal["kept", "squashed"]
Precision = Literal["fp32", "bf16", "int8", "fp16"]
OtherPrecision = Literal["bf16", "int8", "fp16"]
FilePrecision = Literal["int8", "fp16"]
"""Precisions with an ONNX file of their own; bf16 is computed from the fp32 file."""
AskedPrecision = Literal["auto", "fp32", "bf16", "int8", "fp16"]
"""Precisions that a setting accepts; `auto` chooses one for the machine at run time."""

Engine = Literal["onnxruntime", "openvino"]
AskedEngine = Literal["auto", "onnxruntime", "openvino"]
"""Engines that a setting accepts; `auto` chooses the faster one that the export measured."""


class Mode(NamedTuple):
    """How a network is run: the engine and the numeric precision."""

    engine: Engine
    precision: Precision

    def __str__(self) -> str:
        return f"{self.precision} with {self.engine}"

    @property
    def key(self) -> str:
        """Its name in files and manifests, such as `openvino-bf16`."""
        return f"{self.engine}-{self.precision}"


FP32 = Mode("onnxruntime", "fp32")
"""The reference mode, with which every other mode is compared."""


BoxesLayout = Literal[
    "torchvision", "centernet", "tensorflow", "yolo", "yolo-objectness", "yolo-nms"
]
"""What the outputs of a detector are; `kinlens.embedder.views.boxes` reads each.

- torchvision, centernet, tensorflow: boxes (N, 4), scores (N) and classes (N), the last optional.
  Boxes are left, top, right, bottom in pixels of the input; in shares of it; or top, left, bottom,
  right in shares.
- yolo, yolo-objectness: one table with centre, width and height in pixels of the input; then the
  objectness, if there is one, and a score of each class.
- yolo-nms: one table with left, top, right, bottom in pixels of the input, score, class.
"""

HeldOutSplit = Literal["validation", "test"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Preprocessing(_Frozen):
    """Resize the shorter side to `resize_px`, crop the central square of `crop_px`.

    Attributes:
        aspect: "squashed" resizes the image to a square first, whatever its shape.
        colour: "srgb" for the colours that a browser shows; "stored" for the stored values, whose
            colour space is ignored. Manifests without it are of version 0.2 or older: "stored".
    """

    resize_px: int = Field(ge=8, le=4096)
    crop_px: int = Field(ge=8, le=4096)
    interpolation: Interpolation = "bilinear"
    colour: Colour = Field(default="srgb", exclude_if=partial(eq, "stored"))
    aspect: Aspect = Field(default="kept", exclude_if=partial(eq, "kept"))

    @model_validator(mode="after")
    def _crop_fits(self) -> "Preprocessing":
        if self.crop_px > self.resize_px:
            raise ValueError(
                f"crop_px = {self.crop_px} is larger than resize_px = {self.resize_px}; "
                "make the crop at most as large as the resized shorter side"
            )
        return self


class Parity(_Frozen):
    """Differences between the ONNX file and the network that it was exported from."""

    max_abs_difference: float
    batch_sizes: tuple[int, ...]
    recall_at_1_torch: float | None = None
    recall_at_1_onnx: float | None = None


class HeldOut(_Frozen):
    """Held-out images, never used for training, on which the precisions were compared.

    Attributes:
        split: "test" if the job has no validation classes.
        recall: of `model.onnx`.
        no_calibration: why the scores were not calibrated; None if they were.
    """

    split: HeldOutSplit
    images: int = Field(ge=1)
    recall: dict[str, float]
    no_calibration: str | None = None


class Baseline(_Frozen):
    """Recall on the test images before the training.

    Attributes:
        model: the start of the training: the untrained trunk, or the model that was fine-tuned.
        queries: number of queries behind `recall`.
    """

    model: str = "the untrained trunk"
    queries: int = Field(ge=1)
    recall: dict[str, float]


class Comparison(_Frozen):
    """Comparison of a mode with fp32 in onnxruntime, measured at export.

    Attributes:
        recall: on the held-out images.
        recall_at_1_loss: points below `model.onnx` on these images.
        recall_at_1_interval: the paired 95 % interval of that loss.
        mixed_recall_at_1_loss: points lost if queries in this mode search a gallery in fp32.
        gallery_recall_at_1_loss: points lost if queries in fp32 search a gallery in this mode.
        held_out_cosine: mean cosine to fp32 over the held-out images.
        min_cosine, mean_cosine: cosine to fp32 over the golden images.
    """

    recall: dict[str, float]
    recall_at_1_loss: float
    recall_at_1_interval: tuple[float, float] | None = Field(
        default=None, exclude_if=partial(is_, None)
    )
    mixed_recall_at_1_loss: float
    gallery_recall_at_1_loss: float | None = Field(default=None, exclude_if=partial(is_, None))
    held_out_cosine: float | None = Field(default=None, exclude_if=partial(is_, None))
    min_cosine: float
    mean_cosine: float


class Variant(Comparison):
    """The network as an ONNX file in another precision, compared in onnxruntime."""

    sha256: str


class MapFile(_Frozen):
    """`model.map.onnx`: the contribution of each image position to the embedding.

    Attributes:
        sum_difference: largest difference between a sum over positions and the embedding.
        difference: mean difference between the maps of ONNX and torch, relative to their mean
            size. Both are measured on the golden images.
    """

    sha256: str = ""
    sum_difference: float
    difference: float


class BoxesFile(_Frozen):
    """`boxes.onnx`: a detector, whose boxes are the parts of a busy photo to search with.

    Attributes:
        width_px, height_px: of its input, which is RGB.
        scale: the value of white: 1 or 255. Then `mean` is subtracted, and `std` divides.
        fit: "padded" keeps the shape of an image and fills the rest of the input with black.
        threshold: boxes with a lower score are dropped.
        labels: of the classes, by their numbers; empty if they are unknown.
    """

    sha256: str = ""
    layout: BoxesLayout
    width_px: int = Field(ge=16, le=2048)
    height_px: int = Field(ge=16, le=2048)
    scale: Literal[1, 255]
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (1.0, 1.0, 1.0)
    fit: Literal["padded", "stretched"] = "padded"
    threshold: float = Field(ge=0, le=1)
    labels: tuple[str, ...] = ()
    licence: str = "unspecified"

    @property
    def id(self) -> str:
        """sha256 of this description, which covers the file: of everything that boxes depend on."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def label(self, kind: int) -> str | None:
        """The label of a class; None if it is unknown."""
        return self.labels[kind] if kind < len(self.labels) else None


class WordsFound(_Frozen):
    """How well texts find items that a text tower was not fitted on; all but `texts` in percent.

    Attributes:
        texts: number of texts that were searched for.
        map, chance: mean average precision, and that of a random order.
        precision_at_1: share of the texts whose first item is right.
        gain, gain_low: how far `map` is on the way from `chance` to 100, and the lower end of its
            95 % interval over the texts.
    """

    texts: int = Field(ge=1)
    map: float
    chance: float
    precision_at_1: float
    gain: float
    gain_low: float


class TextTower(_Frozen):
    """`text.onnx` and `tokenizer.json`: texts to vectors in the space of the images.

    Attributes:
        kind: "native" if images and texts were trained together, "taught" if the texts of a
            catalogue were fitted to the vectors of its images.
        golden_sha256: of `golden/texts.json`, texts with their vectors.
        context: the maximum number of tokens; the rest of a text is not read.
        padding: "longest" pads to the longest text of a batch and marks the padding in a mask;
            "context" pads every text to `context`.
        cleaning: "lower" for lowercase letters and single spaces; "canonical" also removes
            punctuation.
        parity: of the ONNX file with the network that it was exported from, in several batches.
        held_out: for "taught", by what was held out: "photos" of products that it was fitted on,
            "products" that share a text with others, or "titles" that it was not fitted on.
        mean: the mean vector (D,) of texts, which is subtracted before texts are added to images;
            empty if it is not known.
    """

    kind: Literal["native", "taught"]
    sha256: str = ""
    tokenizer_sha256: str = ""
    golden_sha256: str = ""
    context: int = Field(ge=1, le=8192)
    padding: Literal["longest", "context"] = "longest"
    pad_id: int = Field(default=0, ge=0)
    cleaning: Literal["lower", "canonical"] = "lower"
    licence: str = "unspecified"
    parity: Parity | None = None
    held_out: dict[Literal["photos", "products", "titles"], WordsFound] = Field(
        default_factory=dict
    )
    mean: tuple[float, ...] = ()

    @property
    def id(self) -> str:
        """sha256 of this description, which covers the files: of all that vectors depend on."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


class GoldenHashes(_Frozen):
    """sha256 of each file under `golden/`."""

    files: dict[str, str]


ATTACHED = ("boxes", "text")
"""The blocks of a manifest that describe attached files."""


class BundleManifest(_Frozen):
    """Metadata of an exported model. `bundle_id` is a hash of the model and this manifest.

    Files may be attached to a bundle later, which changes no vector: see ATTACHED. Then `base_id`
    is the id that it had without them.

    `variants` are the files in other precisions; `modes` are other ways to run a file, by
    `Mode.key`. `seen_sha256` is that of the record of classes and images trained on. Keys that were
    added to schema 1 later are omitted, also from the id, while empty.
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
    seen_sha256: str | None = Field(default=None, exclude_if=not_)
    boxes: BoxesFile | None = Field(default=None, exclude_if=not_)
    text: TextTower | None = Field(default=None, exclude_if=not_)
    licence: str = "unspecified"
    versions: dict[str, str] = Field(default_factory=dict)
    base_id: str = Field(default="", exclude_if=not_)
    bundle_id: str = ""

    @field_validator("preprocessing", mode="before")
    @classmethod
    def _old_colour(cls, spec: object) -> object:
        return {"colour": "stored"} | spec if isinstance(spec, dict) else spec

    def comparison(self, mode: Mode) -> Comparison | None:
        """The comparison of `mode` with fp32; None if it was not measured."""
        for precision, variant in self.variants.items():
            if mode == ("onnxruntime", precision):
                return variant
        return self.modes.get(mode.key)

    def no_calibration(self) -> str | None:
        """Why the bundle has no calibration; None if it has one."""
        if self.calibration is not None:
            return None
        reason = None if self.held_out is None else self.held_out.no_calibration
        return reason or "The model was exported without held-out images."

    def computed_id(self) -> str:
        """sha256 of this manifest without its id; it covers the model file by `model_sha256`."""
        content = self.model_dump(mode="json", exclude={"bundle_id"})
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def with_id(self) -> "BundleManifest":
        """A copy with `base_id` and `bundle_id` set to the computed ids."""
        base = self.model_copy(update={**dict.fromkeys(ATTACHED), "base_id": ""})
        is_base = all(getattr(self, name) is None for name in ATTACHED)
        named = self.model_copy(update={"base_id": "" if is_base else base.computed_id()})
        return named.model_copy(update={"bundle_id": named.computed_id()})

    @property
    def vectors_id(self) -> str:
        """The id of everything that vectors depend on. Galleries, caches and answers carry it, so
        bundles that differ in attached files alone serve the same galleries.
        """
        return self.base_id or self.bundle_id
