"""From the bytes of an upload to its vector: cache, decode, model, each at most once."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embedder.preprocess import Box
from embedder.session import Embedder
from service.observe.tracing import span
from service.search.batching import MicroBatcher
from service.search.cache import Cache, Lookup, embedding_key
from service.search.decoder import Decoder
from service.search.payloads import decode_vector, encode_vector
from service.search.query import View
from service.search.single_flight import SingleFlight


@dataclass(frozen=True, slots=True)
class Encoded:
    """A vector (D,) and what it took; zeros if it came from a cache."""

    vector: NDArray[np.float32]
    decode_ms: float = 0.0
    embed_ms: float = 0.0


class Encoder:
    """Turns uploads into vectors; equal uploads at the same time cost one inference."""

    def __init__(
        self, embedder: Embedder, cache: Cache, decoding: Decoder, batcher: MicroBatcher
    ) -> None:
        self._embedder = embedder
        self._cache = cache
        self._decoding = decoding
        self._batcher = batcher
        self._flights: SingleFlight[Encoded] = SingleFlight()

    async def encode(self, data: bytes, digest: str, box: Box | None = None) -> Encoded:
        """The vector of the image `data`, whose sha256 is `digest`, or of its part in `box`.

        Raises: ImageError, OverloadedError, SearchError.
        """
        view = View(data, digest, box)
        vector = await self._cache.get(self.lookup(view))
        return await self.compute(view) if vector is None else Encoded(vector)

    def lookup(self, view: View) -> Lookup[NDArray[np.float32]]:
        """Where a cache may have the vector of `view`."""
        dim = self._embedder.dim
        return Lookup("embedding", self._key(view), lambda value: decode_vector(value, dim))

    async def compute(self, view: View) -> Encoded:
        """As `encode`, without a look in the cache; the vector is stored there.

        Raises: ImageError, OverloadedError, SearchError.
        """
        key = self._key(view)
        return await self._flights.run(key, lambda: self._compute(view, key))

    async def infer(self, data: bytes, box: Box | None = None, *, urgent: bool = False) -> Encoded:
        """As `encode`, without any cache; an `urgent` call goes first everywhere."""
        started = time.perf_counter()
        with span("decode"):
            image = await self._decoding.decode(
                data, self._embedder.preprocessing, self._embedder.limits, box, urgent=urgent
            )
        decoded = time.perf_counter()
        vector = await self._batcher.submit(image, urgent=urgent)
        embedded = time.perf_counter()
        return Encoded(vector, (decoded - started) * 1e3, (embedded - decoded) * 1e3)

    def _key(self, view: View) -> str:
        embedder = self._embedder
        return embedding_key(embedder.bundle_id, embedder.precision, view.digest, view.box)

    async def _compute(self, view: View, key: str) -> Encoded:
        encoded = await self.infer(view.data, view.box)
        self._cache.set(key, encode_vector(encoded.vector))
        return encoded
