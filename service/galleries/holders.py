"""Who has a content: asked before an upload is thrown away, so whoever may have it is believed."""

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import structlog

from embedder.errors import GalleryBusyError, GalleryNotFoundError, KinlensError
from indexer.gallery import contents_held, current_generation, is_being_replaced
from service.galleries.claims import Claims
from service.galleries.registry import Served

_FOLDERS = ("galleries", "candidates")


class Holders:
    """Every gallery that may show uploads: those served now, those that ever stored one, and others
    in the folder of the state. While one of them is away, nothing may go.

    A served one that was swapped on the disk a moment ago is read as it is there.
    """

    def __init__(
        self,
        served: Sequence[Served],
        state: Path,
        claims: Claims,
        is_copying: Callable[[], bool] = lambda: False,
    ) -> None:
        """`served` are leased as long as this is used; `is_copying` tells whether some job is
        copying a gallery, whose copy has what the gallery had a while ago."""
        self._served = served
        self._state = state
        self._claims = claims
        self._is_copying = is_copying
        self._is_blind = False

    def __call__(self, sha256s: Collection[str]) -> set[str]:
        """Which of these contents some item has; all, if a gallery cannot be read."""
        if self._is_blind:
            return set(sha256s)
        try:
            return set(sha256s) if self._is_copying() else self._found(sorted(sha256s))
        except (KinlensError, OSError) as error:
            self._is_blind = True
            structlog.get_logger().warning(
                "uploads are kept, since a gallery cannot be read",
                error=type(error).__name__,
                detail=str(error),
            )
            return set(sha256s)

    def _found(self, asked: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for served in self._served:
            if served.path is None or _is_current(served):
                held = served.gallery.held(asked)
                if held and served.path is not None:
                    self._claims.claim(served.path)  # a swap may have brought it there
                found |= held
        for folder in self._others():
            found |= contents_held(folder, asked)
        return found

    def _others(self) -> Iterator[Path]:
        current = {served.path for served in self._served if served.path and _is_current(served)}
        claimed = self._claims.folders()
        kept = [folder for name in _FOLDERS for folder in _folders(self._state / name)]
        for served in self._served:
            if served.path and not served.managed and served.path not in current:
                claimed.append(served.path)
        for folder in kept:
            if current_generation(folder) is not None:
                claimed.append(folder)
        for folder in {*claimed, *current}:
            if is_being_replaced(folder):  # by a copy of another gallery, perhaps
                raise GalleryBusyError(f"The gallery {folder.name} is being replaced.")
        for folder in dict.fromkeys(claimed):
            if folder not in current:
                yield folder


def _is_current(served: Served) -> bool:
    """Raises: GalleryNotFoundError if a given one is away."""
    assert served.path is not None
    generation = current_generation(served.path)
    if generation is None and not served.managed:
        raise GalleryNotFoundError(f"The gallery {served.name} is away at this moment.")
    return generation == served.gallery.generation


def _folders(parent: Path) -> list[Path]:
    """The folders below `parent`, one level deep; none if it is not there."""
    try:
        return [entry for entry in parent.iterdir() if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
