"""The service under load, and its parts: images, model, gallery, key and Redis."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from demo_steps import BIN, free_port, kinlens, serve

SMALL_CACHE = {"KINLENS_CACHE_MAX_BYTES": "2000000", "KINLENS_CACHE_MAX_ENTRIES": "500"}
"""Few enough that the caches are full, and stop growing, after the first minutes."""


@dataclass(frozen=True)
class Plan:
    """How to build the service; the script creates everything that is None."""

    folder: Path
    workers: int = 1
    images: Path | None = None
    bundle: Path | None = None


class Redis:
    """A redis-server of this script that can be paused, killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self.start()

    def start(self) -> None:
        """Start it; it answers only after a moment."""
        words = ["--port", self.port, "--bind", "127.0.0.1", "--save", "", "--dir", self._folder]
        command = ["redis-server", *map(str, words), "--maxmemory", "64mb"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """Kill it without a clean shutdown."""
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class Shop:
    """A running service; `images` are the images of its gallery `shop`, below `root`."""

    url: str
    key: str
    root: Path
    images: list[Path]
    build: list[str]
    process: "subprocess.Popen[bytes]"
    redis: Redis | None

    def client(self) -> httpx.Client:
        """A client with the key of an administrator."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, timeout=60, headers=headers)

    def name(self, image: Path) -> str:
        """The key of an image in the gallery."""
        return image.relative_to(self.root).as_posix()


@contextlib.contextmanager
def open_shop(plan: Plan) -> Iterator[Shop]:
    """Create images, model, gallery, key, Redis and a service; it must stop cleanly."""
    root, bundle = plan.images or _render(plan.folder), plan.bundle or _export(plan.folder)
    gallery, state = plan.folder / "gallery", plan.folder / "state"
    words = ("build", root, "--bundle", bundle, "--out", gallery)
    build = [str(BIN / "kinlens-index"), *map(str, words)]
    subprocess.run(build, check=True)
    key = _make_key(state)
    redis = Redis(plan.folder) if shutil.which("redis-server") else None
    port = free_port()
    while redis is not None and port == redis.port:  # Redis may not listen yet
        port = free_port()
    flags = ["--bundle", str(bundle), "--gallery", f"shop={gallery}", "--state", str(state)]
    flags += ["--workers", str(plan.workers)]
    if redis is not None:
        flags += ["--redis-url", f"redis://127.0.0.1:{redis.port}/0"]
    os.environ.update(SMALL_CACHE)
    try:
        process = serve(port, *flags)
        images = sorted(path for path in root.rglob("*") if path.suffix in (".jpg", ".png"))
        shop = Shop(f"http://127.0.0.1:{port}", key, root, images, build, process, redis)
        try:
            with shop.client() as client:
                client.post("/galleries", json={"name": "live"}).raise_for_status()
            yield shop
        finally:
            _stop(process)
    finally:
        if redis is not None:
            redis.kill()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _render(folder: Path) -> Path:
    images = folder / "images"
    sizes = ("--products", "20", "--views", "10", "--size-px", "160")
    kinlens("train", "data", "render", str(images), *sizes)
    return images


def _export(folder: Path) -> Path:
    bundle = folder / "bundle"
    plain = ("--backbone", "mobilenet_v2", "--weights", "none", "--size-px", "96")
    kinlens("train", "export", "--out", str(bundle), *plain, "--resize-px", "96")
    return bundle


def _make_key(state: Path) -> str:
    words = ["keys", "create", "soak", "--scope", "admin", "--state", str(state)]
    command = [BIN / "kinlens-serve", *words]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    return next(word for word in made.stdout.split() if word.startswith("kl_"))
