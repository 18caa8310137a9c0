import subprocess
import sys

import numpy as np

from training.evaluation.clustering import clustering
from training.evaluation.retrieval import retrieval
from training.evaluation.structure import structure
from training.evaluation.suite import MEANING, evaluate_embeddings


def random_set(count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((count, 6)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.arange(count) % 7


def test_all_measures_come_in_one_call() -> None:
    vectors, labels = random_set()
    figures = evaluate_embeddings(vectors, labels, ks=(1, 10), seed=4)
    assert figures == {
        **retrieval(vectors, labels, ks=(1, 10)).as_dict(),
        **clustering(vectors, labels, 4),
        **structure(vectors, labels),
    }


def test_every_name_is_explained() -> None:
    figures = evaluate_embeddings(*random_set(), ks=(1,))
    assert [name.replace("R@1", "R@K") for name in figures] == list(MEANING)


def test_clusters_and_structure_are_left_out_where_not_asked_for() -> None:
    assert list(evaluate_embeddings(*random_set(), ks=(2,), full=False)) == ["R@2", "MAP@R"]


def test_with_a_gallery_retrieval_asks_in_it_and_the_rest_sees_both() -> None:
    vectors, labels = random_set()
    sets = vectors[:20], labels[:20], vectors[20:], labels[20:]
    figures = evaluate_embeddings(*sets, ks=(1,))
    assert figures["R@1"] == retrieval(*sets, ks=(1,)).recall[1]
    assert figures["uniformity"] == structure(vectors, labels)["uniformity"]
    assert figures["NMI"] == clustering(vectors, labels)["NMI"]


def test_memory_beside_the_embeddings_is_a_few_blocks() -> None:
    # In a process of its own, whose peak is VmHWM: ru_maxrss would count what its parent held
    # before. benchmarks/evaluation_memory.py has the largest data set and k-means.
    code = """
import numpy as np
from training.evaluation.retrieval import retrieval
from training.evaluation.structure import structure

def peak_mb():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

vectors = np.random.default_rng(0).standard_normal((12_000, 8)).astype(np.float32)
labels = np.arange(12_000) % 3_000
for part in (retrieval, structure):
    part(vectors[:3_000], labels[:3_000] % 750)
before = peak_mb()
for part in (retrieval, structure):
    part(vectors, labels)
print(peak_mb() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The whole matrix would be 576 MB.
    assert float(done.stdout) < 150
