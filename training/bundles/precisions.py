"""int8 for the CPU and fp16 for the GPU: made, then compared with fp32.

Only the trunk changes. The normalisation of the pixels, pooling, projection, flow and the L2
normalisation stay in float32. They take little time and determine the unit norm.
See docs/decisions/0022.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.engines.models import SessionSettings, absence
from kinlens.embedder.errors import BundleError, ExportError
from kinlens.embedder.machine import core_count
from kinlens.embedder.manifest import Comparison, Engine, FilePrecision, HeldOut, Mode, Precision
from kinlens.embedder.preprocess import ImageLimits
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.types import Embeddings, Images
from kinlens.training.bundles.graph import write_onnx
from kinlens.training.bundles.int8 import quantize_int8, range_images
from kinlens.training.data.records import LabelledImages
from kinlens.training.data.samplers import times_before
from kinlens.training.evaluation.retrieval import Retrieval, retrieval
from kinlens.training.models.embedding import EmbeddingNet
from kinlens.training.models.onnx_trunk import OnnxTrunk

MAX_RECALL_LOSS = 0.5
"""Points of R@1 that a precision may lose; more if the loss may be chance."""

MAX_UNSURE_LOSS = 2.0
"""Limit in points even then: on few images nearly every loss may be chance."""

_Z95 = 1.96

MIN_COSINE = 0.98
"""Minimum mean cosine to fp32 on held-out images."""

OnRefusal = Callable[[Precision, str], None]


@dataclass
class Candidate:
    """A mode that may go into the bundle.

    Attributes:
        model: its ONNX file; None for the fp32 file.
        fault: what failed first, after which the mode is not tried any more.
        comparison: with fp32, once measured.
    """

    mode: Mode
    model: Path | None = None
    fault: ExportError | None = None
    comparison: Comparison | None = None
    embedder: OnnxEmbedder = field(init=False)

    @property
    def has_own_file(self) -> bool:
        """Whether it represents its file in the manifest, as onnxruntime does."""
        return self.model is not None and self.mode.engine == "onnxruntime"

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A block whose errors are the fault of this mode."""
        try:
            yield
        except ExportError as error:
            self.fault = error
        except BundleError as error:
            self.fault = ExportError(f"The network does not work in {self.mode}: {error}")

    def open(self, bundle: Bundle, model: Path | None) -> None:
        """Run `model`, or that of the `bundle`, and check its golden vectors."""
        self.model, settings = model, SessionSettings(threads=core_count())
        with self.attempt():
            self.embedder = OnnxEmbedder.checked(bundle, settings, ImageLimits(), self.mode, model)

    def embed(self, images: Images) -> Embeddings:
        """Vectors (N, D); NaN from the first image on which the network breaks."""
        if self.fault is None:
            with self.attempt():
                return self.embedder.embed(images)
        return np.full((len(images), self.embedder.dim), np.nan, np.float32)

    @cached_property
    def golden(self) -> Embeddings:
        """Its vectors of the golden images (N, D). Raises: BundleError."""
        return self.embedder.embed(self.embedder.bundle.golden_inputs())

    def measure(
        self, page: HeldOut, labels: NDArray[np.int64], fp32: Embeddings, vectors: Embeddings
    ) -> None:
        """Compare the mode with fp32, as `compare` does."""
        if self.fault is None:
            with self.attempt():
                cosines = (self.golden * self.embedder.bundle.golden_vectors()).sum(axis=1)
                self.comparison = compare(self.mode, cosines, page, labels, fp32, vectors)


def open_candidates(
    net: EmbeddingNet, precisions: Sequence[Precision], bundle: Bundle, train: LabelledImages
) -> list[Candidate]:
    """The modes of these precisions on this machine, checked on the golden images of `bundle`.

    bf16 needs no file, so it is tried wherever it runs, requested or not. A file that fails in
    onnxruntime is not tried in OpenVINO.
    """
    candidates: list[Candidate] = []
    for precision in dict.fromkeys((*precisions, "bf16")):
        if precision == "fp32":
            continue
        modes = [Mode(engine, precision) for engine in get_args(Engine)]
        if precision == "fp16":
            modes = modes[:1]  # OpenVINO does not run on a GPU
        missing = {mode: absence(mode) for mode in modes}
        able = [mode for mode in modes if missing[mode] is None]
        if not able and precision not in precisions:
            continue
        tried = [Candidate(mode) for mode in able or modes[:1]]
        with tried[0].attempt():
            if not able:
                raise ExportError(" ".join(filter(None, missing.values())))
            model = None if precision == "bf16" else make_file(precision, net, bundle, train)
            for candidate in tried:
                if tried[0].fault is None:
                    candidate.open(bundle, model)
        candidates += tried
    return candidates


