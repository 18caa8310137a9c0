"""The tables of a job file: default, bounds and meaning of every setting.

The site shows the docstrings as the page "Settings of a job". The options of a loss are those of
its constructor, see kinlens.training.terms.
"""

import logging
import math
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from kinlens.embedder.errors import JobError
from kinlens.embedder.manifest import Aspect, Interpolation, Preprocessing
from kinlens.training.parts.fields import OR_OWN, Section
from kinlens.training.parts.own import OWN_PATH, is_own


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class ImageData(Section):
    """Images below a folder."""

    root: str
    """Folder of the data set; may contain `~` and `$VARIABLES`."""
    feedback: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    """One folder or more of `kinlens-serve feedback export` on these images."""


class SplitData(ImageData):
    """Images whose classes are split by a hash of their names, unless a list defines the split."""

    train_fraction: float = Field(0.5, gt=0, lt=1)
    """Fraction of the classes to train on; the others test."""
    split_seed: int = Field(0, ge=0)
    """Seed of the hash that splits classes into train and test."""


MAX_DAMAGED = 0.1
"""Share of damaged images that a training skips."""


class FolderData(SplitData):
    """A folder with a sub-folder for each class."""

    kind: Literal["folder"]
    small_classes: Literal["refuse", "drop"] = "refuse"
    """Refuse a class with one image, or skip it."""
    max_damaged: float = Field(MAX_DAMAGED, ge=0, le=1)
    """Skip damaged images up to this share of all; above it no training starts."""


class CsvData(SplitData):
    """A CSV with the columns path, label and, optionally, split (train or test)."""

    kind: Literal["csv"]
    file: str = "images.csv"
    """The CSV, a path below `root`."""
    small_classes: Literal["refuse", "drop"] = "refuse"
    """Refuse a class with one image, or skip it."""
    max_damaged: float = Field(MAX_DAMAGED, ge=0, le=1)
    """Skip damaged images up to this share of all; above it no training starts."""


class RenderedData(SplitData):
    """A catalogue of rendered products, generated in `root` if it does not exist yet."""

    kind: Literal["rendered"]
    products: int = Field(90, ge=2)
    """Number of products, each a class."""
    views: int = Field(16, ge=1)
    """Images of each product."""
    size_px: int = Field(160, ge=32, le=1024)
    """Side of an image."""
    seed: int = Field(0, ge=0)
    """Another seed gives other products."""


class OfficialData(ImageData):
    """A data set of the literature in its official layout."""

    kind: Literal["cub", "cars196", "sop", "in_shop", "aircraft"]
    allow_partial: bool = False
    """Accept a subset; otherwise the number of images and classes must be the official one."""


Data = Annotated[FolderData | CsvData | RenderedData | OfficialData, Field(discriminator="kind")]

BACKBONE_NAMES = ("mobilenet_v2", "resnet50", "googlenet", "bn_inception")
TIMM = "timm:"
"""Prefix of the name of a timm network."""

ONNX = "onnx"
"""Backbone of bundles that `kinlens-train import` wrote, and of what is trained on them."""

Pooling = Literal["gap", "gmp", "gap+gmp", "gem", "cls"]


