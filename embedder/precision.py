"""Whether a precision holds on the machine that runs it, and whether that machine gains from it.

x86 processors without VNNI add the products of unsigned and signed 8-bit numbers in pairs, in 16
bits, which saturates: the same int8 model gives other vectors there.
"""

from collections.abc import Callable
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from embedder.errors import GoldenMismatchError
from embedder.manifest import OtherPrecision, Precision
from embedder.types import Embeddings, Images

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

FASTER: dict[str, OtherPrecision] = {
    PROVIDERS["cpu"]: "int8",
    PROVIDERS["cuda"]: "fp16",
}
"""What `precision = "auto"` may take in place of fp32."""

_RUNS = 5

Embed = Callable[[Images], Embeddings]
Gain = Callable[[Embed, Embed, Images], float]
"""How many times as fast the first is as the second."""


def golden_fault(
    precision: Precision, vectors: Embeddings, own: Embeddings, fp32: Embeddings
) -> str | None:
    """What is wrong with golden vectors (N, D) made here, in figures; None if they hold.

    Args:
        precision: of the model that made `vectors`.
        own: what the same model gave at export.
        fp32: what the fp32 model gave at export.
    """
    cosine = float(_cosines(vectors, own).min())
    if not cosine >= MIN_OWN_COSINE[precision]:
        return f"cosine {cosine:.4f}, expected at least {MIN_OWN_COSINE[precision]}"
    mean = float(_cosines(vectors, fp32).mean())
    if not mean >= MIN_FP32_COSINE[precision]:
        return f"mean cosine to fp32 {mean:.4f}, expected at least {MIN_FP32_COSINE[precision]}"
    return None


def mismatch(
    precision: Precision, bundle_id: str, provider: str, fault: str
) -> GoldenMismatchError:
    """The error for a model whose golden vectors do not hold."""
    cure = {
        "fp32": "Its galleries would not fit; export it again or run it elsewhere.",
        "fp16": "Run it in fp32 or with precision auto; its galleries fit every precision.",
        "int8": "It needs a processor with VNNI; run it in fp32 or with precision auto here. Its "
        "galleries fit every precision.",
    }[precision]
    return GoldenMismatchError(
        f"The {precision} model {bundle_id[:12]} on {provider} does not reproduce its golden "
        f"vectors: {fault}. {cure}"
    )


def speed_gain(fast: Embed, plain: Embed, images: Images) -> float:
    """How many times as fast `fast` embeds `images` as `plain` does, here and now.

    The best of a few runs of each, in turn: what else the machine does can only slow a run down.
    Both have run on `images` before.
    """
    best = [np.inf, np.inf]
    for _ in range(_RUNS):
        for number, embed in enumerate((fast, plain)):
            started = perf_counter()
            embed(images)
            best[number] = min(best[number], perf_counter() - started)
    return float(best[1] / best[0])


def _cosines(one: Embeddings, other: Embeddings) -> NDArray[np.float32]:
    cosines: NDArray[np.float32] = (one * other).sum(axis=1)
    return cosines
