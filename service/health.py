"""Readiness checks: embed a test image and search every gallery with it."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import structlog

from kinlens.embedder.errors import GalleryNotFoundError, KinlensError
from kinlens.embedder.types import SHORT
from kinlens.indexer.galleries import gpu_memory
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.indexer.images import ImageAddress
from kinlens.indexer.types import IndexLocation
from kinlens.service.access.keys import EVERYTHING, Binding
from kinlens.service.concurrency import KeyedThreads, Recent
from kinlens.service.encoding.model import Model, Models
from kinlens.service.galleries.registry import Registry, Served
from kinlens.service.galleries.reloads import probe
from kinlens.service.galleries.remote import ImageStores

_PERIOD_S = 4.0
_MODELS_S = 15.0
_AT_ONCE = 16
_MIN_COSINE = 0.999
_UNKNOWN = "unknown"
OK = "ok"
_REMOVED = "removed"
_NO_WORKER = "no worker process runs; they are started again, and the log has the cause"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one gallery: `ok` or its fault, the searched version, and its index."""

    text: str
    version: str = _UNKNOWN
    index: IndexLocation | None = None
    checked_at: float = field(default_factory=time.monotonic)


class Health:
    """Runs the checks on a timer, so metrics are right without a caller of `/ready`; and on demand,
    at most once a second.

    Each run checks up to `_AT_ONCE` galleries, those first that were checked longest ago, so the
    cost does not grow with their number. A model, which was checked when it started, is checked by
    the timer every `_MODELS_S` seconds.

    Attributes:
        passed: whether all models and, if there are galleries, at least one of them passed.
        is_draining: whether the service is shutting down; then it is not ready.
        verdicts: the last check of each gallery.
        last_error: the last faults, even if they are fixed.
        free_gpu_memory_mb: free memory of the GPU; None without one.
    """

    def __init__(
        self,
        registry: Registry,
        models: Models,
        stores: ImageStores,
        timeout_s: float,
        is_on_gpu: bool = False,
    ) -> None:
        """`is_on_gpu`: whether galleries are searched on a GPU."""
        self.passed = False
        self.has_started = False
        self.is_draining = False
        self.verdicts: dict[str, Verdict] = {}
        self.last_error: str | None = None
        self.free_gpu_memory_mb: float | None = None
        self._registry = registry
        self._models = models
        self._stores = stores
        self._threads = KeyedThreads(_AT_ONCE)
        self._timeout_s = timeout_s
        self._is_on_gpu = is_on_gpu
        self._faults: dict[str, str] = {}
        self._of_models: dict[Model, str] = {}
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
        verdicts = {name: verdict.text == OK for name, verdict in self.verdicts.items()}
        return verdicts | dict.fromkeys(closed, False)

    async def check(self) -> None:
        """Embed the test image, compare its vector, and search galleries, ahead of the queue."""
        await self._recent.get()

    def checks(self, binding: Binding = EVERYTHING) -> dict[str, str]:
        """`ok` or the fault of each check that a caller with this binding can see: of models, of
        galleries, and of generations that cannot be opened, while the old one may be served.
        """
        is_single = len(self._of_models) == 1
        found = {
            "model" if is_single else f"model {model.bundle_id[:SHORT]}": text
            for model, text in self._of_models.items()
        }
        for name, verdict in self.verdicts.items():
            if binding.permits(name):
                found[f"gallery {name}"] = verdict.text
        for name, fault in self._registry.failures.verdicts().items():
            if binding.permits(name):
                found[f"reload {name}"] = fault
        return found

    def notes(self, binding: Binding = EVERYTHING) -> dict[str, str]:
        """Why the images of galleries that a caller with this binding can see cannot be read now.
        Searches still answer, so the service stays ready.
        """
        notes = {}
        for name in filter(binding.permits, self._registry.names()):
            with contextlib.suppress(GalleryNotFoundError), self._registry.lease(name) as served:
                root = served.whole.image_root
                fault = self._stores.fault(root) if isinstance(root, ImageAddress) else None
                if fault is not None:
                    notes[f"images of {name}"] = fault
        return notes

    def end(self) -> None:
        """Start the drain: report not ready, so load balancers send requests elsewhere."""
        self.is_draining = True
        structlog.get_logger().info("drain started")

    async def _keep_checking(self) -> None:
        while True:
            try:
                is_due = time.monotonic() - self._models_at >= _MODELS_S
                await self._check(with_models=is_due or not self._models_are_fit())
            except Exception as error:
                # The boundary of the task: the next check may work.
                structlog.get_logger().error("readiness cannot be checked", exc_info=error)
            await asyncio.sleep(_PERIOD_S)

    async def _check_all(self) -> None:
        await self._check(with_models=True)
        self.free_gpu_memory_mb = await self._free_gpu_memory_mb() if self._is_on_gpu else None

    async def _check(self, *, with_models: bool) -> None:
        async with self._turn:
            running = self._models.running()
            known = {model: self._of_models.get(model, OK) for model in running}
            if with_models:
                self._models_at = time.monotonic()
                verdicts = await asyncio.gather(*map(self._check_model, running))
                known = dict(zip(running, verdicts, strict=True))
            self._of_models = known
            await self._check_galleries()
            # A bad gallery is bad in every replica, so it must not take this replica out of
            # service: that would take the other galleries out everywhere.
            of_each = [verdict.text == OK for verdict in self.verdicts.values()]
            self.passed = self._models_are_fit() and (not of_each or any(of_each))
            self.has_started = self.has_started or self.passed
            self._report()

    def _models_are_fit(self) -> bool:
        return all(verdict == OK for verdict in self._of_models.values())

    async def _check_galleries(self) -> None:
        """Check those that were checked longest ago, and forget deleted ones."""
        names, verdicts = self._registry.names(), self.verdicts
        order = sorted(names, key=lambda name: verdicts[name].checked_at if name in verdicts else 0)
        checked = order[:_AT_ONCE]
        results = await asyncio.gather(*map(self._check_gallery, checked))
        verdicts = verdicts | dict(zip(checked, results, strict=True))
        self.verdicts = {
            name: verdicts[name]
            for name in names
            if name in verdicts and verdicts[name].text != _REMOVED
        }

    def _report(self) -> None:
        """Log faults once, when they change."""
        faults = {name: text for name, text in self.checks().items() if text != OK}
        if faults:
            self.last_error = "; ".join(f"{name}: {text}" for name, text in faults.items())
        if faults and faults != self._faults:
            structlog.get_logger().error("readiness checks failed", checks=faults)
        elif self._faults and not faults:
            structlog.get_logger().info("readiness checks passed")
        self._faults = faults

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
                cosine = await model.check()
        except Exception as error:
            # Any failure makes the service not ready; clients only see the class of the error.
            return self._verdict(error) if model.workers.fault is None else _NO_WORKER
        ok = cosine >= _MIN_COSINE
        return OK if ok else f"the test image has another vector: cosine {cosine:.4f}"

    async def _check_gallery(self, name: str) -> Verdict:
        try:
            with self._registry.lease(name) as served:
                if self._of_models.get(served.model.whole) != OK:
                    return Verdict("not searched, since the model failed")
                # If an earlier probe still hangs, do not wait for it again: one gallery must not
                # delay the checks of the others.
                limit_s = 0.0 if self._threads.is_running(served) else self._timeout_s
                return await self._threads.run(served, partial(self._probe, served), limit_s)
        except GalleryNotFoundError:
            return Verdict(_REMOVED)
        except Exception as error:
            return Verdict(self._verdict(error))

    def _verdict(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no result within {self._timeout_s:g} s"
        structlog.get_logger().debug("readiness check failed", exc_info=error)
        return f"failed with {type(error).__name__}"

    def _probe(self, served: Served) -> Verdict:
        gallery = served.whole
        with served.reading():  # its end shows that the gallery responds again
            version, is_searchable = probe(gallery, served.model)
            index = gallery.index_location() if isinstance(gallery, IndexedGallery) else None
            self._stores.watch(gallery)
        return Verdict(OK if is_searchable else "the search returned no hits", version, index)
