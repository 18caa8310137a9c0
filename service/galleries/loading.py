"""Opening galleries: all of them before the service starts, and what each must show."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from embedder.errors import (
    BundleMismatchError,
    BundleNotFoundError,
    GalleryCorruptError,
    GalleryNotFoundError,
    KinlensError,
)
from embedder.types import SHORT
from indexer.gallery import Gallery as Indexed
from service.galleries.failures import Failures
from service.galleries.locations import Place
from service.galleries.types import Gallery
from service.search.model import Model, Models

OpenGallery = Callable[[Place], Gallery]


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """An open gallery; without `place` it was given open, and is not closed by the service."""

    name: str
    gallery: Gallery
    place: Place | None = None

    def look_after(self) -> None:
        """From now on a managed one compacts itself, in a thread of its own, when that is due."""
        if self.place is not None and self.place.managed and isinstance(self.gallery, Indexed):
            self.gallery.compact_in_background()

    def close(self) -> None:
        """Close it if it was opened here."""
        if self.place is not None:
            self.gallery.close()


@dataclass(frozen=True, slots=True)
class Look:
    """What a search with a known image showed: hits where there are items, all of them finite."""

    version: str
    is_searchable: bool


class Loader:
    """Opens what is to be served together with its embedder; what does not fit is refused."""

    def __init__(self, models: Models, primary: str, open_gallery: OpenGallery) -> None:
        """`primary` is the bundle that runs where there is no gallery."""
        self._models = models
        self._primary = primary
        self._open_gallery = open_gallery

    def load(
        self, given: Mapping[str, Gallery], places: Sequence[Place], failures: Failures
    ) -> list[Opened]:
        """Everything, `given` first. One that the service manages and that cannot be opened goes
        to `failures` and does not stop the others.

        Raises: GalleryError, BundleError.
        """
        loaded = [Opened(name, gallery) for name, gallery in given.items()]
        try:
            for opened in loaded:
                self._open_model(opened)
            for place in places:
                if place.name not in given:
                    loaded += self._opened(place, failures)
            if not loaded:
                self._models.open(self._primary)
        except BaseException:
            for opened in loaded:
                opened.close()
            raise
        return loaded

    def _opened(self, place: Place, failures: Failures) -> list[Opened]:
        try:
            opened = Opened(place.name, self._open_gallery(place), place)
            try:
                self._open_model(opened)
            except BaseException:
                opened.close()
                raise
        except KinlensError as error:
            if not place.managed:
                raise
            failures.add(place, error)
            return []
        return [opened]

    def _open_model(self, opened: Opened) -> None:
        gallery = opened.gallery
        try:
            embedder = self._models.open(gallery.bundle_id)
        except BundleNotFoundError:
            if gallery.bundle_id == self._primary:
                raise
            raise BundleMismatchError(
                f"Gallery {opened.name!r} was made with bundle {gallery.bundle_id}, the service "
                f"runs {self._primary}. Serve the bundle it was made with, or build it again: "
                "kinlens-index build."
            ) from None
        check_dim(opened.name, gallery, embedder.dim)


def refuse_nothing(galleries: Sequence[object]) -> None:
    """A service that can get no galleries later must have one. Raises: GalleryNotFoundError."""
    if not galleries:
        raise GalleryNotFoundError(
            "No gallery was given. Name at least one folder with --gallery or KINLENS_GALLERIES, "
            "or a folder for those that are made while the service runs with --state."
        )


def check_dim(name: str, gallery: Gallery, dim: int) -> None:
    """Refuse vectors of another length than the model's. Raises: BundleMismatchError."""
    if gallery.dim != dim:
        raise BundleMismatchError(
            f"Gallery {name!r} has vectors of length {gallery.dim}, its bundle "
            f"{gallery.bundle_id[:SHORT]} makes them of length {dim}. Build it again: "
            "kinlens-index build."
        )


def look_at(gallery: Gallery, model: Model) -> Look:
    """Search a gallery with the known image of its model; others may change it meanwhile.

    Raises: GalleryError.
    """
    version, size = gallery.version, gallery.size
    [hits] = gallery.search(np.ascontiguousarray(model.known_vector[np.newaxis]), 1)
    is_found = bool(hits) or not size or gallery.version != version
    return Look(version, is_found and all(math.isfinite(hit.score) for hit in hits))


def check_searches(name: str, gallery: Gallery, model: Model) -> None:
    """What a gallery must pass before it is served. Raises: GalleryError."""
    check_dim(name, gallery, model.dim)
    if not look_at(gallery, model).is_searchable:
        raise GalleryCorruptError(
            f"Gallery {name!r} has {gallery.size:,} items, but a search found none of them. Make "
            "its index again: kinlens-index compact GALLERY --rebuild."
        )
