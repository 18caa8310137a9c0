"""The folder of a gallery: its generations, the current one, and how a new one replaces it.

gallery/
  CURRENT              the name of the current generation
  LOCK                 build lock: exclusive during a build
  WRITE                write lock: shared by writes, exclusive while a generation is replaced
  TURN                 shared by a write until it has WRITE, exclusive for a build that waits for
                       WRITE, so that new writes do not starve it
  pictures/            uploaded images, managed by the service; builds do not change it
  PUBLISH              publish lock: exclusive while a snapshot is published
  PUBLISHER            a random id that identifies the owner of a published snapshot
  COPY_OF              the address of the original of this copy; copies are read-only
  downloads/           files that a copy has downloaded but not adopted yet
  files.sqlite         hashes of the images as of the last sync; builds do not change it
  golden.sqlite        written by `kinlens.quality`; builds do not change it
  versions/<name>/     a generation: the result of one build, and every change since
  versions/.draft-<...>/     an unfinished build, itself a gallery; kept if the build is killed
    BEGAN              the source of the build; the last write to the old gallery, and its keys
"""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kinlens.embedder.durable import (
    discard,
    exclusive,
    holder,
    in_use,
    is_stage,
    lock_folder,
    make_folder,
    rename,
    shared,
    staged,
    sweep,
    sync,
    sync_tree,
    write_whole,
)
from kinlens.embedder.errors import (
    GalleryBusyError,
    GalleryConflictError,
    GalleryCorruptError,
    GalleryError,
    GalleryNotFoundError,
    GalleryWriteError,
    disk_errors_as,
)
from kinlens.embedder.types import SHORT
from kinlens.indexer.folder.manifest import MANIFEST

CURRENT = "CURRENT"
UNCHANGED = "Nothing was changed."
_LOCK = "LOCK"
_WRITE = "WRITE"
BEGAN = "BEGAN"
_TURN = "TURN"
_VERSIONS = "versions"
UPLOADS = "pictures"
GOLDEN = "golden.sqlite"
FILES = "files.sqlite"
COPY_OF = "COPY_OF"
DOWNLOADS = "downloads"
PUBLISH = "PUBLISH"
PUBLISHER = "PUBLISHER"
_DRAFT = ".draft-"
_DRAFT_S = 7 * 86_400.0
_GENERATION_NAME = re.compile(f"[0-9a-f]{{{SHORT}}}")
_OWN_NAMES = {
    *(CURRENT, f".{CURRENT}.tmp", _LOCK, _WRITE, _TURN, _VERSIONS, UPLOADS, BEGAN),
    *(COPY_OF, DOWNLOADS, PUBLISH, PUBLISHER),
    *(f"{name}{suffix}" for name in (GOLDEN, FILES) for suffix in ("", "-journal")),
}


