"""An embedder without a model, for tests. It is part of the package, for use in other packages."""

import copy
import io
import time
from typing import Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kinlens.embedder.calibration import Calibration
from kinlens.embedder.errors import BundleError
from kinlens.embedder.manifest import FP32, BoxesFile, Preprocessing, TextTower
from kinlens.embedder.preprocess import Box, ImageLimits, preprocess, windows
from kinlens.embedder.types import Embeddings, Images, Maps, check_dims
from kinlens.embedder.views.text import TextEncoder

_BLOCKS = 4  # per side of a map


class FakeEmbedder:
    """Has the interface of `OnnxEmbedder`. A vector is a fixed random projection of the pixels.

    Equal images give equal vectors, similar images similar ones. `embed` sleeps for `delay_s`.
    """

    name = "fake"
    provider = "FakeExecutionProvider"
    mode = FP32
    precision_reason = "asked for"
    has_map = True
    boxes: BoxesFile | None = None
    text: TextTower | None = None
    has_words = False

    def __init__(
        self,
        dim: int = 32,
        size_px: int = 32,
        bundle_id: str = "fake",
        delay_s: float = 0.0,
        limits: ImageLimits | None = None,
        calibration: Calibration | None = None,
        no_calibration: str | None = None,
    ) -> None:
        self.bundle_id = bundle_id
        self.dim = dim
        self.delay_s = delay_s
        self.preprocessing = Preprocessing(resize_px=size_px, crop_px=size_px)
        self.limits = limits or ImageLimits()
        self.calibration = calibration
        self.no_calibration = no_calibration
        rng = np.random.default_rng(0)
        self._whole: Self | None = None
        self._projection = rng.standard_normal((3 * size_px * size_px, dim)).astype(np.float32)

    def preprocess(self, data: bytes, box: Box | None = None) -> NDArray[np.uint8]:
        """Encoded image, or its part in `box`, to uint8 (3, S, S). Raises: ImageError."""
        return preprocess(data, self.preprocessing, self.limits, box)

    def embed(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to float32 (N, D), unit norm."""
        if self.delay_s:
            time.sleep(self.delay_s)
        vectors = _pixels(images).reshape(len(images), -1) @ self._projection + np.float32(1e-3)
        unit: Embeddings = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit

    def first(self, n: int) -> Self:
        """The same embedder with the first `n` numbers of each vector, normalised."""
        check_dims(n, self.dim)
        if n == self.dim:
            return self
        short = copy.copy(self)
        short.dim, short._projection = n, self._projection[:, :n]
        short.calibration, short.no_calibration = None, "The vectors are short."
        short._whole = self
        return short

    @property
    def whole(self) -> Self:
        """The same embedder with all numbers of each vector."""
        return self._whole or self

    def parts(self, data: bytes) -> list[Box | None]:  # noqa: ARG002 (as of `OnnxEmbedder`)
        """The whole image and its windows."""
        return windows()

    def words(self) -> TextEncoder:
        raise BundleError("The fake model has no text tower.")

    def maps(self, images: Images) -> Maps:
        """uint8 (N, 3, S, S) to (N, D, 4, 4), one position per block of pixels. The sums over the
        positions are the embeddings.
        """
        side = images.shape[-1]
        products = _pixels(images)[..., None] * self._projection.reshape(1, 3, side, side, -1)
        starts = np.linspace(0, side, _BLOCKS, endpoint=False, dtype=np.int64)
        rows = np.add.reduceat(products.sum(axis=1), starts, axis=1)
        parts = np.add.reduceat(rows, starts, axis=2) + np.float32(1e-3 / _BLOCKS**2)
        norms = np.linalg.norm(parts.sum(axis=(1, 2)), axis=1)
        maps: Maps = (parts / norms[:, None, None, None]).transpose(0, 3, 1, 2)
        return maps

    def known_images(self) -> list[bytes]:
        """One small image, encoded as PNG."""
        ramp = np.linspace(0, 255, 48 * 48 * 3, dtype=np.uint8).reshape(48, 48, 3)
        buffer = io.BytesIO()
        Image.fromarray(ramp).save(buffer, "PNG")
        return [buffer.getvalue()]


def _pixels(images: Images) -> NDArray[np.float32]:
    return images.astype(np.float32) / np.float32(127.5) - np.float32(1.0)
