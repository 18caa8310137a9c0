import subprocess
import sys

import numpy as np
import pytest

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
        **clustering(vectors, labels, 4).as_dict(),
        **structure(vectors, labels).as_dict(),
    }


def test_every_name_is_explained() -> None:
    figures = evaluate_embeddings(*random_set(), ks=(1,))
    assert [name.replace("R@1", "R@K") for name in figures] == list(MEANING)


def test_parts_are_left_out_where_not_asked_for() -> None:
    figures = evaluate_embeddings(*random_set(), ks=(2,), clustering=False, structure=False)
    assert list(figures) == ["R@2", "MAP@R"]


def test_with_a_gallery_retrieval_asks_in_it_and_the_rest_sees_both() -> None:
    vectors, labels = random_set()
    sets = vectors[:20], labels[:20], vectors[20:], labels[20:]
    steps: list[int] = []
    figures = evaluate_embeddings(*sets, ks=(1,), on_rows=steps.append)
    assert steps == [20]
    assert figures["R@1"] == retrieval(*sets, ks=(1,)).recall[1]
    assert figures["uniformity"] == structure(vectors, labels).uniformity
    assert figures["NMI"] == clustering(vectors, labels).nmi


# Of the process since it began: ru_maxrss would count what its parent held before.
PEAK_MB = """
def peak_mb():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
"""


def test_the_test_images_of_the_largest_data_set_need_less_than_1500_mb() -> None:
    # The shape of Stanford Online Products in a process of its own. Peak memory does not depend on
    # how many rows ask (next test), so that a slice of them is enough here.
    # benchmarks/evaluation_memory.py runs all rows, and k-means.
    code = f"""{PEAK_MB}
import numpy as np
from training.evaluation.retrieval import retrieval
from training.evaluation.structure import structure
rng = np.random.default_rng(0)
vectors = rng.standard_normal((60_502, 512), dtype=np.float32)
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
labels = np.arange(60_502) % 11_316
assert retrieval(vectors, labels, rows=1024).queries == 1024
structure(vectors, labels, rows=1024)
print(peak_mb())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 200 < float(done.stdout) < 1500


@pytest.mark.parametrize("part", ["retrieval", "structure"])
def test_memory_does_not_depend_on_the_rows_that_ask(part) -> None:
    code = f"""{PEAK_MB}
import numpy as np
from training.evaluation.{part} import {part}
vectors = np.random.default_rng(0).standard_normal((8_000, 8)).astype(np.float32)
labels = np.arange(8_000) % 2_000
peaks = []
for rows in (1024, 1024, 8_000):
    {part}(vectors, labels, rows=rows)
    peaks.append(peak_mb())
print(peaks[2] - peaks[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The whole matrix would be 256 MB.
    assert float(done.stdout) < 60
