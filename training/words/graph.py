"""The ONNX file of a text tower that was taught: a text encoder, its pooling, and the taught map.

Shapes: N texts, T tokens, H numbers of the encoder, D of an image vector. All added nodes mean the
same in every operator set, so the file keeps that of the encoder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from kinlens.embedder.engines.models import SessionSettings, create_session
from kinlens.embedder.errors import BundleError, ExportError
from kinlens.embedder.views.text import IDS, MASK
from kinlens.training.words.taught import WordMap

OUTPUT = "embeddings"

_TYPES = "token_type_ids"
_ADDED = "kinlens_"  # no node of an encoder begins so


def write_tower(encoder: Path, out: Path, head: WordMap | None = None) -> int:
    """Write the tower of a text encoder: int64 (N, T) ids and mask to float32 unit vectors.

    Without `head` the vectors are those of the encoder, (N, H): the mean over the tokens, or its
    own output if that has no tokens. With `head` they are (N, D).

    Returns: H.

    Raises: ExportError if the file is not an encoder of texts.
    """
    size, has_tokens = _examine(encoder)
    try:
        model = onnx.load(encoder)
    except Exception as error:
        raise ExportError(f"{encoder} cannot be read: {error}.") from error
    graph = model.graph
    source = graph.output[0].name
    nodes = []
    constants: dict[str, NDArray[Any]] = {}
    if any(each.name == _TYPES for each in graph.input):
        kept = [each for each in graph.input if each.name != _TYPES]
        del graph.input[:]
        graph.input.extend(kept)
        constants["zero"] = np.array(0, np.int64)
        graph.node.insert(0, helper.make_node("Mul", [IDS, f"{_ADDED}zero"], [_TYPES]))
    if has_tokens:
        # The sum over the tokens: its norm is divided by later, which is that of the mean as well.
        constants["row"] = np.array([0, 1, -1], np.int64)
        constants["flat"] = np.array([0, -1], np.int64)
        nodes += [
            _node("Cast", MASK, "mask", to=TensorProto.FLOAT),
            _node("Reshape", "mask row", "mask_row"),
            helper.make_node("MatMul", [f"{_ADDED}mask_row", source], [f"{_ADDED}sum"]),
            _node("Reshape", "sum flat", "pooled"),
        ]
        source = f"{_ADDED}pooled"
    last = OUTPUT if head is None else f"{_ADDED}features"
    nodes.append(helper.make_node("LpNormalization", [source], [last], axis=-1, p=2))
    if head is not None:
        constants |= {"weight": head.weight, "bias": head.bias}
        nodes += [
            _node("MatMul", "features weight", "product"),
            _node("Add", "product bias", "mapped"),
            helper.make_node("LpNormalization", [f"{_ADDED}mapped"], [OUTPUT], axis=-1, p=2),
        ]
        size_out = head.weight.shape[1]
    else:
        size_out = size
    graph.node.extend(nodes)
    graph.initializer.extend(
        numpy_helper.from_array(value, f"{_ADDED}{name}") for name, value in constants.items()
    )
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["n", size_out]))
    onnx.save(model, out)
    return size


def _node(kind: str, inputs: str, output: str, **options: Any) -> onnx.NodeProto:
    """A node between values of our own; the mask is an input of the graph."""
    named = [name if name == MASK else f"{_ADDED}{name}" for name in inputs.split()]
    return helper.make_node(kind, named, [f"{_ADDED}{output}"], **options)


def _examine(encoder: Path) -> tuple[int, bool]:
    """H, and whether the output has a vector for each token. Raises: ExportError."""
    try:
        session = create_session(encoder, SessionSettings())
    except BundleError as error:
        raise ExportError(str(error)) from error
    given = {each.name: each.type for each in session.get_inputs()}
    if not {IDS, MASK} <= given.keys() <= {IDS, MASK, _TYPES} or {*given.values()} != {
        "tensor(int64)"
    }:
        found = ", ".join(f"{name}: {kind}" for name, kind in given.items())
        raise ExportError(
            f"{encoder} has the inputs {found}. A text encoder has {IDS}, {MASK} and perhaps "
            f"{_TYPES}, each int64 (texts, tokens), as encoders of Hugging Face are exported."
        )
    trial = np.ones((2, 3), np.int64)
    try:
        output = session.run(None, dict.fromkeys(given, trial))[0]
    except Exception as error:
        raise ExportError(f"{encoder} fails on two texts of three tokens: {error}.") from error
    shape: Sequence[int] = output.shape
    if output.dtype != np.float32 or shape[:-1] not in ((2,), (2, 3)):
        raise ExportError(
            f"{encoder} makes {output.dtype} {tuple(shape)} of two texts of three tokens. A text "
            "encoder makes float32 (texts, tokens, numbers) or (texts, numbers)."
        )
    return shape[-1], len(shape) == 3
