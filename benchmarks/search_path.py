"""The Python code that one search over HTTP runs in the service: modules, functions and calls.

    python benchmarks/search_path.py --bundle DIR [--verbose]

It serves the bundle and a gallery as `kinlens-serve` does, in a thread, and counts the calls of
Python functions in all threads of the process, by the profiling hook of Python, during one request
with a new image as a form. A search is warm after a few others. A worker process is not counted.
`--verbose` prints the calls in their order. Counts are the least of several searches, since
background work may run at the same time. Without a bundle, a network is trained for a minute.
"""

import logging
import socket
import sys
import tempfile
import threading
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
import uvicorn
from clustered import clustered_batches
from harness import heading, made_gallery, options, row, sample_images
from search import small_bundle

import kinlens
from kinlens.embedder.session import OnnxEmbedder
from kinlens.service.app import create_app
from kinlens.service.http.server import config_of
from kinlens.service.observe.logs import configure_logs
from kinlens.service.settings import Settings

ROOT = f"{Path(kinlens.__file__).parent}/"
TARGETS = {"modules of the service": 14, "modules of Kinlens": 24, "calls of Kinlens": 350}
ITEMS, WARM, COUNTED = 1_000, 8, 20


class Recorder:
    """The code objects that are called while it records, in order."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []
        self.is_recording = False

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """The hook of `sys.setprofile`."""
        if self.is_recording and event == "call":
            self.calls.append(frame.f_code)


def main() -> None:
    args = options(__doc__, bundle=None, verbose=False)
    with tempfile.TemporaryDirectory() as name:
        count(args, Path(name))


def count(args: Namespace, folder: Path) -> None:
    bundle = args.bundle or small_bundle(folder, "mobilenet_v2", "cpu")
    images = sorted(sample_images(folder / "images", WARM + COUNTED).iterdir())
    recorder = Recorder()
    threading.setprofile(recorder.profile)  # of all threads that start from now on
    with served(Path(bundle), folder) as url, httpx.Client(base_url=url, timeout=60) as client:
        paths = [recorded(client, image, recorder) for image in images][WARM:]
        known = [recorded(client, images[-1], recorder) for _ in range(COUNTED)]
    new, cached = (min(each, key=len) for each in (paths, known))
    heading("one warm search", "new image", "target", "cached answer")
    of_new, of_cached = figures(new), figures(cached)
    for name, value in of_new.items():
        row(name, value, TARGETS.get(name, ""), of_cached[name])
    if args.verbose:
        for code in new:
            print(f"{module_of(code) or code.co_filename}: {code.co_qualname}")


@contextmanager
def served(bundle: Path, folder: Path) -> Any:
    """The URL of a service with a gallery of clustered vectors."""
    embedder = OnnxEmbedder.open(bundle)
    path = made_gallery(
        folder / "gallery",
        lambda: clustered_batches(ITEMS, embedder.dim),
        ITEMS,
        embedder.dim,
        bundle_id=embedder.bundle_id,
    )
    configure_logs("info")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # of the client
    settings = Settings(bundle=bundle, galleries=(f"g={path}",))
    server = uvicorn.Server(config_of(create_app(settings), settings))
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            httpx.get(f"{url}/ready", timeout=60).raise_for_status()
            yield url
        finally:
            server.should_exit = True
            thread.join()


def recorded(client: httpx.Client, image: Path, recorder: Recorder) -> list[CodeType]:
    """The calls of one search."""
    recorder.calls = []
    recorder.is_recording = True
    answer = client.post("/search", files={"image": image.read_bytes()})
    recorder.is_recording = False
    answer.raise_for_status()
    return recorder.calls


def figures(calls: Sequence[CodeType]) -> dict[str, int]:
    """The figures of one search by name."""
    ours = [(module, code) for code in calls if (module := module_of(code))]
    modules = [module for module, _ in ours]
    switches = sum(a != b for a, b in pairwise(modules))
    return {
        "modules of the service": len({m for m in modules if m.startswith("service/")}),
        "modules of Kinlens": len(set(modules)),
        "functions of Kinlens": len({code for _, code in ours}),
        "calls of Kinlens": len(ours),
        "switches between its modules": switches,
        "calls with all packages": len(calls),
    }


def module_of(code: CodeType) -> str:
    """The module of Kinlens with this code; empty for other packages."""
    path = code.co_filename
    return path.removeprefix(ROOT) if path.startswith(ROOT) else ""


if __name__ == "__main__":
    sys.exit(main())
