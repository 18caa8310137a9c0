"""The stages of a trunk, from image to output: the layers before its blocks, then its blocks.

timm groups the layers of its networks, for rates that fall toward the image. The networks of
torchvision are divided at the same places.
"""

from bisect import bisect

from torch import nn

from kinlens.embedder.errors import JobError
from kinlens.training.models.backbones import TimmTrunk

_STARTS = {"mobilenet_v2": (1, 2, 4, 7, 11, 14, 17), "resnet50": (4, 5, 6, 7)}
"""The first layer of each stage but the first one."""


def stages_of(backbone: str, trunk: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each stage of a trunk. Raises: JobError if it has no stages."""
    if isinstance(trunk, TimmTrunk) and hasattr(trunk.network, "group_matcher"):
        from timm.models import group_parameters

        network: nn.Module = trunk.network
        matcher = trunk.network.group_matcher(coarse=True)
        numbers: dict[str, int] = group_parameters(network, matcher, reverse=True)
    elif backbone in _STARTS:
        layers = [*trunk.children()]
        network = trunk if len(layers) > 1 else layers[0]
        names = [name for name, _ in network.named_parameters()]
        numbers = {x: bisect(_STARTS[backbone], int(x.partition(".")[0])) for x in names}
    else:
        raise JobError(
            f"{backbone} has no stages for model.frozen_stages and optimizer.stage_decay. Use "
            f"{', '.join(_STARTS)} or a network of timm that has stages, or omit both."
        )
    stages: list[list[nn.Parameter]] = [[] for _ in range(max(numbers.values()) + 1)]
    for name, parameter in network.named_parameters():
        stages[numbers[name]].append(parameter)
    return stages
