"""Readiness checks: embed a test image and search every gallery with it."""

import asyncio
import contextlib
import functools
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

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

_PERIOD_S = 2.0
_CALM_PERIOD_S = 4.0  # with many galleries, none of which has a fault
_MODELS_S = 15.0
_AT_ONCE = 16
_MIN_COSINE = 0.999
_UNKNOWN = "unknown"
_OK = "ok"
_REMOVED = "removed"
_SERVICE = "service"
_NO_WORKER = "no worker process runs; they are started again, and the log has the cause"
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
    """Runs the checks on a timer, so metrics are right without a caller of `/ready`; and on demand,
    at most once a second.

    Each run checks up to `_AT_ONCE` galleries, those first that were checked longest ago, so the
    cost does not grow with their number. A model, which was checked when it started, is checked by
    the timer every `_MODELS_S` seconds.
    """

    def __init__(
        self, registry: Registry, models: Models, timeout_s: float, is_on_gpu: bool = False
    ) -> None:
        """`is_on_gpu`: whether galleries are searched on a GPU."""
        self.passed = False
        self.has_started = False
        self.is_draining = False
        self._registry = registry
        self._models = models
        self._threads = KeyedThreads(_AT_ONCE)
        self._timeout_s = timeout_s
        self._is_on_gpu = is_on_gpu
        self._last_error: str | None = None
        self._faults: dict[str, str] = {}
        self._of_models: dict[Model, str] = {}
        self._of_galleries: dict[str, _Verdict] = {}
        self._models_at = time.monotonic()
        self._recent = Recent(self._check_all)
        self._checking: asyncio.Task[None] | None = None
        # A subject has one thread, so a second check at the same time would be refused as hanging.
        self._turn = asyncio.Lock()

    def start(self) -> None:
        """Check on a timer, in the running event loop, until `stop`."""
        self._checking = asyncio.create_task(self._keep_checking())

    async def stop(self) -> None:
        """Stop checking."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)

    def galleries(self) -> Mapping[str, bool]:
        """Whether each gallery passed its last check; False for one that cannot be opened."""
        closed = self._registry.failures.verdicts().keys() - set(self._registry.names())
        verdicts = {name: one.text == _OK for name, one in self._of_galleries.items()}
        return verdicts | dict.fromkeys(closed, False)

    async def check(self) -> Readiness:
        """Embed the test image, compare its vector, and search galleries, ahead of the queue.

        During a drain the result is never ready.
        """
        found = await self._recent.get()
        if not self.is_draining:
            return found
        return replace(found, ready=False, checks=found.checks | {_SERVICE: "shutting down"})

    def end(self) -> None:
        """Start the drain: report not ready, so load balancers send requests elsewhere."""
        self.is_draining = True
        structlog.get_logger().info("drain started")

    async def _keep_checking(self) -> None:
        while True:
            try:
                is_due = time.monotonic() - self._models_at >= _MODELS_S
                await self._check(with_models=is_due or not self._is_fit(self._of_models))
            except Exception as error:
                # The boundary of the task: the next check may work.
                structlog.get_logger().error("readiness cannot be checked", exc_info=error)
            is_calm = not self._faults and len(self._of_galleries) > _AT_ONCE
            await asyncio.sleep(_CALM_PERIOD_S if is_calm else _PERIOD_S)

    async def _check_all(self) -> Readiness:
        await self._check(with_models=True)
        checks = self._checks()
        free_mb = await self._free_gpu_memory_mb() if self._is_on_gpu else None
        versions = {name: one.version for name, one in self._of_galleries.items()}
        indexes = {name: one.index for name, one in self._of_galleries.items() if one.index}
        return Readiness(self.passed, checks, versions, indexes, free_mb, self._last_error)

    async def _check(self, *, with_models: bool) -> None:
        async with self._turn:
            await self._check_alone(with_models)

    async def _check_alone(self, with_models: bool) -> None:
        running = self._models.running()
        known = {model: self._of_models.get(model, _OK) for model in running}
        if with_models:
            self._models_at = time.monotonic()
            verdicts = await asyncio.gather(*map(self._check_model, running))
            known = dict(zip(running, verdicts, strict=True))
        self._of_models = known
        fit = {model.bundle_id for model, verdict in known.items() if verdict == _OK}
        names = self._registry.names()
        order = sorted(names, key=lambda name: self._checked_at(name))
        found = await asyncio.gather(*(self._check_gallery(name, fit) for name in order[:_AT_ONCE]))
        of_galleries = self._of_galleries | dict(zip(order, found, strict=False))
        self._of_galleries = {
            name: of_galleries[name]
            for name in names
            if name in of_galleries and of_galleries[name].text != _REMOVED
        }
        # A bad gallery is bad in every replica, so it must not take this replica out of service:
        # that would take the other galleries out everywhere.
        of_each = [one.text == _OK for one in self._of_galleries.values()]
        self.passed = self._is_fit(known) and (not of_each or any(of_each))
        self.has_started = self.has_started or self.passed
        self._report({name: text for name, text in self._checks().items() if text != _OK})

    def _report(self, faults: dict[str, str]) -> None:
        """Log faults once, when they change."""
        if faults:
            self._last_error = "; ".join(f"{name}: {text}" for name, text in faults.items())
        if faults and faults != self._faults:
            structlog.get_logger().error("readiness checks failed", checks=faults)
        elif self._faults and not faults:
            structlog.get_logger().info("readiness checks passed")
        self._faults = faults

    def _checks(self) -> dict[str, str]:
        of_models = self._of_models.items()
        return {
            f"model{'' if len(of_models) == 1 else f' {model.bundle_id[:SHORT]}'}": verdict
            for model, verdict in of_models
        } | {
            **{f"gallery {name}": one.text for name, one in self._of_galleries.items()},
            **{f"reload {n}": text for n, text in self._registry.failures.verdicts().items()},
        }

    def _checked_at(self, name: str) -> float:
        return self._of_galleries[name].checked_at if name in self._of_galleries else 0.0

    @staticmethod
    def _is_fit(verdicts: Mapping[Model, str]) -> bool:
        return all(verdict == _OK for verdict in verdicts.values())

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
            return self._verdict(error) if model.encoder.workers.fault is None else _NO_WORKER
        cosine = float(vector @ model.reference_vector)
        ok = cosine >= _MIN_COSINE
        return _OK if ok else f"the test image has another vector: cosine {cosine:.4f}"

    async def _check_gallery(self, name: str, fit: Collection[str]) -> "_Verdict":
        try:
            with self._registry.lease(name) as served:
                if served.model.bundle_id not in fit:
                    return _Verdict("not searched, since the model failed")
                check = functools.partial(_probe, served)
                # If an earlier probe still hangs, do not wait for it again: one gallery must not
                # delay the checks of the others.
                limit_s = 0.0 if self._threads.is_running(served) else self._timeout_s
                version, is_searchable, index = await self._threads.run(served, check, limit_s)
        except GalleryNotFoundError:
            return _Verdict(_REMOVED)
        except Exception as error:
            return _Verdict(self._verdict(error))
        return _Verdict(_OK if is_searchable else "the search returned no hits", version, index)

    def _verdict(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no result within {self._timeout_s:g} s"
        structlog.get_logger().debug("readiness check failed", exc_info=error)
        return f"failed with {type(error).__name__}"


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The result for one gallery: `ok` or its fault, the searched version, and its index."""

    text: str
    version: str = _UNKNOWN
    index: IndexLocation | None = None
    checked_at: float = field(default_factory=time.monotonic)


def _probe(served: Served) -> tuple[str, bool, IndexLocation | None]:
    with served.reading():  # its end shows that the gallery responds again
        version, is_searchable = probe(served.whole, served.model)
        gallery = served.whole
        index = gallery.index_location() if isinstance(gallery, IndexedGallery) else None
        return version, is_searchable, index
