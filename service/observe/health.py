"""Readiness that does what it promises: embeds a known image and searches every gallery."""

import asyncio
import contextlib
import functools
from dataclasses import dataclass, field

import structlog

from embedder.errors import GalleryNotFoundError
from embedder.types import SHORT
from service.galleries.registry import Registry, Served, probe
from service.search.decoder import Decoder
from service.search.model import Model, Models
from service.search.pools import BoundedPool
from service.search.single_flight import SingleFlight

_MIN_COSINE = 0.999
_UNKNOWN = "unknown"
_OK = "ok"


@dataclass(frozen=True, slots=True)
class Readiness:
    """The verdict of each check, `ok` or what is wrong, and the versions that were searched.

    What is `tolerated` is told, but answers come all the same: a worker that was restarted, a new
    generation of a gallery that cannot be opened while the old one is served.
    """

    checks: dict[str, str]
    versions: dict[str, str]
    last_error: str | None = None
    tolerated: frozenset[str] = frozenset()

    @property
    def ready(self) -> bool:
        """Whether every check passed that is not tolerated."""
        return all(
            verdict == _OK or name in self.tolerated for name, verdict in self.checks.items()
        )


@dataclass(slots=True)
class Health:
    """Runs the checks on demand; callers at the same time share one run."""

    registry: Registry
    models: Models
    decoding: Decoder
    pool: BoundedPool
    timeout_s: float
    last_error: str | None = None
    _flights: SingleFlight[Readiness] = field(default_factory=SingleFlight)

    async def check(self) -> Readiness:
        """Embed the known image, compare, and search everywhere, ahead of all that waits."""
        return await self._flights.run("ready", self._check)

    async def _check(self) -> Readiness:
        checks: dict[str, str] = {}
        versions: dict[str, str] = {}
        tolerated: set[str] = set()
        models = self.models.running()
        if not self.decoding.workers_alive:
            checks["decoding"] = f"nothing decodes images: {self.decoding.last_failure}"
        fit = set()
        for model in models:
            suffix = "" if len(models) == 1 else f" {model.bundle_id[:SHORT]}"
            checks[f"worker{suffix}"], is_alive = _worker(model)
            tolerated |= {f"worker{suffix}"} if is_alive else set()
            checks[f"model{suffix}"] = verdict = await self._check_model(model)
            fit |= {model.bundle_id} if verdict == _OK else set()
        for name in self.registry.names():
            with contextlib.suppress(GalleryNotFoundError), self.registry.lease(name) as served:
                is_fit = served.model.bundle_id in fit
                verdict, versions[name] = await self._check_gallery(served, is_fit)
                checks[f"gallery {name}"] = verdict
        for name, verdict in self.registry.failures.verdicts().items():
            checks[f"reload {name}"] = verdict
            tolerated.add(f"reload {name}")
        return self._judged(checks, versions, frozenset(tolerated))

    def _judged(
        self, checks: dict[str, str], versions: dict[str, str], tolerated: frozenset[str]
    ) -> Readiness:
        faults = [f"{name}: {verdict}" for name, verdict in checks.items() if verdict != _OK]
        if faults:
            self.last_error = "; ".join(faults)
            structlog.get_logger().error("readiness checks failed", checks=checks)
        return Readiness(checks, versions, self.last_error, tolerated)

    async def _check_model(self, model: Model) -> str:
        try:
            async with asyncio.timeout(self.timeout_s):
                encoded = await model.encoder.infer(model.known_image, urgent=True)
        except Exception as error:
            # Any failure at all makes the service unready; the class says enough to the outside.
            return self._verdict(error)
        cosine = float(encoded.vector @ model.known_vector)
        ok = cosine >= _MIN_COSINE
        return _OK if ok else f"the known image gives another vector: {cosine:.4f}"

    async def _check_gallery(self, served: Served, is_fit: bool) -> tuple[str, str]:
        """The verdict, and the version that it is about."""
        if not is_fit:
            return "not searched, since the model failed", _UNKNOWN
        check = functools.partial(probe, served.gallery, served.model)
        try:
            async with asyncio.timeout(self.timeout_s):
                version, is_searchable = await self.pool.run(check, urgent=True)
        except Exception as error:
            return self._verdict(error), _UNKNOWN
        return _OK if is_searchable else "the search found nothing", version

    def _verdict(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no result within {self.timeout_s:g} s"
        structlog.get_logger().error("readiness check failed", exc_info=error)
        return f"failed with {type(error).__name__}"


def _worker(model: Model) -> tuple[str, bool]:
    """The verdict about its workers, and whether one is alive."""
    batcher = model.batcher
    if not batcher.alive:
        return f"the worker has stopped: {batcher.last_failure}; it is started again", False
    if batcher.restarts:
        times = "1 time" if batcher.restarts == 1 else f"{batcher.restarts} times"
        return f"worker restarted {times}, last: {batcher.last_failure}", True
    return _OK, True
