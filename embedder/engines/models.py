"""One ONNX file on one engine: onnxruntime on a CPU or GPU, or OpenVINO on a CPU.

OpenVINO is an extra (`pip install 'kinlens[openvino]'`): it computes in bf16 on processors that
have the units for it, which onnxruntime leaves idle. It is imported when it is first asked for.
"""

import functools
import importlib.util
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it reports to Microsoft from 1.29 on

import onnxruntime as ort

from kinlens.embedder.errors import BundleCorruptError, ProviderError
from kinlens.embedder.machine import core_count, processor
from kinlens.embedder.manifest import AskedEngine, AskedPrecision, Engine, Mode
from kinlens.embedder.types import Embeddings, Images

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""What onnxruntime calls a device."""

OPENVINO = "OpenVINOExecutionProvider"
"""What reports call OpenVINO, as onnxruntime would."""

_PROVIDER_OPTIONS: dict[str, dict[str, str]] = {
    "cpu": {},
    "cuda": {
        # Looked up, where the default times all algorithms anew at each shape.
        "cudnn_conv_algo_search": "HEURISTIC",
        # Not powers of two: FAISS and other processes share the memory.
        "arena_extend_strategy": "kSameAsRequested",
    },
}
_ARM_BF16 = "mlas.enable_gemm_fastmath_arm64_bfloat16"


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Where and how the model runs.

    `threads` work on one call; 1 is best where several callers run at once, since then each core
    has its own image. `alone_threads`, where they are more, work on a call of `embed_alone`, in a
    session of its own, which takes as much memory again. `callers` is how many threads call at the
    same time. `device = "cuda"` is refused if the model would run on the CPU, unless
    `allow_cpu_fallback`.

    `precision` chooses how the bundle is computed, `engine` by which library; "auto" takes the
    fastest that was compared with fp32 at the export, whose golden vectors hold here and which is
    worth it, fp32 in onnxruntime anywhere else. int8 and bf16 are made for the CPU, fp16 for the
    GPU. `galleries` names the precisions of the vectors that will be searched: two others than fp32
    were never compared with each other, so "auto" does not mix them.

    Of several GPUs the process takes the first that CUDA_VISIBLE_DEVICES shows it, and of its
    memory at most `gpu_memory_mb` MiB for the arena of the model; 0: as much as there is.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    allow_cpu_fallback: bool = False
    precision: AskedPrecision = "fp32"
    gpu_memory_mb: int = 0
    alone_threads: int = 0
    engine: AskedEngine = "onnxruntime"
    callers: int = 1
    galleries: frozenset[str] = frozenset()


class Model(Protocol):
    """A network that is loaded. Thread safe."""

    provider: str

    def run(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to what the network gives, float32 (N, ...)."""


class OnnxRuntimeModel:
    """A session of onnxruntime."""

    def __init__(self, path: Path, settings: SessionSettings, precision: str = "fp32") -> None:
        """Raises: BundleCorruptError, ProviderError."""
        self._session = create_session(path, settings, precision)
        self._input = str(self._session.get_inputs()[0].name)
        self.provider = str(self._session.get_providers()[0])

    def run(self, images: Images) -> Embeddings:
        """uint8 (N, 3, S, S) to float32 (N, ...)."""
        run = run_plain if self.provider == PROVIDERS["cpu"] else run_bucketed
        return run(self._session, self._input, images)


class OpenVinoModel:
    """A network that OpenVINO compiled for one image: a batch is run image by image.

    A fixed shape is a quarter faster than a free one, and a batch would gain nothing on a CPU.
    Several threads run at once, each in one of `streams`, if `threads` is 1.
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
            # OpenVINO raises RuntimeError for whatever it cannot read or compile.
            text = str(error).strip().splitlines()[-1]
            raise BundleCorruptError(
                f"{path} cannot be loaded by OpenVINO {openvino.__version__}: {text} "
                "Run it with --engine onnxruntime."
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
        """A request that no other thread uses; one that failed is dropped."""
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        yield request
        self._idle.append(request)


def load(path: Path, settings: SessionSettings, mode: Mode) -> Model:
    """The ONNX file at `path` in `mode`. Raises: BundleCorruptError, ProviderError."""
    if (fault := absence(mode, settings.device)) is not None:
        raise ProviderError(fault)
    kind = OpenVinoModel if mode.engine == "openvino" else OnnxRuntimeModel
    return kind(path, settings, mode.precision)


def absence(mode: Mode, device: str = "cpu") -> str | None:
    """Why this machine cannot run `mode`, with the cure; None if it can."""
    if mode.engine == "openvino":
        if device != "cpu":
            return "OpenVINO runs on the CPU only. Use --engine onnxruntime with --device cuda."
        if importlib.util.find_spec("openvino") is None:
            return "OpenVINO is not installed. Install it with: pip install 'kinlens[openvino]'."
        try:
            has_bf16 = _has_bf16()
        except Exception as error:
            # ImportError for a library that is missing, RuntimeError for a plug-in.
            return f"OpenVINO does not start: {error}. Install it again, or use onnxruntime."
        if mode.precision == "bf16" and not has_bf16:
            return "This processor has no units for bf16. Use --precision fp32 or int8."
        return None
    if mode.precision == "bf16" and not _has_arm_bf16():
        return (
            "onnxruntime computes in bf16 on ARM only, with Linux and units for it. Use --engine "
            "openvino or auto."
        )
    return None


def engine_versions() -> dict[Engine, str]:
    """The versions of the engines that are installed."""
    versions: dict[Engine, str] = {"onnxruntime": ort.__version__}
    if importlib.util.find_spec("openvino") is not None:
        with suppress(PackageNotFoundError):  # an archive of Intel has no metadata
            versions["openvino"] = version("openvino")
    return versions


_core_lock = threading.Lock()


def _openvino_core() -> Any:
    """The one `openvino.Core` of the process; to make one takes 50 ms."""
    with _core_lock:
        return _new_core()


@functools.cache
def _new_core() -> Any:
    import openvino

    return openvino.Core()


def _has_arm_bf16() -> bool:
    # Elsewhere onnxruntime ignores the option, and what is called bf16 would be fp32.
    return platform.machine() == "aarch64" and " bf16" in processor()


def _has_bf16() -> bool:
    return "BF16" in _openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


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


def create_session(
    model: Path, settings: SessionSettings, precision: str = "fp32"
) -> ort.InferenceSession:
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
    if precision == "bf16":
        options.add_session_config_entry(_ARM_BF16, "1")
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
            "(pip install 'kinlens[gpu]') and check the driver, or allow the CPU with "
            "--allow-cpu-fallback."
        )
    return session
