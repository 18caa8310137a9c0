"""State folders of versions before pictures lay in the folders of their galleries, brought over.

Then all uploads lay in one folder, STATE/uploads/<ab>/<sha256>, and STATE/claims had a record of
each gallery that might have some. A kill at any point leaves what the next start goes on with.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import structlog
from pydantic import BaseModel, ValidationError

from embedder.durable import discard, exclusive, sweep
from embedder.errors import (
    GalleryCorruptError,
    GalleryNotFoundError,
    GalleryWriteError,
    KinlensError,
)
from indexer.gallery import contents_held, current_generation, keeps_generation
from service.galleries.pictures import PictureFolder


class _Record(BaseModel):
    """Of a gallery that may have uploads: the path of a managed one is relative to the state; of
    another the generations tell it from a stranger in its place. `ending`: it is being deleted.
    """

    path: str
    managed: bool
    generations: tuple[str, ...] = ()
    ending: bool = False


def bring_over(state: Path, served: Iterable[Path]) -> None:
    """Link every upload of the folder `state` into those galleries that show it, `served` ones and
    recorded ones, and then remove it.

    While one of them is away or cannot be changed, all uploads stay for a later start, and the log
    says what to do. Processes that start together wait for the first one.

    Raises: GalleryWriteError if the state cannot be changed.
    """
    try:
        if state.is_dir():
            sweep(state)  # of a removal that was cut short
        if any((state / name).is_dir() for name in ("uploads", "claims")):
            with exclusive(state / ".migration.lock", wait=True):
                _bring_over(state, served)
    except OSError as error:
        raise GalleryWriteError(
            f"The uploads in {state} cannot be brought into the folders of their galleries: "
            f"{error.strerror or error}. Check the permissions of that folder."
        ) from error


def _bring_over(state: Path, served: Iterable[Path]) -> None:
    uploads, records = state / "uploads", state / "claims"
    galleries = {path.absolute() for path in served if current_generation(path) is not None}
    is_complete = True
    for file in sorted(records.glob("*.json")):
        try:
            galleries |= _recorded(state.absolute(), file)
        except KinlensError as error:
            is_complete = _stays(error)
    for gallery in sorted(galleries):
        try:
            held = partial(contents_held, gallery)
            PictureFolder(gallery).take_in(uploads, held)
        except KinlensError as error:
            is_complete = _stays(error)
    if is_complete:
        discard(uploads)
        discard(records)


def _recorded(state: Path, file: Path) -> set[Path]:
    """The gallery of a record; none if it was being deleted and is gone."""
    try:
        record = _Record.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise GalleryCorruptError(f"{file} cannot be read. Restore it.") from error
    gallery = state / record.path
    if current_generation(gallery) is None:
        if record.ending and gallery.parent.is_dir():
            return set()
        raise GalleryNotFoundError(
            f"The gallery {gallery} is away. If it is gone for good, remove {file}."
        )
    if not record.managed and not keeps_generation(gallery, record.generations):
        raise GalleryNotFoundError(
            f"Another gallery is in {gallery}. If the one that was there before is gone for good, "
            f"remove {file}."
        )
    return {gallery}


def _stays(error: KinlensError) -> bool:
    structlog.get_logger().warning("uploads of an earlier version stay for now", detail=str(error))
    return False
