"""Who has a content: asked before an upload is thrown away, so whoever may have it is believed."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import structlog

from embedder.errors import KinlensError
from indexer.contents import contents_held
from indexer.layout import GalleryFolder
from service.registry import Served

_FOLDERS = ("galleries", "candidates")


class Holders:
    """Every gallery that shows uploads: those served now, and others in the folder of the state.

    A served one that was swapped on the disk a moment ago is read as it is there.
    """

    def __init__(self, served: Sequence[Served], state: Path) -> None:
        """`served` are leased as long as this is used."""
        self._served = served
        self._state = state

    def __call__(self, sha256s: Collection[str]) -> set[str]:
        """Which of these contents some item has; all, if a gallery cannot be read."""
        asked = sorted(sha256s)
        found: set[str] = set()
        try:
            for served in self._served:
                if served.path is None or _is_current(served):
                    found |= served.gallery.held(asked)
            for folder in self._others():
                found |= contents_held(folder, asked)
        except KinlensError as error:
            structlog.get_logger().warning(
                "uploads are kept, since a gallery cannot be read", error=type(error).__name__
            )
            return set(asked)
        return found

    def _others(self) -> Iterator[Path]:
        current = {served.path for served in self._served if served.path and _is_current(served)}
        given = [served.path for served in self._served if served.path]
        kept = [folder for name in _FOLDERS for folder in _folders(self._state / name)]
        for folder in dict.fromkeys([*given, *kept]):
            if folder not in current and GalleryFolder(folder).current_name() is not None:
                yield folder


def _is_current(served: Served) -> bool:
    assert served.path is not None
    return GalleryFolder(served.path).current_name() == served.gallery.generation


def _folders(parent: Path) -> list[Path]:
    """The folders below `parent`, one level deep; none if it is not there."""
    try:
        return [entry for entry in parent.iterdir() if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
