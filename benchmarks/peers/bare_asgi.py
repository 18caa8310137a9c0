"""Image search as a bare ASGI application: the same engine, preprocessing and exact search.

A peer of `benchmarks/search.py`, which starts it.

    python benchmarks/peers/bare_asgi.py PORT BUNDLE VECTORS.npy WORKERS PRECISION ENGINE

No framework and no input checks: uvicorn with httptools, one process per core on a shared socket,
all work on the event loop. The difference to a service is the cost of its HTTP layer.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import uvicorn

from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.session import OnnxEmbedder


class Search:
    """POST /search with a form that has an image; any GET returns 200."""

    def __init__(self, bundle: Path, vectors: Path, settings: SessionSettings) -> None:
        self.embedder = OnnxEmbedder.open(bundle, settings)
        found = np.load(vectors)
        faiss.normalize_L2(found)
        self.index = faiss.IndexFlatIP(found.shape[1])
        self.index.add(found)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = [], scope["method"] == "POST"
        while more:
            message = await receive()
            body.append(message.get("body", b""))
            more = message.get("more_body", False)
        answer = self.answer(scope, b"".join(body)) if body else b"{}"
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def answer(self, scope: Any, body: bytes) -> bytes:
        image, k = b"", 20
        boundary = b"--" + dict(scope["headers"])[b"content-type"].partition(b"boundary=")[2]
        for part in body.split(boundary)[1:-1]:
            head, _, content = part[2:-2].partition(b"\r\n\r\n")
            if b'name="image"' in head:
                image = content
            elif b'name="k"' in head:
                k = int(content)
        pixels = self.embedder.preprocess(image)
        scores, numbers = self.index.search(self.embedder.embed(pixels[np.newaxis]), k)
        pairs = zip(numbers[0].tolist(), scores[0].tolist(), strict=True)
        return json.dumps({"hits": [{"id": n, "score": score} for n, score in pairs]}).encode()


def main() -> None:
    _, port, bundle, vectors, workers, precision, engine = sys.argv
    shared = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    shared.bind(("127.0.0.1", int(port)))
    shared.listen(1024)
    for _ in range(int(workers) - 1):
        if os.fork() == 0:
            break
    faiss.omp_set_num_threads(1)
    settings = SessionSettings(precision=precision, engine=engine)  # type: ignore[arg-type]
    app = Search(Path(bundle), Path(vectors), settings)
    config = uvicorn.Config(app, http="httptools", log_level="error", lifespan="off")
    uvicorn.Server(config).run(sockets=[shared])


if __name__ == "__main__":
    main()
