"""Cached values as bytes: plain numbers and JSON, sealed to their key, checked when read."""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

from embedder.calibration import Calibration
from embedder.types import AttributeValue, Hit
from indexer.types import Group

_VERSION_DIGITS = 12
_SEAL_BYTES = 16
_UNIT_TOLERANCE = 1e-2


class _StoredHit(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    id: Annotated[int, Field(ge=0)]
    key: str
    score: Annotated[float, Field(ge=-1.01, le=1.01, allow_inf_nan=False)]
    probability: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None
    attributes: dict[str, AttributeValue]
    image: str


class _StoredGroup(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    value: AttributeValue | None
    score: Annotated[float, Field(ge=-1.01, le=1.01, allow_inf_nan=False)]
    probability: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None
    hits: Annotated[list[_StoredHit], Field(min_length=1)]


class _StoredResults(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    count: int
    match: bool
    hits: list[_StoredHit]
    groups: list[_StoredGroup] | None


@dataclass(frozen=True, slots=True)
class Shown:
    """How the items of a gallery are shown: what their links begin and end with, the calibration
    of its model for a gallery of its size, and how many better ones are left out.
    """

    prefix: str
    suffix: str
    calibration: Calibration | None
    offset: int = 0

    @classmethod
    def of(
        cls, name: str, generation: str, calibration: Calibration | None, offset: int = 0
    ) -> "Shown":
        """For gallery `name`; a link holds for one generation."""
        items = f"/galleries/{quote(name, safe='')}/items/"
        return cls(items, f"/image?version={generation[:_VERSION_DIGITS]}", calibration, offset)

    def likely(self, hits: Sequence[Hit], least: float) -> list[Hit]:
        """Those of the ranked hits, best first, that are right with this probability."""
        return [hit for hit, p in zip(hits, self._ranked(hits), strict=True) if _reaches(p, least)]

    def likely_groups(self, groups: Sequence[Group], least: float) -> list[Group]:
        """The same of ranked groups, and of the hits that each shows."""
        kept = []
        for place, (group, p) in enumerate(zip(groups, self._ranked(groups), strict=True)):
            if _reaches(p, least):
                likely = self._beside(group, place)
                hits = [h for h, q in zip(group.hits, likely, strict=True) if _reaches(q, least)]
                kept.append(replace(group, hits=hits))
        return kept

    def _ranked(self, ranked: Sequence[Hit | Group]) -> list[float] | list[None]:
        """The probability of each, best first; None without a calibration."""
        ranks = self.offset + 1 + np.arange(len(ranked))
        return self._probabilities([one.score for one in ranked], ranks)

    def _beside(self, group: Group, place: int) -> list[float] | list[None]:
        """The probability of each hit of a group, at the rank of the group."""
        ranks = np.full(len(group.hits), self.offset + 1 + place)
        return self._probabilities([hit.score for hit in group.hits], ranks)

    def _probabilities(
        self, scores: Sequence[float], ranks: NDArray[np.integer]
    ) -> list[float] | list[None]:
        if self.calibration is None:
            return [None] * len(scores)
        found: list[float] = self.calibration.probability(np.array(scores), ranks).tolist()
        return found

    def hits(self, hits: Sequence[Hit]) -> list[dict[str, Any]]:
        """Ranked hits as they go over the wire."""
        return self._hits(hits, self._ranked(hits))

    def _hits(self, hits: Sequence[Hit], likely: Sequence[float | None]) -> list[dict[str, Any]]:
        return [
            {
                "id": hit.id,
                "key": hit.key,
                "score": hit.score,
                "probability": probability,
                "attributes": hit.attributes,
                "image": f"{self.prefix}{hit.id}{self.suffix}",
            }
            for hit, probability in zip(hits, likely, strict=True)
        ]

    def groups(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Ranked groups as they go over the wire."""
        return [
            {
                "value": group.value,
                "score": group.score,
                "probability": probability,
                "hits": self._hits(group.hits, self._beside(group, place)),
            }
            for place, (group, probability) in enumerate(
                zip(groups, self._ranked(groups), strict=True)
            )
        ]


def _reaches(probability: float | None, least: float) -> bool:
    return probability is not None and probability >= least


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


def encode_results(
    shown: Shown, hits: Sequence[Hit], groups: Sequence[Group] | None, *, match: bool
) -> bytes:
    """The part of an answer that a cache keeps, as a JSON object in its final form."""
    count = len(hits) if groups is None else len(groups)
    return to_json(
        {
            "count": count,
            "match": match,
            "hits": shown.hits(hits),
            "groups": None if groups is None else shown.groups(groups),
        }
    )


def checked_results(payload: bytes, k: int, shown: Shown) -> bytes:
    """The payload of `encode_results`, once it is one that may be sent.

    Raises: ValueError unless at most `k`, best first and complete, with links into the gallery.
    """
    stored = _StoredResults.model_validate_json(payload)
    ranked: Sequence[_StoredHit | _StoredGroup] = (
        stored.hits if stored.groups is None else stored.groups
    )
    if len(ranked) > k or len(ranked) != stored.count or (stored.groups and stored.hits):
        raise ValueError("the results are too many, or not as many as they say")
    if any(a.score < b.score for a, b in itertools.pairwise(ranked)):
        raise ValueError("the results are out of order")
    for hit in (*stored.hits, *(hit for group in stored.groups or () for hit in group.hits)):
        if hit.image != f"{shown.prefix}{hit.id}{shown.suffix}":
            raise ValueError("a link leads elsewhere")
    return payload


def _digest(key: str, payload: bytes) -> bytes:
    digest = hashlib.blake2b(key.encode(), digest_size=_SEAL_BYTES)
    digest.update(b"\0")
    digest.update(payload)
    return digest.digest()
