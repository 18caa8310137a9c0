"""The device and the precision of a run, and settings that speed up its training steps."""

import ctypes
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kinlens.embedder.errors import TrainingError
from kinlens.training.config.settings import Runtime

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of malloc.h
_LIBC_DEFAULTS = {_MMAP_MAX: 65_536, _TRIM_THRESHOLD: 128 * 1024}
_KEEP_ALL = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1}

Batch = tuple[Tensor, Tensor]


def choose_device(runtime: Runtime) -> torch.device:
    """The device of the job. Raises: TrainingError if CUDA is requested and absent."""
    found = on_gpu(runtime)
    if runtime.device == "cuda" and not found:
        raise TrainingError(
            'runtime.device = "cuda", but torch sees no GPU. Check the driver, or set it to "auto".'
        )
    return torch.device("cuda" if found else "cpu")


def on_gpu(runtime: Runtime) -> bool:
    """Whether the job has a GPU here, and wants it."""
    return runtime.device != "cpu" and torch.cuda.is_available()


def autocast(runtime: Runtime, device: torch.device) -> torch.autocast:
    """Autocast of training steps: bf16 if requested or, under "auto", where it is faster."""
    fast = runtime.precision == "bf16"
    if runtime.precision == "auto" and device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif runtime.precision == "auto":  # with AVX512-BF16 alone, bf16 is slower than fp32
        fast = torch.cpu.get_capabilities().get("amx_bf16", False)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=fast)


@contextmanager
def tuned(device: torch.device) -> Iterator[None]:
    """A block of training and evaluation; process-wide settings are restored at its end.

    On a GPU, cuDNN times its algorithms once, since all steps have one shape. On a CPU with glibc,
    freed memory is kept for the next step: having the system zero the same hundreds of megabytes
    again costs a tenth of its time.
    """
    on_gpu, benchmark = device.type == "cuda", torch.backends.cudnn.benchmark
    if on_gpu:
        torch.backends.cudnn.benchmark = True
    else:
        _set_malloc(_KEEP_ALL)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        if not on_gpu:
            _set_malloc(_LIBC_DEFAULTS)


def _set_malloc(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for name, value in options.items():
            mallopt(name, value)


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on `device`; a GPU copies each while the previous one is in use."""
    if device.type != "cuda":
        yield from batches
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    work = torch.cuda.current_stream(device)
    ready: Batch | None = None
    for images, labels in batches:
        with torch.cuda.stream(copies):
            arriving = (images.to(device, non_blocking=True), labels.to(device, non_blocking=True))
        if ready is not None:
            yield ready
        work.wait_stream(copies)
        for tensor in arriving:
            tensor.record_stream(work)
        ready = arriving
    if ready is not None:
        yield ready
