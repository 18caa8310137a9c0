"""From the bytes of an upload to its vector: cache, decode, model, each at most once."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedder.session import Embedder
from service.batching import MicroBatcher
from service.cache import Cache, embedding_key
from service.flight import SingleFlight
from service.payloads import decode_vector, encode_vector
from service.pools import BoundedPool


@dataclass(frozen=True, slots=True)
class Encoded:
    """A vector (D,) and what it took; zeros if it came from a cache."""

    vector: NDArray[np.float32]
    decode_ms: float = 0.0
    embed_ms: float = 0.0


class Encoder:
    """Turns uploads into vectors; equal uploads at the same time cost one inference."""

    def __init__(
        self, embedder: Embedder, cache: Cache, decoding: BoundedPool, batcher: MicroBatcher
    ) -> None:
        self._embedder = embedder
        self._cache = cache
        self._decoding = decoding
        self._batcher = batcher
        self._flights: SingleFlight[Encoded] = SingleFlight()

    async def encode(self, data: bytes, digest: str) -> Encoded:
        """The vector of the image `data`, whose sha256 is `digest`.

        Raises: ImageError, OverloadedError, SearchError.
        """
        return await self._flights.run(digest, lambda: self._look_up(data, digest))

    async def infer(self, data: bytes, *, urgent: bool = False) -> Encoded:
        """As `encode`, without any cache; an `urgent` call goes first everywhere."""
        started = time.perf_counter()
        image = await self._decoding.run(lambda: self._embedder.preprocess(data), urgent=urgent)
        decoded = time.perf_counter()
        vector = await self._batcher.submit(image, urgent=urgent)
        embedded = time.perf_counter()
        return Encoded(vector, (decoded - started) * 1e3, (embedded - decoded) * 1e3)

    async def _look_up(self, data: bytes, digest: str) -> Encoded:
        key = embedding_key(self._embedder.bundle_id, digest)
        dim = self._embedder.dim
        cached = await self._cache.get("embedding", key, lambda value: decode_vector(value, dim))
        if cached is not None:
            return Encoded(cached)
        encoded = await self.infer(data)
        self._cache.set(key, encode_vector(encoded.vector))
        return encoded
