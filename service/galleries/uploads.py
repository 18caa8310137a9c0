"""The pictures of items that were uploaded, kept by their content: uploads/<ab>/<sha256>.

A picture is whole and on the disk before a catalogue names it, and goes when no item has it any
more. Whoever names contents holds their shards; whoever discards has the shard alone.
"""

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from embedder.durable import make_folder, sync, write_whole
from embedder.errors import GalleryCorruptError, GalleryWriteError, ItemNotFoundError

Held = Callable[[Collection[str]], Collection[str]]
"""Which of these contents some item has."""

_LOCK = "LOCK"
_STAGE = ".stage-"
_SHARD = 2  # hex digits
_SHA256 = re.compile("[0-9a-f]{64}")


class Uploads:
    """Files named by the sha256 of what is in them. Thread safe, also between processes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(self, data: bytes) -> str:
        """Keep `data` for good; its sha256 (hex). Call it inside `keeping`, for what is to stay.

        Raises: GalleryWriteError.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        path = self._path(sha256)
        try:
            make_folder(path.parent, "upload")
            if path.is_file():
                sync(path.parent, "upload")  # another thread may be about to
            else:
                write_whole(path, data, "upload")
        except OSError as error:
            raise GalleryWriteError(
                f"An upload cannot be kept below {self.root}: {error.strerror or error}. Check the "
                "free space and the permissions of that folder."
            ) from error
        return sha256

    def has(self, sha256: str) -> bool:
        """Whether there is a file of this content."""
        return self._path(sha256).is_file()

    def open(self, sha256: str) -> bytes:
        """The content with this sha256. Raises: ItemNotFoundError, GalleryCorruptError."""
        try:
            data = self._path(sha256).read_bytes()
        except FileNotFoundError as error:
            raise ItemNotFoundError(
                "The picture of this item is not kept here; it was stored as a vector, or the item "
                "is gone. Put the item again with its image."
            ) from error
        except OSError as error:
            raise GalleryCorruptError(f"An upload cannot be read: {error}.") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise GalleryCorruptError(
                f"The upload {sha256} is damaged. Put its items again with their image."
            )
        return data

    @contextlib.contextmanager
    def keeping(self, sha256s: Iterable[str]) -> Iterator[None]:
        """Nobody discards these contents until the block ends. Raises: GalleryWriteError."""
        with contextlib.ExitStack() as held:
            for shard in sorted({sha256[:_SHARD] for sha256 in sha256s}):
                held.enter_context(self._locked(shard, fcntl.LOCK_SH))
            yield

    def discard(self, sha256: str) -> None:
        """Remove a content, whoever has it."""
        self._path(sha256).unlink(missing_ok=True)

    def discard_unless(self, held: Held, sha256s: Iterable[str]) -> int:
        """Remove those of these contents that no item has; how many went."""
        shards: dict[str, list[str]] = {}
        for sha256 in set(sha256s):
            if self.has(sha256):
                shards.setdefault(sha256[:_SHARD], []).append(sha256)
        return sum(self._clear(shard, held, listed) for shard, listed in sorted(shards.items()))

    def sweep(self, held: Held) -> int:
        """Remove every content that no item has, and what interrupted writes left over."""
        if not self.root.is_dir():
            return 0
        shards = sorted(folder.name for folder in self.root.iterdir() if folder.is_dir())
        return sum(self._clear(shard, held, None) for shard in shards if len(shard) == _SHARD)

    def _clear(self, shard: str, held: Held, sha256s: Collection[str] | None) -> int:
        with self._locked(shard, fcntl.LOCK_EX):
            if sha256s is None:
                sha256s = self._listed(shard)
            gone = set(sha256s) - set(held(sha256s)) if sha256s else set()
            for sha256 in gone:
                self.discard(sha256)
            return len(gone)

    def _listed(self, shard: str) -> list[str]:
        """The contents of a shard that nobody else has; half-written ones go."""
        names = [file.name for file in (self.root / shard).iterdir()]
        for name in names:
            if name.startswith(_STAGE):
                (self.root / shard / name).unlink(missing_ok=True)
        return [name for name in names if _SHA256.fullmatch(name)]

    @contextlib.contextmanager
    def _locked(self, shard: str, kind: int) -> Iterator[None]:
        folder = self.root / shard
        try:
            make_folder(folder, "upload")
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise GalleryWriteError(
                f"The uploads below {self.root} cannot be changed: {error.strerror}. Check the "
                "permissions of that folder and the limit of open files (`ulimit -n`)."
            ) from error
        try:
            fcntl.flock(descriptor, kind)
            yield
        finally:
            os.close(descriptor)

    def _path(self, sha256: str) -> Path:
        assert _SHA256.fullmatch(sha256), "not a sha256"
        return self.root / sha256[:_SHARD] / sha256
