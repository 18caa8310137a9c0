"""Rebuild the network of a model bundle to continue its training.

Bundles that keep their weights are read exactly. Others, as of 0.1 and 0.2, are read from the names
in their ONNX file, which convolutional networks have.
"""

from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import nn

from kinlens.embedder.bundle import MANIFEST, WEIGHTS, Bundle
from kinlens.embedder.errors import CheckpointError, JobError
from kinlens.training.config.job import Job, expand_path, stored_job
from kinlens.training.config.settings import ONNX, TIMM, Model, Pooling
from kinlens.training.models.backbones import (
    BATCH_NORMS,
    State,
    fold_batch_norm,
    layers_of,
    read_weights,
)
from kinlens.training.models.embedding import EmbeddingNet, torch_embed
from kinlens.training.models.onnx_trunk import OnnxTrunk

MAX_DIFFERENCE = 1e-3
"""Per coordinate of the golden vectors; another summation order causes a tenth of that."""


def new_network(job: Job) -> EmbeddingNet:
    """The initial network of a run, from weights or a bundle. Raises: CheckpointError, JobError."""
    bundle = bundle_of(job.model.weights)
    if bundle is not None:
        return start_from_bundle(job, bundle)
    return EmbeddingNet(job.model, job.regularizers.with_flow)


def bundle_of(weights: str) -> Path | None:
    """The folder that `weights` names, if it is a bundle."""
    if weights in ("imagenet", "none"):
        return None
    path = expand_path(weights, "model.weights")
    return path if (path / MANIFEST).is_file() else None


def start_from_bundle(job: Job, path: Path) -> EmbeddingNet:
    """The network of `job` with the weights of the bundle at `path`: trunk, head and flow.

    The head keeps its initial weights if the bundle is only a trunk, the flow if it has no flow.

    Raises: BundleError; CheckpointError naming the setting that does not fit, or if the network
        cannot be rebuilt; JobError if this version does not know the bundle's own job.
    """
    bundle = Bundle.open(path)
    if job.model.batch_norm == "train" and not (path / WEIGHTS).is_file():
        raise CheckpointError(
            f"The bundle {path} has no batch statistics: its batch norm is folded into its "
            'convolutions. Set model.batch_norm to "frozen", "statistics" or "folded", '
            "or export the bundle with --keep-weights."
        )
    made_by = stored_job(bundle.manifest.job, f"the job of {path}") if bundle.manifest.job else None
    _require_fit(job, bundle, made_by)
    if job.model.backbone == ONNX:
        if made_by is not None:
            raise CheckpointError(
                f"The bundle {path} is an imported network that was adapted, which no training can "
                "continue. Start from the imported bundle that it was adapted from."
            )
        trunk = OnnxTrunk(bundle.model_path.read_bytes())
        return EmbeddingNet(job.model, job.regularizers.with_flow, trunk)
    start = _network(job, bundle, made_by)
    own = {"dim": bundle.manifest.dim} if made_by and job.model.dim == "auto" else {}
    random_start = job.model.model_copy(update={"weights": "none", **own})
    net = EmbeddingNet(random_start, job.regularizers.with_flow)
    net.trunk.load_state_dict(start.trunk.state_dict())
    if made_by is not None:
        net.pool.load_state_dict(start.pool.state_dict())
        net.projection.load_state_dict(start.projection.state_dict())
    if net.flow is not None and start.flow is not None:
        net.flow.load_state_dict(start.flow.state_dict())
    return net


def _require_fit(job: Job, bundle: Bundle, made_by: Job | None) -> None:
    pairs: dict[str, tuple[object, object]] = {
        "model.backbone": (bundle.manifest.backbone, job.model.backbone)
    }
    if made_by is not None:
        for name in ("hidden", "pooling"):
            pairs[f"model.{name}"] = getattr(made_by.model, name), getattr(job.model, name)
        if job.model.dim != "auto":
            pairs["model.dim"] = bundle.manifest.dim, job.model.dim
        there, here = (each.regularizers.with_flow for each in (made_by, job))
        if there is not None:
            for name in ("flow", "activation", "input_norm"):
                key = f"regularizers.determinant.{name}"
                pairs[key] = getattr(there, name), getattr(here, name, None)
    differing = [
        f"{key} is {given!r} in the bundle and {wanted!r} in the job"
        for key, (given, wanted) in pairs.items()
        if given != wanted
    ]
    if differing:
        raise CheckpointError(
            f"The bundle {bundle.path} has another network: {'; '.join(differing)}. Use the "
            "settings of the bundle, or other model.weights."
        )


