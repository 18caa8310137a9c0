"""Cost of engines, precisions and trunks: one image, one thread.

    python benchmarks/engines.py [--rounds 20] [--trunks mobilenet_v2 resnet50]
    python benchmarks/engines.py trunks [--rounds 40] [--only mobilenetv4]

The first shows the speedup of each mode over fp32 in onnxruntime at 224 px; a mode that this
machine lacks is listed with the reason. Targets: bf16 1.8 if the processor has units for it, int8
1.7 if it has VNNI. The second shows the CPU time of the trunks of docs/models.md, each at its own
size, in multiples of MobileNetV2 in fp32 at 224 px.

Weights are random, since time does not depend on them, so nothing is downloaded. A trunk is
exported as in a bundle, and quantized to int8 as in an export. Contestants run in turns, in a new
random order each round, so that noise on the machine affects all alike. Figures are medians over
rounds of the ratio within a round. With --folder the ONNX files stay for the next run.
"""

import re
import statistics
import tempfile
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from harness import heading, in_turns, options, ratio, row, verdict

from kinlens.embedder.engines.models import SessionSettings, absence, load
from kinlens.embedder.manifest import FP32, Engine, Mode, Precision
from kinlens.embedder.preprocess import to_chw
from kinlens.embedder.types import Images
from kinlens.rendered.catalogue import render_view
from kinlens.training.bundles.bundle import write_onnx
from kinlens.training.bundles.int8 import quantize_int8
from kinlens.training.config.settings import Model
from kinlens.training.models.embedding import EmbeddingNet

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
ROW = re.compile(r"^\| `([^`]+)` \| (\d+) \| ", re.MULTILINE)
REFERENCE, SIZE_PX, WARM_UP = "mobilenet_v2", 224, 3
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
TARGETS = {"bf16": 1.8, "int8": 1.7}
ONNXRUNTIME_INT8 = Mode(FP32.engine, "int8")


def main() -> None:
    args = options(
        __doc__, "part", part="engines", rounds=20, trunks=[REFERENCE, "resnet50"], only="",
        folder=None,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        (of_trunks if args.part == "trunks" else of_engines)(args, folder)


def of_engines(args: Namespace, folder: Path) -> None:
    """Each trunk in all modes that this machine has."""
    modes = []
    for mode in [Mode(engine, one) for one in PRECISIONS for engine in get_args(Engine)]:
        if (reason := absence(mode)) is None:
            modes.append(mode)
        else:
            print(f"skipped: {mode}: {reason}")
    best: dict[tuple[str, str], float] = {}
    heading("trunk", f"ms, {FP32}", *map(str, modes[1:]))
    for trunk in args.trunks:
        runs = {str(mode): runner(folder, trunk, SIZE_PX, mode) for mode in modes}
        seconds = in_turns(runs, args.rounds, warm_up=WARM_UP)
        gains = {mode: ratio(seconds[str(FP32)], seconds[str(mode)]) for mode in modes[1:]}
        row(f"`{trunk}`", 1e3 * statistics.median(seconds[str(FP32)]), *gains.values())
        for mode, gain in gains.items():
            key = trunk, mode.precision
            best[key] = max(gain, best.get(key, 0.0))
    for (trunk, precision), gain in best.items():
        if precision in TARGETS:
            verdict(f"{trunk} in {precision}, times fp32", gain, TARGETS[precision])


def of_trunks(args: Namespace, folder: Path) -> None:
    """Each trunk of the page in fp32 and int8, next to MobileNetV2."""
    reference = runner(folder, REFERENCE, SIZE_PX, FP32)
    heading("trunk", "size, px", "fp32", "int8", "ms, fp32")
    for name, side in ROW.findall(PAGE.read_text(encoding="utf-8")):
        if args.only in name:
            modes = {"fp32": FP32, "int8": ONNXRUNTIME_INT8}
            runs = {kind: runner(folder, name, int(side), mode) for kind, mode in modes.items()}
            seconds = in_turns(runs | {"1": reference}, args.rounds, time.thread_time, WARM_UP)
            ratios = (ratio(seconds[kind], seconds["1"]) for kind in modes)
            row(f"`{name}`", side, *ratios, 1e3 * statistics.median(seconds["fp32"]))


def runner(folder: Path, name: str, size_px: int, mode: Mode) -> "partial[object]":
    """A function that embeds one image on one thread; the trunk is exported on first use."""
    stem = re.sub(r"\W", "-", f"{name}-{size_px}")
    fp32, int8 = folder / f"{stem}.onnx", folder / f"{stem}-int8.onnx"
    views = (to_chw(render_view(n, n, size_px=size_px)) for n in range(8))
    images: Images = np.stack([*views])
    if not int8.exists():
        torch.manual_seed(0)
        net = EmbeddingNet(Model(backbone=name, weights="none", dim=None)).eval()
        write_onnx(net, size_px, fp32)
        quantize_int8(fp32, images, int8)
    model = load(int8 if mode.precision == "int8" else fp32, SessionSettings(threads=1), mode)
    return partial(model.run, images[:1])


if __name__ == "__main__":
    main()
