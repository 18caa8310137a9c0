"""The tables `model` and `input` of a job: the network and the sizes of its images."""

from typing import Literal

from pydantic import Field, model_validator

from embedder.manifest import Interpolation, Preprocessing
from training.config.section import Section


class Model(Section):
    """The network: trunk, pooling, projection to `dim`; without `dim` the pooled features.

    `batch_norm`: "frozen" fixes statistics, scale and shift; "folded" folds all three into the
    convolutions before training, which is faster, and fixes statistics and shift; "train" lets
    everything move, as a trunk without pretrained weights needs.
    """

    backbone: Literal["mobilenet_v2", "resnet50", "googlenet"] = "mobilenet_v2"
    weights: str = "imagenet"
    dim: int | None = Field(512, ge=2)
    pooling: Literal["gap", "gmp", "gap+gmp"] = "gap+gmp"
    batch_norm: Literal["frozen", "folded", "train"] = "frozen"


class Input(Section):
    """Sizes in pixels; `min_crop_area` is the smallest part of an image that a crop may keep.

    Training views have `size_px`. Evaluation, index and service cut `test_px` (default `size_px`)
    from the image resized to `resize_px`; random crops enlarge objects, so a somewhat larger
    `test_px` shows them at the size that was trained on.
    """

    size_px: int = Field(224, ge=16)
    resize_px: int = Field(256, ge=16)
    test_px: int | None = Field(None, ge=16)
    interpolation: Interpolation = "bilinear"
    min_crop_area: float = Field(0.16, gt=0, le=1)
    flip: bool = True

    @model_validator(mode="after")
    def _check(self) -> "Input":
        self.preprocessing()
        return self

    def preprocessing(self) -> Preprocessing:
        """What evaluation, index and service do with an image."""
        return Preprocessing(
            resize_px=self.resize_px,
            crop_px=self.test_px or self.size_px,
            interpolation=self.interpolation,
        )
