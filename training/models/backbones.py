"""The trunks: networks without their classifiers, their pixel normalisation, their batch norm."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, takewhile

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from kinlens.embedder.errors import CheckpointError, JobError
from kinlens.training.config.settings import TIMM
from kinlens.training.models.bn_inception import CHANNELS, BNInception
from kinlens.training.models.timm_trunk import TimmTrunk, build_timm_trunk
from kinlens.training.models.weights import State, load_weights, read_weights
from kinlens.training.own import is_own, own_part

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_MAX_FOLDING_DIFFERENCE = 1e-3  # relative to the largest activation


class Normalize(nn.Module):
    """uint8 RGB (B, 3, S, S) to the float32 input of a trunk: (peak · pixels / 255 − mean) / std.

    `mean` and `std` are those of the channels on 0..peak in the order of the trunk, with `bgr` blue
    first.
    """

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], bgr: bool = False, peak: float = 1.0
    ) -> None:
        super().__init__()
        self.bgr = bgr
        scale = peak / (255.0 * torch.tensor(std))
        shift = -torch.tensor(mean) / torch.tensor(std)
        self.register_buffer("scale", scale.view(3, 1, 1), persistent=False)
        self.register_buffer("shift", shift.view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if self.bgr:
            images = images.flip(1)
        scale, shift = self.get_buffer("scale"), self.get_buffer("shift")
        return images.float() * scale + shift


@dataclass(frozen=True)
class Backbone:
    """How to build a trunk, and its input normalisation.

    The trunk is the part of a network before its child named `until`. `url` is that of the ImageNet
    weights that papers on metric learning start from (for ResNet50 torchvision's V1, not the newer
    V2); the file name ends with the start of its sha256. `mean`, `std`, `bgr` and `peak` are those
    of `Normalize`, `cure` is the advice if the weights cannot be downloaded.
    """

    build: Callable[[], nn.Module]
    until: str
    url: str
    channels: int
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    bgr: bool = False
    peak: float = 1.0
    cure: str = "Download {url} on a machine with internet access and pass the file: "


def _torchvision(name: str, **options: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        # Imported here: it takes seconds, and trunks of timm do not need it.
        from torchvision.models import get_model

        network: nn.Module = get_model(name, weights=None, **options)
        return network

    return build


_PYTORCH = "https://download.pytorch.org/models/"

BACKBONES = {
    "mobilenet_v2": Backbone(
        _torchvision("mobilenet_v2"), "classifier", f"{_PYTORCH}mobilenet_v2-7ebf99e0.pth", 1280
    ),
    "resnet50": Backbone(
        _torchvision("resnet50"), "avgpool", f"{_PYTORCH}resnet50-0676ba61.pth", 2048
    ),
    # Its ImageNet weights were trained on inputs in -1..1.
    "googlenet": Backbone(
        _torchvision("googlenet", aux_logits=False, init_weights=True),
        "avgpool",
        f"{_PYTORCH}googlenet-1378be20.pth",
        1024,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    ),
    "bn_inception": Backbone(
        BNInception,
        "last_linear",
        "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth",
        CHANNELS,
        mean=(104.0, 117.0, 128.0),
        std=(1.0, 1.0, 1.0),
        bgr=True,
        peak=255.0,
        cure="Its host at {url} is often down: find a copy of that file, whose sha256 begins with "
        '52deb4733, or start from random weights with "none". Pass the file: ',
    ),
}


def build_trunk(name: str, weights: str) -> nn.Module:
    """A trunk from float (B, 3, S, S) to feature maps (B, C, H, W), or to tokens (B, T, C).

    Args:
        name: a key of BACKBONES, "timm:" and the name of a timm network, or the import path of a
            class of your own. Its instances have `channels`, C, and may have `mean` and `std`
            of RGB in 0..1, otherwise those of ImageNet.
        weights: "imagenet" (the published ones), "none" (random) or the path of a state dict of the
            network of that name; half precision is widened to float32.

    Raises: CheckpointError if the weights are not available or do not fit; JobError if timm is
        missing or does not know the name.
    """
    if name.startswith(TIMM):
        return build_timm_trunk(name.removeprefix(TIMM), weights)
    if is_own(name):
        return _own_trunk(name, weights)
    backbone = BACKBONES[name]
    network = backbone.build()
    if weights != "none":
        state = _state_dict(name, backbone, weights)
        # GoogLeNet's auxiliary classifiers are only used in training.
        state = {key: value for key, value in state.items() if not key.startswith("aux")}
        load_weights(network, state, weights)
    if isinstance(network, BNInception):  # its children are not called in their order
        del network.last_linear
        return nn.Sequential(network)
    before = takewhile(lambda child: child[0] != backbone.until, network.named_children())
    return nn.Sequential(*(layer for _, layer in before))


def _own_trunk(name: str, weights: str) -> nn.Module:
    trunk: nn.Module = own_part(name)()
    if not isinstance(getattr(trunk, "channels", None), int):
        raise JobError(f"{name} has no attribute `channels`, the channels of its output. Add it.")
    if weights == "imagenet":
        raise JobError(
            f"Kinlens has no ImageNet weights for {name}. Set model.weights to the path of a "
            'state dict, or to "none" for those of its constructor.'
        )
    if weights != "none":
        load_weights(trunk, read_weights(weights, name), weights)
    return trunk


def channels_of(name: str, trunk: nn.Module) -> int:
    """Number of channels C of the output of `trunk`."""
    return BACKBONES[name].channels if name in BACKBONES else int(getattr(trunk, "channels", 0))


def normalization_of(name: str, trunk: nn.Module) -> Normalize:
    """The normalisation from pixels to the input of `trunk`."""
    if name not in BACKBONES:
        usual = BACKBONES["resnet50"]
        return Normalize(getattr(trunk, "mean", usual.mean), getattr(trunk, "std", usual.std))
    backbone = BACKBONES[name]
    return Normalize(backbone.mean, backbone.std, backbone.bgr, backbone.peak)


def _state_dict(name: str, backbone: Backbone, weights: str) -> State:
    if weights != "imagenet":
        return read_weights(weights, name)
    try:
        state: State = torch.hub.load_state_dict_from_url(
            backbone.url, map_location="cpu", check_hash=True, weights_only=True
        )
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        # No network, a wrong address or a wrong file; a URLError is an OSError.
        raise CheckpointError(
            f"The ImageNet weights of {name} could not be downloaded ({error}). "
            + backbone.cure.format(url=backbone.url)
            + "--weights /path for kinlens-train adapt, new and export --backbone, "
            "--set model.weights=/path for fit, make demo IMAGES=... WEIGHTS=/path; a service "
            "lists it in KINLENS_TRAINING_WEIGHTS."
        ) from error
    return state


def fold_batch_norm(trunk: nn.Module, side: int = 64) -> None:
    """Fold each batch norm, in evaluation mode, into the convolution before it, in place.

    The network computes the same, which is checked on noise of `side` pixels. Scales become part of
    the weights and learn with them; shifts become biases, which stay fixed.

    Raises: JobError if a batch norm does not follow a convolution of its own; `trunk` is then
        unusable.
    """
    if not _has_batch_norm(trunk):
        return
    mode = trunk.training
    trunk.eval()
    before = _on_noise(trunk, side)
    for (layer_name, layer), (name, norm) in pairwise(layers_of(trunk)):
        if not isinstance(layer, nn.Conv2d) or not isinstance(norm, nn.BatchNorm2d):
            continue
        if layer.out_channels == norm.num_features:
            folded = fuse_conv_bn_eval(layer, norm)
            assert folded.bias is not None
            folded.bias.requires_grad_(False)
            trunk.set_submodule(layer_name, folded)
            # timm's batch norm may include dropout and an activation.
            more = [getattr(norm, part) for part in ("drop", "act") if hasattr(norm, part)]
            trunk.set_submodule(name, nn.Sequential(*more))
    difference = (_on_noise(trunk, side) - before).abs().max()
    if _has_batch_norm(trunk) or not difference <= _MAX_FOLDING_DIFFERENCE * before.abs().max():
        raise JobError(
            'model.batch_norm = "folded" needs a convolution before each batch norm, which this '
            'backbone does not have everywhere. Set model.batch_norm to "frozen".'
        )
    trunk.train(mode)


def synchronize_batch_norm(trunk: nn.Module) -> nn.Module:
    """`trunk` with the batch statistics of all processes in place of those of each."""
    if isinstance(trunk, TimmTrunk):
        # torch's conversion would drop the activations that timm has inside its batch norm.
        from timm.layers import convert_sync_batchnorm

        trunk.network = convert_sync_batchnorm(trunk.network)
        return trunk
    convert: Callable[[nn.Module], nn.Module] = nn.SyncBatchNorm.convert_sync_batchnorm
    return convert(trunk)


def layers_of(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and layer of each batch norm and leaf, in source order; one used twice comes twice."""
    return [
        (name, module)
        for name, module in network.named_modules(remove_duplicate=False)
        if isinstance(module, BATCH_NORMS) or next(module.children(), None) is None
    ]


def _has_batch_norm(trunk: nn.Module) -> bool:
    return any(isinstance(module, BATCH_NORMS) for module in trunk.modules())


def _on_noise(trunk: nn.Module, side: int) -> Tensor:
    noise = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features: Tensor = trunk(noise.to(next(trunk.parameters()).dtype))
    return features
