"""int8 for the CPU and fp16 for the GPU: converted from the fp32 file, then compared with it.

Only the trunk changes. The normalisation of the pixels, pooling, projection, flow and the L2
normalisation stay in float32. They take little time and determine the unit norm.
See docs/decisions/0006.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pandas as pd
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.engines.models import SessionSettings, load
from kinlens.embedder.errors import BundleError, ExportError
from kinlens.embedder.manifest import Comparison, FilePrecision, HeldOut, Mode
from kinlens.embedder.preprocess import ImageLimits
from kinlens.embedder.session import OnnxEmbedder, golden_fault
from kinlens.embedder.types import Embeddings, Images
from kinlens.training.data.records import LabelledImages
from kinlens.training.evaluation.retrieval import Retrieval, retrieval
from kinlens.training.export.int8 import quantize_int8, range_images
from kinlens.training.export.graph import trunk_nodes

MAX_RECALL_LOSS = 0.5
"""Points of R@1 that a precision may lose; more if the loss may be chance."""

MAX_UNSURE_LOSS = 2.0
"""Limit in points even then: on few images nearly every loss may be chance."""

_Z95 = 1.96
_LARGEST = float(np.finfo(np.float16).max)
_NO_FP16 = frozenset(("ConstantOfShape", "Range", "Resize"))
"""Operators whose float inputs or outputs have no fp16 form."""

MIN_COSINE = 0.98
"""Minimum mean cosine to fp32 on held-out images."""


@dataclass
class Candidate:
    """A mode with correct golden vectors on this machine, not yet measured on images.

    `model` is its ONNX file, None for the fp32 file. `fault` is the error on an image; after it all
    vectors are NaN.
    """

    mode: Mode
    model: Path | None
    golden: Embeddings
    cosines: NDArray[np.float32]
    embedder: OnnxEmbedder
    fault: BundleError | None = None

    def embed(self, images: Images) -> Embeddings:
        if self.fault is None:
            try:
                return self.embedder.embed(images)
            except BundleError as error:
                self.fault = error
        return np.full((len(images), self.embedder.dim), np.nan, np.float32)


def make_file(
    precision: FilePrecision, bundle: Bundle, train: LabelledImages, folder: Path
) -> Path:
    """Convert the fp32 model; int8 takes its ranges from `train`. Raises: ExportError."""
    path = folder / f"{precision}.onnx"
    if precision == "fp16":
        convert_fp16(bundle.model_path, path)
    else:
        ranges = range_images(train, bundle.manifest.preprocessing)
        quantize_int8(bundle.model_path, ranges, path)
    return path


def make_candidate(mode: Mode, bundle: Bundle, model: Path | None) -> Candidate:
    """Run a model in `mode`, and check its golden vectors. Raises: ExportError."""
    settings = SessionSettings(threads=os.cpu_count() or 1)
    expected = bundle.golden_vectors()
    try:
        loaded = load(model or bundle.model_path, settings, mode)
        embedder = OnnxEmbedder(bundle, loaded, ImageLimits(), mode)
        golden = embedder.embed(bundle.golden_inputs())
    except BundleError as error:
        raise _broken(mode, error) from error
    fault = golden_fault(mode.precision, golden, golden, expected)
    if fault is not None:
        need = " This processor may lack VNNI." if mode.precision == "int8" else ""
        raise ExportError(f"The golden vectors of {mode} are wrong on this machine: {fault}.{need}")
    cosines = (golden * expected).sum(axis=1)
    return Candidate(mode, model, golden, cosines, embedder)


def compare(
    candidate: Candidate,
    page: HeldOut,
    labels: NDArray[np.int64],
    fp32: Embeddings,
    vectors: Embeddings,
) -> Comparison:
    """Recall of a mode compared with the recall of fp32, on the same images.

    A gallery and its queries may be embedded in different precisions, so the loss is measured for
    each pair: both in this mode, and one of them in fp32, where every second image of a class is a
    query. A loss above 0.5 points fails unless it may be chance: its paired 95 % interval must
    include 0, and it may be 2 points at most, or two queries if these are more. `page` has the
    recall of fp32; labels are (N,), `fp32` and `vectors` (N, D).

    Raises: ExportError, also if the mean cosine to fp32 is below 0.98, or if the network broke on
        an image.
    """
    mode = candidate.mode
    if candidate.fault is not None:
        raise _broken(mode, candidate.fault)
    images = f"{len(labels):,} {page.split} images"
    cosine = float((vectors * fp32).sum(axis=1).mean())
    if not cosine >= MIN_COSINE:
        raise ExportError(
            f"The mean cosine between {mode} and fp32 is {cosine:.4f} on the {images}; "
            f"it must be at least {MIN_COSINE}."
        )
    ks = [int(name.removeprefix("R@")) for name in page.recall]
    own, plain = retrieval(vectors, labels, ks=ks), retrieval(fp32, labels, ks=ks)
    asks = pd.Series(labels).groupby(labels).cumcount().to_numpy() % 2 == 0

    def asked(queries: Embeddings, gallery: Embeddings) -> Retrieval:
        return retrieval(queries[asks], labels[asks], gallery[~asks], labels[~asks], ks=(1,))

    both = asked(fp32, fp32)
    pairs = {
        "": (plain, own),
        ", as queries of a gallery in fp32": (both, asked(vectors, fp32)),
        ", as a gallery of queries in fp32": (both, asked(fp32, vectors)),
    }
    losses = {where: _paired_loss(*pair) for where, pair in pairs.items()}
    for where, (loss, low, high) in losses.items():
        queries = pairs[where][0].queries
        too_much = max(MAX_UNSURE_LOSS, 100 * 2.5 / queries)
        if loss > MAX_RECALL_LOSS and (low > 0 or loss > too_much):
            raise ExportError(
                f"R@1 falls by {loss:.2f} points ({low:.2f} to {high:.2f}) from fp32 to {mode}"
                f"{where}, on the {images}; the limit is {MAX_RECALL_LOSS} points."
            )
    alone, mixed, gallery = losses.values()
    return Comparison(
        recall=own.recall_by_name(),
        recall_at_1_loss=alone[0],
        recall_at_1_interval=alone[1:],
        mixed_recall_at_1_loss=mixed[0],
        gallery_recall_at_1_loss=gallery[0],
        held_out_cosine=cosine,
        min_cosine=float(candidate.cosines.min()),
        mean_cosine=float(candidate.cosines.mean()),
    )


def _paired_loss(before: Retrieval, after: Retrieval) -> tuple[float, float, float]:
    """Loss in points of R@1 on the same queries, with its 95 % interval (normal, paired)."""
    lost = ((before.ranks == 0).double() - (after.ranks == 0).double())[before.ranks >= 0].numpy()
    mean, error = 100 * lost.mean(), 100 * lost.std() / math.sqrt(len(lost))
    return float(mean), float(mean - _Z95 * error), float(mean + _Z95 * error)


def _broken(mode: Mode, error: BundleError) -> ExportError:
    return ExportError(f"The network does not work in {mode}: {error}")


# fp16


def convert_fp16(model: Path, out: Path) -> None:
    """Write the fp16 version of an fp32 model: same inputs and outputs, float32 around the trunk.

    Node-by-node converters cast to fp16 and back between neighbours that should stay in float32,
    which rounds the norm of an embedding. Here casts are only at the border of the trunk.

    Raises: ExportError if the graph has no trunk or a weight is beyond the range of fp16.
    """
    content = onnx.shape_inference.infer_shapes(onnx.load(model))
    graph = content.graph
    names = set(trunk_nodes(content))
    trunk = [n for n in graph.node if n.name in names and n.op_type not in _NO_FP16]
    inside = {node.name for node in trunk}
    others = [node for node in graph.node if node.name not in inside]

    weights = {t.name: t for t in graph.initializer if t.data_type == TensorProto.FLOAT}
    values = (*graph.value_info, *graph.input, *graph.output)
    floats = {v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    floats |= weights.keys()
    made = floats & {name for node in trunk for name in node.output}
    read = floats & {name for node in trunk for name in node.input}
    read_outside = {name for node in others for name in node.input} | {o.name for o in graph.output}
    enters, leaves = read - made - weights.keys(), made & read_outside

    half = {name: f"{name}.fp16" for name in enters | leaves | (read & weights.keys())}
    for node in trunk:
        node.input[:] = [half.get(name, name) for name in node.input]
        node.output[:] = [half.get(name, name) for name in node.output]
        for attribute in node.attribute:
            if (node.op_type, attribute.name, attribute.i) == ("Cast", "to", TensorProto.FLOAT):
                attribute.i = TensorProto.FLOAT16
    kept = [t for t in graph.initializer if t.name not in read - read_outside]
    kept += [_in_fp16(weights[name], half[name]) for name in sorted(read & weights.keys())]
    nodes = list(_with_casts(graph, enters, leaves))
    for field, content_of_field in ((graph.initializer, kept), (graph.node, nodes)):
        del field[:]
        field.extend(content_of_field)
    del graph.value_info[:]
    onnx.checker.check_model(content, full_check=True)
    onnx.save(content, out)


def _in_fp16(weight: TensorProto, name: str) -> TensorProto:
    values = numpy_helper.to_array(weight)
    largest = float(np.abs(values).max(initial=0))
    if not largest <= _LARGEST:
        raise ExportError(
            f"The weight {weight.name} reaches {largest:.3g}, above {_LARGEST:.0f} of fp16. "
            "Export it in fp32 or int8."
        )
    return numpy_helper.from_array(values.astype(np.float16), name)


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
