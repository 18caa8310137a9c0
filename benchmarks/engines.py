"""Cost of each engine and precision compared with fp32 in onnxruntime: one image, one thread.

    python benchmarks/engines.py [--rounds 20] [--trunk mobilenet_v2 resnet50] [--folder DIR]

Weights are random, since time does not depend on them. Each trunk is exported at 224 px, as in a
bundle, and quantized to int8 as in an export. The modes then run in turns, in a new random order
each round, so that noise on the machine affects all alike. Figures are medians over rounds of the
ratio within a round: the speedup over fp32 in onnxruntime. A mode that this machine lacks is listed
with the reason. With --folder the ONNX files stay for the next run. Targets: bf16 1.8 if the
processor has units for it, int8 1.7 if it has VNNI.
"""

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import get_args

from harness import heading, in_turns, options, ratio, row, verdict
from trunks import exported, range_images

from kinlens.embedder.engines.models import SessionSettings, absence, load
from kinlens.embedder.manifest import FP32, Engine, Mode, Precision

SIZE_PX, WARM_UP = 224, 3
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
TARGETS = {"bf16": 1.8, "int8": 1.7}


def main() -> None:
    args = options(__doc__, rounds=20, trunk=["mobilenet_v2", "resnet50"], folder=None)
    modes, image = [], range_images(SIZE_PX)[:1]
    for mode in [Mode(engine, one) for one in PRECISIONS for engine in get_args(Engine)]:
        if (reason := absence(mode)) is None:
            modes.append(mode)
        else:
            print(f"skipped: {mode}: {reason}")
    best: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        heading("trunk", "ms, fp32 with onnxruntime", *map(str, modes[1:]))
        for trunk in args.trunk:
            fp32, int8 = exported(trunk, SIZE_PX, folder)
            models = {
                mode: load(int8 if mode.precision == "int8" else fp32, SessionSettings(), mode)
                for mode in modes
            }
            runs = {str(mode): partial(model.run, image) for mode, model in models.items()}
            seconds = in_turns(runs, args.rounds, warm_up=WARM_UP)
            plain = seconds[str(FP32)]
            times = {mode: ratio(plain, seconds[str(mode)]) for mode in modes[1:]}
            row(f"`{trunk}`", 1e3 * statistics.median(plain), *times.values())
            for mode, gain in times.items():
                key = trunk, mode.precision
                best[key] = max(gain, best.get(key, 0.0))
    for (trunk, precision), gain in best.items():
        if precision in TARGETS:
            verdict(f"{trunk} in {precision}, times fp32", gain, TARGETS[precision])


if __name__ == "__main__":
    main()
