"""On a machine with a GPU: does a bundle run there, give the same vectors, and how much faster?

    make install-gpu
    .venv/bin/python scripts/gpu_check.py BUNDLE

Exit code 1 if the model does not run on CUDA or a vector differs (cosine below 0.999).
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from embedder.errors import KinlensError
from embedder.session import OnnxEmbedder, SessionSettings

BATCHES = (1, 8, 32)
ROUNDS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    options = parser.parse_args()
    try:
        cpu = OnnxEmbedder.open(options.bundle)
        gpu = OnnxEmbedder.open(options.bundle, SessionSettings(device="cuda"))
    except KinlensError as error:
        print(f"error: {error}")
        return 1
    inputs = cpu.bundle.golden_inputs()
    cosine = float((cpu.embed(inputs) * gpu.embed(inputs)).sum(axis=1).min())
    print(f"{gpu.provider}: smallest cosine to {cpu.provider} {cosine:.6f}")
    print(f"{'batch':>6} {'CPU images/s':>14} {'GPU images/s':>14} {'ratio':>7}")
    for size in BATCHES:
        batch = np.resize(inputs, (size, *inputs.shape[1:]))
        slow, fast = rate(cpu, batch), rate(gpu, batch)
        print(f"{size:6} {slow:14.0f} {fast:14.0f} {fast / slow:7.1f}")
    return 0 if cosine >= 0.999 else 1


def rate(embedder: OnnxEmbedder, batch: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> float:
    embedder.embed(batch)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        embedder.embed(batch)
        seconds.append(time.perf_counter() - started)
    return len(batch) / statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