class Model(Section):
    """The network: trunk, pooling, projection to `dim`.

    The job of an exported trunk has no `dim`: its embeddings are the pooled features.
    """

    backbone: str = "mobilenet_v2"
    """The trunk: `mobilenet_v2`, `resnet50`, `googlenet`, `bn_inception`, or `timm:` and any
    network of timm, an optional extra. `onnx`: that of the imported bundle in `weights`, with
    `frozen_trunk`. Or the import path of a class of your own, `my_package.networks:NAME`."""
    weights: str = "imagenet"
    """Initial weights: `imagenet` downloads published ones, `none` is random. Any other value is
    the path of a state dict of the trunk, or the folder of a bundle to continue from."""
    dim: Annotated[int, Field(ge=2)] | Literal["auto"] | None = 512
    """Length of an embedding, the output of the projection. `auto`: as many as the trunk, or as the
    bundle that the run continues. Fewer save memory in a large gallery, but a shop of few products
    does not show which directions other products need."""
    pooling: Pooling = "gap+gmp"
    """Pooling over positions: average, maximum, their sum, the generalised mean with a learnt
    exponent, or the class token of a timm transformer."""
    batch_norm: Literal["frozen", "statistics", "folded", "train"] = "frozen"
    """`frozen` fixes statistics, scale and shift; `statistics` only the statistics, as most papers'
    code does. `folded` folds all three into the convolutions before training, which is faster, and
    fixes statistics and shift. `train` trains everything, as random weights need. A trunk without
    batch norm behaves the same under all four."""
    frozen_trunk: bool = False
    """Keep the weights of trunk and pooling, and train a head on cached features."""
    frozen_stages: int = Field(0, ge=0)
    """The first n stages of the trunk keep weights and batch norm; the layers before the blocks are
    the first stage. Needs `mobilenet_v2`, `resnet50` or a network of timm that has stages."""
    views: int = Field(4, ge=1, le=64)
    """With `frozen_trunk`: views of each image. The first is the image as served, the others are
    random crops."""
    hidden: int | None = Field(None, ge=1)
    """Width of a second layer of the projection; none: one layer."""

    @field_validator("backbone")
    @classmethod
    def _is_known(cls, value: str) -> str:
        is_timm = value.startswith(TIMM) and value != TIMM
        if value not in (*BACKBONE_NAMES, ONNX) and not is_timm and not is_own(value):
            raise ValueError(f"{value} is unknown; use {', '.join(BACKBONE_NAMES)} or {TIMM}NAME")
        return value

    @model_validator(mode="after")
    def _check(self) -> "Model":
        if self.dim is None and (self.frozen_trunk or self.hidden):
            raise ValueError("frozen_trunk and hidden need a projection; set dim")
        if self.backbone == ONNX and self.dim is not None and not self.frozen_trunk:
            raise ValueError(
                "the network of an imported bundle does not learn; set frozen_trunk = true to "
                "train a head on it"
            )
        if self.pooling == "cls" and not self.backbone.startswith(TIMM):
            raise ValueError(
                f'pooling = "cls" needs a class token, which {self.backbone} does not have; choose '
                f'"gap", "gmp", "gap+gmp" or "gem", or a transformer of {TIMM}NAME'
            )
        return self


class Start(Section):
    """Initial values of the projection and the proxies, before the first step."""

    projection: Literal["random", "trunk", "within_class", "proven"] = "random"
    """`random` follows each paper. `trunk` uses the principal directions of the trunk's features on
    training images. `within_class` shrinks directions in which images of one class differ, which
    helps with few classes. `proven` is that if it helps train classes that it was not estimated on,
    beyond chance. Otherwise nothing is trained, and the model is the trunk itself."""
    proxies: Literal["random", "class_means"] = "random"
    """`class_means` starts each proxy at the mean embedding of its class."""
    images: int = Field(10_000, ge=2)
    """Maximum number of training images used for the start."""


class Input(Section):
    """Sizes and random views of images."""

    size_px: int = Field(224, ge=16)
    """Side of a training view."""
    resize_px: int = Field(256, ge=16)
    """Shorter side of an image before the central crop of evaluation, index and service."""
    test_px: int | None = Field(None, ge=16)
    """Side of that crop; none: `size_px`. Random crops enlarge objects, so a somewhat larger crop
    shows objects at the size that the network was trained on."""
    interpolation: Interpolation = "bilinear"
    """Filter of every resize."""
    crop: Literal["area", "fixed"] = "area"
    """Training views: `area` varies area and shape (sides of 3:4 to 4:3). `fixed` crops squares of
    `size_px` at a random position of the image resized to `resize_px`, as in older papers."""
    aspect: Aspect = "kept"
    """`squashed` resizes every image to a square of `resize_px`, whatever its shape, as some papers
    do; needs `crop = "fixed"`. Such a network has no maps of shares."""
    min_crop_area: float = Field(0.16, gt=0, le=1)
    """Smallest part of an image that a crop of kind `area` may keep."""
    flip: bool = True
    """Mirror half of the training views, at random."""
    colour: float = Field(0.0, ge=0, lt=1)
    """Largest change of brightness, contrast and saturation of a training view, each in parts of
    1; such as 0.4 for phone photos."""
    blur_px: float = Field(0.0, ge=0)
    """Largest radius of a blur of training views."""
    jpeg_quality: int | None = Field(None, ge=1, le=95)
    """Lowest quality of training views compressed as JPEG, up to 95; none: not compressed."""
    erase: float = Field(0.0, ge=0, lt=1)
    """Largest part of a training view that a rectangle of one colour covers, in half of them."""
    augment: str | None = Field(None, pattern=OWN_PATH)
    """Import path of a function of your own, `my_package.views:NAME`, that changes each training
    view."""

    @model_validator(mode="after")
    def _check(self) -> "Input":
        self.preprocessing()
        if self.aspect == "squashed" and self.crop != "fixed":
            raise ValueError('aspect = "squashed" needs crop = "fixed"')
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
            aspect=self.aspect,
        )


