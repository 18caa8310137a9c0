"""Any network of timm as a trunk: `model.backbone = "timm:NAME"`.

timm is an optional extra and imported only here, when a job names one of its networks.
"""

import difflib
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from kinlens.embedder.errors import CheckpointError, JobError
from kinlens.training.config.settings import TIMM
from kinlens.training.models.weights import State, load_weights, read_weights

_DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


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
