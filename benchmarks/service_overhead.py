"""What HTTP, batching and search cost: the service against its own model.

Ceiling: the same bundle in the same number of threads, preprocessing and embedding the same files
without a service. Both are measured in turn, several times, in one run; read the ratio.

    python benchmarks/service_overhead.py [BUNDLE]

Without BUNDLE, MobileNetV2 with random weights at 160 px on rendered products.
"""

import http.client
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from running import run, service

from embedder.session import OnnxEmbedder

ROUNDS = 5
IMAGES = 200
CORES = 2
CLIENTS = 4
HEADERS = {"Content-Type": "multipart/form-data; boundary=part"}
HEAD = b'--part\r\nContent-Disposition: form-data; name="image"; filename="query"\r\n\r\n'
TAIL = b"\r\n--part--\r\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = ("--products", 25, "--views", 16)
        run("kinlens-train", "data", "render", folder / "images", *size)
        if len(sys.argv) > 1:
            bundle = Path(sys.argv[1])
        else:
            bundle = folder / "bundle"
            px = ("--size-px", 160, "--resize-px", 176)
            plain = ("--backbone", "mobilenet_v2", "--weights", "none", *px)
            run("kinlens-train", "export", "--out", bundle, *plain)
        gallery = folder / "gallery"
        run("kinlens-index", "build", folder / "images", "--bundle", bundle, "--out", gallery)
        files = [path.read_bytes() for path in sorted((folder / "images").rglob("*.jpg"))]
        embedder = OnnxEmbedder.open(bundle)
        with service(bundle, gallery) as url:
            compare(embedder, url, files)


def compare(embedder: OnnxEmbedder, url: str, files: list[bytes]) -> None:
    """Print images/s of the model alone, of new uploads and of repeated ones."""
    rates: dict[str, list[float]] = {"model alone": [], "service, new": [], "service, cached": []}
    local = threading.local()

    def alone(data: bytes) -> None:
        embedder.embed(np.stack([embedder.preprocess(data)]))

    def ask(data: bytes) -> None:
        # The plainest client there is, since it shares the cores with the service.
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        local.connection.request("POST", "/search", HEAD + data + TAIL, HEADERS)
        answer = local.connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"the service answered {answer.status}")

    for number in range(ROUNDS):
        chosen = [files[(number * 37 + i) % len(files)] for i in range(IMAGES)]
        # A trailing byte makes another file of the same picture, so that no cache knows it.
        new = [data + bytes([number + 1]) for data in chosen]
        rates["model alone"].append(rate(alone, chosen, CORES))
        rates["service, new"].append(rate(ask, new, CLIENTS))
        rates["service, cached"].append(rate(ask, new, CLIENTS))
    ceiling = statistics.median(rates["model alone"])
    print(f"\n{'':18} images/s   of the ceiling")
    for name, values in rates.items():
        middle = statistics.median(values)
        print(f"{name:18} {middle:8.0f} {middle / ceiling:10.2f}")


def rate(function: Callable[[bytes], None], files: list[bytes], threads: int) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(function, files))
    return len(files) / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
