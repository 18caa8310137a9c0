"""Read the graph of an ONNX file, reduce it to one output, and free what others fixed in it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper
from onnx.external_data_helper import (
    ExternalDataInfo,
    load_external_data_for_model,
    uses_external_data,
)
from onnx.inliner import inline_local_functions
from onnx.numpy_helper import from_array, to_array
from onnx.version_converter import convert_version

from kinlens.embedder.errors import ExportError

TRUNK = "trunk."
"""Prefix of the names of the network, by which int8 finds it among the added nodes."""

OPSET = 18
"""Oldest operators in a bundle: torch can write a trained head for these and for newer ones."""

MAX_BYTES = 2**31 - 1
"""Of an ONNX file without external data, as a bundle has it."""

_REASON = 300  # characters of a message of onnxruntime


def reason_of(error: Exception) -> str:
    return " ".join(str(error).split())[:_REASON].rstrip(".")


def load_whole(path: Path) -> ModelProto:
    """The model of a file with the data of the files next to it. Raises: ExportError."""
    if not path.is_file():
        raise ExportError(f"{path} does not exist. Give an ONNX file.")
    try:
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except Exception as error:
        # The DecodeError of protobuf, which is no dependency of ours.
        raise ExportError(f"{path} is not an ONNX file. Export the model as ONNX.") from error
    if not model.graph.node:
        raise ExportError(f"{path} is not an ONNX file, or has no nodes. Export the model as ONNX.")
    files = {
        path.parent / ExternalDataInfo(tensor).location
        for tensor in model.graph.initializer
        if uses_external_data(tensor)
    }
    if missing := [file for file in sorted(files) if not file.is_file()]:
        raise ExportError(
            f"{path} has its weights in {missing[0].name}, which is not next to it. Copy it there."
        )
    size = sum(file.stat().st_size for file in (path, *files))
    if size > MAX_BYTES:
        raise ExportError(
            f"{path} has {size / 2**30:.1f} GiB with its data; a bundle has a model in one file, "
            "which ONNX limits to 2 GiB. Export it in float16, or take a smaller model."
        )
    try:
        load_external_data_for_model(model, str(path.parent))
    except Exception as error:
        # onnx raises its checker's error, ValueError and OSError.
        raise ExportError(
            f"The weights of {path} cannot be read ({reason_of(error)}). Copy its files again."
        ) from error
    return inline_local_functions(model) if model.functions else model


def choose_output(model: ModelProto, name: str | None, path: Path) -> str:
    """The name of the value that is the embedding, before pooling. Raises: ExportError."""
    outputs = [value.name for value in model.graph.output]
    chosen = outputs[0] if name is None and len(outputs) == 1 else name
    if chosen is None:
        raise ExportError(
            f"{path} has {len(outputs)} outputs: {', '.join(outputs)}. Pass one of them as "
            "--output."
        )
    if not any(chosen in node.output for node in model.graph.node):
        raise ExportError(
            f"{path} computes no value {chosen!r}. Pass --output; its outputs are "
            f"{', '.join(outputs)}."
        )
    return chosen


def reduce_to(model: ModelProto, output: str) -> ModelProto:
    """`model` with this one output, without what the output does not depend on."""
    graph, read, nodes = model.graph, {output}, []
    for node in reversed(graph.node):
        if not read.isdisjoint(node.output):
            nodes.append(node)
            read.update(_reads(node))
    tensors = [tensor for tensor in graph.initializer if tensor.name in read]
    sparse = [tensor for tensor in graph.sparse_initializer if tensor.values.name in read]
    constants = {x.name for x in tensors} | {x.values.name for x in sparse}
    inputs = [x for x in graph.input if x.name in read - constants]
    made = helper.make_empty_tensor_value_info(output)
    reduced = helper.make_graph(
        nodes[::-1], graph.name or "network", inputs, [made], tensors, sparse_initializer=sparse
    )
    return helper.make_model(
        reduced, opset_imports=model.opset_import, ir_version=max(model.ir_version, 8)
    )


def _graphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs inside a node, such as the branches of an If."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _reads(node: NodeProto) -> set[str]:
    """The names that a node reads, in the graphs inside it too."""
    inner = (x for graph in _graphs(node) for x in graph.node)
    outputs = (x.name for graph in _graphs(node) for x in graph.output)
    return {*node.input, *outputs}.union(*(_reads(x) for x in inner)) - {""}


def add_prefix(graph: GraphProto) -> None:
    """Put `TRUNK` before all names, in the graphs inside nodes too."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = TRUNK + value.name
    for tensor in graph.sparse_initializer:
        tensor.values.name = TRUNK + tensor.values.name
    for number, node in enumerate(graph.node):
        node.name = TRUNK + (node.name or f"{node.op_type}_{number}")
        node.input[:] = [name and TRUNK + name for name in node.input]
        node.output[:] = [name and TRUNK + name for name in node.output]
        for inner in _graphs(node):
            add_prefix(inner)


