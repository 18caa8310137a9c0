"""Run an ONNX file on an engine: onnxruntime on a CPU or GPU, or OpenVINO on a CPU.

OpenVINO is an extra (`pip install 'kinlens[openvino]'`). It uses the bf16 units of x86 processors,
which onnxruntime does not. It is imported on first use.
"""

import functools
import importlib.util
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import onnxruntime as ort

from kinlens.embedder.errors import BundleCorruptError, ProviderError
from kinlens.embedder.machine import core_count, processor
from kinlens.embedder.manifest import AskedEngine, AskedPrecision, Engine, Mode
from kinlens.embedder.types import Embeddings, Images

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""The onnxruntime provider of each device."""

OPENVINO = "OpenVINOExecutionProvider"
"""The name of OpenVINO in reports, in the style of onnxruntime."""

_DEVICES = {
    PROVIDERS["cpu"]: "the CPU",
    PROVIDERS["cuda"]: "the GPU",
    OPENVINO: "the CPU with OpenVINO",
}

_PROVIDER_OPTIONS: dict[str, dict[str, str]] = {
    "cpu": {},
    "cuda": {
        # The default benchmarks all algorithms for each new shape.
        "cudnn_conv_algo_search": "HEURISTIC",
        # The default grows in powers of two, but FAISS and other processes share the memory.
        "arena_extend_strategy": "kSameAsRequested",
    },
}
_ARM_BF16 = "mlas.enable_gemm_fastmath_arm64_bfloat16"


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Where and how the model runs.

    Attributes:
        device: "cuda" raises if the model would run on the CPU, unless `allow_cpu_fallback`. It is
            the first GPU in CUDA_VISIBLE_DEVICES.
        threads: per call of `embed`. 1 is best with several callers: each core has its own image.
        precision: int8 and bf16 are for the CPU, fp16 for the GPU. "auto" chooses the fastest mode
            that the export compared with fp32, that reproduces its golden vectors on this machine
            and that is fast enough; otherwise fp32 in onnxruntime.
        gpu_memory_mb: limit for the arena of the model in MiB; 0 for no limit.
        engine: "auto" chooses it together with the precision.
        callers: number of threads that call at the same time.
        galleries: the precisions of the galleries that will be searched. "auto" does not mix two
            precisions other than fp32, as they were never compared with each other.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    allow_cpu_fallback: bool = False
    precision: AskedPrecision = "fp32"
    gpu_memory_mb: int = 0
    engine: AskedEngine = "onnxruntime"
    callers: int = 1
    galleries: frozenset[str] = frozenset()


class Model(Protocol):
    """A loaded network. Thread-safe."""

    provider: str

    def run(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to the output of the network, float32 (N, ...)."""


