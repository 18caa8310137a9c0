"""The trunks: networks without their classifiers, their weights, pixel normalisation, batch norm.

Any network of timm is a trunk, too: `model.backbone = "timm:NAME"`. timm is an optional extra,
imported only here, when a job names one of its networks.
"""

import difflib
import functools
import inspect
import pickle
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from kinlens.embedder.errors import CheckpointError, JobError
from kinlens.training.config.job import expand_path
from kinlens.training.config.settings import ONNX, TIMM
from kinlens.training.models.bn_inception import CHANNELS, BNInception
from kinlens.training.parts.own import is_own, own_part

State = dict[str, Tensor]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)
_MAX_FOLDING_DIFFERENCE = 1e-3  # relative to the largest activation
_NO_WEIGHTS = (
    "{path} is not a weight file of PyTorch (names with tensors, as torch.save or safetensors "
    "write them). Use one of {name}."
)


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
    of `Normalize`, `cure` is the advice if the weights cannot be downloaded. `stages` has the first
    layer of each stage but the first one: where timm divides its network of that name.
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
    stages: tuple[int, ...] = ()


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
        _torchvision("mobilenet_v2"),
        "classifier",
        f"{_PYTORCH}mobilenet_v2-7ebf99e0.pth",
        1280,
        stages=(1, 2, 4, 7, 11, 14, 17),
    ),
    "resnet50": Backbone(
        _torchvision("resnet50"),
        "avgpool",
        f"{_PYTORCH}resnet50-0676ba61.pth",
        2048,
        stages=(4, 5, 6, 7),
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

    Raises: CheckpointError if the weights are not available or do not fit, or the name is that of
        an imported network; JobError if timm is missing or does not know the name.
    """
    if name.startswith(TIMM):
        return build_timm_trunk(name.removeprefix(TIMM), weights)
    if is_own(name):
        return _own_trunk(name, weights)
    if name == ONNX:
        raise CheckpointError(
            f'model.backbone = "{ONNX}" is the network of an imported bundle, and model.weights = '
            f"{weights!r} is not one. Set it to a folder of `kinlens-train import`."
        )
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


def stages_of(name: str, trunk: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each stage of a trunk, from image to output: the layers before its blocks,
    then its blocks.

    Raises: JobError if it has no stages.
    """
    starts = BACKBONES[name].stages if name in BACKBONES else ()
    if isinstance(trunk, TimmTrunk) and hasattr(trunk.network, "group_matcher"):
        from timm.models import group_parameters

        network: nn.Module = trunk.network
        matcher = trunk.network.group_matcher(coarse=True)
        numbers: dict[str, int] = group_parameters(network, matcher, reverse=True)
    elif starts:
        layers = [*trunk.children()]
        network = trunk if len(layers) > 1 else layers[0]
        names = [parameter for parameter, _ in network.named_parameters()]
        numbers = {x: bisect(starts, int(x.partition(".")[0])) for x in names}
    else:
        known = (key for key, backbone in BACKBONES.items() if backbone.stages)
        raise JobError(
            f"{name} has no stages for model.frozen_stages and optimizer.stage_decay. Use "
            f"{', '.join(known)} or a network of timm that has stages, or omit both."
        )
    stages: list[list[nn.Parameter]] = [[] for _ in range(max(numbers.values()) + 1)]
    for parameter_name, parameter in network.named_parameters():
        stages[numbers[parameter_name]].append(parameter)
    return stages


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


def fold_batch_norm(trunk: nn.Module, side: int | None = None) -> None:
    """Fold each batch norm, in evaluation mode, into the convolution before it, in place.

    The network computes the same, which is checked on noise of `side` pixels, by default 64 or, for
    networks of timm, theirs. Scales become part of the weights and learn with them; shifts become
    biases, which stay fixed.

    Raises: JobError if a batch norm does not follow a convolution of its own; `trunk` is then
        unusable.
    """
    if not _has_batch_norm(trunk):
        return
    mode = trunk.training
    trunk.eval()
    side = side or (trunk.side if isinstance(trunk, TimmTrunk) else 64)
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


class TimmTrunk(nn.Module):
    """A network of timm without pooling and classifier.

    `side` is the side in pixels of the images that it was made for, `mean` and `std` are of RGB in
    0..1, `class_token` is whether the first token represents the image, and `prefix` the number of
    tokens before the patch tokens.
    """

    def __init__(self, name: str, network: Any) -> None:
        super().__init__()
        self.name = name
        self.network = network
        settings = network.pretrained_cfg
        self.side = int(settings["input_size"][-1])
        self.mean = tuple(settings["mean"])
        self.std = tuple(settings["std"])
        self.channels = int(getattr(network, "head_hidden_size", None) or network.num_features)
        self.class_token = getattr(network, "cls_token", None) is not None
        self.prefix = int(getattr(network, "num_prefix_tokens", int(self.class_token)))

    def forward(self, images: Tensor) -> Tensor:
        """Float (B, 3, S, S) to maps (B, C, H, W) or tokens (B, T, C). Raises: JobError."""
        side = images.shape[-1]
        try:
            features: Any = self.network(images)
        except (AssertionError, RuntimeError) as error:
            # For a wrong size timm raises whatever error comes first.
            if side == self.side or isinstance(error, _DEVICE_ERRORS):
                raise
            raise JobError(
                f"{TIMM}{self.name} does not accept images of {side} px ({error}). It accepts "
                f"{self.side}: set input.size_px and input.test_px."
            ) from error
        if not isinstance(features, Tensor) or features.ndim not in (3, 4):
            raise JobError(
                f"{TIMM}{self.name} does not return one map or one list of tokens to pool. "
                "Choose another model.backbone."
            )
        if features.ndim == 4 and getattr(self.network, "output_fmt", "NCHW") == "NHWC":
            features = features.permute(0, 3, 1, 2)
        maps: Tensor = features
        return maps


def build_timm_trunk(name: str, weights: str) -> TimmTrunk:
    """The network `name` of timm, with or without the tag of its weights.

    `weights` are "imagenet" (timm's own for that name, whatever they were trained on), "none"
    (random) or the path of a state dict, .pth or .safetensors.

    Raises: JobError if timm is missing or has no such network; CheckpointError if the weights are
        not available or do not fit.
    """
    try:
        import timm
    except ModuleNotFoundError as error:
        raise JobError(
            f"A backbone {TIMM}NAME needs the package timm: pip install 'kinlens[timm]'."
        ) from error
    if name not in _known():
        close = difflib.get_close_matches(name, _known(), n=3)
        raise JobError(
            f"timm has no network {name!r}. Set model.backbone to one of timm.list_models(), for "
            f"example {', '.join(TIMM + match for match in close or ['resnet50'])}."
        )
    if weights == "imagenet":
        network = _pretrained(timm, name)
    else:
        network = _create(timm, name, pretrained=False)
        if weights != "none":
            _load(network, read_weights(weights, f"timm's {name}"), weights)
    try:
        # Remove pooling last: norms after it keep their weights and act on each position.
        network.reset_classifier(0, "")
        return TimmTrunk(name, network)
    except (AssertionError, AttributeError, KeyError, TypeError) as error:
        raise JobError(
            f"{TIMM}{name} cannot be built without its own pooling ({error}). Choose another "
            "model.backbone."
        ) from error


@functools.cache
def _known() -> tuple[str, ...]:
    """The networks of timm, with and without tags. To list them takes longer than to build one."""
    import timm

    return (*timm.list_models(), *timm.list_pretrained())


def _create(timm: Any, name: str, pretrained: bool) -> Any:
    options: dict[str, Any] = {"pretrained": pretrained, "num_classes": 0}
    try:
        return timm.create_model(name, dynamic_img_size=True, **options)
    except TypeError:  # an architecture without that option, like all convolutional ones
        return timm.create_model(name, **options)


def _pretrained(timm: Any, name: str) -> Any:
    try:
        return _create(timm, name, pretrained=True)
    except Exception as error:
        # The hub raises its own errors, HTTP client errors, URLError, OSError and RuntimeError.
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"The weights of {TIMM}{name} could not be downloaded ({reason}). On a machine with "
            f"internet access, save timm.create_model({name!r}, pretrained=True).state_dict() with "
            'torch.save and pass the file: --set model.weights=/path; or start with "none".'
        ) from error