class GalleryFolder:
    """The files and locks of a gallery, without the contents of its generations."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._versions = self.path / _VERSIONS

    def current(self) -> Path:
        """The folder of the current generation.

        Raises: GalleryNotFoundError, GalleryCorruptError.
        """
        name = self.current_name()
        if name is None:
            raise GalleryNotFoundError(self._absence())
        if not _GENERATION_NAME.fullmatch(name) or not (self._versions / name).is_dir():
            raise GalleryCorruptError(
                f"{self.path / CURRENT} points to the generation {name[:40]!r}, which does not "
                "exist. Build the gallery again, or write the name of a folder in "
                f"{self._versions} into that file."
            )
        return self._versions / name

    def current_name(self) -> str | None:
        """The name of the current generation; None if there is no gallery."""
        try:
            return (self.path / CURRENT).read_bytes().decode(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    @property
    def copy_of(self) -> str | None:
        """The address of the original if this is a read-only copy; else None."""
        try:
            return (self.path / COPY_OF).read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def mark_as_copy(self, address: str) -> None:
        """Mark this as a copy of the gallery at `address`. Raises: OSError."""
        make_folder(self._versions, "gallery")
        if self.copy_of != address:
            sweep(self.path)
            write_whole(self.path / COPY_OF, f"{address}\n".encode(), "copy")
            (self.path / COPY_OF).chmod(0o644)  # another user may serve the gallery

    def publisher(self) -> str:
        """The id of this folder in snapshots; created at the first call. Raises: OSError."""
        file = self.path / PUBLISHER
        if not file.is_file():
            write_whole(file, f"{os.urandom(16).hex()}\n".encode(), "publisher")
        return file.read_text(encoding="ascii").strip()

    def refuse_copy(self) -> None:
        """Refuse to change a copy. Raises: GalleryConflictError."""
        address = self.copy_of
        if address is not None:
            raise GalleryConflictError(
                f"{self.path} is a copy of {address} and follows it. Change the original. To "
                "create an independent gallery from the copy: kinlens-index backup, then restore."
            )

    def generations(self) -> set[str]:
        """The names of all generations in this folder: the current one and older ones."""
        return {folder.name for folder in self._entries() if _is_generation(folder)}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Excludes other builds and all writes. Raises: the errors of `building`."""
        with self.building(), self.replacing():
            yield

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """The build lock: excludes other builds. Creates the folder if needed.

        Raises: GalleryBusyError if another build runs; GalleryError if the folder contains other
            files; GalleryConflictError for a copy; GalleryWriteError if it cannot be written.
        """
        self.refuse_copy()
        lock = self.path / _LOCK
        with contextlib.ExitStack() as cleanup:
            with disk_errors_explained(self.path):
                self._refuse_foreign_folder()
                make_folder(self._versions, "gallery")
                sweep(self.path)
                is_locked = cleanup.enter_context(exclusive(lock, wait=False))
            if not is_locked:
                raise GalleryBusyError(
                    f"Another build (process {holder(lock)}) is writing {self.path}. "
                    "Wait for it to finish, or choose another folder with --out."
                )
            yield

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """The write lock for a build that replaces the current generation: excludes all writes.

        Raises: GalleryWriteError.
        """
        with contextlib.ExitStack() as cleanup:
            with disk_errors_explained(self.path):
                # Writes are short, and TURN keeps new ones out.
                cleanup.enter_context(exclusive(self.path / _TURN, wait=True))
                cleanup.enter_context(exclusive(self.path / _WRITE, wait=True))
            yield

    @contextlib.contextmanager
    def writing(self, generation: str) -> Iterator[None]:
        """The write lock for one write into `generation`; its replacement has to wait.

        Raises: GalleryBusyError if a build replaces or has replaced the generation;
            GalleryConflictError for a copy; GalleryWriteError if the folder is read-only.
        """
        self.refuse_copy()
        with contextlib.ExitStack() as cleanup:
            try:
                with shared(self.path / _TURN) as is_shared:
                    is_shared = is_shared and cleanup.enter_context(shared(self.path / _WRITE))
            except OSError as error:
                if not self.path.is_dir():
                    raise GalleryBusyError(
                        f"The gallery {self.path} no longer exists; nothing was changed. If "
                        "it is being replaced, try again in a second."
                    ) from error
                raise GalleryWriteError(
                    f"The gallery {self.path} cannot be changed: {error.strerror}. Check that this "
                    "user may write there and that the file system is not read-only."
                ) from error
            if not is_shared:
                raise GalleryBusyError(
                    f"A build (process {holder(self.path / _LOCK)}) is replacing the gallery "
                    f"{self.path}; a change made now would be lost. Repeat it after the build."
                )
            if self.current_name() != generation:
                raise GalleryBusyError(
                    f"The gallery {self.path} was replaced by a build since it was opened; nothing "
                    "was changed. Open it again and repeat the change."
                )
            yield

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        """An empty folder for a new generation; deleted at the end unless it was published.

        First deletes every generation except the current one and those in use.
        """
        self._prune_others()
        with self.aside() as stage:
            yield stage

    def aside(self) -> contextlib.AbstractContextManager[Path]:
        """An empty folder next to the generations; deleted at the end unless it was renamed."""
        return staged(self._versions)

    @contextlib.contextmanager
    def draft(self, purpose: str) -> Iterator["GalleryFolder"]:
        """The gallery folder of a build. An interrupted build with the same `purpose` is resumed.

        Deleted at the end if its generation was published. Those of other builds are deleted a week
        after they were begun, unless their processes live.
        """
        digest = hashlib.sha256(purpose.encode()).hexdigest()
        draft = GalleryFolder(self._versions / f"{_DRAFT}{digest[:SHORT]}")
        name = draft.current_name()
        if name is not None and name != self.current_name():
            moved, home = self._versions / name, draft._versions / name
            # An interrupted publication: move the generation back into the draft. If it is in use,
            # it was published, and superseded since.
            if home.parent.is_dir() and not home.exists() and moved.is_dir() and not in_use(moved):
                rename(moved, home, "draft")
        self._drop_published(draft)
        self._prune_others()
        self._drop_forgotten(draft)
        sweep(self._versions)
        make_folder(draft.path, "draft")
        descriptor = lock_folder(draft.path)
        try:
            yield draft
        finally:
            os.close(descriptor)
        self._drop_published(draft)

    def _drop_published(self, draft: "GalleryFolder") -> None:
        if draft.path.exists() and draft.current_name() == self.current_name() is not None:
            (draft.path / CURRENT).unlink()  # first, so that the rest no longer is a gallery
            discard(draft.path)

    def _drop_forgotten(self, draft: "GalleryFolder") -> None:
        for other in self._versions.glob(f"{_DRAFT}*"):
            is_old = other.stat().st_mtime < time.time() - _DRAFT_S
            if is_old and other != draft.path and not in_use(other):
                discard(other)

    def _prune_others(self) -> None:
        """Delete every generation except the current one and those in use."""
        current = self.current_name()
        # If CURRENT is damaged or missing, any generation may be needed for a repair.
        if current in self.generations():
            self._prune(keep={current})

    def publish(self, stage: Path, name: str) -> Path:
        """Make `stage` the current generation, after syncing all its files to disk.

        Keeps the previous generation; older ones are deleted unless they are in use.
        """
        previous = self.current_name()
        target = self._versions / name
        sync_tree(stage, "generation")
        if target.exists() and name != previous:  # from a copy that was interrupted here
            discard(target)
        rename(stage, target, "generation")
        self._switch(name)
        self._prune(keep={name, previous})
        return target

    def _switch(self, name: str) -> None:
        temporary = self.path / f".{CURRENT}.tmp"
        temporary.write_text(f"{name}\n", encoding="ascii")
        sync(temporary, "current")
        rename(temporary, self.path / CURRENT, "current")

    def _prune(self, keep: set[str | None]) -> None:
        for folder in filter(_is_generation, self._entries()):
            if folder.name not in keep and not in_use(folder):
                discard(folder)

    def _entries(self) -> list[Path]:
        try:
            return list(self._versions.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _absence(self) -> str:
        if any(self._versions.glob(f"{_DRAFT}*")):
            return (
                f"The gallery {self.path} is not finished: its build was interrupted or refused. "
                "Run the same `kinlens-index build` again; it continues where it stopped, or "
                "reports the error."
            )
        if (self.path / "snapshot.json").is_file():
            return (
                f"{self.path} is a published snapshot, not a gallery. Follow it: "
                f"kinlens-serve --gallery NAME={self.path.absolute().as_uri()}."
            )
        if not self.path.exists():
            return (
                f"No gallery at {self.path}: {self.path} does not exist. Check the name, or make "
                f"it: kinlens-index build IMAGES --bundle BUNDLE --out {self.path}"
            )
        return (
            f"No gallery at {self.path}: {CURRENT} is missing. Give the folder that "
            "`kinlens-index build ... --out` wrote."
        )

    def _refuse_foreign_folder(self) -> None:
        foreign = sorted(self._foreign_entries())
        if foreign:
            raise GalleryError(
                f"{self.path} contains files that do not belong to a gallery: {foreign[0]}. "
                "Choose a new or an empty folder with --out, or move them elsewhere."
            )

    def _foreign_entries(self) -> Iterator[Path]:
        own = self.path.iterdir() if self.path.is_dir() else ()
        yield from (one for one in own if not is_stage(one) and one.name not in _OWN_NAMES)
        if self.path.exists() and not self.path.is_dir():
            yield self.path
        for entry in self._entries():
            is_aside = is_stage(entry) or entry.name.startswith(_DRAFT)
            if not is_aside and not _GENERATION_NAME.fullmatch(entry.name):
                yield entry


@contextlib.contextmanager
def disk_errors_explained(
    path: Path, outcome: str | Callable[[], str] = UNCHANGED
) -> Iterator[None]:
    """Translate a failed write below `path` into a GalleryWriteError with advice; `outcome` states
    what was and was not written.
    """
    with disk_errors_as(GalleryWriteError, path, outcome, "The gallery"):
        yield


def _is_generation(folder: Path) -> bool:
    is_named_so = _GENERATION_NAME.fullmatch(folder.name) is not None
    return is_named_so and (folder / MANIFEST).is_file()
