"""Cached values as bytes: plain numbers and JSON, sealed to their key, checked when read."""

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from embedder.types import AttributeValue, Hit

_SEAL_BYTES = 16
_UNIT_TOLERANCE = 1e-2


class _StoredHit(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    id: Annotated[int, Field(ge=0)]
    key: str
    score: Annotated[float, Field(ge=-1.01, le=1.01, allow_inf_nan=False)]
    attributes: dict[str, AttributeValue]


_HITS = TypeAdapter(list[_StoredHit])


def seal(key: str, payload: bytes) -> bytes:
    """Put a digest over key and payload in front, so that a value fits only under its own key."""
    return _digest(key, payload) + payload


def unseal(key: str, sealed: bytes) -> bytes:
    """The payload of `seal`. Raises: ValueError if it was not made for this key, or was changed."""
    digest, payload = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
    if digest != _digest(key, payload):
        raise ValueError("the value does not fit its seal")
    return payload


def encode_vector(vector: NDArray[np.float32]) -> bytes:
    """A vector (D,) as little-endian float32."""
    return vector.astype("<f4").tobytes()


def decode_vector(payload: bytes, dim: int) -> NDArray[np.float32]:
    """The vector (D,) of `encode_vector`.

    Raises: ValueError unless of length `dim` and unit norm.
    """
    if len(payload) != 4 * dim:
        raise ValueError(f"{len(payload)} bytes are not a vector of length {dim}")
    vector = np.frombuffer(payload, dtype="<f4").astype(np.float32)
    if not math.isclose(float(np.linalg.norm(vector)), 1.0, abs_tol=_UNIT_TOLERANCE):
        raise ValueError("the vector is not of unit norm")
    return vector


def encode_hits(hits: Sequence[Hit]) -> bytes:
    """Hits as JSON."""
    return _HITS.dump_json(
        [
            _StoredHit.model_construct(
                id=hit.id, key=hit.key, score=hit.score, attributes=dict(hit.attributes)
            )
            for hit in hits
        ]
    )


def decode_hits(payload: bytes, k: int) -> list[Hit]:
    """The hits of `encode_hits`. Raises: ValueError unless at most `k`, best first and complete."""
    stored = _HITS.validate_json(payload)
    if len(stored) > k or any(a.score < b.score for a, b in itertools.pairwise(stored)):
        raise ValueError("the hits are too many or out of order")
    return [Hit(hit.id, hit.key, hit.score, hit.attributes) for hit in stored]


def _digest(key: str, payload: bytes) -> bytes:
    digest = hashlib.blake2b(key.encode(), digest_size=_SEAL_BYTES)
    digest.update(b"\0")
    digest.update(payload)
    return digest.digest()