def _load(network: Any, state: State, source: str) -> None:
    """Load a file in timm's format, or one that timm can convert, without its classifier."""
    rename = getattr(inspect.getmodule(type(network)), "checkpoint_filter_fn", None)
    if rename is not None:
        state = rename(state, network)
    classifiers = network.pretrained_cfg.get("classifier") or ()
    names = (classifiers,) if isinstance(classifiers, str) else classifiers
    heads = tuple(f"{name}." for name in names)
    load_weights(network, {k: v for k, v in state.items() if not k.startswith(heads)}, source)


def read_weights(weights: str, name: str) -> State:
    """The state dict in the file `weights`. Raises: CheckpointError, JobError."""
    path = expand_path(weights, "model.weights")
    if not path.is_file():
        raise CheckpointError(
            f"The weight file {path} does not exist. Set model.weights to a weight file of {name}, "
            'the folder of a bundle, "imagenet" or "none".'
        )
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{path} needs the package safetensors: pip install 'kinlens[timm]'."
        ) from error
    except Exception as error:
        # torch.load raises pickle, zip, runtime and key errors on other files.
        raise CheckpointError(_NO_WEIGHTS.format(path=path, name=name)) from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise CheckpointError(_NO_WEIGHTS.format(path=path, name=name))
    return state


def write_weights(network: nn.Module, path: Path) -> None:
    """Write the state dict of `network`. Raises: CheckpointError without safetensors."""
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise CheckpointError(
            "--keep-weights needs the package safetensors: pip install 'kinlens[timm]'."
        ) from error
    # Tensors in channels-last order would be refused.
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, path)


def load_weights(network: nn.Module, state: State, source: str) -> None:
    """Load exactly the tensors of `state` into `network`; half precision is widened.

    A leading axis of 1 that the network does not have is dropped: files from the time of
    BN-Inception have one on each batch norm tensor.

    Raises: CheckpointError counting the tensors that do not fit, with an example of each kind.
    """
    shapes = {key: value.shape for key, value in network.state_dict().items()}
    fitted = {}
    for key, value in state.items():
        if value.ndim and value.shape[0] == 1 and value.shape[1:] == shapes.get(key):
            value = value.squeeze(0)
        fitted[key] = value.float() if value.is_floating_point() else value
    try:
        network.load_state_dict(fitted, strict=True)
    except RuntimeError as error:
        both = fitted.keys() & shapes.keys()
        counters = {key for key in shapes if key.endswith("num_batches_tracked")}  # not needed
        kinds = {
            "are missing": sorted(shapes.keys() - both - counters),
            "are unknown": sorted(fitted.keys() - both),
            "have another shape": sorted(key for key in both if fitted[key].shape != shapes[key]),
        }
        counts = (f"{len(x):,} tensors {kind} ({x[0]})" for kind, x in kinds.items() if x)
        raise CheckpointError(
            f"The weights {source} do not fit the network, as they are of another one: "
            f"{', '.join(counts)}. Use weights of this backbone, or the backbone of these weights."
        ) from error
