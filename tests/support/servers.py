"""A running service for tests: real uvicorn on a free port, a fake model, an exact fake gallery."""

import functools
import hashlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import structlog
import uvicorn
from fastapi import FastAPI
from PIL import Image, ImageDraw

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import ItemNotFoundError
from kinlens.embedder.fake import FakeEmbedder
from kinlens.embedder.preprocess import preprocess
from kinlens.embedder.session import Embedder, OnnxEmbedder
from kinlens.embedder.types import Embeddings, Hit, Images, ItemId
from kinlens.indexer.entries import Entry, Item
from kinlens.indexer.galleries import GalleryFacts
from kinlens.indexer.ingest.build import build_gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.indexer.types import SearchOptions
from kinlens.service import app as service_app
from kinlens.service.encoding.fork_server import ForkServer
from kinlens.service.encoding.workers import Workers
from kinlens.service.http.server import config_of, listen
from kinlens.service.runtime import Runtime
from kinlens.service.settings import Settings
from tests.support import waiting
from tests.tiny import encoded, photo

WAIT_S = 20.0
CREATED_AT = "2026-01-01T00:00:00+00:00"
DEFAULTS: dict[str, Any] = {"search_threads": 2}
_LIMITS = "decode_memory_mb", "decode_timeout_ms"
_PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_FIRST = 12_000 + 1_000 * (_PROCESS % 20)
_PORTS = itertools.cycle(random.SystemRandom().sample(range(_FIRST, _FIRST + 1_000), 1_000))
STALLED = (
    b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n"
    b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
)
"""A request whose body does not continue."""


def free_port() -> int:
    """A port that stays free until a program listens at it: outside of those that systems give to
    connections, each once, and in a range of its own for each process of the suite.
    """
    while True:
        try:
            socket.create_server(("127.0.0.1", port := next(_PORTS))).close()
        except OSError:
            continue
        return port


