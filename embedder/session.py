"""Run a model bundle: images in, unit vectors out, with the configured engine and precision.

Each mode is checked against golden vectors on the machine that runs it, because results differ
between processors. For example, x86 without VNNI adds 8-bit products in pairs in 16 bits, which can
saturate.
"""

import copy
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.calibration import Calibration
from kinlens.embedder.engines.choice import Choice, SpeedGains, may_mix, speed_gains
from kinlens.embedder.engines.models import LateModel, Model, SessionSettings, load
from kinlens.embedder.errors import (
    BundleError,
    BundleMismatchError,
    GoldenMismatchError,
    ImageError,
)
from kinlens.embedder.manifest import (
    FP32,
    BoxesFile,
    Mode,
    Precision,
    Preprocessing,
    TextTower,
)
from kinlens.embedder.preprocess import Box, ImageLimits, ImageParts, preprocess
from kinlens.embedder.sources.names import printable, read_file
from kinlens.embedder.types import Embeddings, Images, Maps, check_dims, first_numbers
from kinlens.embedder.views.boxes import Detector, auto_parts
from kinlens.embedder.views.text import TextEncoder, can_read_words

MIN_OWN_COSINE: dict[Precision, float] = {"fp32": 0.999, "fp16": 0.999, "bf16": 0.99, "int8": 0.99}
"""Minimum cosine to the golden vectors of the same mode at export. It is lower for int8 and bf16:
kernels round differently on each processor, and an error in an early layer grows."""

MIN_FP32_COSINE: dict[Precision, float] = {"fp32": 0.999, "fp16": 0.999, "bf16": 0.98, "int8": 0.98}
"""Minimum mean cosine to the golden vectors of fp32. It detects an export on a machine where int8
saturates, whose own golden vectors are wrong."""

_CURE: dict[Precision, str] = {
    "fp32": "Its galleries would give wrong results; export it again or use another machine.",
    "fp16": "Use precision fp32 or auto; existing galleries remain valid.",
    "bf16": "Use precision fp32 or auto on this machine; existing galleries remain valid.",
    "int8": "This processor lacks VNNI, or 8 bits are too few for this model: use precision fp32 "
    "or auto. Existing galleries remain valid.",
}
_MAX_GOLDEN_PIXEL_DIFFERENCE = 0.5  # mean grey levels per image: allows rounding, no other resize
_MAX_BATCH = 64


class Vectors(Protocol):
    """A collection of vectors of one model, such as a gallery."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def precision(self) -> str: ...


def check_precision(gallery: Vectors, embedder: "ModelFacts") -> None:
    """Check that the precisions of a gallery and a model may be mixed.

    Raises: BundleMismatchError if the export did not compare them.
    """
    precision = embedder.mode.precision
    if not may_mix(gallery.precision, precision):
        others = [one for one in gallery.precision.split("+") if may_mix(gallery.precision, one)]
        fitting = " or ".join(f"--precision {one}" for one in sorted({"fp32", *others}))
        raise BundleMismatchError(
            f"Gallery {gallery.name!r} was built in {gallery.precision}, but the model runs in "
            f"{precision}; the export compared each of them with fp32 only. Use {fitting}, or "
            "rebuild the gallery."
        )


Facts = TypeVar("Facts", bound="ModelFacts")


def fitted(gallery: Vectors, embedder: Facts) -> Facts:
    """The model for a gallery of its bundle, which may keep the first numbers of each vector.

    Raises: BundleMismatchError if their vectors cannot be compared.
    """
    if gallery.dim > embedder.dim:
        raise BundleMismatchError(
            f"Gallery {gallery.name!r} has vectors of {gallery.dim} numbers, but its bundle makes "
            f"{embedder.dim}. Rebuild the gallery: kinlens-index build."
        )
    check_precision(gallery, embedder)
    return embedder.first(gallery.dim)


class ModelFacts(Protocol):
    """A model that runs, in this process or in others."""

    name: str
    bundle_id: str
    dim: int
    provider: str
    mode: Mode
    precision_reason: str
    preprocessing: Preprocessing
    limits: ImageLimits
    calibration: Calibration | None
    no_calibration: str | None
    has_map: bool
    boxes: BoxesFile | None
    text: TextTower | None
    has_words: bool

    def words(self) -> TextEncoder:
        """The text tower, which the first call opens. Raises: BundleError, ProviderError."""

    def parts(self, data: bytes) -> list[Box | None]:
        """The parts of an encoded image that a search with crop = auto compares: the whole image,
        which is None, and boxes of the detector, or windows without one.

        Raises: ImageError, BundleError.
        """

    def maps(self, images: Images) -> Maps:
        """uint8 (N, 3, S, S) to (N, D, h, w), which sum to the embeddings in fp32.

        Raises: BundleError without `has_map`.
        """

    def known_images(self) -> list[bytes]:
        """Encoded images with known vectors; never empty."""

    def first(self, n: int) -> Self:
        """The same model with the first `n` numbers of each vector, normalised.

        Raises: InvalidParameterError above `dim`.
        """

    @property
    def whole(self) -> Self:
        """The same model with all numbers of each vector."""


class Embedder(ModelFacts, Protocol):
    """Converts image bytes to unit vectors. Thread-safe."""

    def preprocess(self, data: bytes, box: Box | None = None) -> NDArray[np.uint8]:
        """Encoded image, or its part in `box`, to uint8 (3, S, S). Raises: ImageError."""

    def embed(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to float32 (N, D), unit norm; N >= 1."""


