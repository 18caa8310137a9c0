"""Which galleries have ever kept an upload: a record of each in the state folder, for good.

claims/<digest>.json   written before the first upload, removed with the gallery alone
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from embedder.durable import make_folder, sync, write_whole
from embedder.errors import (
    GalleryBusyError,
    GalleryCorruptError,
    GalleryNotFoundError,
    GalleryWriteError,
)
from indexer.gallery import current_generation, keeps_generation

_LOCK = "LOCK"
_STEP = "claim"
_DIGITS = 32


class Claim(BaseModel):
    """A gallery that may have uploads.

    A `managed` one lies in the state folder and `path` is relative to it; else it is absolute, and
    the generations that it had tell it from another gallery in its place. `ending`: it is being
    deleted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    managed: bool
    generations: tuple[str, ...] = ()
    ending: bool = False


class Claims:
    """The records in `state`. Thread safe, also between processes; every call may block.

    Every call raises: GalleryWriteError, GalleryCorruptError for a record that cannot be read.
    """

    def __init__(self, state: Path) -> None:
        self._state = state.absolute()
        self._root = self._state / "claims"

    def claim(self, gallery: Path) -> None:
        """From now on the uploads of this gallery stay, whether it is there or not.

        Raises: GalleryBusyError if it is not there now.
        """
        with self._locked():
            generation = current_generation(gallery)
            if generation is None:
                raise GalleryBusyError(
                    f"The gallery {gallery.name} is not there at this moment; nothing was stored. "
                    "Try again in a second."
                )
            path, managed = self._place(gallery)
            claim = Claim(path=path, managed=managed, generations=() if managed else (generation,))
            for other in self._files():
                known = self._read(other)
                if known.path == path and _is_same(known, gallery, generation):
                    self._note(other, known, generation)
                    return
            self._write(self._root / f"{_digest(claim)}.json", claim)

    def folders(self) -> list[Path]:
        """The folder of every gallery that has a record; each is there, and the one recorded.

        Raises: GalleryNotFoundError if one is away or another is in its place.
        """
        if not self._root.is_dir():
            return []
        with self._locked():
            return [found for file in self._files() if (found := self._checked(file)) is not None]

    def follow(self) -> None:
        """Note the generations that recorded galleries are at now, as far as they are there."""
        if not self._root.is_dir():
            return
        with self._locked():
            for file in self._files():
                with contextlib.suppress(GalleryNotFoundError):
                    self._checked(file)

    def end(self, gallery: Path, delete: Callable[[], None]) -> None:
        """Delete a managed gallery together with its record. Raises: what `delete` raises."""
        path, managed = self._place(gallery)
        claim = Claim(path=path, managed=managed)
        file = self._root / f"{_digest(claim)}.json"
        with self._locked():
            if file.exists():
                self._write(file, claim.model_copy(update={"ending": True}))
            delete()
            self._remove(file)

    def _checked(self, file: Path) -> Path | None:
        """The gallery of a record; None if it was being deleted and is gone by now."""
        claim = self._read(file)
        folder = self._state / claim.path
        current = current_generation(folder)
        if current is None and claim.ending and folder.parent.is_dir():
            self._remove(file)
            return None
        if current is None:
            raise GalleryNotFoundError(
                f"The gallery {folder} is away. If it is gone for good, remove {file}."
            )
        if not _is_same(claim, folder, current):
            raise GalleryNotFoundError(
                f"Another gallery is in {folder}. If the one that was there before is gone for "
                f"good, remove {file}."
            )
        self._note(file, claim, current)
        return folder

    def _note(self, file: Path, claim: Claim, generation: str) -> None:
        """The gallery of a record is there, at this generation."""
        generations = claim.generations
        if not claim.managed and generation not in generations:
            generations = (*generations, generation)
        noted = Claim(path=claim.path, managed=claim.managed, generations=generations)
        if noted != claim:
            self._write(file, noted)

    def _place(self, gallery: Path) -> tuple[str, bool]:
        path = gallery.absolute()
        if path.is_relative_to(self._state):
            return str(path.relative_to(self._state)), True
        return str(path), False

    def _files(self) -> list[Path]:
        return sorted(self._root.glob("*.json"))

    def _read(self, file: Path) -> Claim:
        try:
            return Claim.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            raise GalleryCorruptError(
                f"{file}, the record of a gallery that has uploads, cannot be read. Restore it, or "
                "remove it and put an item into that gallery."
            ) from error

    def _write(self, file: Path, claim: Claim) -> None:
        write_whole(file, claim.model_dump_json().encode() + b"\n", _STEP)

    def _remove(self, file: Path) -> None:
        file.unlink(missing_ok=True)
        sync(self._root, _STEP)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            make_folder(self._root, _STEP)
            descriptor = os.open(self._root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)
        except OSError as error:
            raise GalleryWriteError(
                f"The records in {self._root} cannot be changed: {error.strerror or error}. Check "
                "the free space and the permissions of that folder."
            ) from error


def _is_same(claim: Claim, folder: Path, current: str) -> bool:
    """Whether the gallery in `folder` is the one recorded; the state folder needs no proof."""
    known = claim.managed or current in claim.generations
    return known or keeps_generation(folder, claim.generations)


def _digest(claim: Claim) -> str:
    content = "\n".join((claim.path, *claim.generations[:1]))
    return hashlib.sha256(os.fsencode(content)).hexdigest()[:_DIGITS]
