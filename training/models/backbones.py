"""The trunks: torchvision networks without their classifiers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
import torchvision.models as tv
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from embedder.errors import CheckpointError
from training.config.job import expand_path

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Backbone:
    """How to build a trunk, what it gives and what it expects.

    `mean` and `std` apply to RGB in 0..1.
    """

    build: Callable[[], nn.Module]
    layers: Callable[[Any], list[nn.Module]]
    weights: Any
    channels: int
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD


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
        tv.ResNet50_Weights.IMAGENET1K_V2,
        2048,
    ),
    # Its ImageNet weights were trained on inputs in -1..1.
    "googlenet": Backbone(
        _googlenet, _before("avgpool"), tv.GoogLeNet_Weights.IMAGENET1K_V1, 1024, _HALF, _HALF
    ),
}


def build_trunk(name: str, weights: str) -> nn.Module:
    """A trunk from float (B, 3, S, S) to feature maps (B, C, H, W).

    Args:
        name: a key of BACKBONES.
        weights: "imagenet" (torchvision's), "none" (random) or the path of a state dict of the
            torchvision network of that name; half precision is widened to float32.

    Raises: CheckpointError if the weights cannot be had or do not fit.
    """
    backbone = BACKBONES[name]
    network = backbone.build()
    if weights != "none":
        _load(network, _state_dict(name, backbone, weights), weights)
    return nn.Sequential(*backbone.layers(network))


def fold_batch_norm(trunk: nn.Module) -> None:
    """Fold each batch norm, as it evaluates, into the convolution before it, in place.

    The network computes the same. Scales, now part of the weights, learn with them; the shifts, now
    biases, stay as they are.
    """
    before: tuple[str, nn.Module] | None = None
    for name, module in list(trunk.named_children()):
        if isinstance(module, nn.BatchNorm2d) and before and isinstance(before[1], nn.Conv2d):
            folded = fuse_conv_bn_eval(before[1].eval(), module.eval())
            assert folded.bias is not None
            folded.bias.requires_grad_(False)
            setattr(trunk, before[0], folded)
            setattr(trunk, name, nn.Identity())
        else:
            fold_batch_norm(module)
        before = (name, module)


def _state_dict(name: str, backbone: Backbone, weights: str) -> dict[str, Tensor]:
    if weights == "imagenet":
        try:
            state: dict[str, Tensor] = backbone.weights.get_state_dict(check_hash=True)
        except (URLError, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"The ImageNet weights of {name} could not be downloaded ({error}). Download "
                f"{backbone.weights.url} where there is a network and pass its path as "
                "model.weights."
            ) from error
        return state
    path = expand_path(weights, "model.weights")
    if not path.is_file():
        raise CheckpointError(
            f"The weight file {path} does not exist. Set model.weights to a state dict of "
            f'torchvision\'s {name}, "imagenet" or "none".'
        )
    return _read_state_dict(path)


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch.load raises pickle, zip, runtime and key errors on a file that is no state dict.
        raise CheckpointError(f"{path} is not a torch state dict: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise CheckpointError(f"{path} is not a state dict (a mapping of names to tensors).")
    return state


def _load(network: nn.Module, state: dict[str, Tensor], source: str) -> None:
    wide = {
        key: value.float() if value.is_floating_point() else value
        for key, value in state.items()
        if not key.startswith("aux")  # GoogLeNet's training-time classifiers
    }
    try:
        network.load_state_dict(wide, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"The weights {source} do not fit the network: {reason}") from error