AUGMENTATIONS = ("augment", "colour", "blur_px", "jpeg_quality", "erase")
"""The settings of `Input` by which a random view differs from its crop; by default none does."""

Rate = Annotated[float, Field(ge=0)] | Annotated[str, Field(pattern=r"^x\d+(\.\d+)?$")]
"""A learning rate, or "x100" for 100 times `lr_trunk`."""


class Sampling(Section):
    """Composition of a batch."""

    kind: Annotated[Literal["random", "balanced", "paired"], *OR_OWN] = "random"
    """Random images, `per_class` images of each class, or two such draws of the same classes. Or
    the import path of a function of your own, `my_package.samplers:NAME`."""
    per_class: int = Field(2, ge=1)
    """Images of each class; under `paired` in each draw."""
    pairs: Literal["disjoint", "independent"] = "disjoint"
    """Under `paired`: whether the two draws share no image, or are independent as in the paper."""
    draws: Literal[1, 2] | None = None
    """1: the loss is that of the whole batch. 2: it is the mean over its two halves. None: 2 under
    `paired`, otherwise 1."""

    @property
    def parts(self) -> int:
        return self.draws or (2 if self.kind == "paired" else 1)


class Optimizer(Section):
    """Adam or AdamW, with a learning rate for each parameter group.

    The rate of head, proxies or flows may be a multiple of `lr_trunk`, such as "x100".
    """

    kind: Literal["adamw", "adam"] = "adamw"
    """The optimizer."""
    epochs: int = Field(30, ge=1)
    """Number of epochs."""
    batch_size: int = Field(90, ge=2)
    """Images of a batch, over all processes. A multiple of `sampling.per_class` under `balanced`,
    of twice that under `paired`."""
    lr_trunk: float = Field(1e-4, ge=0)
    """Learning rate of the trunk."""
    stage_decay: float = Field(1.0, gt=0, le=1)
    """The last stage of the trunk learns at `lr_trunk`, each stage before it at the rate of the
    next one times this. Below 1 it needs a trunk with stages, see `model.frozen_stages`."""
    lr_head: Rate = 1e-4
    """Learning rate of the projection and of the exponent of the pooling `gem`."""
    lr_proxies: Rate = 1e-2
    """Learning rate of all parameters of the loss."""
    lr_flows: Rate = 1e-3
    """Learning rate of the flows of `determinant` and `non_isotropy`."""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay of trunk and head."""
    weight_decay_criterion: float | None = Field(None, ge=0)
    """Weight decay of proxies and flows; none: `weight_decay`."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon of Adam."""
    schedule: Literal["constant", "linear", "cosine", "step"] = "linear"
    """Course of all rates: `linear` and `cosine` fall to 0, `step` multiplies by `gamma`."""
    decay_start: float = Field(0.0, ge=0, lt=1)
    """Fraction of the run before `linear` or `cosine` begin to fall."""
    step_epochs: Annotated[int, Field(ge=1)] | tuple[Annotated[int, Field(ge=1)], ...] = 10
    """Under `step`: the number of epochs between two steps, or a list of the epochs of the steps.
    Warm-up epochs count."""
    gamma: float = Field(0.5, gt=0, le=1)
    """Factor of a `step`."""
    warmup_epochs: int = Field(0, ge=0)
    """First epochs, in which the trunk is frozen."""
    clip_norm: float | None = Field(None, gt=0)
    """Limit of the norm of the whole gradient."""
    clip_value: float | None = Field(None, gt=0)
    """Limit of each entry of the gradient."""
    steps_per_epoch: int | None = Field(None, ge=1)
    """Ends an epoch early; none: an epoch has images / `batch_size` steps, rounded down."""
    min_steps: int = Field(0, ge=0)
    """Minimum number of steps of the run; with few images it raises `epochs`."""
    average: float | None = Field(None, gt=0, lt=1)
    """Decay of a moving average of the weights, such as 0.99, which is then the model of the run.
    """

    def enough_epochs(self, steps_per_epoch: int) -> "Optimizer":
        """These settings with enough epochs for `min_steps`."""
        epochs = max(self.epochs, math.ceil(self.min_steps / steps_per_epoch))
        return self.model_copy(update={"epochs": epochs})

    def rate_of(self, value: Rate) -> float:
        """`value` as a number: "x100" is 100 times `lr_trunk`."""
        return self.lr_trunk * float(value[1:]) if isinstance(value, str) else value