def _network(job: Job, bundle: Bundle, made_by: Job | None) -> EmbeddingNet:
    """The network of the bundle with the batch norm of `job`, checked on the golden images."""
    kept, least = bundle.path / WEIGHTS, np.inf
    is_kept = kept.is_file()
    tensors = read_weights(str(kept), WEIGHTS) if is_kept else _onnx_tensors(bundle.model_path)
    shapes = _trunks(job.model.backbone)
    if made_by is not None:
        shapes = [made_by.model.model_copy(update={"dim": bundle.manifest.dim})]
    flow = made_by.regularizers.with_flow if made_by is not None else None
    for shape in shapes:
        batch_norm = shape.batch_norm if is_kept else job.model.batch_norm
        try:
            changes = {"weights": "none", "batch_norm": batch_norm}
            net = EmbeddingNet(shape.model_copy(update=changes), flow).eval()
            net.load_state_dict(tensors if is_kept else _state(net, tensors))
            found = torch_embed(net, bundle.golden_inputs())
        except RuntimeError:  # a tensor of another shape
            continue
        except JobError:
            if shape.pooling != "cls":  # which needs a class token
                raise
            continue
        least = min(least, float(np.abs(found - bundle.golden_vectors()).max()))
        if least <= MAX_DIFFERENCE:
            return _folded(net, batch_norm, job, bundle)
    raise CheckpointError(
        f"The network of the bundle {bundle.path} cannot be rebuilt from its "
        f"{WEIGHTS if is_kept else 'ONNX file'}: the golden vectors differ by {least:.2g}, allowed "
        f"is {MAX_DIFFERENCE:g}. Export the run again with --keep-weights, or train from other "
        "model.weights."
    )


def _folded(net: EmbeddingNet, given: str, job: Job, bundle: Bundle) -> EmbeddingNet:
    """The network with the batch norm of `job`, which `given` may have to be folded into."""
    is_folded, shall_be = given == "folded", job.model.batch_norm == "folded"
    if is_folded and not shall_be:
        raise CheckpointError(
            f"The batch norm of the bundle {bundle.path} is folded. Set model.batch_norm to "
            '"folded".'
        )
    if shall_be and not is_folded:
        fold_batch_norm(net.trunk)
    return net


def _trunks(backbone: str) -> list[Model]:
    """Trunks alone, with each pooling: the bundle of a trunk has no job that names it."""
    poolings = [x for x in get_args(Pooling) if x != "cls" or backbone.startswith(TIMM)]
    return [Model(backbone=backbone, dim=None, pooling=pooling) for pooling in poolings]


def _onnx_tensors(model: Path) -> State:
    import onnx  # here, as few runs begin with a bundle

    tensors = onnx.load(model).graph.initializer
    return {x.name: torch.from_numpy(onnx.numpy_helper.to_array(x).copy()) for x in tensors}


def _state(net: EmbeddingNet, tensors: State) -> State:
    """The state dict of `net` from ONNX tensors by name; tensors that the file lacks are zero.

    A batch norm is folded into the convolution before it, whose bias, NAME.weight_bias in versions
    to 0.2, is its shift; the batch norm then only adds this shift.
    """
    own = net.state_dict()
    state = {name: tensors.get(name, torch.zeros_like(value)) for name, value in own.items()}
    for (name, layer), (next_name, following) in pairwise([*layers_of(net), ("", nn.Identity())]):
        if not isinstance(layer, nn.Conv2d):
            continue
        none = torch.zeros(layer.out_channels)
        shift = tensors.get(f"{name}.weight_bias", tensors.get(f"{name}.bias", none))
        if isinstance(following, BATCH_NORMS) and f"{next_name}.running_var" not in tensors:
            # In evaluation mode this batch norm only adds the shift.
            state[f"{next_name}.weight"] = torch.ones_like(shift)
            state[f"{next_name}.bias"] = shift
            state[f"{next_name}.running_var"] = torch.ones_like(shift) - following.eps
            shift = none
        if layer.bias is not None:
            state[f"{name}.bias"] = shift
    return state
