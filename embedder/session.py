"""Run a model bundle with onnxruntime: images in, unit vectors out, on the device asked for.

A bundle may hold the network in several precisions. Each is checked here against golden vectors,
since what holds on one processor need not on another: x86 without VNNI adds the products of
unsigned and signed 8-bit numbers in pairs, in 16 bits, which saturates.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Literal, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from embedder.bundle import Bundle
from embedder.calibration import Calibration
from embedder.errors import BundleCorruptError, BundleError, GoldenMismatchError, ProviderError
from embedder.manifest import AskedPrecision, OtherPrecision, Precision, Preprocessing
from embedder.preprocess import Box, ImageLimits, preprocess
from embedder.types import Embeddings, Images, Maps

MIN_OWN_COSINE = {"fp32": 0.999, "fp16": 0.999, "int8": 0.99}
"""The least cosine to the golden vectors that the same precision gave at export. Integer kernels
round where they please: a last bit that flips in an early layer grows, so int8 on another processor
is not as close."""

MIN_FP32_COSINE = {"fp32": 0.999, "fp16": 0.999, "int8": 0.985}
"""The mean cosine to the golden vectors of fp32, so that an export where int8 saturates does not
bless itself. MobileNetV2 has 0.996 with VNNI and 0.963 without: 0.985 is half way, as an angle."""

MIN_GAIN = 1.2
"""How many times as fast as fp32 a precision must be. MobileNetV2 in int8 has 1.5 to 3 with VNNI;
less than a fifth is near what short runs differ by, and int8 may cost half a point of recall."""

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""What onnxruntime calls a device."""

FASTER: dict[str, OtherPrecision] = {PROVIDERS["cpu"]: "int8", PROVIDERS["cuda"]: "fp16"}
"""What `precision = "auto"` may take in place of fp32."""

_PROVIDER_OPTIONS: dict[str, dict[str, str]] = {
    "cpu": {},
    "cuda": {
        # Looked up, where the default times all algorithms anew at each shape.
        "cudnn_conv_algo_search": "HEURISTIC",
        # Not powers of two: FAISS and other processes share the memory.
        "arena_extend_strategy": "kSameAsRequested",
    },
}
_CURE = {
    "fp32": "Its galleries would not fit; export it again or run it elsewhere.",
    "fp16": "Run it in fp32 or with precision auto; its galleries fit every precision.",
    "int8": "It needs a processor with VNNI; run it in fp32 or with precision auto here. Its "
    "galleries fit every precision.",
}
_MAX_GOLDEN_PIXEL_DIFFERENCE = 0.5  # grey levels, mean over an image: rounding, not another resize
_MAX_BATCH = 64
_TIMED_RUNS = 5

Embed = Callable[[Images], Embeddings]
"""uint8 (N, 3, S, S) to unit vectors (N, D)."""


def speed_gain(fast: Embed, plain: Embed, images: Images) -> float:
    """How many times as fast `fast` embeds `images` as `plain` does, here and now.

    The best of a few runs of each, in turn: what else the machine does can only slow a run down.
    Both have run on `images` before.
    """
    best = [np.inf, np.inf]
    for _ in range(_TIMED_RUNS):
        for number, embed in enumerate((fast, plain)):
            started = perf_counter()
            embed(images)
            best[number] = min(best[number], perf_counter() - started)
    return float(best[1] / best[0])


