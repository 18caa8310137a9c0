"""The network in fp16 for the GPU: the trunk alone, with casts where it begins and ends."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from embedder.errors import ExportError
from training.export.graph import trunk_nodes

_LARGEST = float(np.finfo(np.float16).max)
_STAYS = frozenset(("ConstantOfShape", "Range", "Resize"))
"""Operators whose float inputs or outputs have no fp16 form."""


def convert_fp16(model: Path, out: Path) -> None:
    """Write the fp16 twin of an fp32 model: same inputs and outputs, float32 around the trunk.

    Converters that go node by node cast to fp16 and back between neighbours that should stay in
    float32, so the norm of an embedding is rounded; here casts stand at the border of the trunk
    alone.

    Raises: ExportError if the graph has no trunk or a weight is beyond the range of fp16.
    """
    content = onnx.shape_inference.infer_shapes(onnx.load(model))
    graph = content.graph
    names = set(trunk_nodes(content))
    trunk = [n for n in graph.node if n.name in names and n.op_type not in _STAYS]
    others = [n for n in graph.node if n.name not in {t.name for t in trunk}]

    weights = {t.name: t for t in graph.initializer if t.data_type == TensorProto.FLOAT}
    floats = _float_values(graph)
    made = floats & _values(node.output for node in trunk)
    read = floats & _values(node.input for node in trunk)
    read_outside = _values(node.input for node in others) | {o.name for o in graph.output}
    enters, leaves = read - made - weights.keys(), made & read_outside

    halves = {name: f"{name}.fp16" for name in enters | leaves | (read & weights.keys())}
    for node in trunk:
        node.input[:] = [halves.get(name, name) for name in node.input]
        node.output[:] = [halves.get(name, name) for name in node.output]
        _keep_half(node)
    graph.initializer.extend(_half(weights[n], halves[n]) for n in sorted(read & weights.keys()))
    _replace(graph.initializer, [t for t in graph.initializer if t.name not in read - read_outside])
    _replace(graph.node, list(_with_casts(graph, enters, leaves)))
    del graph.value_info[:]
    onnx.checker.check_model(content, full_check=True)
    onnx.save(content, out)


def _float_values(graph: GraphProto) -> set[str]:
    """Names of all float32 tensors: weights, inputs, outputs and what is in between."""
    values = (*graph.value_info, *graph.input, *graph.output)
    found = {v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    return found | {t.name for t in graph.initializer if t.data_type == TensorProto.FLOAT}


def _values(lists: Iterable[Iterable[str]]) -> set[str]:
    return {name for names in lists for name in names}


def _half(weight: TensorProto, name: str) -> TensorProto:
    values = numpy_helper.to_array(weight)
    largest = float(np.abs(values).max(initial=0))
    if not largest <= _LARGEST:
        raise ExportError(
            f"The weight {weight.name} reaches {largest:.3g}, fp16 ends at {_LARGEST:.0f}. "
            "Export it in fp32 or int8."
        )
    return numpy_helper.from_array(values.astype(np.float16), name)


def _keep_half(node: NodeProto) -> None:
    """A cast to float32 inside the trunk becomes one to fp16."""
    for attribute in node.attribute:
        if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.FLOAT16


def _with_casts(graph: GraphProto, enters: set[str], leaves: set[str]) -> Iterator[NodeProto]:
    """The nodes of the graph, with a cast before the first reader in fp16 and after each writer."""
    missing = {f"{name}.fp16": name for name in enters}
    for node in graph.node:
        for half in [name for name in dict.fromkeys(node.input) if name in missing]:
            yield _cast(missing.pop(half), half, TensorProto.FLOAT16)
        yield node
        for name in sorted(leaves):
            if f"{name}.fp16" in node.output:
                yield _cast(f"{name}.fp16", name, TensorProto.FLOAT)


def _cast(source: str, target: str, to: int) -> NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"cast_{target}", to=to)


def _replace(field: Any, values: list[Any]) -> None:
    del field[:]
    field.extend(values)
