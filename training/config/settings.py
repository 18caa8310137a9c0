"""The tables of a job file, with the default and the bounds of every setting.

The options of a loss are those of its constructor, see kinlens.training.losses.table.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kinlens.embedder.errors import JobError
from kinlens.embedder.manifest import Interpolation, Preprocessing
from kinlens.training.fields import Section


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class ImageData(Section):
    """Images below `root`, and folders of `feedback` on them (see training.data.feedback)."""

    root: str
    feedback: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()


class SplitData(ImageData):
    """Images whose classes are split at random, by seed, unless a list defines the split."""

    train_fraction: float = Field(0.5, gt=0, lt=1)
    split_seed: int = Field(0, ge=0)


class FolderData(SplitData):
    """A folder with a sub-folder for each class."""

    kind: Literal["folder"]
    small_classes: Literal["refuse", "drop"] = "refuse"


class CsvData(SplitData):
    """A CSV with the columns path, label and, optionally, split (train or test)."""

    kind: Literal["csv"]
    file: str = "images.csv"
    small_classes: Literal["refuse", "drop"] = "refuse"


class RenderedData(SplitData):
    """A catalogue of rendered products, generated in `root` if it does not exist yet."""

    kind: Literal["rendered"]
    products: int = Field(90, ge=2)
    views: int = Field(16, ge=1)
    size_px: int = Field(160, ge=32, le=1024)
    seed: int = Field(0, ge=0)


class OfficialData(ImageData):
    """A data set of the literature in its official layout, complete or a subset of it."""

    kind: Literal["cub", "cars196", "sop", "in_shop", "aircraft"]
    allow_partial: bool = False


Data = Annotated[FolderData | CsvData | RenderedData | OfficialData, Field(discriminator="kind")]

BACKBONE_NAMES = ("mobilenet_v2", "resnet50", "googlenet", "bn_inception")
TIMM = "timm:"
"""Prefix of the name of a timm network."""

Pooling = Literal["gap", "gmp", "gap+gmp", "gem", "cls"]


class Model(Section):
    """The network: trunk, pooling, projection to `dim`; without `dim` the pooled features.

    `backbone`: one of BACKBONE_NAMES, or "timm:" and any network of timm, an optional extra.
    `weights`: "imagenet" downloads the published weights, "none" starts from random weights, any
    other value is the path of a state dict, or of a bundle to continue from. `pooling`: average,
    maximum, their sum, the generalised mean with a learnt exponent, or the class token of a timm
    transformer.

    `batch_norm`: "frozen" fixes statistics, scale and shift; "statistics" only the statistics, as
    most papers' code does. "folded" folds all three into the convolutions before training, which
    is faster, and fixes statistics and shift. "train" trains everything, as a trunk without
    pretrained weights needs. A trunk without batch norm behaves the same under all four.

    `frozen_trunk`: trunk and pooling keep their weights, and a head is trained on cached features
    of `views` views of each image: view 0 is the image as served, the others are random crops.
    `hidden` adds a second layer of that width to the projection, see
    kinlens.training.models.embedding.Head.
    """

    backbone: str = Field("mobilenet_v2", pattern=rf"^({'|'.join(BACKBONE_NAMES)}|{TIMM}.+)$")
    weights: str = "imagenet"
    dim: int | None = Field(512, ge=2)
    pooling: Pooling = "gap+gmp"
    batch_norm: Literal["frozen", "statistics", "folded", "train"] = "frozen"
    frozen_trunk: bool = False
    views: int = Field(4, ge=1, le=64)
    hidden: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _head_to_train(self) -> "Model":
        if self.dim is None and (self.frozen_trunk or self.hidden):
            raise ValueError("frozen_trunk and hidden need a projection; set dim")
        return self

    @model_validator(mode="after")
    def _token_to_pool(self) -> "Model":
        if self.pooling == "cls" and not self.backbone.startswith(TIMM):
            raise ValueError(
                f'pooling = "cls" needs a class token, which {self.backbone} does not have; choose '
                f'"gap", "gmp", "gap+gmp" or "gem", or a transformer of {TIMM}NAME'
            )
        return self


class Start(Section):
    """Initial values of the projection and the proxies, before the first step.

    `projection`: "random" follows each paper. "trunk" uses the principal directions of the trunk's
    features on training images. "within_class" shrinks the directions in which images of one class
    differ, which helps with few classes. See training.start for both. `proxies`: "class_means"
    starts each proxy at the mean embedding of its class. At most `images` images are used.
    """

    projection: Literal["random", "trunk", "within_class"] = "random"
    proxies: Literal["random", "class_means"] = "random"
    images: int = Field(10_000, ge=2)


class Input(Section):
    """Sizes in pixels; `min_crop_area` is the smallest part of an image that a crop may keep.

    Training views have `size_px`. `crop` = "fixed" crops squares of `size_px` at a random position
    of the image resized to `resize_px`, as in older papers; "area" also varies area and shape.
    Evaluation, index and service crop `test_px` (default `size_px`) from the image resized to
    `resize_px`. Random crops enlarge objects, so a somewhat larger `test_px` shows objects at the
    size that the network was trained on.
    """

    size_px: int = Field(224, ge=16)
    resize_px: int = Field(256, ge=16)
    test_px: int | None = Field(None, ge=16)
    interpolation: Interpolation = "bilinear"
    crop: Literal["area", "fixed"] = "area"
    min_crop_area: float = Field(0.16, gt=0, le=1)
    flip: bool = True

    @model_validator(mode="after")
    def _check(self) -> "Input":
        self.preprocessing()
        if self.crop == "fixed" and self.size_px > self.resize_px:
            raise ValueError(
                f'crop = "fixed" cuts size_px = {self.size_px} from an image resized to '
                f"resize_px = {self.resize_px}; raise resize_px"
            )
        return self

    def preprocessing(self) -> Preprocessing:
        """The preprocessing of an image in evaluation, index and service."""
        return Preprocessing(
            resize_px=self.resize_px,
            crop_px=self.test_px or self.size_px,
            interpolation=self.interpolation,
        )


Direction = Literal["between", "beyond", "tangent"]
Share = Annotated[float, Field(gt=0, le=10)]
"""Target norm of a regularizer's gradient relative to the loss's; its weight is calibrated."""


class Flow(Section):
    """Shape of a flow of coupling layers."""

    kind: Literal["real_nvp", "nice"] = "real_nvp"
    layers: int = Field(12, ge=1)
    hidden: int = Field(256, ge=1)
    clamp: float = Field(2.0, gt=0)


class Determinant(Section):
    """See training.regularizers.determinant; `input_norm` is the norm of the flows' inputs."""

    flow: Flow = Flow()
    activation: Literal["leaky_relu", "none"] = "leaky_relu"
    input_norm: float = Field(5.0, gt=0)
    lambda1: float = Field(0.05, ge=0)
    lambda2: float = Field(0.05, ge=0)
    eps: float = 0.4
    neighbours: int = Field(1, ge=1)
    same_class: bool = False
    direction: Direction = "between"
    depth: Literal["composed", "mean", "sum"] = "composed"
    proxies: Literal["shared", "separate"] = "shared"
    share: Share | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_old_name(cls, content: Any) -> Any:
        """Translate `normalize_depth` of stored jobs, the older name, into `depth`."""
        if not isinstance(content, dict) or "normalize_depth" not in content:
            return content
        if "depth" in content:
            raise ValueError("normalize_depth is the old name of depth; remove it")
        rest = {name: value for name, value in content.items() if name != "normalize_depth"}
        return rest | {"depth": "mean" if content["normalize_depth"] else "sum"}