def read_pixels(path: Path | str, embedder: Embedder) -> tuple[bytes, NDArray[np.uint8]]:
    """The bytes of an image file, and its pixels (1, 3, S, S) for the model.

    Raises: SourceError or ImageError naming the file.
    """
    data = read_file(path, embedder.limits.max_bytes)
    return data, pixels_of(data, f"image {printable(str(path))}", embedder)


def pixels_of(
    data: bytes, name: str, embedder: Embedder, boxes: Sequence[Box | None] = (None,)
) -> NDArray[np.uint8]:
    """The pixels (N, 3, S, S) of parts of an encoded image for the model. A box that is None is the
    whole image.

    Raises: ImageError with the name; InvalidParameterError for a box.
    """
    try:
        parts = ImageParts(data, embedder.limits, embedder.preprocessing.colour)
        return parts.pixels(boxes, embedder.preprocessing)
    except ImageError as error:
        raise type(error)(f"The {name} cannot be used: {error}") from error


class BundleFacts:
    """What is known of a bundle that runs, perhaps in other processes.

    Attributes:
        mode: the engine and precision that run.
        precision_reason: why this mode was chosen, and why others were not.
        provider: the provider of the engine that is in use.
        calibration: None if there is none, for the reason in `no_calibration`.
        boxes: the detector; None if there is none.
        text: the text tower; None if there is none.
        has_words: whether there is a text tower, and the package that reads words.
    """

    def __init__(
        self,
        bundle: Bundle,
        provider: str,
        limits: ImageLimits,
        mode: Mode = FP32,
        precision_reason: str = "asked for",
    ) -> None:
        manifest = bundle.manifest
        self.bundle = bundle
        self.name = manifest.name
        self.bundle_id = bundle.bundle_id
        self.dim = manifest.dim
        self.preprocessing = manifest.preprocessing
        self.limits = limits
        self.calibration = manifest.calibration
        self.no_calibration = manifest.no_calibration()
        self.mode = mode
        self.precision_reason = precision_reason
        self.provider = provider
        self.has_map = manifest.map is not None
        self.boxes = manifest.boxes
        self.text = manifest.text
        self.has_words = manifest.text is not None and can_read_words()
        self._words: TextEncoder | None = None
        self._words_opening = threading.Lock()
        self._detector: Detector | None = None
        self._map: Model | None = None
        self._map_opening = threading.Lock()
        self._whole: Self | None = None

    def first(self, n: int) -> Self:
        """This model with the first `n` numbers of each vector, normalised: for a gallery that
        keeps only these. It has no calibration, which is of whole vectors.

        Raises: InvalidParameterError above `dim`.
        """
        check_dims(n, self.dim)
        if n == self.dim:
            return self
        short = copy.copy(self)
        short._whole, short.dim, short.calibration = self, n, None
        short.no_calibration = f"The gallery keeps the first {n} of {self.dim} numbers."
        return short

    def maps(self, images: Images) -> Maps:
        """uint8 (N, 3, S, S) to the contributions of the positions in fp32, (N, D, h, w).

        The first call opens a separate session on the CPU, so searches without maps do not pay.

        Raises: BundleError (no map, corrupt, golden mismatch).
        """
        if self._whole is not None:
            parts = self._whole.maps(images)[:, : self.dim]  # (N, n, h, w)
            norms = np.linalg.norm(parts.sum((2, 3)), axis=1)
            short: Maps = parts / norms[:, None, None, None]
            return short
        with self._map_opening:
            if self._map is None:
                model = load(self.bundle.map_file(), SessionSettings(), FP32)
                golden = self.bundle.golden_vectors()
                sums = model.run(self.bundle.golden_inputs()).sum((2, 3))
                fault = golden_fault("fp32", sums, golden, golden)
                if fault is not None:
                    raise GoldenMismatchError(
                        f"The map of the model {self.bundle_id[:12]} does not sum to the golden "
                        f"vectors: {fault}. Export the model again, or without --map."
                    )
                self._map = model
        return self._map.run(images)

    def words(self) -> TextEncoder:
        """The text tower, which the first call opens.

        Raises: BundleError, ProviderError.
        """
        if self._whole is not None:
            return self._whole.words()
        with self._words_opening:
            if self._words is None:
                self._words = TextEncoder.open(self.bundle)
            return self._words

    @property
    def whole(self) -> Self:
        """This model with all numbers of each vector."""
        return self._whole or self

    def parts(self, data: bytes) -> list[Box | None]:
        """The parts of an encoded image that a search with crop = auto compares: the whole image,
        which is None, and boxes of the detector, or windows without one. The first call opens the
        detector.

        Raises: ImageError, BundleError.
        """
        if self.boxes is not None and self._detector is None:
            self._detector = Detector.open(self.bundle)
        return auto_parts(data, self.limits, self.preprocessing.colour, self._detector)

    def known_images(self) -> list[bytes]:
        """The golden images as encoded files."""
        return self.bundle.golden_images()


