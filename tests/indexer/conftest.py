"""A small shop of images and a gallery of it."""

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kinlens.commands.__main__ import app
from kinlens.embedder.fake import FakeEmbedder
from kinlens.embedder.types import Images
from kinlens.indexer.entries import Entry
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import BuildReport, build_gallery
from kinlens.indexer.ingest.sources import Record, Source, folder_source
from tests.indexer.oracle import BUNDLE, DIM
from tests.support.memory_disk import tmp_path, tmp_path_factory
from tests.support.milvus_server import (
    MilvusFile,
    MilvusServer,
    imported,
    milvus_lite,
    milvus_server,
)
from tests.support.seams import MilvusStore, options, set_fault_hook
from tests.tiny import encoded, photo

PHOTOS = {
    "cup/a.png": ("PNG", 1),
    "cup/b.jpg": ("JPEG", 2),
    "hat/c.webp": ("WEBP", 3),
    "hat/d.bmp": ("BMP", 4),
    "hat/e.tiff": ("TIFF", 5),
    "f.gif": ("GIF", 6),
}


Run = Callable[..., Result]
"""The command line with a fake model."""


class CountingEmbedder(FakeEmbedder):
    def __init__(self, bundle_id: str = "b" * 64) -> None:
        super().__init__(bundle_id=bundle_id)
        self.batches: list[int] = []

    def embed(self, images: Images) -> np.ndarray:
        self.batches.append(len(images))
        return super().embed(images)


def listed(root: Path, *records: Record) -> Source:
    return Source(root, lambda: iter(records), len(records), "list")


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Six images of six formats in two sub-folders and the root."""
    root = tmp_path / "shop"
    for name, (kind, seed) in PHOTOS.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(photo(seed), kind))
    return root


@pytest.fixture
def embedder() -> CountingEmbedder:
    return CountingEmbedder()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "gallery"


@pytest.fixture
def build(shop: Path, embedder: CountingEmbedder, out: Path) -> Callable[[], BuildReport]:
    """Index whatever is in the shop now."""
    return lambda: build_gallery(folder_source(shop), embedder, out)


@pytest.fixture
def built(build: Callable[[], BuildReport], out: Path) -> Path:
    build()
    return out


@pytest.fixture
def gallery(tmp_path: Path) -> Iterator[Gallery]:
    """A gallery without items, for those of `tests.indexer.oracle`."""
    made = Gallery.create(tmp_path / "gallery", name="shop", bundle_id=BUNDLE, dim=DIM)
    yield made
    made.close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, embedder: CountingEmbedder) -> Callable[..., Result]:
    """Run the command line with a fake model."""
    monkeypatch.setattr(options.ModelOptions, "open", lambda *arguments: embedder)
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


def printed(result: Result, status: int = 0) -> Any:
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def usage(result: Result) -> str:
    """The message of wrong usage, without its frame."""
    assert result.exit_code == 2
    return " ".join(result.stderr.replace("│", " ").split())


def failure(result: Result) -> str:
    """The one line of an error."""
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    return line


def query(embedder: FakeEmbedder, file: Path) -> np.ndarray:
    return FakeEmbedder.embed(embedder, embedder.preprocess(file.read_bytes())[None])


def generation_of(gallery: Path) -> Path:
    return gallery / "versions" / (gallery / "CURRENT").read_text().strip()


def catalog_of(gallery: Path) -> Path:
    return generation_of(gallery) / "catalog.sqlite"


def segment_of(gallery: Path) -> Path:
    [segment] = (generation_of(gallery) / "segments").iterdir()
    return segment


def rows_of(gallery: Path) -> Path:
    [folder] = (generation_of(gallery) / "vectors").iterdir()
    return folder / "rows.f32"


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flipped(file: Path) -> None:
    """A bit in the middle; nobody reads the zeros of a page of SQLite that is nearly empty."""
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[next((n for n in range(middle, len(data)) if data[n]), middle)] ^= 1
    file.write_bytes(data)


@contextmanager
def faults(hook: Callable[[str], None]) -> Iterator[None]:
    """Call this at every fault point."""
    set_fault_hook(hook)
    try:
        yield
    finally:
        set_fault_hook(None)


def fails_at(number: int, seen: list[str] | None = None) -> Callable[[str], None]:
    """For `faults`: a full disk from the point with this number on; `seen` gets all points."""
    points = [] if seen is None else seen

    def hook(point: str) -> None:
        points.append(point)
        if len(points) > number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return hook


def stops_at(point: str, time: int = 1) -> Callable[[str], None]:
    """For `faults`: the process is interrupted when it comes to this point for this time."""
    left = time

    def hook(reached: str) -> None:
        nonlocal left
        left -= reached == point
        if reached == point and not left:
            raise KeyboardInterrupt

    return hook


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file may grow beyond `limit` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def published(
    server: MilvusServer | MilvusFile, name: str, entries: Sequence[Entry] = (), **options: Any
) -> MilvusStore:
    """A gallery on Milvus, with these entries as a new generation."""
    return imported(server.uri, name, entries, **{"dim": DIM, "bundle_id": BUNDLE, **options})


def milvus_client(server: MilvusServer | MilvusFile) -> Any:
    from pymilvus import MilvusClient

    return MilvusClient(uri=server.uri, timeout=10)


def collections(server: MilvusServer | MilvusFile, name: str) -> list[str]:
    with closing(milvus_client(server)) as there:
        return [known for known in there.list_collections() if known.startswith(f"{name}_")]


__all__ = ["milvus_lite", "milvus_server", "tmp_path", "tmp_path_factory"]