class SkewedMean(Section):
    """See training.regularizers.skewed_mean.

    `centres`: the proxies of the loss, or the class means of the batch for a loss without proxies.
    Only "r1" reads `gamma`, `delta` and `hinge`, only "r2" and "distance" read `exponent`.
    """

    weight: float = Field(1.0, gt=0)
    kind: Literal["r1", "r2", "distance", "uniform_face", "mhe0", "mhe1", "mhe2"] = "r1"
    gamma: float = 16.0
    delta: float = Field(0.55, allow_inf_nan=False)
    exponent: float = 8.0
    subset: int | None = Field(None, ge=2)
    hinge: bool = False
    centres: Literal["proxies", "batch"] = "proxies"
    share: Share | None = None

    @model_validator(mode="after")
    def _check(self) -> "SkewedMean":
        if self.gamma == 0 or math.isnan(self.gamma) or math.isnan(self.exponent):
            raise ValueError("gamma must not be 0; gamma and exponent must be numbers")
        if self.hinge and not 0 < self.gamma < math.inf:
            raise ValueError(f"hinge = true needs a finite gamma above 0, not {self.gamma}")
        return self


class NonIsotropy(Section):
    """See training.regularizers.non_isotropy.

    `loss_weight` multiplies the loss: the authors weight the loss, not the regularizer.
    In the first `fit_epochs` only the flow learns from it, on detached embeddings and proxies.
    """

    weight: float = Field(1.0, gt=0)
    loss_weight: float = Field(1.0, gt=0)
    exponentiate: bool = True
    noise: float = Field(0.0, ge=0, le=1)
    fit_epochs: int = Field(0, ge=0)
    blocks: int = Field(5, ge=1)
    hidden: int = Field(128, ge=1)
    layers: int = Field(8, ge=2)
    clamp: float = Field(2.0, gt=0)
    share: Share | None = None


