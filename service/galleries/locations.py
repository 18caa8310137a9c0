"""Finds galleries and bundles: those of the settings first, then those of the state folder."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from kinlens.embedder.bundle import MANIFEST, Bundle
from kinlens.embedder.durable import is_settled, is_stage, stamp
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import BundleError, GalleryNotFoundError
from kinlens.indexer.galleries import (
    CURRENT,
    MilvusStore,
    current_generation,
    current_manifest,
)
from kinlens.indexer.gallery import Gallery as IndexedGallery
from kinlens.indexer.types import GALLERY_NAME, MILVUS, OnCall, milvus_address, unobserved
from kinlens.service.galleries.uploads import SharedUploads
from kinlens.service.galleries.view import GalleryView
from kinlens.service.settings import Settings, is_followed, split_named

_NO_GALLERIES: dict[str, tuple[str, ...]] = {"galleries": (), "image_roots": (), "pictures": ()}
_SHOWN = 64

Stamp = tuple[object, ...]

Opened = IndexedGallery | MilvusStore
"""A gallery with all its items."""

Gallery = Opened | GalleryView
"""A served gallery, whole or limited by the filter of a key. Reading its `version` or `size` may
block. Each change raises GalleryBusyError while a build replaces the gallery, and
GalleryWriteError.
"""


@dataclass(frozen=True, slots=True, eq=False)
class GalleryLocation:
    """Where a gallery is stored.

    path: its folder; None on Milvus.
    managed: it was made by the service and is stored in the state folder.
    generation: the current one; None if it was not read, does not exist or is on Milvus.
    address: its address on Milvus.
    uploads: the uploaded images of a gallery on Milvus or of a followed gallery.
    follows: the address that the gallery in `path` is a copy of.
    given: an open gallery, which is never opened or closed here.
    """

    name: str
    path: Path | None
    managed: bool = False
    generation: str | None = None
    image_root: str | None = None
    address: str = ""
    uploads: SharedUploads | None = None
    follows: str | None = None
    given: Opened | None = None

    @property
    def exists(self) -> bool:
        """Whether the gallery exists; on Milvus it is assumed to."""
        return self.generation is not None or bool(self.address)

    def stamp(self) -> "Stamp | None":
        """Differs after another generation became current; None if that must be read. A `stat`."""
        if self.given is not None:
            return (self.given.generation,)
        found = None if self.path is None else stamp(f"{self.path}/{CURRENT}")
        return found if is_settled(found) else None


class Locations:
    """Finds galleries on the disk; every call may block."""

    def __init__(self, settings: Settings, given: Mapping[str, Opened] | None = None) -> None:
        """Open galleries that are `given` replace the galleries of the settings.

        Raises: GalleryNotFoundError if two galleries have the same name, or an image root names no
            gallery; GalleryError if a gallery is not named in the settings and cannot be read.
        """
        if given is not None:
            settings = settings.model_copy(update=_NO_GALLERIES)
        self._managed = None if settings.state is None else managed_folder(settings.state)
        self._roots = dict(map(split_named, settings.image_roots))
        self._named = {
            name: GalleryLocation(name, getattr(gallery, "path", None), given=gallery)
            for name, gallery in (given or {}).items()
        }
        self._add_named(settings)
        self._ranks = {name: rank for rank, name in enumerate(self._named)}
        self._listed: list[GalleryLocation] = []
        self._listed_at: tuple[int, ...] | None = None
        names = [location.name for location in self.list_unread()]
        for name in self._roots:
            if name not in names:
                raise GalleryNotFoundError(
                    f"--image-root names the gallery {name!r}, which is not served. Known are: "
                    f"{', '.join(names) or 'none'}."
                )

    def _add_named(self, settings: Settings) -> None:
        limit_s = settings.pictures_timeout_ms / 1e3
        uploads = {
            name: SharedUploads(address, limit_s)
            for name, address in map(split_named, settings.pictures)
            if name is not None
        }
        copies = followed(settings)
        for name, text in map(split_named, settings.galleries):
            name = name or _own_name(text)
            if name in self._named:
                raise GalleryNotFoundError(
                    f"Two galleries are called {name!r}. Give one of them another name: "
                    f"--gallery NAME={text}."
                )
            location = GalleryLocation(name, Path(text), image_root=self._roots.get(name))
            if name in copies:
                address, path = copies[name]
                shared = SharedUploads(f"{address.rstrip('/')}/pictures", limit_s)
                location = replace(location, path=path, uploads=shared, follows=address)
            elif text.startswith(MILVUS):
                location = replace(location, path=None, address=text, uploads=uploads.get(name))
            self._named[name] = location
        remote = [name for name, location in self._named.items() if location.address]
        for name in uploads:
            if name not in remote:
                raise GalleryNotFoundError(
                    f"--pictures names {name!r}, which is not a gallery on Milvus of this service. "
                    f"Known are: {', '.join(remote) or 'none'}. A gallery in a folder stores its "
                    "uploaded images in that folder."
                )

    @property
    def has_state(self) -> bool:
        """Whether there is a folder for galleries that are created over HTTP."""
        return self._managed is not None

    def list_galleries(self) -> list[GalleryLocation]:
        """Every gallery, in the order of the service. Galleries of the settings are listed even if
        they cannot be found.
        """
        found = map(self.read, self.list_unread())
        return [location for location in found if location.exists or not location.managed]

    def list_unread(self) -> list[GalleryLocation]:
        """All possible locations of galleries, in the order of the service. Their galleries are not
        read, since one that hangs must not delay the others.
        """
        folder = None if self._managed is None else stamp(str(self._managed))
        if folder != self._listed_at or not is_settled(folder):
            managed: list[str] = []
            if self._managed is not None and self._managed.is_dir():
                managed = sorted(path.name for path in self._managed.iterdir())
            names = dict.fromkeys([*self._named, *managed])
            self._listed = [found for name in names if (found := self.find(name)) is not None]
            self._listed_at = folder
        return self._listed

    def find(self, name: str) -> GalleryLocation | None:
        """The possible location of one gallery, unread; None for a name that none can have."""
        if name in self._named or self._managed is None or not is_name(name):
            return self._named.get(name)
        path, root = self._managed / name, self._roots.get(name)
        return GalleryLocation(name, path, managed=True, image_root=root)

    def order(self, name: str) -> tuple[int, str]:
        """A sort key for the order of the service: of the settings first, then by name."""
        return self._ranks.get(name, len(self._ranks)), name

    def read(self, location: GalleryLocation) -> GalleryLocation:
        """The location with its current generation."""
        if location.given is not None:
            return replace(location, generation=location.given.generation)
        if location.path is not None:
            return replace(location, generation=current_generation(location.path))
        return location

    def hidden(self) -> dict[str, str]:
        """A warning for each gallery of the state folder that is not served, by its name: the
        settings have a gallery of the same name in another place.
        """
        if self._managed is None:
            return {}
        return {
            name: f"{_place(location)} is served as {name!r}, since --gallery or KINLENS_GALLERIES "
            f"names it, and {self._managed / name} is not. To serve that one, remove {name!r} "
            f"there. To serve both, write NAME={_place(location)} with another name."
            for name, location in self._named.items()
            if location.given is None and _is_elsewhere(location, self._managed / name)
        }


def open_gallery(
    location: GalleryLocation, settings: Settings, on_call: OnCall = unobserved
) -> Opened:
    """Open the current generation of a gallery, whose vectors are not checked yet; `on_call` is
    called for each request to Milvus.

    Raises: GalleryError.
    """
    if location.given is not None:
        return location.given
    if location.path is not None:
        return IndexedGallery.open(
            location.path,
            image_root=location.image_root,
            device=settings.searched_on(),
            check_vectors=False,
        )
    token = settings.milvus_token
    uri, name = milvus_address(location.address)
    return MilvusStore.open(
        uri,
        name,
        image_root=location.image_root,
        token="" if token is None else token.get_secret_value(),
        timeout_s=settings.milvus_timeout_ms / 1e3,
        consistency=settings.milvus_consistency,
        on_call=on_call,
    )


def followed(settings: Settings) -> dict[str, tuple[str, Path]]:
    """The address of each followed gallery and the folder of its copy, by name."""
    folder = settings.copies_in()
    named = ((name or name_of(text), text) for name, text in map(split_named, settings.galleries))
    return {
        name: (text, folder / name)
        for name, text in named
        if folder is not None and is_followed(text)
    }


def name_of(address: str) -> str:
    """The name of a gallery: the last part of its address. Raises: GalleryNotFoundError."""
    name = address.rstrip("/").rpartition("/")[2]
    if not is_name(name):
        raise GalleryNotFoundError(
            f"The address {address} does not end with a name for its gallery. Write "
            f"--gallery NAME={address}."
        )
    return name


def unknown_gallery(name: str, known: Iterable[str]) -> GalleryNotFoundError:
    """The error for a name that no gallery of the caller has."""
    return GalleryNotFoundError(
        f"gallery = {name[:_SHOWN]!r} is unknown. Known are: {', '.join(known) or 'none'}."
    )


def _place(location: GalleryLocation) -> str:
    """Where a gallery of the settings is, as they name it."""
    return location.follows or location.address or str(location.path)


def _is_elsewhere(location: GalleryLocation, folder: Path) -> bool:
    """Whether `folder` has a gallery, and the location is another folder or an address."""
    if stamp(f"{folder}/{CURRENT}") is None:
        return False
    path = None if location.follows is not None else location.path
    return path is None or path.resolve() != folder.resolve()


def _own_name(text: str) -> str:
    """The name that a gallery has in its address or manifest. Raises: GalleryError."""
    if is_followed(text):
        return name_of(text)
    return milvus_address(text)[1] if text.startswith(MILVUS) else current_manifest(text).name


def is_name(name: str) -> bool:
    """Whether this is a valid name for a gallery."""
    return re.fullmatch(GALLERY_NAME, name) is not None


def managed_folder(state: Path) -> Path:
    """The folder of the galleries that the service makes."""
    return state / "galleries"


def session_of(settings: Settings) -> SessionSettings:
    """How the settings run a model."""
    return SessionSettings(
        settings.device,
        settings.threads,
        precision=settings.precision,
        gpu_memory_mb=settings.gpu_memory_mb,
        engine=settings.engine,
    )


def list_bundles(state: Path | None, bundle: Path | None) -> list[tuple[Path, dict[str, str]]]:
    """Each folder of bundles of the state folder, whatever its name, and the one of the settings,
    with its unchecked manifest. Of bundles with one id the one to serve comes first.

    They differ in attached files alone. The one of the settings comes first, then those with such
    files, then the one whose manifest was written last.
    """
    folders = [] if state is None else sorted(state.glob("bundles/*"), reverse=True)
    folders = [folder for folder in folders if folder.is_dir() and not is_stage(folder)]
    if bundle is not None:
        folders = [bundle, *(folder for folder in folders if folder != bundle)]
    found = [(folder, manifest_of(folder)) for folder in folders]

    def rank(pair: tuple[Path, dict[str, str]]) -> tuple[bool, bool, float]:
        folder, manifest = pair
        return folder == bundle, "base_id" in manifest, _written_at(folder / MANIFEST)

    return sorted(found, key=rank, reverse=True)


def known_bundles(
    state: Path | None, bundle: Path | None
) -> dict[str, tuple[Path, dict[str, str]]]:
    """The folder and the unchecked manifest of the bundle to serve for each id."""
    found = reversed(list_bundles(state, bundle))
    return {name: (folder, one) for folder, one in found if (name := vectors_id(one))}


def find_bundle(state: Path | None, primary: Path | None, bundle_id: str) -> Path | None:
    """The folder of the bundle to serve for the id that galleries carry; None if it is unknown."""
    known = list_bundles(state, primary)
    copies = [folder for folder, manifest in known if vectors_id(manifest) == bundle_id]
    return intact(copies, primary) if copies else None


def intact(copies: Sequence[Path], primary: Path | None) -> Path:
    """The one to use of folders that have one bundle, the best first: a damaged one is passed over
    if there is another, but not the `primary` one of the settings.
    """
    *others, last = copies
    for folder in others:
        if folder == primary:
            return folder
        try:
            Bundle.open(folder)
        except BundleError as error:
            structlog.get_logger().warning("bundle is damaged", detail=str(error))
        else:
            return folder
    return last


def _written_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # it has just been removed
        return 0.0


def vectors_id(manifest: Mapping[str, str]) -> str | None:
    """The id of a bundle that galleries carry, from its unchecked manifest; None without one."""
    return manifest.get("base_id") or manifest.get("bundle_id")


def manifest_of(folder: Path) -> dict[str, str]:
    """The string fields of a bundle's manifest, unchecked; empty if there is no such manifest."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    found = content if isinstance(content, dict) else {}
    return {name: value for name, value in found.items() if isinstance(value, str)}
