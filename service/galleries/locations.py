"""Where things are: the galleries and bundles of the settings, then those of the state folder."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from embedder.bundle import MANIFEST, Bundle
from embedder.errors import (
    BundleNotFoundError,
    GalleryNotFoundError,
    InvalidParameterError,
    ItemNotFoundError,
)
from embedder.session import Embedder, OnnxEmbedder, SessionSettings
from embedder.types import SHORT
from indexer.gallery import Gallery as IndexedGallery
from indexer.gallery import current_generation, current_manifest
from indexer.types import checked_name
from service.settings import Settings, split_gallery

VERSION_DIGITS = 12
"""Hex digits of a generation in links."""

VERSION_PATTERN = rf"^[0-9a-f]{{{VERSION_DIGITS},64}}$"
VERSION_TEXT = "The gallery generation that the number is from; default: the one being served."

_FOLDER_DIGITS = 16


@dataclass(frozen=True, slots=True)
class GalleryLocation:
    """Where a gallery is; `generation` is what it is at now, None if it is not there.

    A `managed` one was made by the service and lies in its state folder.
    """

    name: str
    path: Path
    managed: bool
    generation: str | None
    image_root: Path | None = None


class Locations:
    """Finds galleries on the disk; every call may block."""

    def __init__(self, settings: Settings) -> None:
        """Raises: GalleryNotFoundError if two galleries have one name, or an image root has none.

        GalleryError for a gallery without a name of its own that cannot be read.
        """
        self._roots = dict(split_gallery(entry) for entry in settings.image_roots)
        self._managed = managed_folder(settings.state)
        self._given: dict[str, Path] = {}
        for entry in settings.galleries:
            name, path = split_gallery(entry)
            name = name or current_manifest(path).name
            if name in self._given:
                raise GalleryNotFoundError(
                    f"Two galleries are called {name!r}. Give one of them another name: "
                    f"--gallery NAME={path}."
                )
            self._given[name] = path
        self._check_roots()

    def list_galleries(self) -> list[GalleryLocation]:
        """Every gallery, in the order of the service; given ones also while they are away."""
        found = [self._location(name, path, managed=False) for name, path in self._given.items()]
        for path in self._managed_folders():
            location = self._location(path.name, path, managed=True)
            if path.name not in self._given and location.generation is not None:
                found.append(location)
        return found

    def _location(self, name: str, path: Path, *, managed: bool) -> GalleryLocation:
        current = current_generation(path)
        return GalleryLocation(name, path, managed, current, self._roots.get(name))

    def _managed_folders(self) -> list[Path]:
        if self._managed is None or not self._managed.is_dir():
            return []
        return sorted(path for path in self._managed.iterdir() if is_name(path.name))

    def _check_roots(self) -> None:
        known = [location.name for location in self.list_galleries()]
        for name in self._roots:
            if name not in known:
                raise GalleryNotFoundError(
                    f"--image-root names the gallery {name!r}, which is not served. Known are: "
                    f"{', '.join(known) or 'none'}."
                )


def open_gallery(location: GalleryLocation) -> IndexedGallery:
    """The generation that a gallery is at now. Raises: GalleryError."""
    return IndexedGallery.open(location.path, image_root=location.image_root)


def is_name(name: str) -> bool:
    """Whether a gallery can be called so."""
    try:
        return bool(checked_name(name))
    except InvalidParameterError:
        return False


def managed_folder(state: Path | None) -> Path | None:
    """Where the galleries are that the service makes."""
    return None if state is None else state / "galleries"


def check_generation(name: str, current: str, version: str | None) -> None:
    """Numbers of items belong to one generation of a gallery; in another they name other items.

    Raises: ItemNotFoundError for a number from another generation than the current one.
    """
    if version is not None and not current.startswith(version):
        raise ItemNotFoundError(
            f"This link is from version {version[:VERSION_DIGITS]} of gallery {name}, which was "
            f"built again and is at version {current[:VERSION_DIGITS]} now. Search again."
        )


class Bundles:
    """Finds a bundle by its id and opens it; the hashes of its files are checked each time."""

    def __init__(self, settings: Settings, embedder: Embedder | None = None) -> None:
        """An `embedder` that is given stands for the bundle of the settings."""
        self._embedder = embedder
        self._primary = settings.bundle if embedder is None else None
        self._stored = None if settings.state is None else settings.state / "bundles"
        self._limits = settings.image_limits()
        self._session = SessionSettings(
            settings.device,
            settings.threads,
            settings.allow_cpu_fallback,
            settings.precision,
            settings.gpu_memory_mb,
        )

    def primary(self) -> str:
        """The id of the bundle that the settings name. Raises: BundleNotFoundError, BundleError."""
        if self._embedder is not None:
            return self._embedder.bundle_id
        if self._primary is None:
            raise BundleNotFoundError(
                "No model bundle was given. Name its folder with --bundle or KINLENS_BUNDLE."
            )
        return id_of(self._primary) or Bundle.open(self._primary).bundle_id

    def open(self, bundle_id: str) -> Embedder:
        """A bundle in a session of its own. Raises: BundleNotFoundError, BundleError."""
        if self._embedder is not None and bundle_id == self._embedder.bundle_id:
            return self._embedder
        return OnnxEmbedder.open(self.folder(bundle_id), self._session, self._limits)

    def folder(self, bundle_id: str) -> Path:
        """Where a bundle is. Raises: BundleNotFoundError naming the known ones."""
        known = {id_of(folder): folder for folder in self._folders(bundle_id)}
        if bundle_id not in known:
            ids = [other[:SHORT] for other in known if other]
            if self._embedder is not None:
                ids.append(self._embedder.bundle_id[:SHORT])
            raise BundleNotFoundError(
                f"The bundle {bundle_id[:SHORT]} is unknown to this service. Known are: "
                f"{', '.join(ids) or 'none'}. "
                "Name its folder with --bundle, or put it into the folder bundles of --state under "
                f"the first {_FOLDER_DIGITS} digits of its id."
            )
        return known[bundle_id]

    def _folders(self, bundle_id: str) -> Iterator[Path]:
        if self._stored is not None and bundle_id.isalnum():
            yield self._stored / bundle_id[:_FOLDER_DIGITS]
        if self._primary is not None:
            yield self._primary


def id_of(folder: Path) -> str | None:
    """The id that the manifest in a folder names, unchecked; None if there is no such manifest."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = content.get("bundle_id") if isinstance(content, dict) else None
    return found if isinstance(found, str) else None
