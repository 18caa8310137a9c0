"""Run a model bundle: images in, unit vectors out, by the engine and in the precision asked for.

Each mode is checked here against golden vectors, since what holds on one processor need not on
another: x86 without VNNI adds the products of unsigned and signed 8-bit numbers in pairs, in 16
bits, which saturates.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.calibration import Calibration
from kinlens.embedder.engines.measured import Measured, read_measured, write_measured
from kinlens.embedder.engines.models import PROVIDERS, Model, SessionSettings, absence, load
from kinlens.embedder.errors import (
    BundleError,
    BundleMismatchError,
    GoldenMismatchError,
    ProviderError,
)
from kinlens.embedder.manifest import FP32, Engine, Mode, OtherPrecision, Precision, Preprocessing
from kinlens.embedder.preprocess import Box, ImageLimits, preprocess
from kinlens.embedder.types import Embed, Embeddings, Images, Maps

MIN_OWN_COSINE: dict[Precision, float] = {"fp32": 0.999, "fp16": 0.999, "bf16": 0.99, "int8": 0.99}
"""The least cosine to the golden vectors that the same mode gave at export. Kernels in few bits
round where they please: a last bit that flips in an early layer grows, so int8 and bf16 on another
processor are not as close."""

MIN_FP32_COSINE: dict[Precision, float] = {
    "fp32": 0.999,
    "fp16": 0.999,
    "bf16": 0.98,
    "int8": 0.98,
}
"""The mean cosine to the golden vectors of fp32, so that an export where int8 saturates does not
bless itself."""

MIN_GAIN = 1.2
"""How many times as fast as fp32 another mode must be. MobileNetV2 in int8 has 1.5 to 3 with VNNI,
in bf16 1.5 to 2; less than a fifth is near what short runs differ by."""

FASTER: dict[str, OtherPrecision] = {"cpu": "int8", "cuda": "fp16"}
"""The precision of a file that an export adds for a device."""

_CURE: dict[Precision, str] = {
    "fp32": "Its galleries would not fit; export it again or run it elsewhere.",
    "fp16": "Run it in fp32 or with precision auto; its galleries fit every precision.",
    "bf16": "Run it in fp32 or with precision auto here. Its galleries fit every precision.",
    "int8": "It needs a processor with VNNI; run it in fp32 or with precision auto here. Its "
    "galleries fit every precision.",
}
_MAX_GOLDEN_PIXEL_DIFFERENCE = 0.5  # grey levels, mean over an image: rounding, not another resize
_MAX_BATCH = 64
_TIMED_RUNS = 5


def speed_gains(embeds: Mapping[Mode, Embed], images: Images) -> dict[Mode, float]:
    """How many times as fast as the first of `embeds` each one embeds `images`, here and now.

    The best of a few runs of each, in turn: what else the machine does can only slow a run down.
    All have run on `images` before.
    """
    best = dict.fromkeys(embeds, math.inf)
    for _ in range(_TIMED_RUNS):
        for mode, embed in embeds.items():
            started = perf_counter()
            embed(images)
            best[mode] = min(best[mode], perf_counter() - started)
    first = next(iter(best.values()))
    return {mode: first / seconds for mode, seconds in best.items()}


def may_mix(one: str, other: str) -> bool:
    """Whether the export compared vectors of two precisions, or mixtures such as fp32+int8.

    Engines do not count: golden vectors hold those of one precision near to fp32, and so together.
    """
    pairs = itertools.product(one.split("+"), other.split("+"))
    return all(first == second or "fp32" in (first, second) for first, second in pairs)


class Vectors(Protocol):
    """What is made of vectors of one model."""

    @property
    def name(self) -> str: ...
    @property
    def precision(self) -> str: ...


def check_precision(gallery: Vectors, embedder: "Embedder") -> None:
    """Raises: BundleMismatchError if the export compared no vectors of the two."""
    precision = embedder.mode.precision
    if not may_mix(gallery.precision, precision):
        others = [one for one in gallery.precision.split("+") if may_mix(gallery.precision, one)]
        fitting = " or ".join(f"--precision {one}" for one in sorted({"fp32", *others}))
        raise BundleMismatchError(
            f"Gallery {gallery.name!r} was made in {gallery.precision}, the model runs in "
            f"{precision}: the export compared each with fp32 only. Use {fitting}, or build the "
            "gallery again."
        )


class Embedder(Protocol):
    """Whatever turns image bytes into unit vectors. Thread safe."""

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


class OnnxEmbedder:
    """A bundle on an engine, checked against its golden vectors by `open`.

    `mode` is what runs, `precision_reason` says why and why no other; `provider` is what it really
    runs on; without a `calibration`, `no_calibration` says why.
    """

    def __init__(
        self, bundle: Bundle, model: Model, limits: ImageLimits, mode: Mode = FP32
    ) -> None:
        manifest = bundle.manifest
        self.bundle = bundle
        self.bundle_id = bundle.bundle_id
        self.dim = manifest.dim
        self.preprocessing = manifest.preprocessing
        self.limits = limits
        self.calibration = manifest.calibration
        self.no_calibration = manifest.no_calibration()
        self.mode = mode
        self.precision_reason = "asked for"
        self.provider = model.provider
        self.has_map = manifest.map is not None
        self._model = self._alone = model
        self._map: Model | None = None
        self._map_opening = threading.Lock()

    @classmethod
    def open(
        cls,
        bundle: Bundle | Path | str,
        settings: SessionSettings | None = None,
        limits: ImageLimits | None = None,
        gains: Callable[[Mapping[Mode, Embed], Images], dict[Mode, float]] = speed_gains,
    ) -> "OnnxEmbedder":
        """Load, assert the device, and reproduce the golden vectors of what runs.

        `gains` measures how much faster other modes are, where `settings` leave that open. The
        figures are kept in the cache folder, so the next start opens the chosen mode alone.

        Raises: BundleError (not found, corrupt, precision absent, golden mismatch, provider).
        """
        settings, limits = settings or SessionSettings(), limits or ImageLimits()
        if not isinstance(bundle, Bundle):
            bundle = Bundle.open(bundle)
        embedder = _Choice(bundle, settings, limits, gains).made()
        if 0 < settings.threads < settings.alone_threads:
            more = replace(settings, threads=settings.alone_threads)
            path = bundle.model_file(embedder.mode.precision)
            embedder._alone = load(path, more, embedder.mode)
            embedder._check_vectors(embedder.embed_alone)
        return embedder

    @classmethod
    def checked(
        cls, bundle: Bundle, settings: SessionSettings, limits: ImageLimits, mode: Mode
    ) -> "OnnxEmbedder":
        """The bundle in `mode`, whose golden vectors hold. Raises: BundleError."""
        model = load(bundle.model_file(mode.precision), settings, mode)
        embedder = cls(bundle, model, limits, mode)
        embedder._check_vectors(embedder.embed)
        embedder._check_pixels()
        return embedder

    def preprocess(self, data: bytes, box: Box | None = None) -> NDArray[np.uint8]:
        """Encoded image, or its part in `box`, to uint8 (3, S, S). Raises: ImageError."""
        return preprocess(data, self.preprocessing, self.limits, box)

    def embed(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to float32 (N, D), unit norm. Large N runs in chunks."""
        return self._run(self._model, images)

    def embed_images(self, contents: Iterable[bytes]) -> Embeddings:
        """Encoded images to float32 (N, D), unit norm. Raises: ImageError."""
        return self.embed(np.stack([self.preprocess(data) for data in contents]))

    def embed_files(self, paths: Iterable[Path | str]) -> Embeddings:
        """Image files to float32 (N, D), unit norm. Raises: ImageError, OSError."""
        return self.embed_images(Path(path).read_bytes() for path in paths)

    def embed_alone(self, images: Images) -> Embeddings:
        """The same with `alone_threads`."""
        return self._run(self._alone, images)

    @property
    def gains_alone(self) -> bool:
        """Whether `embed_alone` has more threads than `embed`."""
        return self._alone is not self._model

    def drop_single_session(self) -> None:
        """Free the session of `embed`, where other processes embed; it has the other one's then."""
        self._model = self._alone

    def _run(self, model: Model, images: Images) -> Embeddings:
        chunks = [images[n : n + _MAX_BATCH] for n in range(0, len(images), _MAX_BATCH)]
        try:
            vectors: Embeddings = np.concatenate([model.run(chunk) for chunk in chunks])
        except Exception as error:
            # Both engines raise families of unrelated classes.
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
                model = load(self.bundle.map_file(), SessionSettings(), FP32)
                golden = self.bundle.golden_vectors()
                sums = model.run(self.bundle.golden_inputs()).sum((2, 3))
                fault = golden_fault("fp32", sums, golden, golden)
                if fault is not None:
                    raise GoldenMismatchError(
                        f"The map of the model {self.bundle_id[:12]} does not sum to the golden "
                        f"vectors: {fault}. Export it again, or without --map."
                    )
                self._map = model
        return self._map.run(images)

    def known_images(self) -> list[bytes]:
        """The golden images as encoded files."""
        return self.bundle.golden_images()

    def _check_vectors(self, embed: Embed) -> None:
        fp32 = self.bundle.golden_vectors()
        is_known = self.mode in self.bundle.modes()
        own = self.bundle.golden_vectors(self.mode) if is_known else None
        images = self.bundle.golden_inputs()
        # In pairs: onnxruntime keeps the memory of its largest batch for good.
        pairs = [embed(images[start : start + 2]) for start in range(0, len(images), 2)]
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
                f"average, allowed are {_MAX_GOLDEN_PIXEL_DIFFERENCE}: this machine decodes or "
                "resizes otherwise. Install the pinned version of pillow."
            )