class OnnxRuntimeModel:
    """An onnxruntime session."""

    def __init__(
        self, file: Path | bytes, settings: SessionSettings, precision: str = "fp32"
    ) -> None:
        """Raises: BundleCorruptError, ProviderError."""
        self._session = create_session(file, settings, precision)
        self._input = str(self._session.get_inputs()[0].name)
        self.provider = str(self._session.get_providers()[0])

    def run(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to float32 (N, ...)."""
        run = run_plain if self.provider == PROVIDERS["cpu"] else run_bucketed
        return run(self._session, self._input, images)


class OpenVinoModel:
    """A network that OpenVINO compiled for one image; a batch is run image by image.

    A fixed shape is 25 % faster than a dynamic one, and batches are no faster on a CPU. If
    `threads` is 1, several threads run at once, each in its own stream.
    """

    provider = OPENVINO

    def __init__(self, path: Path, settings: SessionSettings, precision: str = "fp32") -> None:
        """Raises: BundleCorruptError, ProviderError."""
        import openvino

        streams = settings.callers if settings.threads == 1 else 1
        options = {
            "NUM_STREAMS": streams,
            "INFERENCE_NUM_THREADS": max(streams, settings.threads or core_count()),
            "INFERENCE_PRECISION_HINT": "bf16" if precision == "bf16" else "f32",
            "ENABLE_CPU_PINNING": False,
        }
        core = _openvino_core()
        try:
            network = core.read_model(path)
            shape = network.input(0).get_partial_shape()
            shape[0] = 1
            network.reshape(shape)
            self._compiled: Any = core.compile_model(network, "CPU", options)
        except Exception as error:
            # OpenVINO raises RuntimeError for any file that it cannot read or compile.
            text = str(error).strip().splitlines()[-1]
            raise BundleCorruptError(
                f"{path} cannot be loaded by OpenVINO {openvino.__version__}: {text} "
                "Use --engine onnxruntime."
            ) from error
        self._idle: list[Any] = []

    def run(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to float32 (N, ...)."""
        with self._request() as request:
            found = []
            for number in range(len(images)):
                request.infer([images[number : number + 1]], share_inputs=True)
                found.append(request.get_output_tensor(0).data.copy())
        return np.concatenate(found)

    @contextmanager
    def _request(self) -> Iterator[Any]:
        """An inference request for this thread only. After an error it is discarded."""
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        yield request
        self._idle.append(request)


class LateModel:
    """A model that its first call loads, from `content` in memory.

    For processes that are forked from this one: threads do not survive a fork, and a sandbox opens
    no file.
    """

    def __init__(self, content: bytes, settings: SessionSettings, mode: Mode) -> None:
        self.provider = PROVIDERS[settings.device]
        self._load = functools.cache(
            functools.partial(OnnxRuntimeModel, content, settings, mode.precision)
        )

    def run(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to float32 (N, ...)."""
        return self._load().run(images)


def load(path: Path, settings: SessionSettings, mode: Mode) -> Model:
    """Load the ONNX file at `path` in `mode`. Raises: BundleCorruptError, ProviderError."""
    if (fault := absence(mode, settings.device)) is not None:
        raise ProviderError(fault)
    kind = OpenVinoModel if mode.engine == "openvino" else OnnxRuntimeModel
    return kind(path, settings, mode.precision)


def place_of(provider: str, mode: Mode, reason: str) -> str:
    """Where a model runs, and in which precision: "on the CPU in fp32"."""
    device = _DEVICES.get(provider, provider)
    return f"on {device} in {mode.precision}" + ("" if reason == "asked for" else f" ({reason})")


def absence(mode: Mode, device: str = "cpu") -> str | None:
    """Why this machine cannot run `mode`, and what to do; None if it can."""
    if mode.engine == "openvino":
        if device != "cpu":
            return "OpenVINO runs on the CPU only. Use --engine onnxruntime with --device cuda."
        if importlib.util.find_spec("openvino") is None:
            return "OpenVINO is not installed. Install it with: pip install 'kinlens[openvino]'."
        try:
            has_bf16 = _has_bf16()
        except Exception as error:
            # ImportError for a missing library, RuntimeError for a missing plug-in.
            return f"OpenVINO does not start: {error}. Install it again, or use onnxruntime."
        if mode.precision == "bf16" and not has_bf16:
            return "This processor has no bf16 units. Use --precision fp32 or int8."
        return None
    if mode.precision == "bf16" and not _has_arm_bf16():
        return (
            "onnxruntime supports bf16 only on ARM processors with bf16 units, with Linux. Use "
            "--engine openvino or auto."
        )
    return None


def engine_versions() -> dict[Engine, str]:
    """The versions of the installed engines."""
    versions: dict[Engine, str] = {"onnxruntime": ort.__version__}
    if importlib.util.find_spec("openvino") is not None:
        with suppress(PackageNotFoundError):  # Intel's archives have no package metadata
            versions["openvino"] = version("openvino")
    return versions


_core_lock = threading.Lock()


def _openvino_core() -> Any:
    """The `openvino.Core` of the process, shared because its creation takes 50 ms."""
    with _core_lock:
        return _new_core()


@functools.cache
def _new_core() -> Any:
    import openvino

    return openvino.Core()


def _has_arm_bf16() -> bool:
    # Elsewhere onnxruntime ignores the option and silently computes in fp32.
    return platform.machine() == "aarch64" and " bf16" in processor()


def _has_bf16() -> bool:
    return "BF16" in _openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def run_plain(session: ort.InferenceSession, name: str, images: Images) -> Embeddings:
    """Run a batch on a CPU; `name` is the name of the input."""
    vectors: Embeddings = session.run(None, {name: images})[0]
    return vectors


def run_bucketed(session: ort.InferenceSession, name: str, images: Images) -> Embeddings:
    """Run a batch on a GPU, padded to a power of two, with bound buffers.

    The GPU libraries prepare for each new shape, which takes longer than the padding images. With
    1, 2, 4, ... 64 images there are only seven shapes.
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


def create_session(
    file: Path | bytes, settings: SessionSettings, precision: str = "fp32"
) -> ort.InferenceSession:
    """Open an onnxruntime session for an ONNX file, or its content.

    Raises: BundleCorruptError, ProviderError.
    """
    wanted = PROVIDERS[settings.device]
    available = wanted in ort.get_available_providers()
    provider_options = dict(_PROVIDER_OPTIONS[settings.device])
    if settings.device == "cuda" and settings.gpu_memory_mb:
        provider_options["gpu_mem_limit"] = str(settings.gpu_memory_mb << 20)
    chosen = [(wanted, provider_options)] if available else []
    if settings.device != "cpu":
        chosen.append((PROVIDERS["cpu"], _PROVIDER_OPTIONS["cpu"]))
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    if precision == "bf16":
        options.add_session_config_entry(_ARM_BF16, "1")
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(file, options, providers=chosen)
    except Exception as error:
        # onnxruntime raises exceptions without a common base class for unreadable files.
        name = file if isinstance(file, Path) else "The model"
        raise BundleCorruptError(f"{name} cannot be loaded: {error}") from error
    active = session.get_providers()[0]
    if active != wanted and not settings.allow_cpu_fallback:
        raise ProviderError(
            f"{wanted} was requested, but the model would run on {active}. Install the GPU "
            "packages in a new environment (pip install 'kinlens[gpu]') and check the driver, or "
            "choose --device cpu."
        )
    return session
