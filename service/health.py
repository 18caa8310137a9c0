"""Readiness that does what it promises: embeds a known image and searches every gallery."""

import asyncio
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import structlog

from embedder.errors import GalleryNotFoundError
from embedder.types import SHORT
from service.concurrency import OwnThreads, Recent
from service.encoding.model import Model, Models
from service.galleries.registry import Registry, Served, probe

_MIN_COSINE = 0.999
_UNKNOWN = "unknown"
_OK = "ok"
_GONE = "gone"


@dataclass(frozen=True, slots=True)
class Readiness:
    """The verdict of each check, `ok` or what is wrong, and the versions that were searched.

    `ready` needs every model, and one gallery if there is any: `checks` names those that fail. A
    new generation that cannot be opened is in `checks` too, while the old one is served.
    """

    ready: bool
    checks: dict[str, str]
    versions: dict[str, str]
    last_error: str | None


class Health:
    """Runs the checks on demand, at most once a second, whoever asks: they go first everywhere."""

    def __init__(self, registry: Registry, models: Models, timeout_s: float) -> None:
        self.passed = True
        self._registry = registry
        self._models = models
        self._threads = OwnThreads("probe")
        self._timeout_s = timeout_s
        self._last_error: str | None = None
        self._verdicts: dict[str, bool] = {}
        self._recent = Recent(self._check)

    def galleries(self) -> Mapping[str, bool]:
        """Whether each gallery passed the last check; not so one that cannot be opened."""
        closed = self._registry.failures.verdicts().keys() - set(self._registry.names())
        return self._verdicts | dict.fromkeys(closed, False)

    async def check(self) -> Readiness:
        """Embed the known image, compare, and search everywhere, ahead of all that waits."""
        return await self._recent.get()

    async def _check(self) -> Readiness:
        checks: dict[str, str] = {}
        versions: dict[str, str] = {}
        models = self._models.running()
        fit = set()
        for model in models:
            suffix = "" if len(models) == 1 else f" {model.bundle_id[:SHORT]}"
            checks[f"model{suffix}"] = verdict = await self._check_model(model)
            fit |= {model.bundle_id} if verdict == _OK else set()
        is_fit = all(verdict == _OK for verdict in checks.values())
        names = self._registry.names()
        found = await asyncio.gather(*(self._check_gallery(name, fit) for name in names))
        for name, (verdict, version) in zip(names, found, strict=True):
            if verdict != _GONE:
                checks[f"gallery {name}"], versions[name] = verdict, version
        # One bad gallery is bad in every replica: to take this one out would end the others too.
        self._verdicts = {name: checks[f"gallery {name}"] == _OK for name in versions}
        self.passed = is_fit and (not self._verdicts or any(self._verdicts.values()))
        for name, verdict in self._registry.failures.verdicts().items():
            checks[f"reload {name}"] = verdict
        faults = [f"{name}: {verdict}" for name, verdict in checks.items() if verdict != _OK]
        if faults:
            self._last_error = "; ".join(faults)
            structlog.get_logger().error("readiness checks failed", checks=checks)
        return Readiness(self.passed, checks, versions, self._last_error)

    async def _check_model(self, model: Model) -> str:
        try:
            async with asyncio.timeout(self._timeout_s):
                vector = await model.encoder.infer(model.known_image)
        except Exception as error:
            # Any failure at all makes the service unready; the class says enough to the outside.
            return self._verdict(error)
        cosine = float(vector @ model.known_vector)
        ok = cosine >= _MIN_COSINE
        return _OK if ok else f"the known image gives another vector: {cosine:.4f}"

    async def _check_gallery(self, name: str, fit: Collection[str]) -> tuple[str, str]:
        """The verdict, and the version that it is about."""
        try:
            with self._registry.lease(name) as served:
                if served.model.bundle_id not in fit:
                    return "not searched, since the model failed", _UNKNOWN
                check = functools.partial(_probe, served)
                # A probe that an earlier check gave up is not waited for again, so one gallery
                # cannot delay the answer about the others.
                limit_s = 0.0 if self._threads.is_running(served) else self._timeout_s
                version, is_searchable = await self._threads.run(served, check, limit_s)
        except GalleryNotFoundError:
            return _GONE, _UNKNOWN
        except Exception as error:
            return self._verdict(error), _UNKNOWN
        return _OK if is_searchable else "the search found nothing", version

    def _verdict(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no result within {self._timeout_s:g} s"
        structlog.get_logger().error("readiness check failed", exc_info=error)
        return f"failed with {type(error).__name__}"


def _probe(served: Served) -> tuple[str, bool]:
    with served.reading():  # that it ends tells that the gallery answers again
        return probe(served.gallery, served.model)