class GraphConsistency(Section):
    """See training.regularizers.graph_consistency; needs `sampling.kind = "paired"`."""

    weight: float = Field(0.001, gt=0)
    sigma: float = Field(1.0, gt=0, allow_inf_nan=False)
    form: Literal["bound", "graph"] = "bound"
    share: Share | None = None


class Regularizers(Section):
    """The regularizers to add to the loss, one or several; a missing table turns one off.

    Weights (`lambda1`, `lambda2`, `weight`) are fixed, as in the papers. With `share`, for example
    0.2, they are initial values: in the first epoch they are scaled, by at most 100, until the
    regularizer's gradient has that size relative to the loss's; then they stay fixed.
    """

    determinant: Determinant | None = None
    skewed_mean: SkewedMean | None = None
    non_isotropy: NonIsotropy | None = None
    graph_consistency: GraphConsistency | None = None


Rate = Annotated[float, Field(ge=0)] | Annotated[str, Field(pattern=r"^x\d+(\.\d+)?$")]
"""A learning rate, or "x100" for 100 times `lr_trunk`."""


class Sampling(Section):
    """Batch composition: random images, m images per class, or two draws of the same classes.

    `per_class` is m. Under "paired", which graph consistency needs, each draw has m of each class,
    and the two draws are "disjoint" or "independent", as in the paper (`pairs`). With `draws` = 2
    the loss is the mean over the two halves of a batch, with 1 it is that of the whole batch; unset
    it is 2 under "paired" and otherwise 1. In the fraction `confused` of the batches, classes that
    feedback marks as confused are put together, by exchange with the other batches.
    """

    kind: Literal["random", "balanced", "paired"] = "random"
    per_class: int = Field(2, ge=1)
    pairs: Literal["disjoint", "independent"] = "disjoint"
    draws: Literal[1, 2] | None = None
    confused: float = Field(0.25, ge=0, le=0.5)

    @property
    def parts(self) -> int:
        """Number of parts of a batch over which the loss is averaged."""
        return self.draws or (2 if self.kind == "paired" else 1)


class Optimizer(Section):
    """Adam or AdamW with a learning rate for each parameter group.

    All rates are constant until `decay_start`, a fraction of the run, then follow `schedule` to 0.
    Under "step" they are multiplied by `gamma` every `step_epochs` epochs, or at each epoch of a
    list. `weight_decay_criterion` applies to proxies and flows (default: `weight_decay`).
    The trunk is frozen for the first `warmup_epochs`. `clip_value` bounds each gradient entry,
    `clip_norm` the norm of all entries. With few images an epoch has few steps, so `epochs` is
    raised until the run has `min_steps`. With `average`, a decay such as 0.99, the model of the run
    is the exponential moving average of its weights.
    """

    kind: Literal["adamw", "adam"] = "adamw"
    epochs: int = Field(30, ge=1)
    batch_size: int = Field(90, ge=2)
    lr_trunk: float = Field(1e-4, ge=0)
    lr_head: Rate = 1e-4
    lr_proxies: Rate = 1e-2
    lr_flows: Rate = 1e-3
    weight_decay: float = Field(1e-4, ge=0)
    weight_decay_criterion: float | None = Field(None, ge=0)
    eps: float = Field(1e-8, gt=0)
    schedule: Literal["constant", "linear", "cosine", "step"] = "linear"
    decay_start: float = Field(0.0, ge=0, lt=1)
    step_epochs: Annotated[int, Field(ge=1)] | tuple[Annotated[int, Field(ge=1)], ...] = 10
    gamma: float = Field(0.5, gt=0, le=1)
    warmup_epochs: int = Field(0, ge=0)
    clip_norm: float | None = Field(None, gt=0)
    clip_value: float | None = Field(None, gt=0)
    steps_per_epoch: int | None = Field(None, ge=1)
    min_steps: int = Field(0, ge=0)
    average: float | None = Field(None, gt=0, lt=1)

    def enough_epochs(self, steps_per_epoch: int) -> "Optimizer":
        """These settings with enough epochs for `min_steps`."""
        epochs = max(self.epochs, math.ceil(self.min_steps / steps_per_epoch))
        return self.model_copy(update={"epochs": epochs})

    def rate_of(self, value: Rate) -> float:
        """`value` as a number: "x100" is 100 times `lr_trunk`."""
        return self.lr_trunk * float(value[1:]) if isinstance(value, str) else value


