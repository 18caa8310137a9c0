"""Where the galleries of a service are: those of its settings, then those of its state folder."""

from dataclasses import dataclass
from pathlib import Path

from embedder.errors import GalleryNotFoundError, InvalidParameterError
from indexer.gallery import Gallery as IndexedGallery
from indexer.gallery import current_generation, current_manifest
from indexer.types import checked_name
from service.settings import Settings, split_gallery


@dataclass(frozen=True, slots=True)
class Place:
    """A gallery on the disk; `generation` is what it is at now, None if it is not there.

    A `managed` one was made by the service and lies in its state folder.
    """

    name: str
    path: Path
    managed: bool
    generation: str | None
    image_root: Path | None = None


class Sources:
    """Looks for galleries on the disk; every call may block."""

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

    def look(self) -> list[Place]:
        """Every gallery, in the order of the service; given ones also while they are away."""
        places = [self._place(name, path, managed=False) for name, path in self._given.items()]
        for path in self._managed_folders():
            place = self._place(path.name, path, managed=True)
            if path.name not in self._given and place.generation is not None:
                places.append(place)
        return places

    def _place(self, name: str, path: Path, *, managed: bool) -> Place:
        current = current_generation(path)
        return Place(name, path, managed, current, self._roots.get(name))

    def _managed_folders(self) -> list[Path]:
        if self._managed is None or not self._managed.is_dir():
            return []
        return sorted(path for path in self._managed.iterdir() if is_name(path.name))

    def _check_roots(self) -> None:
        known = [place.name for place in self.look()]
        for name in self._roots:
            if name not in known:
                raise GalleryNotFoundError(
                    f"--image-root names the gallery {name!r}, which is not served. Known are: "
                    f"{', '.join(known) or 'none'}."
                )


def open_place(place: Place) -> IndexedGallery:
    """The generation that a gallery is at now. Raises: GalleryError."""
    return IndexedGallery.open(place.path, image_root=place.image_root)


def is_name(name: str) -> bool:
    """Whether a gallery can be called so."""
    try:
        return bool(checked_name(name))
    except InvalidParameterError:
        return False


def managed_folder(state: Path | None) -> Path | None:
    """Where the galleries are that the service makes."""
    return None if state is None else state / "galleries"
