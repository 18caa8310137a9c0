"""Turn an ONNX file that others made into the graph of a bundle, and check its vectors.

Nodes are added that scale the pixels, pool maps or tokens, and divide each vector by its norm.

Shapes: N images, S pixels a side, C channels, T tokens, D dimensions.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper
from onnx.numpy_helper import from_array

from kinlens.embedder.engines.models import SessionSettings, create_session
from kinlens.embedder.errors import BundleError, ExportError
from kinlens.embedder.machine import core_count
from kinlens.embedder.manifest import Parity
from kinlens.embedder.types import Embeddings, Images
from kinlens.training.bundles.onnx_graph import (
    TRUNK,
    add_prefix,
    choose_output,
    free_batch,
    load_whole,
    modernize,
    reason_of,
    reduce_to,
)

BATCHES = (1, 2, 5)
MAX_DIFFERENCE = 1e-4
"""Per coordinate, between the graph of the bundle and the file that gets one image at a time."""

_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.UINT8)
_RANKS = {"none": 2, "cls": 3, "mean": 3, "gap": 4}
_LEAST_NORM = 1e-12
_EQUAL = 1e-6  # the rounding of a coordinate

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
        whole = load_whole(path)
        self.output = choose_output(whole, reading.output, path)
        self.model = reduce_to(whole, self.output)
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
                f"{reason_of(error)}. Check --size, or export the model again."
            ) from error
        if not all(isinstance(x, np.ndarray) for x in found):
            raise ExportError(
                f"The output {self.output!r} of {self.path} is a sequence or a map, but an "
                "embedding is a tensor. Pass another --output."
            )
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
            free_batch(model.graph, self.batch)
        model = modernize(model, self.path)
        network = model.graph
        add_prefix(network)
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
            raise ExportError(f"it fails on a batch of {size}: {reason_of(error)}.") from error
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
