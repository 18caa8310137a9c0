"""Image search on LitServe: the same ONNX file, the same preprocessing, the same exact search.

A peer of `benchmarks/search.py`, which starts it.

    python benchmarks/peers/litserve_search.py PORT BUNDLE VECTORS.npy WORKERS PRECISION ENGINE

As its documentation recommends for a model on a CPU: `accelerator="cpu"`, workers as processes (the
benchmark tries one and one per core, and uses the better), no batching, which only helps a GPU.
"""
# ruff: noqa: E402

import os
import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from fastapi import Request

# LitServe 0.2.19 does not start in an environment with mcp 2.
sys.modules["mcp"] = None  # type: ignore[assignment]
import litserve

from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.session import OnnxEmbedder


class Search(litserve.LitAPI):
    """Decode, embed, search."""

    def setup(self, device: str) -> None:
        _, _, bundle, vectors, workers, precision, engine = sys.argv
        cores = len(os.sched_getaffinity(0))
        threads = max(1, cores // int(workers))
        settings = SessionSettings(threads=threads, precision=precision, engine=engine)  # type: ignore[arg-type]
        self.embedder = OnnxEmbedder.open(Path(bundle), settings)
        faiss.omp_set_num_threads(threads)
        found = np.load(vectors)
        faiss.normalize_L2(found)
        self.index = faiss.IndexFlatIP(found.shape[1])
        self.index.add(found)

    def decode_request(self, request: Request, **_: Any) -> tuple[np.ndarray, int]:
        form: Any = request  # LitServe passes the form of the request
        data = form["image"].file.read()
        return self.embedder.preprocess(data), int(form["k"])

    def predict(self, asked: tuple[np.ndarray, int], **_: Any) -> tuple[np.ndarray, np.ndarray]:
        image, k = asked
        scores, numbers = self.index.search(self.embedder.embed(image[np.newaxis]), k)
        return numbers[0], scores[0]

    def encode_response(
        self, found: tuple[np.ndarray, np.ndarray], **_: Any
    ) -> dict[str, list[dict[str, float]]]:
        pairs = zip(*(each.tolist() for each in found), strict=True)
        return {"hits": [{"id": number, "score": score} for number, score in pairs]}


if __name__ == "__main__":
    server = litserve.LitServer(
        Search(api_path="/search"),
        accelerator="cpu",
        workers_per_device=int(sys.argv[4]),
        healthcheck_path="/ready",
        fast_queue=True,
    )
    server.run(port=int(sys.argv[1]), host="127.0.0.1", generate_client_file=False)
