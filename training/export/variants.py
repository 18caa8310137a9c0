"""The other precisions of a bundle: made, compared with fp32 on held-out images, or refused."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedder.bundle import Bundle, VariantFiles
from embedder.errors import BundleError, ExportError
from embedder.manifest import HeldOut, OtherPrecision, Variant
from embedder.precision import golden_fault
from embedder.preprocess import ImageLimits
from embedder.session import OnnxEmbedder, SessionSettings, create_session
from embedder.types import Embeddings, Images
from training.data.records import LabelledImages
from training.evaluation.retrieval import retrieval
from training.export.half import convert_fp16
from training.export.quantize import calibration_images, quantize_int8

MAX_RECALL_LOSS = 0.5
"""Points of R@1 that a precision may lose."""

OnRefusal = Callable[[str], None]
EmbedHeldOut = Callable[[Callable[[Images], Embeddings]], Embeddings]


@dataclass(frozen=True)
class Reference:
    """fp32 on the held-out images: `page` for the manifest, `labels` (N,), `vectors` (N, D).

    `embed` makes the vectors of the same images by another model.
    """

    page: HeldOut
    labels: NDArray[np.int64]
    vectors: Embeddings
    embed: EmbedHeldOut


@dataclass(frozen=True)
class Made:
    """A precision that passed: its page of the manifest and its files."""

    page: Variant
    files: VariantFiles


def make_variants(
    precisions: Iterable[OtherPrecision],
    bundle: Bundle,
    reference: Reference,
    train: LabelledImages,
    folder: Path,
    on_refusal: OnRefusal | None = None,
) -> dict[OtherPrecision, Made]:
    """Convert the fp32 model of `bundle` and measure what comes out.

    Args:
        precisions: which ones.
        bundle: with its fp32 model.
        reference: fp32 on the held-out images.
        train: a random choice of these training images gives int8 its ranges.
        folder: for the files.
        on_refusal: told why a precision is refused, which is then left out.

    Raises: without `on_refusal`, ExportError if one loses more than 0.5 points of R@1, has other
        golden vectors than fp32 on this machine, or cannot be made.
    """
    made = {}
    for precision in dict.fromkeys(precisions):
        try:
            made[precision] = _made(precision, bundle, reference, train, folder)
        except ExportError as error:
            if on_refusal is None:
                raise ExportError(
                    f"{error} No bundle was written; export without --precision {precision}, or "
                    "with --skip-refused."
                ) from error
            on_refusal(f"{precision} is left out: {error}")
    return made


def _made(
    precision: OtherPrecision,
    bundle: Bundle,
    reference: Reference,
    train: LabelledImages,
    folder: Path,
) -> Made:
    path = folder / f"{precision}.onnx"
    if precision == "int8":
        pixels = calibration_images(train, bundle.manifest.preprocessing)
        quantize_int8(bundle.model_path, pixels, path)
    else:
        convert_fp16(bundle.model_path, path)
    return _measured(precision, bundle, reference, path)


def _measured(precision: OtherPrecision, bundle: Bundle, reference: Reference, path: Path) -> Made:
    session = create_session(path, SessionSettings(threads=os.cpu_count() or 1))
    embedder = OnnxEmbedder(bundle, session, ImageLimits(), precision)
    expected = bundle.golden_vectors()
    try:
        golden = embedder.embed(bundle.golden_inputs())
        fault = golden_fault(precision, golden, golden, expected)
        if fault is not None:
            need = ""
            if precision == "int8":
                need = (
                    " Either this processor has no VNNI, which int8 needs, or 8 bits are too few "
                    'for this network: start.projection = "trunk" magnifies small '
                    "directions, and their rounding."
                )
            raise ExportError(
                f"The golden vectors of {precision} do not hold on this machine: {fault}.{need}"
            )
        vectors = reference.embed(embedder.embed)
    except BundleError as error:
        raise ExportError(f"The network does not work in {precision}: {error}") from error
    cosines = (golden * expected).sum(axis=1)
    return Made(compare(precision, reference, vectors, cosines), VariantFiles(path, golden))


def compare(
    precision: OtherPrecision,
    reference: Reference,
    vectors: Embeddings,
    golden_cosines: NDArray[np.float32],
) -> Variant:
    """Recall of a precision beside that of fp32, on the same images.

    **Reading**: a gallery and its queries may be embedded in different precisions, since the bundle
    is one. That loss is measured too, every second image of a class as query, and told; the gate is
    on the loss within the precision.

    Raises: ExportError if R@1 falls by more than 0.5 points.
    """
    labels, before = reference.labels, reference.page.recall["R@1"]
    ks = [int(name.removeprefix("R@")) for name in reference.page.recall]
    recall = retrieval(vectors, labels, ks=ks).recall_by_name()
    if before - recall["R@1"] > MAX_RECALL_LOSS:
        raise ExportError(
            f"R@1 falls from {before:.2f} in fp32 to {recall['R@1']:.2f} in {precision} on the "
            f"{len(labels):,} {reference.page.split} images; allowed is a loss of "
            f"{MAX_RECALL_LOSS} points."
        )
    asks = every_second(labels)

    def in_fp32(queries: Embeddings) -> float:
        """R@1 of queries in an fp32 gallery."""
        gallery = reference.vectors[~asks]
        return retrieval(queries[asks], labels[asks], gallery, labels[~asks], ks=(1,)).recall[1]

    return Variant(
        sha256="",
        recall=recall,
        recall_at_1_loss=before - recall["R@1"],
        mixed_recall_at_1_loss=in_fp32(reference.vectors) - in_fp32(vectors),
        min_cosine=float(golden_cosines.min()),
        mean_cosine=float(golden_cosines.mean()),
    )


def every_second(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The first, third, ... image of each class: (N,)."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    place = np.arange(len(labels)) - np.searchsorted(ordered, ordered)
    chosen = np.empty(len(labels), dtype=np.bool_)
    chosen[order] = place % 2 == 0
    return chosen
