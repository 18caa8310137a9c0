"""Managed galleries: the service makes and deletes them in its state folder."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kinlens.embedder.durable import discard, exclusive, is_stage, make_folder
from kinlens.embedder.errors import (
    AccessError,
    BundleNotFoundError,
    GalleryConflictError,
    GalleryNotFoundError,
    GalleryWriteError,
    InvalidParameterError,
    StateMissingError,
    disk_fault,
)
from kinlens.indexer.galleries import current_generation, delete_gallery
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import checked_name
from kinlens.indexer.uploads import UploadFolder
from kinlens.models import JobModel
from kinlens.service.access.keys import CALLER
from kinlens.service.concurrency import BoundedPool, within
from kinlens.service.encoding.model import Model, Models
from kinlens.service.galleries.locations import managed_folder
from kinlens.service.galleries.registry import Registry

_SHOWN = 64
_SUBJECT = "The folder of galleries"
_DELETE_LIMITS = 6  # a gallery may have many images
_MODEL_LIMITS = 6


@dataclass(slots=True)
class ManagedGalleries:
    """Makes and deletes galleries; other processes notice when they next read the disk.

    `active_job` returns a job that uses a gallery; `limit_s` limits reading the disk.
    """

    registry: Registry
    models: Models
    state: Path | None
    pool: BoundedPool
    active_job: Callable[[str], JobModel | None]
    limit_s: float
    # Only one call at a time blocks a thread on the file lock.
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def create(self, name: str, bundle_id: str | None) -> None:
        """Make an empty gallery and serve it.

        Raises: StateMissingError, InvalidParameterError for an invalid name or an unknown bundle,
            GalleryConflictError for a name that is taken, GalleryWriteError;
            DeadlineExceededError if it was made but could not be served in time.
        """
        if self.state is None:
            raise StateMissingError(
                "The service has no state folder for galleries. Start it with --state DIR."
            )
        folder = managed_folder(self.state)
        checked_name(name)
        binding = CALLER.get()
        if not binding.permits(name):  # before the check for existence, which would reveal it
            raise AccessError(
                f"The key {binding.key} is not bound to a gallery {name!r}, so it cannot make one. "
                f"Make {' or '.join(binding.galleries or ())}, or send a key that is bound to it."
            )
        if name in self.registry.names():
            raise _taken(name)
        model = await self._model(bundle_id)
        limit = within(self.limit_s, "Creating the gallery")
        async with limit, self._changing:
            await self.pool.run(lambda: _create(folder / name, model), subject=_SUBJECT)
        await self.registry.read_from_disk(self.limit_s, name)

    async def delete(self, name: str) -> None:
        """Delete a gallery with its items and their images.

        Raises: GalleryNotFoundError, GalleryConflictError if the service did not make it or a job
            uses it, GalleryBusyError while a build runs in it, GalleryWriteError;
            DeadlineExceededError if it was deleted but the galleries could not be read in time.
        """
        async with self.registry.find(name) as served:
            path = served.path
            if path is None or not served.managed:
                raise GalleryConflictError(
                    f"Gallery {name[:_SHOWN]!r} was not made by this service, so the service does "
                    "not delete it. Remove it from the settings (--gallery) and delete its folder."
                )
        limit = within(_DELETE_LIMITS * self.limit_s, "Deleting the gallery", "It continues.")
        async with limit, self._changing:
            await self.pool.run(lambda: self._delete(path), subject=_SUBJECT)
        await self.registry.read_from_disk(self.limit_s, name)

    def _delete(self, path: Path) -> None:
        with _locked(path.parent):
            if current_generation(path) is None:
                raise GalleryNotFoundError(f"Gallery {path.name!r} has just been deleted.")
            job = self.active_job(path.name)
            if job is not None:
                raise GalleryConflictError(
                    f"Job {job.id} ({job.kind}) uses gallery {path.name!r}. Wait until it has "
                    f"ended, or cancel it: POST /jobs/{job.id}/cancel."
                )
            with UploadFolder(path).deleting():
                delete_gallery(path)

    async def _model(self, bundle_id: str | None) -> Model:
        if bundle_id is None:
            return self.registry.model
        try:
            async with within(_MODEL_LIMITS * self.limit_s, "Loading the model"):
                return await self.models.get(bundle_id)
        except BundleNotFoundError as error:
            raise InvalidParameterError(
                f"bundle_id = {bundle_id[:_SHOWN]!r} is unknown to this service. Put the bundle "
                "into the folder bundles of its state, or omit bundle_id."
            ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock for making and deleting galleries. Raises: GalleryWriteError."""
    try:
        make_folder(folder, "galleries")
        with exclusive(folder / ".lock", wait=True):
            for stage in filter(is_stage, folder.iterdir()):  # of an interrupted deletion
                discard(stage)
            yield
    except OSError as error:
        raise GalleryWriteError(
            disk_fault(error, folder, what="The folder of galleries")
        ) from error


def _create(path: Path, model: Model) -> None:
    with _locked(path.parent):
        if current_generation(path) is not None:
            raise _taken(path.name)
        Gallery.create(
            path,
            name=path.name,
            bundle_id=model.bundle_id,
            precision=model.embedder.mode.precision,
            dim=model.dim,
            source="uploads",
        ).close()


def _taken(name: str) -> GalleryConflictError:
    return GalleryConflictError(
        f"A gallery {name!r} already exists. Choose another name, or delete it first."
    )
