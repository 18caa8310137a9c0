"""The trunks: networks without their classifiers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torchvision.models as tv
from torch import nn

from embedder.errors import CheckpointError
from training.config.model import TIMM
from training.models.bn_inception import CHANNELS, BNInception
from training.models.normalize import Normalize
from training.models.timm_trunk import TimmTrunk, build_timm_trunk
from training.models.weights import (
    DOWNLOAD_ERRORS,
    PublishedWeights,
    State,
    load_weights,
    read_weights,
)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_HALF = (0.5, 0.5, 0.5)


HOW_TO_NAME_A_FILE = (
    "--set model.weights=/path for kinlens-train fit, --weights /path for export --backbone, "
    "make demo IMAGES=... WEIGHTS=/path; a service lists it in KINLENS_TRAINING_WEIGHTS."
)


@dataclass(frozen=True)
class Backbone:
    """How to build a trunk, what it gives and what it expects.

    `mean` and `std` apply to RGB in 0..1, or to what `bgr` and `peak` say (see Normalize). `cure`
    is what to do if the weights cannot be downloaded.
    """

    build: Callable[[], nn.Module]
    layers: Callable[[Any], list[nn.Module]]
    weights: Any
    channels: int
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    bgr: bool = False
    peak: float = 1.0
    cure: str = "Download {url} where there is a network and name the file: "


def _googlenet() -> nn.Module:
    model: nn.Module = tv.googlenet(
        weights=None, aux_logits=False, transform_input=False, init_weights=True
    )
    return model


def _before(name: str) -> Callable[[Any], list[nn.Module]]:
    """The children of a network in order, up to and without the one called `name`."""

    def layers(network: nn.Module) -> list[nn.Module]:
        children = dict(network.named_children())
        return [children[key] for key in list(children)[: list(children).index(name)]]

    return layers


def _without_classifier(network: BNInception) -> list[nn.Module]:
    del network.last_linear
    return [network]


BACKBONES = {
    "mobilenet_v2": Backbone(
        lambda: tv.mobilenet_v2(weights=None),
        _before("classifier"),
        tv.MobileNet_V2_Weights.IMAGENET1K_V2,
        1280,
    ),
    "resnet50": Backbone(
        lambda: tv.resnet50(weights=None),
        _before("avgpool"),
        tv.ResNet50_Weights.IMAGENET1K_V1,
        2048,
    ),
    # Its ImageNet weights were trained on inputs in -1..1.
    "googlenet": Backbone(
        _googlenet, _before("avgpool"), tv.GoogLeNet_Weights.IMAGENET1K_V1, 1024, _HALF, _HALF
    ),
    "bn_inception": Backbone(
        BNInception,
        _without_classifier,
        PublishedWeights("http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth"),
        CHANNELS,
        mean=(104.0, 117.0, 128.0),
        std=(1.0, 1.0, 1.0),
        bgr=True,
        peak=255.0,
        cure="Its host at {url} is often down: find a copy of that file, whose sha256 begins with "
        '52deb4733, or start from random weights with "none". Name the file: ',
    ),
}


def build_trunk(name: str, weights: str) -> nn.Module:
    """A trunk from float (B, 3, S, S) to maps (B, C, H, W), or to tokens (B, T, C).

    Args:
        name: a key of BACKBONES, or "timm:" and a name of timm.
        weights: "imagenet" (the published ones), "none" (random) or the path of a state dict of the
            network of that name; half precision is widened to float32.

    Raises: CheckpointError if the weights cannot be had or do not fit; JobError if timm is missing
        or does not know the name.
    """
    if name.startswith(TIMM):
        return build_timm_trunk(name.removeprefix(TIMM), weights)
    backbone = BACKBONES[name]
    network = backbone.build()
    if weights != "none":
        _load(network, _state_dict(name, backbone, weights), weights)
    return nn.Sequential(*backbone.layers(network))


def channels_of(name: str, trunk: nn.Module) -> int:
    """C of what `trunk`, built as `name`, gives."""
    return trunk.channels if isinstance(trunk, TimmTrunk) else BACKBONES[name].channels


def normalization_of(name: str, trunk: nn.Module) -> Normalize:
    """From pixels to the input of `trunk`, built as `name`."""
    if isinstance(trunk, TimmTrunk):
        return Normalize(trunk.mean, trunk.std)
    backbone = BACKBONES[name]
    return Normalize(backbone.mean, backbone.std, backbone.bgr, backbone.peak)


def _state_dict(name: str, backbone: Backbone, weights: str) -> State:
    if weights != "imagenet":
        return read_weights(weights, name)
    try:
        state: State = backbone.weights.get_state_dict(check_hash=True)
    except DOWNLOAD_ERRORS as error:
        raise CheckpointError(
            f"The ImageNet weights of {name} could not be downloaded ({error}). "
            + backbone.cure.format(url=backbone.weights.url)
            + HOW_TO_NAME_A_FILE
        ) from error
    return state


def _load(network: nn.Module, state: State, source: str) -> None:
    # GoogLeNet's training-time classifiers are not part of the network.
    load_weights(network, {k: v for k, v in state.items() if not k.startswith("aux")}, source)
