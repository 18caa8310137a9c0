"""What an evaluation costs in memory and time, at the size of Stanford Online Products.

60,502 embeddings of 512 dimensions in 11,316 classes, all rows asked, each measure in a process of
its own: peak memory of the whole process (imports and embeddings included) and seconds. Ceiling:
the same N x N scores as a bare matrix product. The peer, at the size of CUB-200-2011's test images
(5,924 in 100 classes), is the AccuracyCalculator of pytorch-metric-learning.

    python benchmarks/evaluation_memory.py [IMAGES CLASSES]

IMAGES and CLASSES replace 60,502 and 11,316. The embeddings are class centres with noise, so that
recall is neither 0 nor 100. On 2 cores the whole takes 6 to 10 minutes and, for the peer, 3 GB.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SOP = (60_502, 11_316)
CUB = (5_924, 100)
DIM = 512
NOISE = 2.5
LIMIT_MB = 1500


def main() -> None:
    if sys.argv[1:2] == ["--part"]:
        name, images, classes = sys.argv[2:]
        print(json.dumps(measure(PARTS[name], int(images), int(classes))))
        return
    size = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) == 3 else SOP
    large = ("embeddings alone", "bare matrix product", "retrieval", "structure", "clustering")
    heaviest = table(size, (*large, "all in one call"))
    small = ("retrieval", "peer, k = None", "peer, k = max_bin_count")
    table(CUB, small)
    print(f"\nheaviest of ours: {heaviest:,.0f} MB; the limit is {LIMIT_MB:,} MB")


def table(size: tuple[int, int], names: tuple[str, ...]) -> float:
    """Print a row per part; returns the largest peak."""
    print(f"\n{size[0]:,} x {DIM}, {size[1]:,} classes\n")
    print("| part | peak MB | seconds | figures |\n|---|---|---|---|")
    peaks = []
    for name in names:
        command = [sys.executable, __file__, "--part", name, *map(str, size)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        figures = " ".join(f"{key} {value:.4g}" for key, value in row["figures"].items())
        peaks.append(row["peak_mb"])
        print(f"| {name} | {row['peak_mb']:,.0f} | {row['seconds']:.1f} | {figures} |", flush=True)
    return max(peaks)


def measure(part: Callable[..., dict[str, float]], images: int, classes: int) -> dict[str, Any]:
    """Run a part on embeddings made for it."""
    vectors, labels = make(images, classes)
    start = time.perf_counter()
    figures = part(vectors, labels)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"figures": figures, "seconds": seconds, "peak_mb": peak}


def make(images: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors around a random centre for each class, made in place."""
    rng = np.random.default_rng(0)
    labels = np.arange(images) % classes
    vectors = rng.standard_normal((images, DIM), dtype=np.float32)
    vectors *= NOISE
    centres = rng.standard_normal((classes, DIM), dtype=np.float32)
    for start in range(0, images, 4096):
        vectors[start : start + 4096] += centres[labels[start : start + 4096]]
    vectors /= np.sqrt(np.einsum("nd,nd->n", vectors, vectors))[:, None]
    return vectors, labels


def product(vectors: np.ndarray, _labels: np.ndarray) -> dict[str, float]:
    import torch

    every = torch.from_numpy(vectors)
    for start in range(0, len(every), 1024):
        for column in range(0, len(every), 2048):
            every[start : start + 1024] @ every[column : column + 2048].T
    return {}


def our_retrieval(vectors: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    from training.evaluation.retrieval import retrieval

    return retrieval(vectors, labels, ks=(1, 10, 100, 1000)).as_dict()


def our_structure(vectors: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    from training.evaluation.structure import structure

    return structure(vectors, labels)


def our_clustering(vectors: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    from training.evaluation.clustering import clustering

    return clustering(vectors, labels)


def our_suite(vectors: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    from training.evaluation.evaluate import evaluate_embeddings

    return evaluate_embeddings(vectors, labels, ks=(1, 10, 100, 1000))


def peer(k: str | None) -> Callable[[np.ndarray, np.ndarray], dict[str, float]]:
    def run(vectors: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

        names = ("precision_at_1", "mean_average_precision_at_r")
        found = AccuracyCalculator(include=names, k=k).get_accuracy(vectors, labels)
        return {"R@1": 100 * found[names[0]], "MAP@R": 100 * found[names[1]]}

    return run


PARTS: dict[str, Callable[[np.ndarray, np.ndarray], dict[str, float]]] = {
    "embeddings alone": lambda *_: {},
    "bare matrix product": product,
    "retrieval": our_retrieval,
    "structure": our_structure,
    "clustering": our_clustering,
    "all in one call": our_suite,
    "peer, k = None": peer(None),
    "peer, k = max_bin_count": peer("max_bin_count"),
}


if __name__ == "__main__":
    main()
