"""Weight files: reading them and fitting them to a network."""

from pathlib import Path

import torch
from torch import Tensor, nn

from kinlens.embedder.errors import CheckpointError
from kinlens.training.config.job import expand_path

State = dict[str, Tensor]

_NO_WEIGHTS = (
    "{path} is not a weight file of PyTorch (names with tensors, as torch.save or safetensors "
    "write them). Use one of {name}."
)


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
