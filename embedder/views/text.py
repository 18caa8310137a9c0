"""Texts as queries: the text tower of a bundle turns them into vectors of the space of its images.

It needs the package `tokenizers` (`pip install 'kinlens[text]'`), which is imported when a tower is
opened. A service opens a tower at the first text query, so others do not pay for it.
"""

import importlib.util
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.bundle import TEXT, TOKENIZER, Bundle
from kinlens.embedder.engines.models import SessionSettings, create_session
from kinlens.embedder.errors import (
    BundleCorruptError,
    BundleError,
    GoldenMismatchError,
    InvalidParameterError,
    ProviderError,
)
from kinlens.embedder.manifest import TextTower
from kinlens.embedder.types import Embeddings
from kinlens.environment import missing_package

MAX_CHARACTERS = 1_000
"""Maximum length of a text; a longer one would cost time and exceed every context."""

MIN_COSINE = 0.999
"""Minimum cosine to the golden vectors of the texts from the export."""

IDS, MASK = "input_ids", "attention_mask"
"""Inputs of `text.onnx`, int64 (N, T). A tower with `padding = "context"` may have no mask."""

_MAX_BATCH = 64
_CANCELLED = 1e-3  # norm below which a query has no direction
_PUNCTUATION = str.maketrans("_", " ", string.punctuation.replace("_", ""))


