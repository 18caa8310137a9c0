"""Write the graph of a network as ONNX, and find the nodes of its trunk."""

import copy
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import onnx
import torch
from onnx import NodeProto, numpy_helper
from torch import Tensor, nn

from kinlens.embedder.errors import ExportError
from kinlens.embedder.views.text import IDS
from kinlens.training.bundles.onnx_graph import TRUNK
from kinlens.training.models.backbones import fold_batch_norm
from kinlens.training.models.embedding import EmbeddingNet
from kinlens.training.models.onnx_trunk import OnnxTrunk

Net = TypeVar("Net", bound=nn.Module)

_TRACE_BATCH = 2
_OPSET = 20
_POINTWISE = "Add Clip Concat Elu Gelu HardSigmoid HardSwish LeakyRelu Mul PRelu Relu Sigmoid"


def write_onnx(net: nn.Module, size_px: int, path: Path, output: str = "embeddings") -> None:
    """The inference graph with its weights: uint8 (N, 3, S, S) to float32 (N, ...), N free.

    Activations of `net` that work in place do so no more: the exporter takes each of them apart,
    which takes longer than all else.
    """
    if isinstance(net, EmbeddingNet) and isinstance(net.trunk, OnnxTrunk):
        _write_on_trunk(net, net.trunk, path)
        return
    for module in net.modules():
        if hasattr(module, "inplace"):
            module.inplace = False  # type: ignore[assignment]
    sample = torch.zeros(_TRACE_BATCH, 3, size_px, size_px, dtype=torch.uint8)
    _write(net, sample, path, "images", output)


def folded(net: Net, size_px: int) -> Net:
    """A copy of `net` whose batch norms are parts of its convolutions; `net` if they cannot be.

    The exporter does the same to its graph, but late: a network with a third of its layers gone is
    written in three fifths of the time.
    """
    if not isinstance(net, EmbeddingNet):
        return net
    try:
        copied = copy.deepcopy(net)
        fold_batch_norm(copied.trunk, size_px)
    except Exception:  # a trunk may be code of a user, and its export needs no folding
        return net
    return copied


def write_text_onnx(net: nn.Module, context: int, path: Path) -> None:
    """The text tower with its weights: token ids, int64 (N, T), to float32 (N, D), N free."""
    sample = torch.ones(_TRACE_BATCH, context, dtype=torch.int64)
    _write(net, sample, path, IDS, "embeddings")


def _write(
    net: nn.Module, sample: Tensor, path: Path, source: str, output: str, opset: int = _OPSET
) -> None:
    write = partial(
        torch.onnx.export,
        net,
        (sample,),
        path,
        dynamo=True,
        external_data=False,
        opset_version=opset,
        input_names=[source],
        output_names=[output],
        dynamic_shapes=({0: torch.export.Dim("n", min=1)},),
        verbose=False,
    )
    with torch.no_grad():
        try:
            write()
        except SystemError:
            # Python 3.11 counts the depth of its parser for all threads together, so it fails if
            # another thread parses at that time, for example to print a traceback.
            write()


class _Head(nn.Module):
    """The part of a network after its trunk: features (N, C) to unit embeddings (N, D)."""

    def __init__(self, net: EmbeddingNet) -> None:
        super().__init__()
        self.net = copy.deepcopy(net)
        self.net.trunk = nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        return self.net.embed_pooled(features)


def _write_on_trunk(net: EmbeddingNet, trunk: OnnxTrunk, path: Path) -> None:
    """The file of an imported trunk, with the head of `net` behind it."""
    if net.flow is None and isinstance(net.projection, nn.Identity):
        path.write_bytes(trunk.content())
        return
    whole = onnx.load_from_string(trunk.content())
    for values in (x.output for x in whole.graph.node):
        values[:] = ["features" if name == "embeddings" else name for name in values]
    whole.graph.output[0].name = "features"
    opset = next(x.version for x in whole.opset_import if x.domain in ("", "ai.onnx"))
    _write(
        _Head(net).eval(),
        torch.zeros(_TRACE_BATCH, net.channels),
        path,
        "head",
        "embeddings",
        opset,
    )
    head = onnx.load(path)
    whole.ir_version = head.ir_version = max(whole.ir_version, head.ir_version)
    onnx.save(onnx.compose.merge_models(whole, head, [("features", "head")]), path)


def trunk_nodes(model: onnx.ModelProto) -> list[str]:
    """Names of the nodes between the first and the last weight of the trunk, in their order.

    Activations, residual sums and concatenations after the last weight belong to it too. The head
    begins at the first other node, which pools. So does a clip to values above 0, as in generalised
    mean pooling: in 8 bits its bound would be 0. Nodes without a name are given one.

    Raises: ExportError if no weight has a name of the trunk.
    """
    nodes = model.graph.node
    for number, node in enumerate(nodes):
        node.name = node.name or f"{node.op_type}_unnamed_{number}"
    weighted = {n.name for n in nodes if any(i.startswith(TRUNK) for i in n.input)}
    if not weighted:
        raise ExportError(
            f"The graph has no weight whose name begins with {TRUNK!r}, so there is nothing to "
            "quantize. Export it with this version of kinlens-train."
        )
    behind = _closure(nodes, weighted)
    before = _closure(reversed(nodes), weighted, backwards=True)
    inside = behind & before
    made = {name for node in nodes if node.name in inside for name in node.output}
    head = [node for node in nodes if node.name in behind - inside]
    made_by_head = {name for node in head for name in node.output}
    scalars = [t for t in model.graph.initializer if not t.dims]
    positive = {t.name for t in scalars if float(numpy_helper.to_array(t)) > 0}
    for node in head:
        if node.op_type == "Clip" and node.input[1] in positive:
            continue
        if node.op_type in _POINTWISE.split() and made_by_head.isdisjoint(set(node.input) - made):
            inside.add(node.name)
            made.update(node.output)
    return [node.name for node in nodes if node.name in inside]


def _closure(nodes: Iterable[NodeProto], start: set[str], backwards: bool = False) -> set[str]:
    """The nodes `start` and all nodes after (or before) them; `nodes` in traversal order."""
    reached: set[str] = set()
    values: set[str] = set()
    for node in nodes:
        arrives, leaves = (node.output, node.input) if backwards else (node.input, node.output)
        if node.name in start or not values.isdisjoint(arrives):
            reached.add(node.name)
            values.update(leaves)
    return reached
