"""Galleries that the service makes and deletes itself, in the folder of its state."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
)
from kinlens.indexer.gallery import Gallery, current_generation, delete_gallery
from kinlens.indexer.types import checked_name
from kinlens.models import JobModel
from kinlens.service.access.binding import of_caller
from kinlens.service.concurrency import BoundedPool
from kinlens.service.encoding.model import Model, Models
from kinlens.service.galleries.locations import managed_folder
from kinlens.service.galleries.registry import Registry
from kinlens.service.galleries.uploads import UploadFolder

_SHOWN = 64


class ManagedGalleries:
    """Makes and deletes galleries; other processes see it when they next read the disk."""

    def __init__(
        self,
        registry: Registry,
        models: Models,
        state: Path | None,
        pool: BoundedPool,
        active_job: Callable[[str], JobModel | None],
        limit_s: float,
    ) -> None:
        """`active_job` returns a job that uses a gallery; reading the disk may take `limit_s`."""
        self._registry = registry
        self._models = models
        self._state = state
        self._pool = pool
        self._active_job = active_job
        self._limit_s = limit_s
        self._changing = asyncio.Lock()  # one waits for the folder, the others for it

    async def create(self, name: str, bundle_id: str | None) -> None:
        """Make an empty gallery and serve it.

        Raises: StateMissingError, InvalidParameterError for a name that fits in no link or a bundle
            that is unknown, GalleryConflictError for a name that is taken, GalleryWriteError;
            DeadlineExceededError if it was made but could not be served in time.
        """
        if self._state is None:
            raise StateMissingError(
                "The service has no folder to keep galleries in. Start it with --state DIR."
            )
        folder = managed_folder(self._state)
        checked_name(name)
        binding = of_caller()
        if not binding.permits(name):  # whether it exists or not
            raise AccessError(
                f"The key {binding.key} is not bound to a gallery {name!r}, so it cannot make one. "
                f"Make {' or '.join(binding.galleries or ())}, or send a key that is bound to it."
            )
        if name in self._registry.names():
            raise _taken(name)
        model = await self._model(bundle_id)
        async with self._changing:
            await self._pool.run(lambda: _create(folder / name, model))
        await self._registry.read_from_disk(self._limit_s, name)

    async def delete(self, name: str) -> None:
        """Delete a gallery with its items and their pictures.

        Raises: GalleryNotFoundError, GalleryConflictError for one that the service did not make or
            a job works with, GalleryBusyError while a build runs in it, GalleryWriteError;
            DeadlineExceededError if it was deleted but the others could not be looked at in time.
        """
        async with self._registry.find(name) as served:
            path = served.path
            if path is None or not served.managed:
                raise GalleryConflictError(
                    f"Gallery {name[:_SHOWN]!r} was not made by this service, which leaves its "
                    "files alone. Take it out of the settings (--gallery) and delete its folder."
                )
        async with self._changing:
            await self._pool.run(lambda: self._delete(path))
        await self._registry.read_from_disk(self._limit_s, name)

    def _delete(self, path: Path) -> None:
        with _locked(path.parent):
            if current_generation(path) is None:
                raise GalleryNotFoundError(f"Gallery {path.name!r} has just been deleted.")
            job = self._active_job(path.name)
            if job is not None:
                raise GalleryConflictError(
                    f"Job {job.id} ({job.kind}) works with gallery {path.name!r}. Wait until "
                    f"it has ended, or end it: POST /jobs/{job.id}/cancel."
                )
            with UploadFolder(path).deleting():
                delete_gallery(path)

    async def _model(self, bundle_id: str | None) -> Model:
        if bundle_id is None:
            return self._registry.model
        try:
            return await self._models.get(bundle_id)
        except BundleNotFoundError as error:
            raise InvalidParameterError(
                f"bundle_id = {bundle_id[:_SHOWN]!r} is unknown to this service. Put the bundle "
                "into the folder bundles of its state, or leave bundle_id away."
            ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one process makes or deletes galleries at a time. Raises: GalleryWriteError."""
    try:
        make_folder(folder, "galleries")
        with exclusive(folder / ".lock", wait=True):
            for left in filter(is_stage, folder.iterdir()):  # of a deletion that was cut short
                discard(left)
            yield
    except OSError as error:
        raise GalleryWriteError(
            f"The galleries in {folder} cannot be changed: {error.strerror}. Check its permissions."
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
        f"There is a gallery {name!r} already. Choose another name, or delete it first."
    )
