"""Readiness checks: embed a test image and search every gallery with it."""

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
from kinlens.indexer.types import IndexLocation
from kinlens.service.access.binding import Binding
from kinlens.service.concurrency import KeyedThreads, Recent
from kinlens.service.encoding.model import Model, Models
from kinlens.service.galleries.registry import Registry, Served, probe

_MIN_COSINE = 0.999
_UNKNOWN = "unknown"
_OK = "ok"
_REMOVED = "removed"
_SERVICE = "service"
_OF_GALLERIES = ("gallery ", "reload ")


@dataclass(frozen=True, slots=True)
class Readiness:
    """The result of the readiness checks.

    `ready` requires all models and, if there are galleries, at least one of them.

    Attributes:
        checks: `ok` or the fault of each check. A new generation that cannot be opened is listed
            too, while the old one is served.
        versions: the searched version of each gallery.
        indexes: the device and memory of each index.
        free_gpu_memory_mb: free memory of the GPU; None without one.
        last_error: the last faults, even if they are fixed.
    """

    ready: bool
    checks: dict[str, str]
    versions: dict[str, str]
    indexes: dict[str, IndexLocation]
    free_gpu_memory_mb: float | None
    last_error: str | None

    def seen_by(self, binding: Binding) -> "Readiness":
        """The part that a caller with this binding can see."""
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
            checks={name: text for name, text in self.checks.items() if name not in hidden},
            versions={name: own for name, own in self.versions.items() if binding.permits(name)},
            indexes={name: index for name, index in of_index.items() if binding.permits(name)},
            last_error=None,
        )

    def of_gallery(self, name: str) -> bool:
        """Whether one gallery can be searched. Raises: GalleryNotFoundError."""
        if name not in self.versions and f"reload {name}" not in self.checks:
            raise GalleryNotFoundError(
                f"gallery = {name[:SHORT]!r} is unknown. Existing galleries: "
                f"{', '.join(self.versions) or 'none'}."
            )
        return self.checks.get(f"gallery {name}") == _OK and _SERVICE not in self.checks


class Health:
    """Runs the checks on demand, at most once a second, since they take priority over searches."""

    def __init__(
        self, registry: Registry, models: Models, timeout_s: float, is_on_gpu: bool = False
    ) -> None:
        """`is_on_gpu`: whether galleries are searched on a GPU."""
        self.passed = True
        self.has_started = False
        self.is_draining = False
        self._registry = registry
        self._models = models
        self._threads = KeyedThreads("probe")
        self._timeout_s = timeout_s
        self._is_on_gpu = is_on_gpu
        self._last_error: str | None = None
        self._verdicts: dict[str, bool] = {}
        self._recent = Recent(self._check)

    def galleries(self) -> Mapping[str, bool]:
        """Whether each gallery passed the last check; False for one that cannot be opened."""
        closed = self._registry.failures.verdicts().keys() - set(self._registry.names())
        return self._verdicts | dict.fromkeys(closed, False)

    async def check(self) -> Readiness:
        """Embed the test image, compare its vector, and search every gallery, ahead of the queue.

        During a drain the result is never ready.
        """
        found = await self._recent.get()
        self.has_started = self.has_started or found.ready
        if not self.is_draining:
            return found
        return replace(found, ready=False, checks=found.checks | {_SERVICE: "shutting down"})

    def end(self) -> None:
        """Start the drain: report not ready, so load balancers send requests elsewhere."""
        self.is_draining = True
        structlog.get_logger().info("drain started")

    async def _check(self) -> Readiness:
        checks: dict[str, str] = {}
        versions: dict[str, str] = {}
        indexes: dict[str, IndexLocation] = {}
        models = self._models.running()
        fit = set()
        for model in models:
            suffix = "" if len(models) == 1 else f" {model.bundle_id[:SHORT]}"
            checks[f"model{suffix}"] = verdict = await self._check_model(model)
            fit |= {model.bundle_id} if verdict == _OK else set()
        is_fit = all(verdict == _OK for verdict in checks.values())
        names = self._registry.names()
        found = await asyncio.gather(*(self._check_gallery(name, fit) for name in names))
        for name, (verdict, version, index) in zip(names, found, strict=True):
            if verdict != _REMOVED:
                checks[f"gallery {name}"], versions[name] = verdict, version
                indexes |= {} if index is None else {name: index}
        # A bad gallery is bad in every replica, so it must not take this replica out of service:
        # that would take the other galleries out everywhere.
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
        """The free memory of the GPU; None if it cannot be read."""
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
            # Any failure makes the service not ready; clients only see the class of the error.
            return self._verdict(error)
        cosine = float(vector @ model.reference_vector)
        ok = cosine >= _MIN_COSINE
        return _OK if ok else f"the test image has another vector: cosine {cosine:.4f}"

    async def _check_gallery(
        self, name: str, fit: Collection[str]
    ) -> tuple[str, str, IndexLocation | None]:
        """The verdict, the searched version, and the device of its index."""
        try:
            with self._registry.lease(name) as served:
                if served.model.bundle_id not in fit:
                    return "not searched, since the model failed", _UNKNOWN, None
                check = functools.partial(_probe, served)
                # If an earlier probe still hangs, do not wait for it again: one gallery must not
                # delay the checks of the others.
                limit_s = 0.0 if self._threads.is_running(served) else self._timeout_s
                version, is_searchable, index = await self._threads.run(served, check, limit_s)
        except GalleryNotFoundError:
            return _REMOVED, _UNKNOWN, None
        except Exception as error:
            return self._verdict(error), _UNKNOWN, None
        return _OK if is_searchable else "the search returned no hits", version, index

    def _verdict(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no result within {self._timeout_s:g} s"
        structlog.get_logger().error("readiness check failed", exc_info=error)
        return f"failed with {type(error).__name__}"


def _probe(served: Served) -> tuple[str, bool, IndexLocation | None]:
    with served.reading():  # its end shows that the gallery responds again
        version, is_searchable = probe(served.opened, served.model)
        gallery = served.opened
        index = gallery.index_location() if isinstance(gallery, IndexedGallery) else None
        return version, is_searchable, index
