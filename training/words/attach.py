"""Attach a text tower to a bundle, checked on golden texts."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kinlens.embedder.bundle import (
    GOLDEN,
    GOLDEN_TEXTS,
    TEXT,
    TOKENIZER,
    Bundle,
    attach,
    sha256_of,
)
from kinlens.embedder.durable import staged
from kinlens.embedder.errors import ExportError
from kinlens.embedder.manifest import Parity, TextTower
from kinlens.embedder.types import Embeddings
from kinlens.embedder.views.text import TextEncoder

MAX_DIFFERENCE = 1e-4
"""Per coordinate, between the vectors of the ONNX file and of the network that it was made from."""

_WORDS = ("red", "shoe", "with", "white", "laces", "and", "a", "green", "glass", "bottle")
_SIZES = (1, 20)


def golden_texts(encoder: TextEncoder) -> list[str]:
    """Texts of one word, of about 20 tokens, and of more tokens than the tower reads."""
    counts = (*_SIZES, encoder.tower.context + 5)
    return [" ".join(_WORDS[n % len(_WORDS)] for n in range(count)) for count in counts]


def attach_tower(
    bundle: Bundle,
    out: Path,
    model: Path,
    tokenizer: Path,
    tower: TextTower,
    expected: Callable[[list[str]], Embeddings],
    texts: Sequence[str],
) -> Bundle:
    """Write a copy of `bundle` with a text tower to the new folder `out`.

    Args:
        tower: without hashes and parity, which are filled in here.
        expected: the vectors of texts by the network that `model` was made from.
        texts: the golden texts, with which both are compared, one by one and together.

    Raises: ExportError if they differ; BundleError.
    """
    encoder = TextEncoder(model, tokenizer, tower, bundle.manifest.dim, "the new tower")
    wanted = expected(list(texts))
    alone = np.concatenate([encoder.embed([text]) for text in texts])
    worst = 0.0
    for vectors in (alone, encoder.embed(texts)):
        worst = max(worst, float(np.nan_to_num(np.abs(vectors - wanted).max(), nan=np.inf)))
    if worst > MAX_DIFFERENCE:
        raise ExportError(
            f"The text tower in ONNX differs by {worst:.2e} from the network that it was made "
            f"from; the limit is {MAX_DIFFERENCE:.0e}. No bundle was written; compare the versions "
            "of torch, onnx and onnxruntime with constraints.txt."
        )
    with staged(out.parent) as folder:
        golden = folder / GOLDEN_TEXTS
        rows: list[Any] = wanted.tolist()
        golden.write_text(json.dumps(dict(zip(texts, rows, strict=True))), encoding="utf-8")
        block = {
            "sha256": sha256_of(model),
            "tokenizer_sha256": sha256_of(tokenizer),
            "golden_sha256": sha256_of(golden),
            "parity": Parity(max_abs_difference=worst, batch_sizes=(1, len(texts))),
        }
        files = {TEXT: model, TOKENIZER: tokenizer, f"{GOLDEN}/{GOLDEN_TEXTS}": golden}
        return attach(bundle, out, files, text=tower.model_copy(update=block))
