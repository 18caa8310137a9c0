"""Turn an ONNX file that others made into the graph of a bundle, and check its vectors.

Nodes are added that scale the pixels, pool maps or tokens, and divide each vector by its norm.

Shapes: N images, S pixels a side, C channels, T tokens, D dimensions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper
from onnx.external_data_helper import (
    ExternalDataInfo,
    load_external_data_for_model,
    uses_external_data,
)
from onnx.inliner import inline_local_functions
from onnx.numpy_helper import from_array, to_array
from onnx.version_converter import convert_version

from kinlens.embedder.engines.models import SessionSettings, create_session
from kinlens.embedder.errors import BundleError, ExportError
from kinlens.embedder.machine import core_count
from kinlens.embedder.manifest import Parity
from kinlens.embedder.types import Embeddings, Images

TRUNK = "trunk."
"""Prefix of the names of the network, by which int8 finds it among the added nodes."""

OPSET = 18
"""Oldest operators in a bundle: torch can write a trained head for these and for newer ones."""

BATCHES = (1, 2, 5)
MAX_DIFFERENCE = 1e-4
"""Per coordinate, between the graph of the bundle and the file that gets one image at a time."""

MAX_BYTES = 2**31 - 1
"""Of an ONNX file without external data, as a bundle has it."""

_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.UINT8)
_RANKS = {"none": 2, "cls": 3, "mean": 3, "gap": 4}
_LEAST_NORM = 1e-12
_EQUAL = 1e-6  # the rounding of a coordinate
_REASON = 300  # characters of a message of onnxruntime

FilePooling = Literal["gap", "cls", "mean", "none"]
Values = NDArray[Any]
_Step = tuple[str, list[Values], dict[str, Any]]
"""An operator, its constants after the first input, and its attributes."""


@dataclass(frozen=True)
class Reading:
    """How a file reads images, and which of its values is the embedding.

    The network gets (peak · pixels / 255 − mean) / std in RGB.

    Attributes:
        output: name of an output, or of a value inside the graph; None: the only output.
        pooling: None: `gap` for maps (N, C, H, W), `none` for vectors (N, D).
    """

    size_px: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    peak: float = 1.0
    output: str | None = None
    pooling: FilePooling | None = None


def import_graph(path: Path, reading: Reading, images: Images, out: Path) -> Parity:
    """Write the graph of a bundle to `out`: uint8 (N, 3, S, S) to unit float32 (N, D), N free.

    Its vectors of the eight `images` must be those of the file, which gets one image at a time, in
    each of `BATCHES`. A number of images that the file fixes is freed, if its nodes allow it.

    Raises: ExportError with the reason.
    """
    network = _Network(path, reading)
    expected = network.vectors(images)
    onnx.save(network.graph(), out)
    try:
        difference = _difference(out, expected, images)
    except ExportError as error:
        raise network.refusal(error) from error
    if np.abs(expected - expected[0]).max() <= _EQUAL:
        raise ExportError(
            f"{path} gives the same vector for all images. Check --output, --mean, --std and "
            "--scale."
        )
    return Parity(max_abs_difference=difference, batch_sizes=BATCHES)


class _Network:
    """The part of a file between the pixels and the chosen value."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path = path
        self.reading = reading
        whole = _load(path)
        self.output = _chosen(whole, reading.output, path)
        self.model = _reduced(whole, self.output)
        inputs = self.model.graph.input
        if len(inputs) != 1:
            names = ", ".join(value.name for value in inputs) or "none"
            raise ExportError(
                f"The output {self.output!r} of {path} depends on {len(inputs)} inputs ({names}), "
                "but an embedding depends on the image alone. Pass another --output, or export the "
                "image encoder alone."
            )
        self.input = inputs[0].name
        self.type = inputs[0].type.tensor_type.elem_type
        self.batch, self.channels_last = self._layout(inputs[0])
        self.mean_over: tuple[int, ...] = ()
        self.dim = 0
        self.output_type = np.dtype(np.float32)
        if self.type not in _TYPES:
            kind = TensorProto.DataType.Name(self.type).lower()
            raise ExportError(
                f"The input {self.input!r} of {path} is {kind}; it must be float, float16, double "
                "or uint8. Export the model with such an input."
            )
        is_raw = (*reading.mean, *reading.std, reading.peak) == (0, 0, 0, 1, 1, 1, 255)
        if self.type == TensorProto.UINT8 and not is_raw:
            raise ExportError(
                f"The input {self.input!r} of {path} is uint8, so the network scales the pixels "
                "itself. Pass --mean 0 --std 1 --scale 255."
            )

    def _layout(self, value: ValueInfoProto) -> tuple[int | None, bool]:
        """The number of images if the file fixes it, and whether channels come last."""
        given = value.type.tensor_type.shape.dim
        shape = [x.dim_value if x.dim_value > 0 else None for x in given]  # some write -1
        text = f"({', '.join('?' if x is None else str(x) for x in shape)})"
        if len(shape) != 4 or {3, None}.isdisjoint((shape[1], shape[3])):
            raise ExportError(
                f"The input {value.name!r} of {self.path} has the shape {text}; RGB images have "
                "(N, 3, H, W) or (N, H, W, 3). Export the model with such an input."
            )
        channels_last = shape[1] != 3 and shape[3] == 3
        for side in shape[1:3] if channels_last else shape[2:]:
            if side not in (None, self.reading.size_px):
                raise ExportError(
                    f"The input {value.name!r} of {self.path} has the shape {text}, and --size is "
                    f"{self.reading.size_px}. Pass --size {side}."
                )
        return shape[0], channels_last

    def vectors(self, images: Images) -> Embeddings:
        """Unit vectors (N, D) by the file itself, each image on its own. Raises: ExportError."""
        try:
            session = create_session(self.model.SerializeToString(), _settings())
            found: list[Values] = [
                session.run([self.output], {self.input: self._pixels(image)})[0] for image in images
            ]
        except Exception as error:
            # onnxruntime raises exceptions without a common base class.
            raise ExportError(
                f"{self.path} does not run on images of {self.reading.size_px} px: "
                f"{_reason(error)}. Check --size, or export the model again."
            ) from error
        shapes = sorted({x.shape for x in found}, key=str)
        if len(shapes) > 1:
            raise ExportError(
                f"The output {self.output!r} of {self.path} has the shape {shapes[0]} for one "
                f"image and {shapes[1]} for another, but all embeddings have the same length. "
                "Pass another --output."
            )
        shape, self.output_type = shapes[0], found[0].dtype
        if self.output_type.kind != "f" or len(shape) < 2 or shape[0] != (self.batch or 1):
            raise ExportError(
                f"The output {self.output!r} of {self.path} is {self.output_type} of the shape "
                f"{shape} for {self.batch or 1} image(s). An embedding is float (N, D), or can be "
                "pooled from maps (N, C, H, W) or tokens (N, T, C). Pass another --output."
            )
        self.mean_over = self._mean_over(shape)
        rows = np.concatenate([x[:1] for x in found]).astype(np.float32)
        if self.reading.pooling == "cls":
            rows = rows[:, 0]
        elif self.mean_over:
            rows = rows.mean(axis=self.mean_over)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        if not np.isfinite(norms).all():
            raise ExportError(
                f"{self.path} gives vectors that are not finite numbers. Check --mean, --std and "
                "--scale, or export the model again."
            )
        if not (norms > _LEAST_NORM).all():
            raise ExportError(
                f"{self.path} gives a vector of zeros. Check --output, --mean, --std and --scale."
            )
        vectors: Embeddings = rows / norms
        self.dim = vectors.shape[1]
        return vectors

    def _pixels(self, image: Images) -> Values:
        """One image, uint8 (3, S, S), as the input of the file, as often as it demands."""
        values: Values = image
        if self.type != TensorProto.UINT8:
            peak, (mean, std) = self.reading.peak, self._channels()
            values = (np.float32(peak / 255) * image.astype(np.float32) - mean) / std
        if self.channels_last:
            values = values.transpose(1, 2, 0)
        batch = np.repeat(values[None], self.batch or 1, axis=0)
        return batch.astype(helper.tensor_dtype_to_np_dtype(self.type))

    def _channels(self) -> tuple[Values, Values]:
        """Mean and std, (3, 1, 1)."""
        mean, std = (np.array(x, np.float32) for x in (self.reading.mean, self.reading.std))
        return mean.reshape(3, 1, 1), std.reshape(3, 1, 1)

    def _mean_over(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of an output that pooling averages. Raises: ExportError."""
        rank = len(shape)
        kind = self.reading.pooling or {2: "none", 4: "gap"}.get(rank)
        if kind is None or _RANKS[kind] != rank:
            fitting = [name for name, of_rank in _RANKS.items() if of_rank == rank]
            cure = f"Pass --pooling {' or '.join(fitting)}." if fitting else "Pass --output."
            raise ExportError(
                f"The output {self.output!r} of {self.path} has the shape {shape}, which "
                f"{'needs a pooling' if kind is None else f'--pooling {kind} does not fit'}. {cure}"
            )
        if kind == "mean":
            return (1,)
        if kind == "gap":
            is_square = shape[1] == shape[2]
            last = is_square and (shape[2] != shape[3] or self.channels_last)
            return (1, 2) if last else (2, 3)
        return ()

    def graph(self) -> ModelProto:
        """The graph of the bundle. Raises: ExportError."""
        model = ModelProto()
        model.CopyFrom(self.model)
        if self.batch is not None:
            _free_batch(model.graph, self.batch)
        model = _modern(model, self.path)
        network = model.graph
        _add_prefix(network)
        made = TRUNK + self.output
        for node in network.node:  # nothing else reads it: what does is removed
            node.output[:] = ["values" if name == made else name for name in node.output]
        before, constants = _chain("images", TRUNK + self.input, self._scaling())
        pooling = self._pooling()
        after, more = _chain("values", "pooled", pooling or [("Identity", [], {})])
        norm = _chain("pooled", "norm", [("ReduceL2", [np.array([1])], {"keepdims": 1})])
        clip = _chain("norm", "divisor", [("Clip", [np.array(_LEAST_NORM, np.float32)], {})])
        divide = helper.make_node("Div", ["pooled", "divisor"], ["embeddings"], "embeddings")
        size, dim = self.reading.size_px, self.dim
        images = helper.make_tensor_value_info("images", TensorProto.UINT8, ["n", 3, size, size])
        embeddings = helper.make_tensor_value_info("embeddings", TensorProto.FLOAT, ["n", dim])
        whole = helper.make_graph(
            [*before, *network.node, *after, *norm[0], *clip[0], divide],
            "embedding",
            [images],
            [embeddings],
            [*constants, *network.initializer, *more, *norm[1], *clip[1]],
            sparse_initializer=network.sparse_initializer,
        )
        model.graph.CopyFrom(whole)
        return model

    def _scaling(self) -> list[_Step]:
        steps: list[_Step] = []
        if self.type != TensorProto.UINT8:
            mean, std = self._channels()
            scale = np.float32(self.reading.peak / 255) / std
            steps += [("Cast", [], {"to": TensorProto.FLOAT})]
            steps += [("Mul", [scale], {}), ("Add", [-mean / std], {})]
        if self.channels_last:
            steps += [("Transpose", [], {"perm": [0, 2, 3, 1]})]
        if self.type in (TensorProto.FLOAT16, TensorProto.DOUBLE):
            steps += [("Cast", [], {"to": self.type})]
        return steps or [("Identity", [], {})]

    def _pooling(self) -> list[_Step]:
        steps: list[_Step] = []
        if self.output_type != np.float32:
            steps += [("Cast", [], {"to": TensorProto.FLOAT})]
        if self.reading.pooling == "cls":
            steps += [("Gather", [np.array(0)], {"axis": 1})]
        elif self.mean_over:
            steps += [("ReduceMean", [np.array(self.mean_over)], {"keepdims": 0})]
        return steps

    def refusal(self, fault: ExportError) -> ExportError:
        """Why the file cannot be a bundle, given the fault of its graph."""
        if self.batch is None:
            return ExportError(f"{self.path} cannot be a bundle: {fault}")
        return ExportError(
            f"{self.path} is made for {self.batch} image(s) at a time, and its nodes allow no "
            f"other number: {fault} Export it with a free first axis (in PyTorch: dynamic_shapes)."
        )


def _settings() -> SessionSettings:
    return SessionSettings(threads=core_count())


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:_REASON].rstrip(".")


def _load(path: Path) -> ModelProto:
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
            f"The weights of {path} cannot be read ({_reason(error)}). Copy its files again."
        ) from error
    return inline_local_functions(model) if model.functions else model


def _chosen(model: ModelProto, name: str | None, path: Path) -> str:
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


def _reduced(model: ModelProto, output: str) -> ModelProto:
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


def _add_prefix(graph: GraphProto) -> None:
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
            _add_prefix(inner)


def _free_batch(graph: GraphProto, batch: int) -> None:
    """Let reshapes of what is computed from the images keep the number of images, in place."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    values = {graph.input[0].name}
    for number, node in enumerate(graph.node):
        if node.op_type == "Constant" and node.attribute[0].HasField("t"):
            constants[node.output[0]] = node.attribute[0].t
        if values.isdisjoint(_reads(node)):
            continue
        values.update(node.output)
        if node.op_type != "Reshape" or node.input[0] not in values:
            continue
        keeps_zeros = any(x.name == "allowzero" and x.i for x in node.attribute)
        if len(node.input) < 2 or node.input[1] not in constants or keeps_zeros:
            continue
        shape = to_array(constants[node.input[1]])
        if len(shape) > 1 and shape[0] == batch:
            free = np.array([0, *shape[1:]], np.int64)  # 0: as before
            node.input[1] = f"{node.input[1]}.free.{number}"
            graph.initializer.append(from_array(free, node.input[1]))
    graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"


def _modern(model: ModelProto, path: Path) -> ModelProto:
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
            f"{OPSET} ({_reason(error)}). Export the model with opset {OPSET} or newer."
        ) from error


