"""Files in a folder of fsspec: on this machine, or in an object store such as S3.

Every file is written atomically, on any file system.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from kinlens.embedder.durable import make_folder, rename, sync
from kinlens.embedder.errors import GalleryError, KinlensError
from kinlens.indexer.addresses import REMOTE, files_at, is_local, protocols, refuse_secrets

_ATOMIC = {"s3", "s3a", "gs", "gcs", "az", "abfs", "memory"}  # protocols with atomic writes

_CONCURRENT = 64  # requests

Content = bytes | Path
"""The content of a file, or a file of this machine with it."""


class ObjectFolder:
    """The folder at an address. Methods raise OSError, and the errors of the store's client."""

    def __init__(self, address: str) -> None:
        """Raises: EngineUnavailableError without fsspec, or without the package of a protocol;
        InvalidParameterError for an address with a password.
        """
        refuse_secrets(address)
        # Worker processes have other current folders.
        self.address = address if REMOTE in address else str(Path(address).resolve())
        self.files, self.root = files_at(self.address)

    def exists(self, name: str) -> bool:
        """Whether there is a file with this name now."""
        self.files.invalidate_cache()
        return bool(self.files.exists(self.at(name)))

    def names(self, folder: str) -> set[str]:
        """The names of the files in a folder and below it, by one listing; empty if the folder does
        not exist.
        """
        self.files.invalidate_cache()
        return {Path(name).name for name in self.files.find(self.at(folder))}

    def read(self, name: str) -> bytes:
        """The content of a file. Raises: FileNotFoundError."""
        return bytes(self.files.cat_file(self.at(name)))

    def download(self, files: Mapping[str, Path]) -> None:
        """Copy files to this machine, `concurrent` at a time. Raises: FileNotFoundError."""
        sources, targets = [self.at(name) for name in files], [str(file) for file in files.values()]
        if self.concurrent > 1:
            self.files.get(sources, targets, batch_size=self.concurrent)
            return
        for source, target in zip(sources, targets, strict=True):
            self.files.get_file(source, target)

    def write(self, name: str, content: Content) -> None:
        """Replace a file."""
        self.write_all({name: content})

    def write_all(self, contents: Mapping[str, Content]) -> None:
        """Replace files, `concurrent` at a time."""
        if self.concurrent > 1:
            data = {self.at(n): one for n, one in contents.items() if isinstance(one, bytes)}
            files = {self.at(n): str(one) for n, one in contents.items() if isinstance(one, Path)}
            self.files.pipe(data, batch_size=self.concurrent)
            self.files.put([*files.values()], [*files], batch_size=self.concurrent)
            return
        for name, content in contents.items():
            path = self.at(name)
            if is_local(self.files):
                with _beside(Path(path), content) as part:
                    rename(part, Path(path), "object")
            elif self._is_atomic:
                self._put(content, path)
            else:
                self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._put(content, f"{path}.part")
                self.files.mv(f"{path}.part", path)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless there is one; returns whether it did.

        Of several calls at a time one wins, except on stores that cannot create exclusively.
        """
        try:
            if is_local(self.files):
                target = Path(self.at(name))
                with _beside(target, data) as part:
                    _claim(target, part)
            elif self._is_atomic:
                self.files.pipe_file(self.at(name), data, mode="create")
            elif self.exists(name):
                return False
            else:
                self.write(name, data)  # written in place, it could stay incomplete
        except OSError:
            if self.exists(name):
                return False
            raise
        return True

    def _put(self, content: Content, path: str) -> None:
        if isinstance(content, bytes):
            self.files.pipe_file(path, content)
        else:
            self.files.put_file(str(content), path)

    @property
    def concurrent(self) -> int:
        """Number of files that are sent or fetched at a time."""
        is_async = bool(getattr(self.files, "async_impl", False))
        return _CONCURRENT if self._is_atomic and is_async else 1

    @property
    def _is_atomic(self) -> bool:
        return bool(protocols(self.files) & _ATOMIC)

    def remove(self, name: str) -> None:
        """Delete a file. Raises: FileNotFoundError."""
        self.files.rm_file(self.at(name))

    def at(self, name: str) -> str:
        """The path of a file for fsspec."""
        return f"{self.root}/{name}"


@contextlib.contextmanager
def store_errors_explained(outcome: str, cure: str) -> Iterator[None]:
    """Translate the errors of a store into a GalleryError with these two texts."""
    try:
        yield
    except KinlensError:
        raise
    except Exception as error:  # each store client has its own exception classes
        raise GalleryError(f"{outcome}: {type(error).__name__}: {error}. {cure}") from error


@contextlib.contextmanager
def _beside(target: Path, content: Content) -> Iterator[Path]:
    """A synced file with this content next to `target`; deleted at the end unless renamed."""
    make_folder(target.parent, "object")
    part = target.with_name(f"{target.name}.{os.urandom(4).hex()}.part")
    try:
        if isinstance(content, bytes):
            part.write_bytes(content)
        else:
            shutil.copyfile(content, part)
        sync(part, "object")
        yield part
    finally:
        part.unlink(missing_ok=True)


def _claim(target: Path, part: Path) -> None:
    """Give the whole file `part` the name `target`. Raises: FileExistsError."""
    try:
        target.hardlink_to(part)
    except FileExistsError:
        raise
    except OSError:  # a file system without links, such as SMB or exFAT
        os.close(os.open(f"{target}.claim", os.O_CREAT | os.O_EXCL))
        part.replace(target)