class Runtime(Section):
    """Device, precision and processes; without bf16 they change the result only by rounding."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is a GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of training steps; `auto` is bf16 on GPUs that support it and CPUs with AMX.
    Figures are always computed in float32."""
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Processes that read images; 0 reads in the training process. `auto` is 2 for a CPU; for a GPU
    the cores less one, at most 16."""
    eval_every_epochs: int = Field(1, ge=0)
    """Epochs between two evaluations; 0 evaluates only after the last epoch."""
    tensorboard: bool = False
    """Write the log also for TensorBoard."""


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


@cache
def _say_once(sentence: str) -> None:
    logging.getLogger(__name__).warning(sentence)


CHOOSE_BY_TEST = "--choose-by-test"
"""Flag that every command requires to train a job whose test classes choose the model."""


class Protocol(Section):
    """How a model is chosen and tested."""

    validation_fraction: float = Field(0.0, ge=0, lt=1)
    """Fraction of the train classes to hold out for validation; 0: none."""
    validation_seed: int = Field(0, ge=0)
    """Seed of the choice of validation classes or folds."""
    folds: int | None = Field(None, ge=2)
    """Number of folds of the train classes; a cross validation sets it."""
    fold: int | None = Field(None, ge=0)
    """Hold out this fold, counted from 0, instead of a fraction; a cross validation sets it."""
    alpha: float = Field(0.25, ge=0, le=1, multiple_of=0.25)
    """Under `choose_by = "alpha"`: the model is this point between the start (0) and the last epoch
    (1). At 0 nothing is trained."""
    choose_by: Literal["last", "validation", "alpha", "test"] = "last"
    """The model that a run keeps. `last`: the last epoch. `validation`: the epoch with the best R@1
    on validation classes. `alpha`: a point between start and last epoch. `test`: the epoch with
    the best R@1 on test classes, which makes its test recall too high and needs the flag
    `--choose-by-test`."""
    evaluate_test: Literal["never", "end", "every"] = "every"
    """Evaluate test classes never, at the end of the run, or after every evaluated epoch."""

    @model_validator(mode="before")
    @classmethod
    def _without_folds(cls, content: Any) -> Any:
        """Jobs of versions 0.1 and 0.2 may choose by folds, which could replace `alpha`."""
        if isinstance(content, dict) and content.get("choose_by") == "folds":
            _say_once('protocol.choose_by = "folds" is read as "alpha": no folds are trained.')
            return {**content, "choose_by": "alpha", "folds": None}
        return content

    @model_validator(mode="after")
    def _check(self) -> "Protocol":
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

    @property
    def trains(self) -> bool:
        """Whether anything is trained after the start."""
        return self.choose_by != "alpha" or self.alpha > 0

    def require_flag(self, given: bool) -> None:
        """Raises: JobError if test classes choose the model and the flag was not given."""
        if self.choose_by == "test" and not given:
            raise JobError(
                'protocol.choose_by = "test" picks the epoch by its own test classes, '
                'so the reported recall is too high. Use "validation" with validation_fraction = '
                f"0.1, or pass {CHOOSE_BY_TEST}; the report will show it."
            )