def accepted(
    candidates: Sequence[Candidate], asked: Sequence[Precision], on_refusal: OnRefusal | None
) -> list[Candidate]:
    """The candidates without a fault; a precision is refused if its first engine has one.

    A precision that was `asked` for ends the export then, unless `on_refusal` takes the reason.

    Raises: ExportError.
    """
    kept: list[Candidate] = []
    is_refused: dict[Precision, bool] = {}
    for candidate in candidates:
        precision, fault = candidate.mode.precision, candidate.fault
        is_first = precision not in is_refused
        if is_first:
            is_refused[precision] = fault is not None
        elif is_refused[precision]:
            continue
        if fault is None:
            kept.append(candidate)
        elif on_refusal is not None:
            refused = precision if is_first else candidate.mode
            on_refusal(precision, f"{refused} is skipped: {fault}")
        elif is_first and precision in asked:
            raise ExportError(
                f"{fault} No bundle was written; export without --precision {precision}, or with "
                "--skip-refused."
            ) from fault
    return kept


def make_file(
    precision: FilePrecision, net: EmbeddingNet, bundle: Bundle, train: LabelledImages
) -> Path:
    """Write `net` next to its `bundle`; int8 takes its ranges from `train`. Raises: ExportError."""
    path = bundle.path.parent / f"{precision}.onnx"
    spec = bundle.manifest.preprocessing
    if precision == "fp16":
        if isinstance(net.trunk, OnnxTrunk):
            raise ExportError(
                "An imported network has no fp16 version. Export it in fp32 or int8, or import a "
                "file in float16."
            )
        half = with_half_trunk(net)
        try:
            write_onnx(half, spec.crop_px, path)
        except Exception as error:  # the exporter has many, and fp32 should still be written
            raise ExportError(f"The network cannot be exported in fp16: {error}") from error
    else:
        quantize_int8(bundle.model_path, range_images(train, spec), path)
    return path


def with_half_trunk(net: EmbeddingNet) -> EmbeddingNet:
    """A copy of `net` whose trunk computes in fp16; all else stays in float32.

    Raises: ExportError for a weight beyond fp16.
    """
    half = copy.deepcopy(net)
    half.trunk.half()
    for name, weight in half.trunk.state_dict().items():
        if not weight.isfinite().all():
            raise ExportError(
                f"The weight {name} of the network is beyond the range of fp16, 65,504. Export it "
                "in fp32 or int8."
            )
    return half


def compare(
    mode: Mode,
    cosines: NDArray[np.float32],
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
    recall of fp32; labels are (N,), `fp32` and `vectors` (N, D), `cosines` those of golden images.

    Raises: ExportError, also if the mean cosine to fp32 is below 0.98.
    """
    images = f"{len(labels):,} {page.split} images"
    cosine = float((vectors * fp32).sum(axis=1).mean())
    if not cosine >= MIN_COSINE:
        raise ExportError(
            f"The mean cosine between {mode} and fp32 is {cosine:.4f} on the {images}; "
            f"it must be at least {MIN_COSINE}."
        )
    ks = [int(name.removeprefix("R@")) for name in page.recall]
    own, plain = retrieval(vectors, labels, ks=ks), retrieval(fp32, labels, ks=ks)
    asks = times_before(labels) % 2 == 0

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
                f"Right first results fall by {loss:.2f} points ({low:.2f} to {high:.2f}) from "
                f"fp32 to {mode}{where}, on the {images}; the limit is {MAX_RECALL_LOSS} points."
            )
    alone, mixed, gallery = losses.values()
    return Comparison(
        recall=own.recall_by_name(),
        recall_at_1_loss=alone[0],
        recall_at_1_interval=alone[1:],
        mixed_recall_at_1_loss=mixed[0],
        gallery_recall_at_1_loss=gallery[0],
        held_out_cosine=cosine,
        min_cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
    )


def _paired_loss(before: Retrieval, after: Retrieval) -> tuple[float, float, float]:
    """Loss in points of R@1 on the same queries, with its 95 % interval (normal, paired)."""
    lost = ((before.ranks == 0).double() - (after.ranks == 0).double())[before.ranks >= 0].numpy()
    mean, error = 100 * lost.mean(), 100 * lost.std() / math.sqrt(len(lost))
    return float(mean), float(mean - _Z95 * error), float(mean + _Z95 * error)
