"""Readiness that does what it promises: embeds a known image and searches every gallery."""

import asyncio
import contextlib
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import structlog

from kinlens.embedder.errors import GalleryNotFoundError, KinlensError
from kinlens.embedder.types import SHORT
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.indexer.gallery import gpu_memory
from kinlens.indexer.types import IndexPlace
from kinlens.service.access.binding import Binding
from kinlens.service.concurrency import OwnThreads, Recent
from kinlens.service.encoding.model import Model, Models
from kinlens.service.galleries.registry import Registry, Served, probe

_MIN_COSINE = 0.999
_UNKNOWN = "unknown"
_OK = "ok"
_GONE = "gone"
_SERVICE = "service"
_OF_GALLERIES = ("gallery ", "reload ")


@dataclass(frozen=True, slots=True)
class Readiness:
    """The verdict of each check, `ok` or what is wrong, and the versions that were searched; where
    their indexes are, and what the GPU has free for more.

    `ready` needs every model, and one gallery if there is any: `checks` names those that fail. A
    new generation that cannot be opened is in `checks` too, while the old one is served.
    """

    ready: bool
    checks: dict[str, str]
    versions: dict[str, str]
    indexes: dict[str, IndexPlace]
    free_gpu_memory_mb: float | None
    last_error: str | None

    def seen_by(self, binding: Binding) -> "Readiness":
        """What a caller with this binding may know of it."""
        if not binding.is_bound:
            return self
        hidden = {
            check
            for check in self.checks
            if check.startswith(_OF_GALLERIES) and not binding.permits(check.partition(" ")[2])
        }
        of_index = {} if binding.where is not None else self.indexes
        return replace(
            self,
            checks={name: what for name, what in self.checks.items() if name not in hidden},
            versions={name: own for name, own in self.versions.items() if binding.permits(name)},
            indexes={name: place for name, place in of_index.items() if binding.permits(name)},
            last_error=None,
        )

    def of_gallery(self, name: str) -> bool:
        """Whether searches of one gallery are answered. Raises: GalleryNotFoundError."""
        if name not in self.versions and f"reload {name}" not in self.checks:
            raise GalleryNotFoundError(
                f"gallery = {name[:SHORT]!r} is unknown. Known are: "
                f"{', '.join(self.versions) or 'none'}."
            )
        return self.checks.get(f"gallery {name}") == _OK and _SERVICE not in self.checks


class Health:
    """Runs the checks on demand, at most once a second, whoever asks: they go first everywhere."""

    def __init__(
        self, registry: Registry, models: Models, timeout_s: float, is_on_gpu: bool = False
    ) -> None:
        """`is_on_gpu` if galleries are to be searched there."""
        self.passed = True
        self.has_started = False
        self.is_ending = False
        self._registry = registry
        self._models = models
        self._threads = OwnThreads("probe")
        self._timeout_s = timeout_s
        self._is_on_gpu = is_on_gpu
        self._last_error: str | None = None
        self._verdicts: dict[str, bool] = {}
        self._recent = Recent(self._check)

    def galleries(self) -> Mapping[str, bool]:
        """Whether each gallery passed the last check; not so one that cannot be opened."""
        closed = self._registry.failures.verdicts().keys() - set(self._registry.names())
        return self._verdicts | dict.fromkeys(closed, False)

    async def check(self) -> Readiness:
        """Embed the known image, compare, and search everywhere, ahead of all that waits; not
        ready, whatever that says, once the end has begun.
        """
        found = await self._recent.get()
        self.has_started = self.has_started or found.ready
        if not self.is_ending:
            return found
        return replace(found, ready=False, checks=found.checks | {_SERVICE: "it is ending"})

    def end(self) -> None:
        """From now on it is not ready, so that load balancers send their requests elsewhere."""
        self.is_ending = True
        structlog.get_logger().info("the end has begun")

    async def _check(self) -> Readiness:
        checks: dict[str, str] = {}
        versions: dict[str, str] = {}
        indexes: dict[str, IndexPlace] = {}
        models = self._models.running()
        fit = set()
        for model in models:
            suffix = "" if len(models) == 1 else f" {model.bundle_id[:SHORT]}"
            checks[f"model{suffix}"] = verdict = await self._check_model(model)
            fit |= {model.bundle_id} if verdict == _OK else set()
        is_fit = all(verdict == _OK for verdict in checks.values())
        names = self._registry.names()
        found = await asyncio.gather(*(self._check_gallery(name, fit) for name in names))
        for name, (verdict, version, place) in zip(names, found, strict=True):
            if verdict != _GONE:
                checks[f"gallery {name}"], versions[name] = verdict, version
                indexes |= {} if place is None else {name: place}
        # One bad gallery is bad in every replica: to take this one out would end the others too.
        self._verdicts = {name: checks[f"gallery {name}"] == _OK for name in versions}
        self.passed = is_fit and (not self._verdicts or any(self._verdicts.values()))
        for name, verdict in self._registry.failures.verdicts().items():
            checks[f"reload {name}"] = verdict
        faults = [f"{name}: {verdict}" for name, verdict in checks.items() if verdict != _OK]
        if faults:
            self._last_error = "; ".join(faults)
            structlog.get_logger().error("readiness checks failed", checks=checks)
        free_mb = await self._free_gpu_memory_mb() if self._is_on_gpu else None
        return Readiness(self.passed, checks, versions, indexes, free_mb, self._last_error)

    async def _free_gpu_memory_mb(self) -> float | None:
        """None if the GPU does not tell."""
        with contextlib.suppress(TimeoutError, KinlensError):
            limit_s = 0.0 if self._threads.is_running(gpu_memory) else self._timeout_s
            memory = await self._threads.run(gpu_memory, gpu_memory, limit_s)
            return round(memory.free_mb)
        return None

    async def _check_model(self, model: Model) -> str:
        try:
            async with asyncio.timeout(self._timeout_s):
                vector = await model.encoder.infer(model.reference_image)
        except Exception as error:
            # Any failure at all makes the service unready; the class says enough to the outside.
            return self._verdict(error)
        cosine = float(vector @ model.reference_vector)
        ok = cosine >= _MIN_COSINE
        return _OK if ok else f"the known image gives another vector: {cosine:.4f}"

    async def _check_gallery(
        self, name: str, fit: Collection[str]
    ) -> tuple[str, str, IndexPlace | None]:
        """The verdict, the version that it is about, and where that is searched."""
        try:
            with self._registry.lease(name) as served:
                if served.model.bundle_id not in fit:
                    return "not searched, since the model failed", _UNKNOWN, None
                check = functools.partial(_probe, served)
                # A probe that an earlier check gave up is not waited for again, so one gallery
                # cannot delay the answer about the others.
                limit_s = 0.0 if self._threads.is_running(served) else self._timeout_s
                version, is_searchable, place = await self._threads.run(served, check, limit_s)
        except GalleryNotFoundError:
            return _GONE, _UNKNOWN, None
        except Exception as error:
            return self._verdict(error), _UNKNOWN, None
        return _OK if is_searchable else "the search found nothing", version, place

    def _verdict(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no result within {self._timeout_s:g} s"
        structlog.get_logger().error("readiness check failed", exc_info=error)
        return f"failed with {type(error).__name__}"


def _probe(served: Served) -> tuple[str, bool, IndexPlace | None]:
    with served.reading():  # that it ends tells that the gallery answers again
        version, is_searchable = probe(served.opened, served.model)
        gallery = served.opened
        place = gallery.index_place() if isinstance(gallery, IndexedGallery) else None
        return version, is_searchable, place
