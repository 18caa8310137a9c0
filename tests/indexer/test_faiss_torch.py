"""Libraries for metric learning change FAISS when they are imported; galleries do not mind."""

import subprocess
import sys

CODE = """
import faiss.contrib.torch_utils
import numpy as np
from indexer.index.faiss import SegmentIndex
from indexer.index.kinds import Effort
from indexer.index.plan import plan_index
vectors = np.random.default_rng(0).standard_normal((2000, 16)).astype(np.float32)
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
for kind in ("flat", "fp16", "hnsw", "ivf-pq"):
    plan = plan_index(2000, 16, kind=kind)
    index = SegmentIndex.build(plan, vectors)
    scores, positions = index.search(vectors[:30], 1, Effort(64, 8))
    assert (positions[:, 0] == np.arange(30)).mean() > 0.9, kind
    index.exact(vectors[:30], 5)
print("same answers")
"""


def test_an_index_answers_where_faiss_was_changed_for_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "same answers"