class Runtime(Section):
    """Device, precision and processes; they change the result only by rounding.

    `precision` applies to the training steps; figures are always computed in float32. `workers` is
    the number of processes that read images: "auto" is 2 on a CPU, one per core (at most 16) on a
    GPU.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    eval_every_epochs: int = Field(1, ge=0)
    tensorboard: bool = False


def rate(settings: Optimizer, step: int, steps_per_epoch: int) -> float:
    """The factor of all learning rates at `step`, in [0, 1].

    Linear and cosine stay at 1 until the fraction `decay_start` of the steps, then fall towards 0
    at the end of the run. "step" multiplies by `gamma` every `step_epochs` epochs, with warm-up,
    or at each epoch of a list.
    """
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "step":
        epoch, at = step // steps_per_epoch, settings.step_epochs
        falls = epoch // at if isinstance(at, int) else sum(epoch >= mark for mark in at)
        return float(settings.gamma**falls)
    done = min(step / max(settings.epochs * steps_per_epoch, 1), 1.0)
    progress = max(done - settings.decay_start, 0.0) / (1.0 - settings.decay_start)
    if settings.schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))


CHOOSE_BY_TEST = "--choose-by-test"
"""Flag that every command requires to train a job whose test classes choose the model."""


class Protocol(Section):
    """How a model is chosen and tested.

    `validation_fraction` is the fraction of the train classes to hold out (0: none). In a cross
    validation the held-out classes are fold number `fold` of `folds` instead. `validation_seed`
    seeds either choice. `choose_by` selects the model that a run keeps:

    - "last": the last epoch.
    - "validation": the epoch with the best R@1 on validation classes.
    - "folds": a point between the start and the last epoch, or the trunk itself. It is chosen by
      `folds` trainings, each without a part of the train classes (see training.evaluation.choice).
    - "test": the epoch with the best R@1 on test classes, which makes its test recall too high and
      needs the flag `--choose-by-test`.

    `evaluate_test`: after "every" evaluated epoch, only at the "end" of the run, or "never".
    """

    validation_fraction: float = Field(0.0, ge=0, lt=1)
    validation_seed: int = Field(0, ge=0)
    folds: int | None = Field(None, ge=2)
    fold: int | None = Field(None, ge=0)
    choose_by: Literal["last", "validation", "folds", "test"] = "last"
    evaluate_test: Literal["never", "end", "every"] = "every"

    @model_validator(mode="after")
    def _check(self) -> "Protocol":
        on_folds = self.choose_by == "folds"
        if on_folds and (self.folds is None or self.fold is not None or self.validation_fraction):
            raise ValueError(
                'choose_by = "folds" needs folds = 2 or more, no fold and validation_fraction = 0, '
                f"not folds = {self.folds}, fold = {self.fold}, validation_fraction = "
                f"{self.validation_fraction:g}"
            )
        if self.fold is not None and self.fold >= (self.folds or 0):
            raise ValueError(f"fold = {self.fold} is not one of 0 .. {self.folds} - 1")
        if self.choose_by == "validation" and self.validation_fraction == 0 and self.fold is None:
            raise ValueError(
                'choose_by = "validation" needs validation classes; set validation_fraction = 0.1'
            )
        if self.choose_by == "test" and self.evaluate_test != "every":
            raise ValueError(
                'choose_by = "test" compares epochs by test recall; set evaluate_test = "every"'
            )
        return self

    def require_flag(self, given: bool) -> None:
        """Raises: JobError if test classes choose the model and the flag was not given."""
        if self.choose_by == "test" and not given:
            raise JobError(
                'protocol.choose_by = "test" picks the epoch by its own test classes, '
                'so the reported recall is too high. Use "validation" with validation_fraction = '
                f"0.1, or pass {CHOOSE_BY_TEST}; the report will show it."
            )