class Embedder(Protocol):
    """Whatever turns image bytes into unit vectors. Thread safe."""

    bundle_id: str
    dim: int
    provider: str
    precision: Precision
    precision_reason: str
    preprocessing: Preprocessing
    limits: ImageLimits
    calibration: Calibration | None
    no_calibration: str | None
    has_map: bool

    def preprocess(self, data: bytes, box: Box | None = None) -> NDArray[np.uint8]:
        """Encoded image, or its part in `box`, to uint8 (3, S, S). Raises: ImageError."""

    def embed(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to float32 (N, D), unit norm; N >= 1."""

    def embed_alone(self, images: Images) -> Embeddings:
        """The same, sooner if no other call runs: with more cores, if there are some for it."""

    def maps(self, images: Images) -> Maps:
        """uint8 (N, 3, S, S) to (N, D, h, w), which sum to the embeddings in fp32. Raises:
        BundleError without `has_map`.
        """

    def known_images(self) -> list[bytes]:
        """Encoded images whose vectors are known; never empty."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Where and how the model runs.

    `threads` work on one call; 1 is best where several callers run at once, since then each core
    has its own image. `alone_threads`, where they are more, work on a call of `embed_alone`, in a
    session of its own, which takes as much memory again. `device = "cuda"` is refused if the model
    would run on the CPU, unless `allow_cpu_fallback`. `precision` chooses among the models of the
    bundle: int8 is made for the CPU, fp16 for the GPU; either runs on the other too, without gain.
    Vectors of all precisions of a bundle may be compared with each other. "auto" takes int8 on a
    CPU, fp16 on a GPU, where the bundle has it, its golden vectors hold and the CPU gains from it;
    fp32 anywhere else. Of several GPUs the process takes the first that CUDA_VISIBLE_DEVICES shows
    it, and of its memory at most `gpu_memory_mb` MiB for the arena of the model; 0: as much as
    there is.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    allow_cpu_fallback: bool = False
    precision: AskedPrecision = "fp32"
    gpu_memory_mb: int = 0
    alone_threads: int = 0


class OnnxEmbedder:
    """A bundle in an onnxruntime session, checked against its golden vectors by `open`.

    `precision` is the one that runs, `precision_reason` says why; `provider` is what onnxruntime
    really runs it on; without a `calibration`, `no_calibration` says why.
    """

    def __init__(
        self,
        bundle: Bundle,
        session: ort.InferenceSession,
        limits: ImageLimits,
        precision: Precision = "fp32",
    ) -> None:
        manifest = bundle.manifest
        self.bundle = bundle
        self.bundle_id = bundle.bundle_id
        self.dim = manifest.dim
        self.preprocessing = manifest.preprocessing
        self.limits = limits
        self.calibration = manifest.calibration
        self.no_calibration = manifest.no_calibration()
        self.precision = precision
        self.precision_reason = "asked for"
        self.provider = str(session.get_providers()[0])
        self.has_map = manifest.map is not None
        self._session = self._alone = session
        self._map: ort.InferenceSession | None = None
        self._map_opening = threading.Lock()
        self._input = str(session.get_inputs()[0].name)

    @classmethod
    def open(
        cls,
        bundle: Bundle | Path | str,
        settings: SessionSettings | None = None,
        limits: ImageLimits | None = None,
        gain: Callable[[Embed, Embed, Images], float] = speed_gain,
    ) -> "OnnxEmbedder":
        """Load, assert the device, and reproduce the golden vectors of what runs.

        `gain` measures how much faster another precision is, where `settings` leave that open.

        Raises: BundleError (not found, corrupt, precision absent, golden mismatch, provider).
        """
        settings, limits = settings or SessionSettings(), limits or ImageLimits()
        if not isinstance(bundle, Bundle):
            bundle = Bundle.open(bundle)
        embedder = cls._chosen(bundle, settings, limits, gain)
        if 0 < settings.threads < settings.alone_threads:
            model = bundle.model_file(embedder.precision)
            more = replace(settings, threads=settings.alone_threads)
            embedder._alone = create_session(model, more)
            embedder._check_vectors(embedder.embed_alone)
        return embedder

    @classmethod
    def _chosen(
        cls,
        bundle: Bundle,
        settings: SessionSettings,
        limits: ImageLimits,
        gain: Callable[[Embed, Embed, Images], float],
    ) -> "OnnxEmbedder":
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
        if fast.provider != PROVIDERS["cpu"]:
            fast.precision_reason = "its golden vectors hold"
            return fast
        times = gain(fast.embed, plain.embed, bundle.golden_inputs())
        chosen = fast if times >= MIN_GAIN else plain
        chosen.precision_reason = (
            f"the golden vectors of {faster} hold, and it is {times:.2f} times as fast as fp32 "
            f"here; {MIN_GAIN} is asked for"
        )
        return chosen

    @classmethod
    def _checked(
        cls, bundle: Bundle, settings: SessionSettings, limits: ImageLimits, precision: Precision
    ) -> "OnnxEmbedder":
        session = create_session(bundle.model_file(precision), settings)
        embedder = cls(bundle, session, limits, precision)
        embedder._check_vectors(embedder.embed)
        embedder._check_pixels()
        return embedder

    def preprocess(self, data: bytes, box: Box | None = None) -> NDArray[np.uint8]:
        """Encoded image, or its part in `box`, to uint8 (3, S, S). Raises: ImageError."""
        return preprocess(data, self.preprocessing, self.limits, box)

    def embed(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to float32 (N, D), unit norm. Large N runs in chunks."""
        return self._run(self._session, images)

    def embed_alone(self, images: Images) -> Embeddings:
        """The same with `alone_threads`."""
        return self._run(self._alone, images)

    def _run(self, session: ort.InferenceSession, images: Images) -> Embeddings:
        chunks = [images[n : n + _MAX_BATCH] for n in range(0, len(images), _MAX_BATCH)]
        run = run_plain if self.provider == PROVIDERS["cpu"] else run_bucketed
        try:
            found = [run(session, self._input, chunk) for chunk in chunks]
            vectors: Embeddings = np.concatenate(found)
        except Exception as error:
            # onnxruntime raises a family of unrelated classes.
            raise BundleError(
                f"The model {self.bundle_id[:12]} failed on {len(images)} image(s) of shape "
                f"{images.shape[1:]} on {self.provider}: {error}. Use smaller batches, free memory."
            ) from error
        if not np.isfinite(vectors).all():
            raise BundleError(
                f"The model {self.bundle_id[:12]} gave vectors that are not finite numbers. "
                "Export it again and compare `kinlens-train evaluate` of both."
            )
        return vectors

    def maps(self, images: Images) -> Maps:
        """uint8 (N, 3, S, S) to what each position adds to the embedding in fp32, (N, D, h, w).

        A session of its own, on the CPU, opens at the first call, so that searches pay nothing.

        Raises: BundleError (no map, corrupt, golden mismatch).
        """
        with self._map_opening:
            if self._map is None:
                session = create_session(self.bundle.map_file(), SessionSettings())
                golden = self.bundle.golden_vectors()
                sums = run_plain(session, self._input, self.bundle.golden_inputs()).sum((2, 3))
                fault = golden_fault("fp32", sums, golden, golden)
                if fault is not None:
                    raise GoldenMismatchError(
                        f"The map of the model {self.bundle_id[:12]} does not sum to the golden "
                        f"vectors: {fault}. Export it again, or without --map."
                    )
                self._map = session
        maps: Maps = run_plain(self._map, self._input, images)
        return maps

    def known_images(self) -> list[bytes]:
        """The golden images as encoded files."""
        return self.bundle.golden_images()

    def _check_vectors(self, embed: Embed) -> None:
        own, fp32 = self.bundle.golden_vectors(self.precision), self.bundle.golden_vectors()
        fault = golden_fault(self.precision, embed(self.bundle.golden_inputs()), own, fp32)
        if fault is not None:
            raise GoldenMismatchError(
                f"The {self.precision} model {self.bundle_id[:12]} on {self.provider} does not "
                f"reproduce its golden vectors: {fault}. {_CURE[self.precision]}"
            )

    def _check_pixels(self) -> None:
        decoded = np.stack([self.preprocess(data) for data in self.known_images()])
        inputs = self.bundle.golden_inputs()
        differences = np.abs(decoded.astype(np.int16) - inputs).mean(axis=(1, 2, 3))
        difference = float(differences.max())
        if difference > _MAX_GOLDEN_PIXEL_DIFFERENCE:
            raise GoldenMismatchError(
                f"Preprocessing of a golden image is off by {difference:.2f} grey levels on "
                f"average, allowed are {_MAX_GOLDEN_PIXEL_DIFFERENCE}: this machine decodes or "
                "resizes otherwise. Install the pinned version of pillow."
            )


def golden_fault(
    precision: Precision, vectors: Embeddings, own: Embeddings, fp32: Embeddings
) -> str | None:
    """What is wrong with golden vectors (N, D) made here, in figures; None if they hold.

    Args:
        precision: of the model that made `vectors`.
        own: what the same model gave at export.
        fp32: what the fp32 model gave at export.
    """
    cosine = float((vectors * own).sum(axis=1).min())
    if not cosine >= MIN_OWN_COSINE[precision]:
        return f"cosine {cosine:.4f}, expected at least {MIN_OWN_COSINE[precision]}"
    mean = float((vectors * fp32).sum(axis=1).mean())
    if not mean >= MIN_FP32_COSINE[precision]:
        return f"mean cosine to fp32 {mean:.4f}, expected at least {MIN_FP32_COSINE[precision]}"
    return None


def run_plain(session: ort.InferenceSession, name: str, images: Images) -> Embeddings:
    """A run on a CPU, of a batch as it is; `name` is that of the input."""
    vectors: Embeddings = session.run(None, {name: images})[0]
    return vectors


def run_bucketed(session: ort.InferenceSession, name: str, images: Images) -> Embeddings:
    """A run on a GPU: the batch is filled up to a power of two, and its buffers are bound.

    A GPU library prepares itself for each new shape, which takes longer than the images that fill
    the batch; with 1, 2, 4, ... 64 images there are seven shapes in all.
    """
    count = len(images)
    size = 1 << (count - 1).bit_length()
    filled = np.concatenate([images, np.repeat(images[-1:], size - count, axis=0)])
    binding = session.io_binding()
    binding.bind_cpu_input(name, np.ascontiguousarray(filled))
    binding.bind_output(session.get_outputs()[0].name)
    session.run_with_iobinding(binding)
    vectors: Embeddings = binding.copy_outputs_to_cpu()[0][:count]
    return vectors


def create_session(model: Path, settings: SessionSettings) -> ort.InferenceSession:
    """An ONNX file ready to run. Raises: BundleCorruptError, ProviderError."""
    wanted = PROVIDERS[settings.device]
    available = wanted in ort.get_available_providers()
    told = dict(_PROVIDER_OPTIONS[settings.device])
    if settings.device == "cuda" and settings.gpu_memory_mb:
        told["gpu_mem_limit"] = str(settings.gpu_memory_mb << 20)
    chosen = [(wanted, told)] if available else []
    if settings.device != "cpu":
        chosen.append((PROVIDERS["cpu"], _PROVIDER_OPTIONS["cpu"]))
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