class OnnxEmbedder(BundleFacts):
    """A bundle on an engine; `open` checks it against its golden vectors."""

    def __init__(
        self, bundle: Bundle, model: Model, limits: ImageLimits, mode: Mode = FP32
    ) -> None:
        super().__init__(bundle, model.provider, limits, mode)
        self._model = model

    @classmethod
    def open(
        cls,
        bundle: Bundle | Path | str,
        settings: SessionSettings | None = None,
        limits: ImageLimits | None = None,
        gains: SpeedGains = speed_gains,
    ) -> Self:
        """Load the model, check the device, and compare with the golden vectors.

        If `settings` allow several modes, `gains` measures their speed. The results are cached, so
        the next start opens only the chosen mode.

        Raises: BundleError (not found, corrupt, precision absent, golden mismatch, provider).
        """
        settings, limits = settings or SessionSettings(), limits or ImageLimits()
        if not isinstance(bundle, Bundle):
            bundle = Bundle.open(bundle)
        opens = partial(cls.checked, bundle, settings, limits)
        return Choice(opens, bundle, settings, gains).open()

    @classmethod
    def checked(
        cls,
        bundle: Bundle,
        settings: SessionSettings,
        limits: ImageLimits,
        mode: Mode,
        file: Path | None = None,
    ) -> Self:
        """Load the bundle in `mode` and compare it with its golden vectors. Raises: BundleError.

        `file` is an ONNX file of this precision that is not in the bundle yet.
        """
        model = load(file or bundle.model_file(mode.precision), settings, mode)
        embedder = cls(bundle, model, limits, mode)
        embedder._check_vectors()
        embedder._check_pixels()
        return embedder

    def load_in_forks(self, settings: SessionSettings) -> None:
        """Free the session. Each process that is forked from this one loads its own, at the first
        call of `embed`; this process must not call it. Only for onnxruntime.
        """
        content = self.bundle.model_file(self.mode.precision).read_bytes()
        self._model = LateModel(content, settings, self.mode)

    def preprocess(self, data: bytes, box: Box | None = None) -> NDArray[np.uint8]:
        """Encoded image, or its part in `box`, to uint8 (3, S, S). Raises: ImageError."""
        return preprocess(data, self.preprocessing, self.limits, box)

    def embed(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to float32 (N, D), unit norm. Large N runs in chunks."""
        chunks = [images[n : n + _MAX_BATCH] for n in range(0, len(images), _MAX_BATCH)]
        try:
            vectors: Embeddings = np.concatenate([self._model.run(chunk) for chunk in chunks])
        except Exception as error:
            # Both engines raise exceptions without a common base class.
            raise BundleError(
                f"The model {self.bundle_id[:12]} failed on {len(images)} image(s) of shape "
                f"{images.shape[1:]} on {self.provider}: {error}. Use smaller batches or free "
                "memory."
            ) from error
        if not np.isfinite(vectors).all():
            raise BundleError(
                f"The model {self.bundle_id[:12]} gave vectors that are not finite numbers. "
                "Export it again, and compare both exports with `kinlens-train evaluate`."
            )
        return first_numbers(vectors, self.dim)

    def embed_images(self, contents: Iterable[bytes]) -> Embeddings:
        """Encoded images to float32 (N, D), unit norm. Raises: ImageError."""
        return self._embed_all([self.preprocess(data) for data in contents])

    def embed_files(self, paths: Iterable[Path | str] | Path | str) -> Embeddings:
        """Image files, or one, to float32 (N, D), unit norm.

        Raises: SourceError or ImageError naming the file that cannot be used.
        """
        several = [paths] if isinstance(paths, str | Path) else paths
        return self._embed_all([read_pixels(path, self)[1][0] for path in several])

    def embed_texts(self, texts: Sequence[str]) -> Embeddings:
        """Texts to float32 (N, D), unit norm, by the text tower of the bundle.

        Raises: BundleError if it has none, ProviderError without `kinlens[text]`,
            InvalidParameterError naming a text that cannot be used.
        """
        return first_numbers(self.words().embed(texts), self.dim)

    def _embed_all(self, images: Sequence[NDArray[np.uint8]]) -> Embeddings:
        return self.embed(np.stack(images)) if images else np.empty((0, self.dim), np.float32)

    def _check_vectors(self) -> None:
        fp32 = self.bundle.golden_vectors()
        is_known = self.mode in self.bundle.modes()
        own = self.bundle.golden_vectors(self.mode) if is_known else None
        images = self.bundle.golden_inputs()
        # In pairs, because onnxruntime never frees the memory of its largest batch.
        pairs = [self.embed(images[start : start + 2]) for start in range(0, len(images), 2)]
        fault = golden_fault(self.mode.precision, np.concatenate(pairs), own, fp32)
        if fault is not None:
            raise GoldenMismatchError(
                f"The {self.mode.precision} model {self.bundle_id[:12]} on {self.provider} does "
                f"not reproduce its golden vectors: {fault}. {_CURE[self.mode.precision]}"
            )

    def _check_pixels(self) -> None:
        decoded = np.stack([self.preprocess(data) for data in self.known_images()])
        inputs = self.bundle.golden_inputs()
        differences = np.abs(decoded.astype(np.int16) - inputs).mean(axis=(1, 2, 3))
        difference = float(differences.max())
        if difference > _MAX_GOLDEN_PIXEL_DIFFERENCE:
            raise GoldenMismatchError(
                f"Preprocessing of a golden image is off by {difference:.2f} grey levels on "
                f"average; the limit is {_MAX_GOLDEN_PIXEL_DIFFERENCE}. This machine decodes or "
                "resizes images differently. Install the pinned version of pillow."
            )


def golden_fault(
    precision: Precision, vectors: Embeddings, own: Embeddings | None, fp32: Embeddings
) -> str | None:
    """How golden vectors (N, D) from this machine miss the limits; None if they are within.

    Args:
        precision: of the model that computed `vectors`.
        own: vectors of this mode from the export; None if it was not measured there.
        fp32: vectors of the fp32 model from the export.
    """
    least = MIN_FP32_COSINE[precision]
    if own is not None:
        cosine = float((vectors * own).sum(axis=1).min())
        if not cosine >= MIN_OWN_COSINE[precision]:
            return f"cosine {cosine:.4f}, expected at least {MIN_OWN_COSINE[precision]}"
    mean = float((vectors * fp32).sum(axis=1).mean())
    if not mean >= least:
        return f"mean cosine to fp32 {mean:.4f}, expected at least {least:.4f}"
    return None
