"""Images and a model small enough for every test."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from kinlens.embedder.bundle import Bundle, write_bundle
from kinlens.embedder.manifest import BundleManifest, GoldenHashes, Preprocessing
from kinlens.embedder.preprocess import preprocess
from kinlens.embedder.seen import Seen
from kinlens.embedder.types import Embeddings, Images

TINY = Preprocessing(resize_px=20, crop_px=16)
TINY_DIM = 8


def photo(seed: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    """A smooth random image (width, height) that survives JPEG."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The file content of an image; HEIF is the name that HEIC has in Pillow."""
    if kind == "HEIF":
        from pillow_heif import register_heif_opener

        register_heif_opener()
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_photos_as(root: Path, names: Sequence[str]) -> Path:
    """Write a different photo under each name below `root`, which is returned."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(encoded(photo(number)))
    return root


def tiny_weights(seed: float = 0) -> np.ndarray:
    """The projection (3 S S, D) of the tiny model; that of 0.05 is near that of 0, as int8 is."""
    rng = np.random.default_rng(int(seed))
    weights = rng.standard_normal((3 * TINY.crop_px**2, TINY_DIM))
    return (weights + seed % 1 * rng.standard_normal(weights.shape)).astype(np.float32)


def tiny_embed(images: Images, seed: float = 0) -> Embeddings:
    """What the tiny model computes, in numpy."""
    flat = images.reshape(len(images), -1).astype(np.float32) / np.float32(255) - np.float32(0.5)
    vectors = flat @ tiny_weights(seed)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def write_tiny_onnx(path: Path, seed: float = 0) -> None:
    """uint8 (N, 3, 16, 16) to float32 (N, 8), unit norm."""
    constants = {
        "weights": tiny_weights(seed),
        "scale": np.float32(1 / 255),
        "half": np.float32(0.5),
        "flat": np.array([0, -1], dtype=np.int64),
        "axis": np.array([1], dtype=np.int64),
    }
    nodes = [
        helper.make_node("Cast", ["images"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["float", "scale"], ["scaled"]),
        helper.make_node("Sub", ["scaled", "half"], ["centred"]),
        helper.make_node("Reshape", ["centred", "flat"], ["rows"]),
        helper.make_node("MatMul", ["rows", "weights"], ["vectors"]),
        helper.make_node("ReduceL2", ["vectors", "axis"], ["norm"], keepdims=1),
        helper.make_node("Div", ["vectors", "norm"], ["embeddings"]),
    ]
    side = TINY.crop_px
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["n", 3, side, side])],
        [helper.make_tensor_value_info("embeddings", TensorProto.FLOAT, ["n", TINY_DIM])],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()],
    )
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)


def write_tiny_bundle(folder: Path, seed: int = 0, seen: Seen | None = None, **more: Any) -> Bundle:
    """Write the bundle of the tiny model into `folder`; another `seed` is another model."""
    model = folder / "source.onnx"
    write_tiny_onnx(model, seed)
    images = [encoded(photo(number)) for number in range(3)]
    inputs = np.stack([preprocess(data, TINY) for data in images])
    manifest = BundleManifest(
        name="tiny",
        created_at="2026-01-01T00:00:00+00:00",
        dim=TINY_DIM,
        preprocessing=TINY,
        model_sha256="",
        golden=GoldenHashes(files={}),
        backbone="tiny",
        **more,
    )
    vectors = tiny_embed(inputs, seed)
    return write_bundle(folder / "tiny", manifest, model, images, inputs, vectors, seen=seen)