def render(seed: int, size_px: int = 96) -> Image.Image:
    """An image that has no symmetry and looks like no other."""
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (size_px, size_px), tuple(rng.integers(0, 256, 3).tolist()))
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = rng.integers(0, size_px, 2).tolist()
        radius = int(rng.integers(size_px // 8, size_px // 3))
        colour = tuple(rng.integers(0, 256, 3).tolist())
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return image


_input_of = functools.cache(preprocess)


class FakeGallery:
    """Exact search over what `embedder` makes of `pictures`; item i is image i."""

    def __init__(
        self, embedder: Embedder, photos: Sequence[bytes], name: str = "shop", version: str = "v1"
    ) -> None:
        self.name = name
        self.version = hashlib.sha256(version.encode()).hexdigest()
        self.generation = self.version[-12:]
        self.bundle_id = embedder.bundle_id
        self.precision = "fp32"
        self.dim = embedder.dim
        self.size = len(photos)
        self.created_at = CREATED_AT
        self.image_root = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, self.image_root, ignore_errors=True)
        for number, data in enumerate(photos):
            (self.image_root / f"{number:03d}.png").write_bytes(data)
        self._sha256s = [hashlib.sha256(data).hexdigest() for data in photos]
        inputs = np.stack([_input_of(data, embedder.preprocessing) for data in photos])
        self._vectors = np.concatenate([FakeEmbedder.embed(embedder, inputs)])

    @property
    def loaded_version(self) -> str:
        return self.version

    def search(
        self, queries: Embeddings, k: int, options: SearchOptions | None = None
    ) -> list[list[Hit]]:
        options = options or SearchOptions()
        least = -2.0 if options.min_score is None else options.min_score
        answers = []
        for scores in queries @ self._vectors.T:
            order = [int(i) for i in np.argsort(-scores, kind="stable")]
            hits = [
                Hit(i, f"{i:03d}.png", float(scores[i]), {"number": i})
                for i in order
                if i not in options.exclude and scores[i] >= least
            ]
            answers.append(hits[options.offset : options.offset + k])
        return answers

    def items(self) -> Iterator[Item]:
        yield from (self.item(number) for number in range(self.size))

    def entries(self, keys: Sequence[str]) -> list[Entry]:
        raise ItemNotFoundError(f"Gallery {self.name} has no item {keys[0]!r}.")

    def item(self, item_id: ItemId) -> Item:
        if not 0 <= item_id < self.size:
            raise ItemNotFoundError(f"Gallery {self.name} has no item {item_id}.")
        key = f"{item_id:03d}.png"
        return Item(item_id, key, key, self._sha256s[item_id], {"number": item_id}, "PNG")

    def facts(self) -> GalleryFacts:
        known = ("name", "version", "generation", "bundle_id", "dim", "created_at", "size")
        return GalleryFacts(
            **{name: getattr(self, name) for name in known},
            source="",
            source_root="",
            delta=self.size,
            tombstones=0,
            compaction_due=None,
            segment=None,
        )

    def calibration(self) -> None:
        """It has none."""

    def close(self) -> None:
        """Given open, so never called."""


class HangingGallery(FakeGallery):
    """While `gate` is closed it answers nothing, and counts in `held` who waits."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.held = 0
        super().__init__(*arguments, **options)

    def search(self, *arguments: Any) -> list[list[Hit]]:
        self._wait()
        return super().search(*arguments)

    @property
    def size(self) -> int:
        self._wait()
        return len(self._sha256s)

    @size.setter
    def size(self, _: int) -> None: ...

    def _wait(self) -> None:
        self.held += not self.gate.is_set()
        assert self.gate.wait(WAIT_S)


class GatedEmbedder(FakeEmbedder):
    """Counts its calls and, while `gate` is closed, holds them in `embed`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.batches: list[int] = []

    def embed(self, images: Images) -> Embeddings:
        self.batches.append(len(images))
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        return super().embed(images)


@dataclass
class Running:
    """A service that answers at `url`."""

    app: FastAPI
    url: str
    client: httpx.Client
    _stack: ExitStack

    @property
    def runtime(self) -> Runtime:
        runtime: Runtime = self.app.state.runtime
        return runtime

    def search(self, data: bytes, **fields: Any) -> httpx.Response:
        files = {"image": ("query.jpg", data, "image/jpeg")}
        return self.client.post("/search", files=files, data=fields)

    def connect(self, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        """A connection of its own, on which these bytes are sent; open until the service ends."""
        address = ("127.0.0.1", int(self.url.rsplit(":", 1)[1]))
        connection = socket.create_connection(address, WAIT_S, source_address=(source, 0))
        self._stack.enter_context(connection).sendall(sent)
        return connection

    def metric(self, name: str, **labels: str) -> float:
        self.runtime.observer.refresh()
        value = self.runtime.metrics.registry.get_sample_value(name, labels)
        return 0.0 if value is None else value

    def close(self) -> None:
        self._stack.close()


class SharedWorkers(Workers):
    """Workers that decode for every service of a test process with a given embedder."""

    def close(self) -> None:
        """Do nothing: they are used again, and end with the process."""


@functools.cache
def shared_workers() -> Workers:
    workers = SharedWorkers(ForkServer(1024, WAIT_S), WAIT_S, 4)
    workers.start()
    return workers


def settings_of(**given: Any) -> Settings:
    """Settings, also with other values of their constants."""
    constants = {name: given.pop(name) for name in [*given] if name not in Settings.model_fields}
    if not constants:
        return Settings(**given)
    return type("OtherSettings", (Settings,), {"__module__": __name__, **constants})(**given)


def create_app(
    settings: Settings, embedder: Embedder | None = None, galleries: Any = None, **parts: Any
) -> FastAPI:
    """The product's, which decodes for a given embedder in workers that are already there, unless
    the settings limit its workers.
    """
    has_own = any(getattr(settings, name) != getattr(Settings, name) for name in _LIMITS)
    if embedder is not None and not has_own:
        parts["workers"] = shared_workers()
    return service_app.create_app(settings, embedder, galleries, **parts)


def workers_of(service: "Running") -> Workers:
    [workers] = service.runtime.models.workers()
    return workers


def run(app: FastAPI) -> Running:
    """Serve `app` in a thread until `close`."""
    stack = ExitStack()
    listener = stack.enter_context(closing(listen("127.0.0.1", 0)))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(config_of(app, app.state.runtime.settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)

    def stop() -> None:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()

    thread.start()
    stack.callback(stop)
    client = stack.enter_context(
        httpx.Client(base_url=url, timeout=WAIT_S, limits=httpx.Limits(max_connections=100))
    )
    client.get("/live").raise_for_status()
    return Running(app, url, client, stack)


def drop(*_: Any) -> Any:
    raise structlog.DropEvent


@pytest.fixture(scope="session", autouse=True)
def quiet_logs() -> Iterator[None]:
    """Events go nowhere unless a test captures them."""
    structlog.configure(processors=[drop])
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session", autouse=True)
def patient_service() -> Iterator[None]:
    """Other work on the cores makes no service unready, and changed galleries are seen soon. The
    services of a process compress the files of the pages once.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_app.Assets, "page", functools.cache(service_app.Assets.page))
        patch.setattr(service_app, "Assets", functools.cache(service_app.Assets))
        patch.setattr(Settings, "ready_timeout_ms", 60_000)
        patch.setattr(Settings, "reload_interval_ms", 50)
        yield


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], bool]], None]:
    return waiting.until


@pytest.fixture(scope="session")
def photos() -> list[bytes]:
    """Twelve different images as PNG files."""
    return [encoded(render(seed)) for seed in range(12)]


@pytest.fixture(scope="session")
def heavy() -> bytes:
    """48 megapixels with transparency in a small file: long and large to decode."""
    return encoded(Image.new("RGBA", (8000, 6000), (10, 200, 30, 128)), compress_level=1)


@pytest.fixture
def embedder() -> GatedEmbedder:
    return GatedEmbedder()


@pytest.fixture
def gallery(embedder: GatedEmbedder, photos: list[bytes]) -> FakeGallery:
    return FakeGallery(embedder, photos)


@pytest.fixture
def hung(embedder: GatedEmbedder, photos: list[bytes]) -> Iterator[HangingGallery]:
    gallery = HangingGallery(embedder, photos[:3], name="hung")
    yield gallery
    gallery.gate.set()


StartService = Callable[..., Running]


@pytest.fixture
def start_service(embedder: GatedEmbedder, gallery: FakeGallery) -> Iterator[StartService]:
    """Start a service with these settings; the rest has defaults that suit a test."""
    started: list[Running] = []

    def start(
        embedder: Embedder = embedder,
        galleries: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Running:
        given = galleries if galleries is not None else {gallery.name: gallery}
        app = create_app(settings_of(**DEFAULTS | settings), embedder, given)
        started.append(run(app))
        return started[-1]

    yield start
    for service in started:
        service.close()


@pytest.fixture(scope="session")
def running_service(photos: list[bytes]) -> Iterator[Running]:
    """One service for many tests that only look."""
    embedder = FakeEmbedder()
    app = create_app(Settings(**DEFAULTS), embedder, {"shop": FakeGallery(embedder, photos)})
    service = run(app)
    yield service
    service.close()


@pytest.fixture(scope="session")
def tiny_gallery(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real gallery of images 0.png .. 7.png, made with the tiny bundle; do not change it."""
    folder = tmp_path_factory.mktemp("gallery")
    source = folder / "pictures"
    source.mkdir()
    for number in range(8):
        (source / f"{number}.png").write_bytes(encoded(photo(number)))
    embedder = OnnxEmbedder.open(tiny_bundle)
    build_gallery(folder_source(source), embedder, folder / "shop")
    return folder / "shop"


@pytest.fixture(scope="session")
def tiny_settings(tiny_bundle: Bundle, tiny_gallery: Path) -> dict[str, Any]:
    """Settings of a service of the tiny bundle and gallery."""
    return {"bundle": tiny_bundle.path, "galleries": f"shop={tiny_gallery}"}


class RedisServer:
    """A real redis-server on a free port with its files in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self._folder), "--save", "", "--maxmemory", "64mb"]
        command += options
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"Ready to accept connections" in line:
                return
        raise AssertionError("redis-server did not start")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self.send(signal.SIGKILL)
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed; install it to test the shared cache")
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()