class _Choice:
    """Which mode of a bundle runs here."""

    def __init__(
        self,
        bundle: Bundle,
        settings: SessionSettings,
        limits: ImageLimits,
        gains: Callable[[Mapping[Mode, Embed], Images], dict[Mode, float]],
    ) -> None:
        self._bundle = bundle
        self._settings = settings
        self._limits = limits
        self._gains = gains
        self._refused: dict[Mode, str] = {}

    def made(self) -> OnnxEmbedder:
        """Raises: BundleError."""
        modes = self._modes()
        if len(modes) == 1:
            return self._with_reason(self._opened(modes[0]), {})
        if self._settings.device == "cuda":
            return self._on_gpu(modes)
        known = read_measured(self._bundle.bundle_id, modes, self._settings.threads)
        if known is not None:
            try:
                embedder = self._opened(best_of(known.gains))
            except BundleError:
                pass  # something has changed that the file does not tell: measure again
            else:
                self._refused |= known.refused
                return self._with_reason(embedder, known.gains)
        return self._measured(modes)

    def _on_gpu(self, modes: list[Mode]) -> OnnxEmbedder:
        """fp16 if it holds: what it gains is known, and shows in full batches alone."""
        plain = self._opened(modes[0])
        if plain.provider != PROVIDERS["cuda"]:
            self._refused[modes[1]] = "it needs the GPU"
        else:
            try:
                fast = self._with_reason(self._opened(modes[1]), {})
                fast.precision_reason = "its golden vectors hold"
                return fast
            except GoldenMismatchError as error:
                self._refused[modes[1]] = str(error)
        return self._with_reason(plain, {})

    def _measured(self, modes: list[Mode]) -> OnnxEmbedder:
        opened: dict[Mode, OnnxEmbedder] = {}
        refused: dict[Mode, BundleError] = {}
        for mode in modes:
            try:
                opened[mode] = self._opened(mode)
            except BundleError as error:
                if mode == FP32:
                    raise  # no gallery would fit
                refused[mode] = error
        if not opened:
            raise next(iter(refused.values()))
        embeds = {mode: embedder.embed for mode, embedder in opened.items()}
        gains = self._gains(embeds, self._bundle.golden_inputs()[:1])
        reasons = {mode: str(error) for mode, error in refused.items()}
        self._refused |= reasons
        if all(isinstance(error, GoldenMismatchError) for error in refused.values()):
            # Other reasons may pass, as a lack of memory does.
            measured = Measured(gains, reasons)
            write_measured(self._bundle.bundle_id, modes, self._settings.threads, measured)
        return self._with_reason(opened[best_of(gains)], gains)

    def _modes(self) -> list[Mode]:
        """What may run, the one first that others must beat; why not the rest is noted. What the
        export did not measure may run if it was asked for and there is nothing else.

        Raises: ProviderError, BundleError if nothing may.
        """
        settings, device = self._settings, self._settings.device
        engines: tuple[Engine, ...] = ("onnxruntime", "openvino")
        if settings.engine != "auto":
            engines = (settings.engine,)
        precisions: tuple[Precision, ...] = ("fp32", "bf16", "int8")
        if device == "cuda":
            precisions = ("fp32", "fp16")
        if settings.precision != "auto":
            precisions = (settings.precision,)
        modes: list[Mode] = []
        asked = [Mode(engine, precision) for precision in precisions for engine in engines]
        for mode in asked:
            if settings.engine == "auto" and mode == ("openvino", "fp32"):
                continue  # as fast as onnxruntime (docs/benchmarks.md), so nothing to measure
            reason = self._unfit(mode) or absence(mode, device)
            if reason is None:
                modes.append(mode)
            else:
                self._refused[mode] = reason
        if not modes:
            reasons = " ".join(dict.fromkeys(self._refused.values()))
            raise ProviderError(f"The model {self._bundle.bundle_id[:12]} cannot run. {reasons}")
        return [mode for mode in modes if mode in self._bundle.modes()] or modes

    def _unfit(self, mode: Mode) -> str | None:
        """Why the choice is not `mode`, which this machine has."""
        if mode.precision not in (*self._bundle.precisions, "bf16"):
            if self._settings.precision == "auto":
                return f"the bundle has no {mode.precision}"
            self._bundle.model_file(mode.precision)  # says so, with the cure
        if self._settings.precision != "auto":
            return None
        if mode not in self._bundle.modes():
            return "the export did not measure it"
        compared = self._bundle.manifest.comparison(mode)
        if compared is not None and compared.held_out_cosine is None and mode.precision != "fp16":
            return "the export, by an earlier version, did not measure it in pairs with fp32"
        others = [one for one in self._settings.galleries if not may_mix(one, mode.precision)]
        if others:
            return f"a gallery holds vectors in {min(others)}, with which it was never compared"
        return None

    def _opened(self, mode: Mode) -> OnnxEmbedder:
        return OnnxEmbedder.checked(self._bundle, self._settings, self._limits, mode)

    def _with_reason(self, embedder: OnnxEmbedder, gains: Mapping[Mode, float]) -> OnnxEmbedder:
        notes = [
            f"{mode} is {gain:.2f} times as fast as {next(iter(gains))} here"
            for mode, gain in list(gains.items())[1:]
        ]
        if notes:
            notes[-1] += f" ({MIN_GAIN} is needed)"
        elif self._settings.precision != "auto":
            notes = ["asked for"]
        refusals: dict[str, list[str]] = {}
        for mode, reason in self._refused.items():
            refusals.setdefault(reason.rstrip("."), []).append(str(mode))
        if self._settings.precision == "auto" or self._settings.engine == "auto":
            notes += [f"not {' or '.join(modes)}: {why}" for why, modes in refusals.items()]
        embedder.precision_reason = "; ".join(notes) or "no other mode fits"
        return embedder


def best_of(gains: Mapping[Mode, float]) -> Mode:
    """The fastest mode, or the first if no other gains enough."""
    first, fastest = next(iter(gains)), max(gains, key=gains.__getitem__)
    return fastest if gains[fastest] >= MIN_GAIN else first


def golden_fault(
    precision: Precision, vectors: Embeddings, own: Embeddings | None, fp32: Embeddings
) -> str | None:
    """What is wrong with golden vectors (N, D) made here, in figures; None if they hold.

    Args:
        precision: of the model that made `vectors`.
        own: what the same mode gave at export; None if it was not tried there.
        fp32: what the fp32 model gave at export.
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
