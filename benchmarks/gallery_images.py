"""A build from images against a bare loop over the same model: decode, preprocess, run.

Ceiling: one onnxruntime session with one thread a call, shared by a thread a core, each taking
batches of the same size from files to vectors; nothing is stored. Both in turn, several times.
"""

import importlib.util
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
from gallery_report import Report, Target
from PIL import Image
from running import run, shared_folder

from embedder.bundle import Bundle
from embedder.preprocess import preprocess
from embedder.session import OnnxEmbedder
from embedder.types import Embeddings
from indexer.ingest.build import build_gallery
from indexer.ingest.embed import EmbedSettings
from indexer.ingest.sources import Source, folder_source

SETTING = "images"
IMAGES = 512
ROUNDS = 3
_SIZE = (1024, 768)
_LEAST = Target(0.9)


def measure_images(folder: Path, report: Report) -> None:
    """Report images/s of a build and of the bare loop, ResNet-50 with random weights, 224 px."""
    report.begin(SETTING)
    if importlib.util.find_spec("torch") is None:
        report.add("build", "skipped: torch is not installed, so no bundle can be made")
        return
    source = folder_source(photographs(folder / "photographs"))
    bundle = folder / "bundle"
    if not bundle.exists():
        run(
            "kinlens-train",
            "export",
            "--backbone",
            "resnet50",
            "--weights",
            "none",
            "--out",
            bundle,
        )
    embedder = OnnxEmbedder.open(bundle)
    files = [source.root / record.path for record in source.records()]
    bare = BareLoop(Bundle.open(bundle))
    rates: dict[str, list[float]] = {"bare loop": [], "build": []}
    bare(files[:64])
    for _ in range(ROUNDS):
        started = time.perf_counter()
        bare(files)
        rates["bare loop"].append(len(files) / (time.perf_counter() - started))
        rates["build"].append(_build(source, embedder, folder / "built"))
    for name, values in rates.items():
        report.add(f"{name}: images/s", statistics.median(values))
    pairs = zip(rates["build"], rates["bare loop"], strict=True)
    ratio = statistics.median(ours / ceiling for ours, ceiling in pairs)
    report.add("build: of the bare loop", ratio, "", _LEAST)


class BareLoop:
    """What one writes without a gallery."""

    def __init__(self, bundle: Bundle) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        self._spec = bundle.manifest.preprocessing
        self._session = ort.InferenceSession(
            bundle.model_path, options, providers=["CPUExecutionProvider"]
        )
        self._input = self._session.get_inputs()[0].name

    def __call__(self, files: list[Path]) -> Embeddings:
        settings = EmbedSettings()
        starts = range(0, len(files), settings.batch_size)
        with ThreadPoolExecutor(settings.worker_count) as pool:
            batches = [files[start : start + settings.batch_size] for start in starts]
            vectors: Embeddings = np.concatenate(list(pool.map(self._batch, batches)))
        return vectors

    def _batch(self, files: list[Path]) -> Embeddings:
        images = np.stack([preprocess(file.read_bytes(), self._spec) for file in files])
        vectors: Embeddings = self._session.run(None, {self._input: images})[0]
        return vectors


def _build(source: Source, embedder: OnnxEmbedder, out: Path) -> float:
    shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    build_gallery(source, embedder, out)
    return source.count / (time.perf_counter() - started)


def photographs(folder: Path) -> Path:
    """A folder of JPEG files: real photographs if this machine has some, else drawn ones."""
    if folder.exists():
        return folder
    shared = shared_folder()
    real = sorted((shared / "data").rglob("*.jpg"))[:IMAGES] if shared else []
    folder.mkdir(parents=True)
    for number, path in enumerate(real):
        shutil.copyfile(path, folder / f"{number:04d}.jpg")
    for number in range(len(real), IMAGES):
        draw(number).save(folder / f"{number:04d}.jpg", quality=90)
    return folder


def draw(number: int) -> Image.Image:
    """Soft shapes with the grain of a sensor: takes as long to decode as a photograph."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    soft = np.asarray(coarse.resize(_SIZE, Image.Resampling.BICUBIC), np.float32)
    grain = 6 * rng.standard_normal((*soft.shape[:2], 1), dtype=np.float32)
    return Image.fromarray(np.clip(soft + grain, 0, 255).astype(np.uint8))
