"""Vectors that callers send in place of images: their parsing, and their use as a view of a query.

A view of a query that needs no image has `weight`, `identity`, `described()` and `vector(model)`.
"""

import base64
import binascii
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.programs.faults import shown
from kinlens.embedder.types import SHORT, first_numbers
from kinlens.service.encoding.cache import encode_vector
from kinlens.service.encoding.model import Model
from kinlens.service.encoding.workers import Vector

MAX_NUMBERS = 16_384
"""Maximum length of a vector in a request."""

MAX_WEIGHT = 10.0
"""Limit of the weight of a view."""

_NORM_TOLERANCE = 1e-3
_ROUNDING = 1e-6  # of the norm of a vector, which is then stored and returned unchanged
_FORMS = "send a list of numbers, or base64 of little-endian float32 numbers"


@dataclass(frozen=True, slots=True)
class VectorView:
    """A view of a query that was embedded before: it takes no worker.

    content: a unit vector, as little-endian float32.
    weight: its part in the mean of all views; an image has 1.
    number: its position among the vectors of the query, from 1.
    """

    content: bytes
    weight: float = 1.0
    number: int = 1

    @property
    def identity(self) -> str:
        """Equal for equal views of queries; the weight is not part of it."""
        return f"vector:{hashlib.sha256(self.content).hexdigest()}"

    def described(self) -> dict[str, Any]:
        """The view that found a hit, in an answer."""
        return {"image": None, "crop": None, "vector": self.number}

    def vector(self, model: Model) -> Vector:
        """The vector (D,) for galleries of `model`. Raises: InvalidParameterError."""
        return fitted(self.content, model)


def vector_content(value: object) -> bytes:
    """The unit vector in a field of a request, as little-endian float32.

    A norm within 1e-3 of 1 is corrected. Raises: InvalidParameterError.
    """
    numbers = _numbers_of(value)
    if not np.isfinite(numbers).all():
        raise InvalidParameterError(
            "vector has NaN or infinite numbers; send finite numbers, as the model computed them."
        )
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(numbers))
    if not math.isclose(norm, 1.0, rel_tol=0, abs_tol=_NORM_TOLERANCE):
        raise InvalidParameterError(
            f"vector has the norm {norm:.4g}, not 1; divide it by its norm before you send it."
        )
    if not math.isclose(norm, 1.0, rel_tol=0, abs_tol=_ROUNDING):
        numbers = numbers / norm
    return encode_vector(numbers.astype(np.float32))


def fitted(content: bytes, model: Model) -> Vector:
    """The vector (D,) for galleries of `model`, from a vector of its bundle or of such a gallery.

    Raises: InvalidParameterError for another dimension.
    """
    vector = np.frombuffer(content, "<f4").astype(np.float32)
    if len(vector) in (model.dim, model.whole.dim):
        return first_numbers(vector, model.dim)
    whole = f" or {model.whole.dim:,}" if model.whole.dim != model.dim else ""
    raise InvalidParameterError(
        f"vector has the dimension {len(vector):,}, and the gallery {model.dim:,}. Send "
        f"{model.dim:,}{whole} numbers from its bundle, {model.bundle_id[:SHORT]}."
    )


def _numbers_of(value: object) -> NDArray[np.float64]:
    """The numbers in a field of a request: a list, or base64. Raises: InvalidParameterError."""
    numbers = _from_text(value) if isinstance(value, str) else _from_list(value)
    if not 1 <= len(numbers) <= MAX_NUMBERS:
        raise InvalidParameterError(
            f"vector has {len(numbers):,} numbers; send from 1 to {MAX_NUMBERS:,}."
        )
    return numbers


def _from_text(text: str) -> NDArray[np.float64]:
    try:
        content = base64.b64decode(text, validate=True)
        return np.frombuffer(content, "<f4").astype(np.float64)
    except (binascii.Error, ValueError) as error:
        raise InvalidParameterError(
            f"vector = {shown(text)!r} is not base64 of float32 numbers ({error}); {_FORMS}."
        ) from error


def _from_list(value: object) -> NDArray[np.float64]:
    if not isinstance(value, list):
        raise InvalidParameterError(f"vector = {shown(value)} is not a vector; {_FORMS}.")
    wrong = [number for number in value if type(number) not in (float, int)]
    if wrong:
        raise InvalidParameterError(f"vector has the entry {shown(wrong[0])}; {_FORMS}.")
    try:
        return np.array(value, np.float64)
    except OverflowError as error:
        raise InvalidParameterError("vector has a number beyond float64; send cosines.") from error
