"""Run a model bundle with onnxruntime: images in, unit vectors out, on the device asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from embedder.bundle import Bundle
from embedder.calibration import Calibration
from embedder.errors import BundleCorruptError, BundleError, GoldenMismatchError, ProviderError
from embedder.manifest import AskedPrecision, Precision, Preprocessing
from embedder.precision import (
    FASTER,
    MIN_GAIN,
    PROVIDERS,
    Gain,
    golden_fault,
    mismatch,
    speed_gain,
)
from embedder.preprocess import Box, ImageLimits, preprocess
from embedder.types import Embeddings, Images

_MAX_GOLDEN_PIXEL_DIFFERENCE = 0.5  # grey levels, mean over an image: rounding, not another resize
_MAX_BATCH = 64

PROVIDER_OPTIONS: dict[str, dict[str, str]] = {
    "cpu": {},
    "cuda": {
        # Looked up, where the default times all algorithms anew at each shape.
        "cudnn_conv_algo_search": "HEURISTIC",
        # Not powers of two: FAISS and other processes share the memory.
        "arena_extend_strategy": "kSameAsRequested",
    },
}
"""What onnxruntime is told about each device."""


class Embedder(Protocol):
    """Whatever turns image bytes into unit vectors. Thread safe."""

    @property
    def bundle_id(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def provider(self) -> str: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def precision_reason(self) -> str: ...
    @property
    def preprocessing(self) -> Preprocessing: ...
    @property
    def limits(self) -> ImageLimits: ...
    @property
    def calibration(self) -> Calibration | None: ...
    @property
    def no_calibration(self) -> str | None: ...

    def preprocess(self, data: bytes, box: Box | None = None) -> NDArray[np.uint8]:
        """Encoded image, or its part in `box`, to uint8 (3, S, S). Raises: ImageError."""

    def embed(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to float32 (N, D), unit norm; N >= 1."""

    def known_images(self) -> list[bytes]:
        """Encoded images whose vectors are known; never empty."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Where and how the model runs.

    `threads` work on one call; 1 is best where several callers run at once, since then each core
    has its own image. `device = "cuda"` is refused if the model would run on the CPU, unless
    `allow_cpu_fallback`. `precision` chooses among the models of the bundle: int8 is made for the
    CPU, fp16 for the GPU; either runs on the other too, without gain. Vectors of all precisions
    of a bundle may be compared with each other. "auto" takes int8 on a CPU, fp16 on a GPU, where
    the bundle has it, its golden vectors hold and the CPU gains from it; fp32 anywhere else.
    Of several GPUs the process takes the first that CUDA_VISIBLE_DEVICES shows it.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    allow_cpu_fallback: bool = False
    precision: AskedPrecision = "fp32"


class OnnxEmbedder:
    """A bundle in an onnxruntime session, checked against its golden vectors when opened.

    `precision` is the one that runs, `precision_reason` says why.
    """

    def __init__(
        self,
        bundle: Bundle,
        session: ort.InferenceSession,
        limits: ImageLimits,
        precision: Precision = "fp32",
    ) -> None:
        self.bundle = bundle
        self.precision = precision
        self.precision_reason = "asked for"
        self._session = session
        self.limits = limits

    @classmethod
    def open(
        cls,
        bundle: Bundle | Path | str,
        settings: SessionSettings | None = None,
        limits: ImageLimits | None = None,
        gain: Gain = speed_gain,
    ) -> "OnnxEmbedder":
        """Load, assert the device, and reproduce the golden vectors of what runs.

        `gain` measures how much faster another precision is, where `settings` leave that open.

        Raises: BundleError (not found, corrupt, precision absent, golden mismatch, provider).
        """
        settings, limits = settings or SessionSettings(), limits or ImageLimits()
        if not isinstance(bundle, Bundle):
            bundle = Bundle.open(bundle)
        if settings.precision != "auto":
            return cls._checked(bundle, settings, limits, settings.precision)
        plain = cls._checked(bundle, settings, limits, "fp32")
        faster = FASTER[plain.provider]
        plain.precision_reason = f"the bundle has no {faster}"
        if faster not in bundle.precisions:
            return plain
        try:
            fast = cls._checked(bundle, settings, limits, faster)
        except GoldenMismatchError as error:
            plain.precision_reason = str(error)
            return plain
        return _faster(fast, plain, gain)

    @classmethod
    def _checked(
        cls, bundle: Bundle, settings: SessionSettings, limits: ImageLimits, precision: Precision
    ) -> "OnnxEmbedder":
        session = create_session(bundle.model_file(precision), settings)
        embedder = cls(bundle, session, limits, precision)
        embedder._check_golden()
        return embedder

    @property
    def bundle_id(self) -> str:
        """sha256 (hex) of the bundle."""
        return self.bundle.bundle_id

    @property
    def dim(self) -> int:
        """Length of an embedding."""
        return self.bundle.manifest.dim

    @property
    def provider(self) -> str:
        """The execution provider that really runs the model."""
        return str(self._session.get_providers()[0])

    @property
    def preprocessing(self) -> Preprocessing:
        """What the model expects of its images."""
        return self.bundle.manifest.preprocessing

    @property
    def calibration(self) -> Calibration | None:
        """From a score to a probability; None if the export could not fit it."""
        return self.bundle.manifest.calibration

    @property
    def no_calibration(self) -> str | None:
        """Why there is no calibration; None with one."""
        manifest = self.bundle.manifest
        if manifest.calibration is not None:
            return None
        reason = None if manifest.held_out is None else manifest.held_out.no_calibration
        return reason or "It was exported without held-out images."

    def preprocess(self, data: bytes, box: Box | None = None) -> NDArray[np.uint8]:
        """Encoded image, or its part in `box`, to uint8 (3, S, S). Raises: ImageError."""
        return preprocess(data, self.preprocessing, self.limits, box)

    def embed(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to float32 (N, D), unit norm. Large N runs in chunks."""
        starts = range(0, len(images), _MAX_BATCH)
        vectors: Embeddings = np.concatenate(
            [self._run(images[start : start + _MAX_BATCH]) for start in starts]
        )
        if not np.isfinite(vectors).all():
            raise BundleError(
                f"The model {self.bundle_id[:12]} gave vectors that are not finite numbers. "
                "Export it again and compare `kinlens-train evaluate` of both."
            )
        return vectors

    def _run(self, images: Images) -> Embeddings:
        try:
            run = run_plain if self.provider == PROVIDERS["cpu"] else run_bucketed
            vectors = run(self._session, images)
        except Exception as error:
            # onnxruntime raises a family of unrelated classes.
            raise BundleError(
                f"The model {self.bundle_id[:12]} failed on {len(images)} image(s) of shape "
                f"{images.shape[1:]} on {self.provider}: {error}. Use smaller batches, free memory."
            ) from error
        return vectors

    def known_images(self) -> list[bytes]:
        """The golden images as encoded files."""
        return self.bundle.golden_images()

    def _check_golden(self) -> None:
        inputs = self.bundle.golden_inputs()
        own, fp32 = self.bundle.golden_vectors(self.precision), self.bundle.golden_vectors()
        fault = golden_fault(self.precision, self.embed(inputs), own, fp32)
        if fault is not None:
            raise mismatch(self.precision, self.bundle_id, self.provider, fault)
        decoded = np.stack([self.preprocess(data) for data in self.known_images()])
        differences = np.abs(decoded.astype(np.int16) - inputs).mean(axis=(1, 2, 3))
        difference = float(differences.max())
        if difference > _MAX_GOLDEN_PIXEL_DIFFERENCE:
            raise GoldenMismatchError(
                f"Preprocessing of a golden image is off by {difference:.2f} grey levels on "
                f"average, allowed are {_MAX_GOLDEN_PIXEL_DIFFERENCE}: this machine decodes or "
                "resizes otherwise. Install the pinned version of pillow."
            )


