"""A tiny bundle with all that a manifest can hold."""

from pathlib import Path

import numpy as np

from kinlens.embedder.bundle import Bundle, model_name, write_bundle
from kinlens.embedder.calibration import Calibration, Curve, Threshold, ViewsCurve
from kinlens.embedder.manifest import HeldOut, Mode, Variant
from kinlens.embedder.types import Images
from tests.tiny import TINY, tiny_embed, write_tiny_onnx

CURVE = Curve(slope=12.0, hits=0.5, below=1.0, absent=4.0, absent_best=2.0, absent_last=4.0)
CALIBRATION = Calibration(
    thresholds=(Threshold(false_matches=0.01, pair_score=0.5, search_score=0.75),),
    split="validation",
    gallery_images=40,
    queries=40,
    negative_pairs=700,
    curves=(ViewsCurve(views=2, products=6, wrong_hits=300, curve=CURVE),),
)
HELD_OUT = HeldOut(split="validation", images=40, recall={"R@1": 80.0})
INT8 = Variant(
    sha256="",
    recall={"R@1": 79.8},
    recall_at_1_loss=0.2,
    recall_at_1_interval=(-0.2, 0.6),
    mixed_recall_at_1_loss=0.1,
    gallery_recall_at_1_loss=0.1,
    held_out_cosine=0.99,
    min_cosine=0.98,
    mean_cosine=0.99,
)


def random_images(count: int) -> Images:
    rng = np.random.default_rng(3)
    return rng.integers(0, 256, (count, 3, TINY.crop_px, TINY.crop_px), dtype=np.uint8)


def write_full_bundle(tiny: Bundle, folder: Path, seed: float = 0.05) -> Bundle:
    """The tiny bundle; in the place of int8 the tiny model of `seed`, by default a near one."""
    manifest = tiny.manifest.model_copy(
        update={"held_out": HELD_OUT, "variants": {"int8": INT8}, "calibration": CALIBRATION}
    )
    inputs = tiny.golden_inputs()
    write_tiny_onnx(folder / "int8.onnx", seed)
    return write_bundle(
        folder / "full",
        manifest,
        tiny.model_path,
        tiny.golden_images(),
        inputs,
        tiny.golden_vectors(),
        {model_name("int8"): folder / "int8.onnx"},
        {Mode("onnxruntime", "int8"): tiny_embed(inputs, seed)},
    )