def free_batch(graph: GraphProto, batch: int) -> None:
    """Let a graph for `batch` images take any number, in place.

    Its reshapes of what is computed from images keep their sizes but the first, and a constant that
    is joined to one image, such as a class token, is joined to each.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer}
    images = graph.input[0].name
    values = {images}
    freed = GraphProto()
    for number, node in enumerate(graph.node):
        if node.op_type == "Constant" and node.attribute[0].HasField("t"):
            constants[node.output[0]] = node.attribute[0].t
        name = f"free.{number}"
        if not values.isdisjoint(_reads(node)):
            values.update(node.output)
            if node.op_type == "Reshape" and node.input[1] in constants:
                shape = _free_shape(to_array(constants[node.input[1]]), batch)
                graph.initializer.append(from_array(shape, name))
                node.input[1] = name
                kept = [x for x in node.attribute if x.name != "allowzero"]
                node.ClearField("attribute")
                node.attribute.extend(kept)
            for place, read in enumerate(node.input):
                if node.op_type == "Concat" and read in constants and batch == 1:
                    nodes, tensors = _repeated(read, constants[read], images, f"{name}.{place}")
                    freed.node.extend(nodes)
                    graph.initializer.extend(tensors)
                    node.input[place] = nodes[-1].output[0]
        freed.node.append(node)
    graph.ClearField("node")
    graph.node.extend(freed.node)
    graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"


def _free_shape(shape: NDArray[np.int64], batch: int) -> NDArray[np.int64]:
    """The shape of a reshape, with the number of images in the first place left open."""
    if len(shape) < 2 or 0 in shape:
        return shape
    if -1 not in shape:
        return np.array([-1, *shape[1:]], np.int64)
    return np.array([0, *shape[1:]], np.int64) if shape[0] == batch else shape  # 0: as before


def _repeated(
    name: str, tensor: TensorProto, images: str, prefix: str
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Nodes that repeat a constant (1, ...) for each image, and their constants."""
    first, ones, count, shape = (f"{prefix}.{x}" for x in ("first", "ones", "count", "shape"))
    nodes = [
        helper.make_node("Shape", [images], [f"{prefix}.sizes"]),
        helper.make_node("Gather", [f"{prefix}.sizes", first], [count], axis=0),
        helper.make_node("Concat", [count, ones], [shape], axis=0),
        helper.make_node("Expand", [name, shape], [f"{prefix}.repeated"]),
    ]
    rest = np.ones(len(tensor.dims) - 1, np.int64)
    return nodes, [from_array(np.array([0], np.int64), first), from_array(rest, ones)]


def modernize(model: ModelProto, path: Path) -> ModelProto:
    """`model` with operators of version `OPSET` or newer. Raises: ExportError."""
    versions = [x.version for x in model.opset_import if x.domain in ("", "ai.onnx")]
    if not versions or versions[0] >= OPSET:
        return model
    try:
        return convert_version(model, OPSET)
    except Exception as error:
        # The converter raises RuntimeError, and others for nodes that it does not know.
        raise ExportError(
            f"{path} has operators of version {versions[0]}, which cannot be converted to version "
            f"{OPSET} ({reason_of(error)}). Export the model with opset {OPSET} or newer."
        ) from error
