"""How many modules of `service/` one search passes: what a reader has to open to follow it.

    python benchmarks/search_hops.py

No times: a service with a fake model in this process, searches over HTTP, every thread traced. Of
two searches the second counts, so that nothing of a start is in it. Target: at most 15 for a form
with one image, where the service of November 2026 passed 45.
"""

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import httpx
import numpy as np
import uvicorn
from request_cpu import DIM, ITEMS, photographs

from embedder.fake import FakeEmbedder
from indexer.gallery import Gallery
from indexer.types import Entry
from service.app import create_app
from service.http.server import config_of, listen
from service.settings import Settings

TARGET = 15
SEEN: set[str] = set()


def look(frame: FrameType, event: str, _: object) -> None:
    """Remember the module of every function that is called."""
    if event == "call":
        SEEN.add(frame.f_globals.get("__name__", ""))


def passed(call: Callable[[], httpx.Response]) -> list[str]:
    """The modules of `service/` whose functions ran for an answer."""
    SEEN.clear()
    call().raise_for_status()
    return sorted(name for name in SEEN if name.startswith("service."))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        photographs(folder / "images")
        files = [path.read_bytes() for path in sorted((folder / "images").iterdir())]
        embedder = FakeEmbedder(dim=DIM)
        made = Gallery.create(folder / "g", name="g", bundle_id=embedder.bundle_id, dim=DIM)
        vectors = np.random.default_rng(0).standard_normal((ITEMS, DIM), "float32")
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        made.add(Entry(f"{n}", vector, f"{n:064x}") for n, vector in enumerate(vectors))
        threading.setprofile(look)
        settings = Settings(lanes=1, recall_sample=0)
        listener = listen("127.0.0.1", 0)
        config = config_of(create_app(settings, embedder, {"g": made}), settings)
        server = uvicorn.Server(config)
        serving = threading.Thread(target=server.run, args=([listener],))
        serving.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        while not server.started:
            serving.join(0.05)

        def search(number: int, k: int = 20) -> httpx.Response:
            return httpx.post(f"{url}/search", files={"image": files[number]}, data={"k": k})

        search(0)
        calls = {
            "a form, one image": lambda: search(1),
            "the same again, from the cache": lambda: search(1),
            "an item, as JSON": lambda: httpx.post(f"{url}/search", json={"positives": ["7"]}),
        }
        for text, call in calls.items():
            modules = passed(call)
            names = ", ".join(name.removeprefix("service.") for name in modules)
            print(f"{len(modules):3}  {text}: {names}")
        server.should_exit = True
        serving.join()


if __name__ == "__main__":
    main()
