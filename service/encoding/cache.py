"""Two levels of cache: in this process and, if configured, Redis. A cache failure is a miss.

Keys contain everything that a value depends on. An answer starts with the gallery version that it
was computed from, so no entry ever has to be invalidated:

    embeddings   bundle_id + engine and precision + sha256 of the bytes + box
    of texts     sha256 of the text tower's description + sha256 of the cleaned text
    boxes        sha256 of the detector's description + sha256 of the bytes
    answers      bundle_id + engine and precision + gallery + its generation + digest of the query
"""

import contextlib
import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from kinlens.embedder.manifest import Mode
from kinlens.embedder.preprocess import Box
from kinlens.embedder.views.boxes import FoundBox
from kinlens.service.observe.metrics import CacheKind, Level, span
from kinlens.service.redis import SharedRedis

T = TypeVar("T")

_PREFIX = "kinlens:4"
_BOXES = TypeAdapter(list[FoundBox])
_UNIT_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Lookup(Generic[T]):
    """A key to look up; `decode` raises ValueError for an invalid or outdated payload."""

    kind: CacheKind
    key: str
    decode: Callable[[bytes], T]


class LruCache:
    """A cache bounded by entries and bytes; evicts the least recently used values. Thread safe."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """The value, which becomes the most recently used."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def set(self, key: str, value: bytes) -> None:
        """Store a value and evict older ones; a value larger than the bound is not stored."""
        with self._lock:
            self._remove(key)
            if len(key) + len(value) > self._max_bytes:
                return
            self._values[key] = value
            self._bytes += len(key) + len(value)
            while len(self._values) > self._max_entries or self._bytes > self._max_bytes:
                self._remove(next(iter(self._values)))

    def _remove(self, key: str) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= len(key) + len(value)


class Cache:
    """Looks in `local`, then in `remote`; a value that does not decode counts as a miss. `observe`
    is called with the kind and level of each lookup.
    """

    def __init__(
        self,
        local: LruCache,
        remote: SharedRedis | None,
        observe: Callable[[CacheKind, Level], None],
    ) -> None:
        self._local = local
        self._remote = remote
        self._observe = observe

    @property
    def remote_state(self) -> str:
        """`off`, `up` or `down`."""
        return "off" if self._remote is None else self._remote.state

    def has(self, key: str) -> bool:
        """Whether the cache of this process has a value."""
        return self._local.get(key) is not None

    def get(self, lookup: Lookup[T]) -> T | None:
        """The decoded value, or None."""
        value: T | None = self.get_all([lookup])[0]
        return value

    def get_local(self, lookup: Lookup[T]) -> T | None:
        """The decoded value from the cache of this process; a miss is not counted."""
        payload = self._local.get(lookup.key)
        if payload is not None:
            with contextlib.suppress(ValueError):
                value = lookup.decode(payload)
                self._observe(lookup.kind, "local")
                return value
        return None

    def get_all(self, lookups: Sequence[Lookup[Any]]) -> list[Any]:
        """The decoded value of each lookup, or None. All local misses share one remote call."""
        values = [self.get_local(lookup) for lookup in lookups]
        missing = [index for index, value in enumerate(values) if value is None]
        if not missing:
            return values
        with span("cache"):
            if self._remote is None:
                for index in missing:
                    self._observe(lookups[index].kind, "miss")
                return values
            payloads = self._remote.get([lookups[index].key for index in missing])
        for index, payload in zip(missing, payloads, strict=True):
            values[index] = self._checked(lookups[index], payload)
        return values

    def set(self, key: str, payload: bytes) -> None:
        """Store a value in both levels; the remote write runs in the background."""
        self._local.set(key, payload)
        if self._remote is not None:
            self._remote.set(key, payload)

    def _checked(self, lookup: Lookup[T], payload: bytes | None) -> T | None:
        if payload is None:
            self._observe(lookup.kind, "miss")
            return None
        try:
            value = lookup.decode(payload)
        except ValueError:
            self._observe(lookup.kind, "invalid")
            return None
        self._local.set(lookup.key, payload)
        self._observe(lookup.kind, "redis")
        return value


def embedding_keys(bundle_id: str, mode: Mode) -> Callable[[str, Box | None], str]:
    """The function that makes the cache key for the vector of an image, or of its part in a box."""
    start = f"{_PREFIX}:e:{bundle_id}:{mode.key}"

    def key(digest: str, box: Box | None) -> str:
        part = "" if box is None else ",".join(map(repr, box))
        return f"{start}:{digest}:{part}"

    return key


def text_key(tower: str, text: str) -> str:
    """The cache key for the vector of a cleaned text."""
    return f"{_PREFIX}:t:{tower}:{hashlib.sha256(text.encode()).hexdigest()}"


def boxes_key(detector: str, digest: str) -> str:
    """The cache key for the boxes that a detector finds in an image."""
    return f"{_PREFIX}:b:{detector}:{digest}"


def encode_boxes(boxes: Sequence[FoundBox]) -> bytes:
    """Boxes as JSON."""
    return _BOXES.dump_json(list(boxes))


def decode_boxes(payload: bytes) -> list[FoundBox]:
    """The boxes that `encode_boxes` encoded. Raises: ValueError."""
    return _BOXES.validate_json(payload)


def answer_keys(bundle_id: str, mode: Mode) -> Callable[[str, str, str], str]:
    """The function that makes the cache key for the answer to a query, by its digest, in a gallery
    and a generation of it.
    """
    start = f"{_PREFIX}:a:{bundle_id}:{mode.key}"

    def key(gallery: str, generation: str, digest: str) -> str:
        return f"{start}:{quote(gallery, safe='')}:{generation}:{digest}"

    return key


def encode_vector(vector: NDArray[np.float32]) -> bytes:
    """A vector (D,) as little-endian float32."""
    return vector.astype("<f4").tobytes()


def decode_vector(payload: bytes, dim: int) -> NDArray[np.float32]:
    """The vector (D,) that `encode_vector` encoded.

    Raises: ValueError unless it has length `dim` and unit norm.
    """
    if len(payload) != 4 * dim:
        raise ValueError(f"{len(payload)} bytes are not a vector of length {dim}")
    vector = np.frombuffer(payload, dtype="<f4").astype(np.float32)
    if not math.isclose(float(np.linalg.norm(vector)), 1.0, abs_tol=_UNIT_TOLERANCE):
        raise ValueError("the vector is not of unit norm")
    return vector