def _chain(first: str, last: str, steps: list[_Step]) -> tuple[list[NodeProto], list[TensorProto]]:
    """Nodes that compute the value `last` from `first` step by step, and their constants."""
    nodes: list[NodeProto] = []
    tensors: list[TensorProto] = []
    for number, (kind, values, attributes) in enumerate(steps):
        name = f"{first}.{number}.{kind.lower()}"
        made = [from_array(np.asarray(x), f"{name}.{n}") for n, x in enumerate(values)]
        read = [nodes[-1].output[0] if nodes else first, *(x.name for x in made)]
        output = last if number == len(steps) - 1 else name
        nodes.append(helper.make_node(kind, read, [output], name, **attributes))
        tensors += made
    return nodes, tensors


def _difference(graph: Path, expected: Embeddings, images: Images) -> float:
    """The largest difference of the graph from expected vectors (N, D), on one batch of each of the
    sizes `BATCHES`. Raises: ExportError.
    """
    try:
        session = create_session(graph, _settings())
    except BundleError as error:
        raise ExportError(f"the graph with the added nodes is not valid: {error}") from error
    worst, start = 0.0, 0
    for size in BATCHES:
        rows = slice(start, start + size)
        start += size
        try:
            (vectors,) = session.run(None, {"images": images[rows]})
        except Exception as error:
            raise ExportError(f"it fails on a batch of {size} images: {_reason(error)}.") from error
        if vectors.shape != expected[rows].shape:
            raise ExportError(
                f"it gives {vectors.shape} for {size} images, not {expected[rows].shape}."
            )
        found = float(np.nan_to_num(np.abs(vectors - expected[rows]).max(), nan=np.inf))
        if found > MAX_DIFFERENCE:
            where = "differs from that of the file" if size == 1 else "depends on its batch"
            raise ExportError(
                f"the vector of an image {where}: in a batch of {size} it differs by {found:.1e}, "
                f"allowed is {MAX_DIFFERENCE:.0e}."
            )
        worst = max(worst, found)
    return worst
