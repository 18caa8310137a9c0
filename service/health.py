"""Readiness that does what it promises: embeds a known image and searches every gallery."""

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import structlog
from numpy.typing import NDArray

from embedder.session import Embedder
from service.batching import MicroBatcher
from service.cache import Cache
from service.encoding import Encoded, Encoder
from service.flight import SingleFlight
from service.search import SearchService
from service.types import Gallery

_MIN_COSINE = 0.999
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Readiness:
    """The verdict of each check, `ok` or what is wrong, and the versions that were searched."""

    checks: dict[str, str]
    versions: dict[str, str]
    last_error: str | None = None

    @property
    def ready(self) -> bool:
        """Whether every check passed."""
        return all(verdict == "ok" for verdict in self.checks.values())


@dataclass(slots=True)
class Health:
    """Runs the checks on demand; callers at the same time share one run."""

    embedder: Embedder
    galleries: Mapping[str, Gallery]
    encoder: Encoder
    searching: SearchService
    batcher: MicroBatcher
    cache: Cache
    timeout_s: float
    last_error: str | None = None
    _known: NDArray[np.float32] | None = None
    _image: bytes = b""
    _flights: SingleFlight[Readiness] = field(default_factory=SingleFlight)

    async def warm_up(self) -> None:
        """Embed the known image once, before requests come; later checks compare with it."""
        self._image = self.embedder.known_images()[0]
        self._known = (await self.encoder.infer(self._image)).vector

    async def check(self) -> Readiness:
        """Embed the known image, compare, and search everywhere, ahead of all that waits."""
        return await self._flights.run("ready", self._check)

    async def _check(self) -> Readiness:
        checks: dict[str, str] = {}
        versions: dict[str, str] = {}
        encoded = await self._check_model(checks)
        for name, gallery in self.galleries.items():
            verdict, versions[name] = await self._check_gallery(gallery, encoded)
            checks[f"gallery {name}"] = verdict
        faults = [f"{name}: {verdict}" for name, verdict in checks.items() if verdict != "ok"]
        if faults:
            self.last_error = "; ".join(faults)
            structlog.get_logger().error("not ready", checks=checks)
        return Readiness(checks, versions, self.last_error)

    async def _check_model(self, checks: dict[str, str]) -> Encoded | None:
        checks["worker"] = "ok" if self.batcher.alive else "the worker has stopped"
        try:
            async with asyncio.timeout(self.timeout_s):
                encoded = await self.encoder.infer(self._image, urgent=True)
        except Exception as error:
            # Any failure at all makes the service unready; the class says enough to the outside.
            checks["model"] = self._verdict(error)
            return None
        cosine = float(encoded.vector @ self._known) if self._known is not None else math.nan
        ok = cosine >= _MIN_COSINE
        checks["model"] = "ok" if ok else f"the known image gives another vector: {cosine:.4f}"
        return encoded if ok else None

    async def _check_gallery(self, gallery: Gallery, encoded: Encoded | None) -> tuple[str, str]:
        """The verdict, and the version that it is about."""
        if encoded is None:
            return "not searched, since the model failed", _UNKNOWN
        try:
            async with asyncio.timeout(self.timeout_s):
                state = await self.searching.state(gallery, urgent=True)
                found = await self.searching.search_gallery(gallery, encoded, 1, None, urgent=True)
        except Exception as error:
            return self._verdict(error), _UNKNOWN
        has_items = state.size > 0 and state.version == found.version
        if (has_items and not found.hits) or not all(math.isfinite(h.score) for h in found.hits):
            return "the search found nothing", state.version
        return "ok", state.version

    def _verdict(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no result within {self.timeout_s:g} s"
        structlog.get_logger().error("readiness check failed", exc_info=error)
        return f"failed with {type(error).__name__}"
