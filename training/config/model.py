"""The tables `model` and `input` of a job: the network and the sizes of its images."""

import difflib
from typing import Literal

from pydantic import Field, field_validator, model_validator

from embedder.manifest import Interpolation, Preprocessing
from training.config.section import Section

BACKBONE_NAMES = ("mobilenet_v2", "resnet50", "googlenet", "bn_inception")
TIMM = "timm:"
"""What the name of a network of timm begins with."""

Pooling = Literal["gap", "gmp", "gap+gmp", "gem", "cls"]


class Model(Section):
    """The network: trunk, pooling, projection to `dim`; without `dim` the pooled features.

    `backbone`: one of BACKBONE_NAMES, or "timm:" and any network of timm, an optional extra.
    `weights`: "imagenet" downloads the published ones, "none" starts from random ones, all else is
    the path of a state dict, or of a bundle to go on from. `pooling`: average, maximum, their sum,
    the generalised mean with a learnt exponent, or the class token of a timm transformer.

    `batch_norm`: "frozen" fixes statistics, scale and shift; "statistics" fixes these alone, as
    most papers' code does; "folded" folds all three into the convolutions before training, which is
    faster, and fixes statistics and shift; "train" lets everything move, as a trunk without
    pretrained weights needs. A trunk without batch norm is the same under all of them.
    """

    backbone: str = "mobilenet_v2"
    weights: str = "imagenet"
    dim: int | None = Field(512, ge=2)
    pooling: Pooling = "gap+gmp"
    batch_norm: Literal["frozen", "statistics", "folded", "train"] = "frozen"

    @field_validator("backbone")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in BACKBONE_NAMES or (name.startswith(TIMM) and name != TIMM):
            return name
        close = difflib.get_close_matches(name, BACKBONE_NAMES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"unknown backbone; {hint}Known are {', '.join(BACKBONE_NAMES)} and {TIMM}NAME for any "
            "network of timm"
        )

    @model_validator(mode="after")
    def _token_to_pool(self) -> "Model":
        if self.pooling == "cls" and not self.backbone.startswith(TIMM):
            raise ValueError(
                f'pooling = "cls" needs a class token, which {self.backbone} does not have; choose '
                f'"gap", "gmp", "gap+gmp" or "gem", or a transformer of {TIMM}NAME'
            )
        return self


class Start(Section):
    """Where projection and proxies begin, before the first step.

    "random" is each paper's own; "trunk" gives the projection the directions of the trunk's
    features on training images (see training.start), so that step 0 is no worse than the trunk,
    and each proxy the mean embedding of its class. At most `images` are looked at.
    """

    projection: Literal["random", "trunk"] = "random"
    proxies: Literal["random", "class_means"] = "random"
    images: int = Field(10_000, ge=2)


class Input(Section):
    """Sizes in pixels; `min_crop_area` is the smallest part of an image that a crop may keep.

    Training views have `size_px`. With `crop` = "fixed" they are squares of `size_px` cut anywhere
    from the image resized to `resize_px`, as in older papers; "area" varies area and shape too.
    Evaluation, index and service cut `test_px` (default `size_px`) from the image resized to
    `resize_px`; random crops enlarge objects, so a somewhat larger `test_px` shows them at the size
    that was trained on.
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
        if self.crop == "fixed":
            if self.min_crop_area != type(self).model_fields["min_crop_area"].default:
                raise ValueError('crop = "fixed" does not read min_crop_area; remove it')
            if self.size_px > self.resize_px:
                raise ValueError(
                    f'crop = "fixed" cuts size_px = {self.size_px} from an image resized to '
                    f"resize_px = {self.resize_px}; raise resize_px"
                )
        return self

    def preprocessing(self) -> Preprocessing:
        """What evaluation, index and service do with an image."""
        return Preprocessing(
            resize_px=self.resize_px,
            crop_px=self.test_px or self.size_px,
            interpolation=self.interpolation,
        )
