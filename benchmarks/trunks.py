"""Cost of the trunks of docs/trunks.md compared with MobileNetV2: one image, one thread, ONNX.

    python benchmarks/trunks.py [--rounds 40] [--only mobilenetv4] [--folder /tmp/trunks]

Weights are random, since time does not depend on them, so nothing is downloaded. Each trunk is
exported at the size in the page's table, as in a bundle, and quantized to int8 as in an export. It
then runs in turns with MobileNetV2 in fp32 at 224 px, in a new random order each round, so that
noise on the machine affects both alike. Figures are CPU time, medians over rounds of the ratio
within a round; 1.0 is MobileNetV2. int8 is only fast on a processor with VNNI. With --folder the
ONNX files stay for the next run. The page's table takes ten minutes, most of them for the exports.
"""

import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from harness import heading, in_turns, options, ratio, row

from kinlens.embedder.engines.models import SessionSettings, create_session
from kinlens.embedder.preprocess import to_chw
from kinlens.embedder.types import Images
from kinlens.training.config.settings import Model
from kinlens.training.export.bundle import write_onnx
from kinlens.training.export.int8 import quantize_int8
from kinlens.training.models.embedding import EmbeddingNet
from kinlens.training.rendered.catalogue import render_view

PAGE = Path(__file__).parents[1] / "docs" / "trunks.md"
ROW = re.compile(r"^\| `([^`]+)` \| (\d+) \| ", re.MULTILINE)
REFERENCE, REFERENCE_PX = "mobilenet_v2", 224
WARM_UP, RANGE_IMAGES = 3, 8


def main() -> None:
    args = options(__doc__, rounds=40, only="", folder=None)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        reference = runner(exported(REFERENCE, REFERENCE_PX, folder)[0], REFERENCE_PX)
        heading("trunk", "size, px", "fp32", "int8", "ms, fp32")
        for name, side in ROW.findall(PAGE.read_text(encoding="utf-8")):
            if args.only in name:
                fp32, int8 = (runner(path, int(side)) for path in exported(name, int(side), folder))
                runs = {"1": reference, "fp32": fp32, "int8": int8}
                seconds = in_turns(runs, args.rounds, time.thread_time, WARM_UP)
                ratios = (ratio(seconds[kind], seconds["1"]) for kind in ("fp32", "int8"))
                row(f"`{name}`", side, *ratios, 1e3 * statistics.median(seconds["fp32"]))


def exported(name: str, size_px: int, folder: Path) -> tuple[Path, Path]:
    """The fp32 file of a trunk with random weights and its int8 version."""
    stem = re.sub(r"\W", "-", f"{name}-{size_px}")
    fp32, int8 = folder / f"{stem}.onnx", folder / f"{stem}-int8.onnx"
    if not int8.exists():
        torch.manual_seed(0)
        net = EmbeddingNet(Model(backbone=name, weights="none", dim=None)).eval()
        write_onnx(net, size_px, fp32)
        quantize_int8(fp32, range_images(size_px), int8)
    return fp32, int8


def range_images(size_px: int) -> Images:
    """Rendered products, uint8 (n, 3, S, S)."""
    return np.stack([to_chw(render_view(n, n, size_px=size_px)) for n in range(RANGE_IMAGES)])


def runner(model: Path, size_px: int) -> Callable[[], object]:
    """A function that embeds one image on one thread."""
    session = create_session(model, SessionSettings(threads=1))
    image = range_images(size_px)[:1]
    name = session.get_inputs()[0].name
    return lambda: session.run(None, {name: image})


if __name__ == "__main__":
    main()