def _faster(fast: OnnxEmbedder, plain: OnnxEmbedder, gain: Gain) -> OnnxEmbedder:
    """The one that `precision = "auto"` takes, with its reason; on a GPU nothing is measured."""
    if fast.provider != PROVIDERS["cpu"]:
        fast.precision_reason = "its golden vectors hold"
        return fast
    times = gain(fast.embed, plain.embed, plain.bundle.golden_inputs())
    chosen = fast if times >= MIN_GAIN else plain
    chosen.precision_reason = (
        f"the golden vectors of {fast.precision} hold, and it is {times:.2f} times as fast as fp32 "
        f"here; {MIN_GAIN} is asked for"
    )
    return chosen


def run_plain(session: ort.InferenceSession, images: Images) -> Embeddings:
    """A run on a CPU, of a batch as it is."""
    vectors: Embeddings = session.run(None, {session.get_inputs()[0].name: images})[0]
    return vectors


def run_bucketed(session: ort.InferenceSession, images: Images) -> Embeddings:
    """A run on a GPU: the batch is filled up to a power of two, and its buffers are bound.

    A GPU library prepares itself for each new shape, which takes longer than the images that fill
    the batch; with 1, 2, 4, ... 64 images there are seven shapes in all.
    """
    count = len(images)
    size = 1 << (count - 1).bit_length()
    filled = np.concatenate([images, np.repeat(images[-1:], size - count, axis=0)])
    binding = session.io_binding()
    binding.bind_cpu_input(session.get_inputs()[0].name, np.ascontiguousarray(filled))
    binding.bind_output(session.get_outputs()[0].name)
    session.run_with_iobinding(binding)
    vectors: Embeddings = binding.copy_outputs_to_cpu()[0][:count]
    return vectors


def create_session(model: Path, settings: SessionSettings) -> ort.InferenceSession:
    """An ONNX file ready to run. Raises: BundleCorruptError, ProviderError."""
    wanted = PROVIDERS[settings.device]
    available = wanted in ort.get_available_providers()
    chosen = [(wanted, PROVIDER_OPTIONS[settings.device])] if available else []
    if settings.device != "cpu":
        chosen.append((PROVIDERS["cpu"], PROVIDER_OPTIONS["cpu"]))
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(model, options, providers=chosen)
    except Exception as error:
        # onnxruntime raises a family of unrelated classes for a file that it cannot load.
        raise BundleCorruptError(f"{model} cannot be loaded: {error}") from error
    active = session.get_providers()[0]
    if active != wanted and not settings.allow_cpu_fallback:
        raise ProviderError(
            f"Asked for {wanted}, but the model would run on {active}. Install the GPU packages "
            "(`make install-gpu`) and check the driver, or allow the CPU with "
            "--allow-cpu-fallback."
        )
    return session