class TextEncoder:
    """A text tower with its tokenizer: texts to unit vectors. Thread-safe."""

    def __init__(self, model: Path, tokenizer: Path, tower: TextTower, dim: int, name: str) -> None:
        """Load the files of a tower with vectors (D,), unchecked; `name` is for messages.

        Raises: ProviderError without the package `tokenizers`; BundleCorruptError.
        """
        self.tower = tower
        self.dim = dim
        self._name = name
        self._mean = np.array(tower.mean or 0, np.float32)
        self._tokenizer = open_tokenizer(tokenizer, tower.context)
        self._session = create_session(model, SessionSettings())
        self._inputs = [str(each.name) for each in self._session.get_inputs()]

    @classmethod
    def open(cls, bundle: Bundle) -> "TextEncoder":
        """Load the text tower of a bundle and check its golden texts.

        Raises: BundleError if the bundle has none or it is damaged; ProviderError without the
            package `tokenizers`; GoldenMismatchError.
        """
        manifest, name = bundle.manifest, f"the bundle {bundle.bundle_id[:12]}"
        if manifest.text is None:
            raise BundleError(no_tower(bundle))
        files = bundle.path / TEXT, bundle.path / TOKENIZER
        encoder = cls(*files, manifest.text, manifest.dim, name)
        golden = bundle.golden_texts()
        cosine = float((encoder.embed(list(golden)) * [*golden.values()]).sum(axis=1).min())
        if not cosine >= MIN_COSINE:
            raise GoldenMismatchError(
                f"The text tower of {name} does not reproduce its golden texts: cosine "
                f"{cosine:.4f}, expected at least {MIN_COSINE}. Its answers to words would be "
                "wrong; make it again or use another machine."
            )
        return encoder

    def embed(self, texts: Sequence[str]) -> Embeddings:
        """Texts to float32 (N, D), unit norm. What exceeds the context of the tower is not read.

        Raises: InvalidParameterError naming a text that is empty or too long; BundleError.
        """
        if not texts:
            return np.empty((0, self.dim), np.float32)
        ids, mask = self.tokens(texts)
        chunks = []
        for start in range(0, len(ids), _MAX_BATCH):
            part = slice(start, start + _MAX_BATCH)
            is_fixed = self.tower.padding == "context"
            width = ids.shape[1] if is_fixed else int(mask[part].sum(axis=1).max())
            chunks.append(self._run(ids[part, :width], mask[part, :width]))
        return np.concatenate(chunks)

    def joined(
        self, images: Embeddings | None, texts: Embeddings, weights: Sequence[float]
    ) -> Embeddings:
        r"""Queries of images (Q, D) moved by texts (M, D), or of texts alone, (1, D); unit norm.

        .. math:: q = x + \sum_m w_m \, (t_m - \mu)

        The mean text :math:`\mu` of the tower is subtracted, because it is the same for every
        query: texts of some models all have one part in common. A text of weight 0 changes
        nothing. Without images the sum is the query.

        Args:
            weights: of the texts; below 0 for what the results must not be like.

        Raises: InvalidParameterError if the parts cancel out, or no part has a weight above 0.
        """
        if images is None and not max(weights, default=0) > 0:
            raise InvalidParameterError(
                "No text has a weight above 0, and there is no image. Name what to search for."
            )
        moved = np.asarray(weights, np.float32)[None] @ (texts - self._mean)  # (1, D)
        queries: Embeddings = moved if images is None else images + moved
        norms = np.linalg.norm(queries, axis=1, keepdims=True)
        if norms.min() < _CANCELLED:
            raise InvalidParameterError(
                "The images and texts of the query cancel out. Omit some, or change their weights."
            )
        unit: Embeddings = queries / norms
        return unit

    def tokens(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Token ids and their mask, each (N, T): 1 for tokens of a text, 0 for padding.

        Raises: InvalidParameterError naming a text that is empty or too long.
        """
        cleaned = [
            cleaned_text(text, f"texts[{number}]", self.tower) for number, text in enumerate(texts)
        ]
        # One by one: `encode_batch` starts threads, which do not survive the fork of a worker.
        rows = [self._tokenizer.encode(text).ids for text in cleaned]
        is_fixed = self.tower.padding == "context"
        width = self.tower.context if is_fixed else max(1, *map(len, rows))
        ids = np.full((len(rows), width), self.tower.pad_id, np.int64)
        mask = np.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
            mask[number, : len(row)] = 1
        return ids, mask

    def _run(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> Embeddings:
        given = {IDS: ids, MASK: mask}
        try:
            vectors: Embeddings = self._session.run(None, {n: given[n] for n in self._inputs})[0]
        except Exception as error:
            # onnxruntime raises exceptions without a common base class.
            raise BundleError(
                f"The text tower of {self._name} failed on {len(ids)} text(s): "
                f"{error}. Make it again with `kinlens-train teach-words` or `export --text`."
            ) from error
        if vectors.shape != (len(ids), self.dim) or not np.isfinite(vectors).all():
            raise BundleError(
                f"The text tower of {self._name} gave vectors of shape {vectors.shape} "
                f"that are not {len(ids)} x {self.dim} finite numbers. Make it again."
            )
        return vectors


def can_read_words() -> bool:
    """Whether the package `tokenizers` is installed, which is not loaded for this."""
    return importlib.util.find_spec("tokenizers") is not None


def no_tower(bundle: Bundle) -> str:
    """Why a bundle cannot be searched with words, and what to do."""
    return (
        f"The bundle {bundle.bundle_id[:12]} has no text tower, so it cannot be searched with "
        "words. Teach it those of your catalogue: kinlens-train teach-words BUNDLE GALLERY ..."
    )


def open_tokenizer(path: Path, context: int) -> Any:
    """The tokenizer in a file, which cuts texts to `context` tokens.

    Raises: ProviderError without the package `tokenizers`; BundleCorruptError.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as missing:
        raise ProviderError(missing_package("A search with words", missing, "text")) from missing
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The package raises plain `Exception` for a file that it cannot read.
        raise BundleCorruptError(
            f"{path} is not a tokenizer that the package `tokenizers` can read: {error}. Pass the "
            "tokenizer.json of the model."
        ) from error
    tokenizer.enable_truncation(context)
    tokenizer.no_padding()
    return tokenizer


def cleaned_text(text: str, name: str, tower: TextTower) -> str:
    """A text in the form that the tower reads; `name` is for messages.

    Raises: InvalidParameterError if it is too long, or if nothing is left of it.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidParameterError(
            f"{name} has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}. "
            "Describe the product in a few words."
        )
    if tower.cleaning == "canonical":
        text = text.translate(_PUNCTUATION)
    cleaned = " ".join(text.lower().split())
    if not cleaned:
        raise InvalidParameterError(f"{name} = {text!r} is empty. Give one word or more.")
    return cleaned
