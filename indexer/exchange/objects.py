"""Files in a folder of fsspec: on this machine, or in an object store such as S3.

Every file is written atomically, on any file system.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kinlens.embedder.durable import make_folder, rename, sync, write_whole
from kinlens.embedder.errors import EngineUnavailableError, InvalidParameterError

REMOTE = "://"
"""Marks an address of fsspec, in contrast to a folder."""

_ATOMIC = {"s3", "s3a", "gs", "gcs", "az", "abfs", "memory"}  # protocols with atomic writes

_CONCURRENT = 64  # requests


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

    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None if it does not exist."""
        self.files.invalidate_cache()
        try:
            return int(self.files.info(self.at(name))["size"])
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> set[str]:
        """The names of the files in a folder; empty if the folder does not exist."""
        self.files.invalidate_cache()
        try:
            return {Path(name).name for name in self.files.ls(self.at(folder), detail=False)}
        except FileNotFoundError:
            return set()

    def all_names(self, folder: str) -> set[str]:
        """The names of the files in a folder and below it, by one listing."""
        self.files.invalidate_cache()
        return {Path(name).name for name in self.files.find(self.at(folder))}

    def read(self, name: str) -> bytes:
        """The content of a file. Raises: FileNotFoundError."""
        return bytes(self.files.cat_file(self.at(name)))

    def download(self, name: str, file: Path) -> None:
        """Copy a file to this machine. Raises: FileNotFoundError."""
        self.files.get_file(self.at(name), str(file))

    def write(self, name: str, data: bytes) -> None:
        """Replace a small file."""
        path = self.at(name)
        if is_local(self.files):
            make_folder(Path(path).parent, "object")
            write_whole(Path(path), data, "object")
            Path(path).chmod(0o644)  # readers may be other users
        elif protocols(self.files) & _ATOMIC:
            self.files.pipe_file(path, data)
        else:
            self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.files.pipe_file(f"{path}.part", data)
            self.files.mv(f"{path}.part", path)

    def write_all(self, contents: Mapping[str, bytes]) -> None:
        """Replace small files; on a store with concurrent requests, many at a time."""
        if getattr(self.files, "async_impl", False) and protocols(self.files) & _ATOMIC:
            paths = {self.at(name): data for name, data in contents.items()}
            self.files.pipe(paths, batch_size=_CONCURRENT)
            return
        for name, data in contents.items():
            self.write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless there is one; returns whether it did.

        Of several calls at a time one wins, except on stores that cannot create exclusively.
        """
        try:
            if is_local(self.files):
                target = Path(self.at(name))
                part = target.with_name(f"{target.name}.{os.urandom(4).hex()}.part")
                write_whole(part, data, "object")
                part.chmod(0o644)
                try:
                    _claim(target, part)
                finally:
                    part.unlink(missing_ok=True)
            elif protocols(self.files) & _ATOMIC:
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

    def upload(self, file: Path, name: str) -> None:
        """Copy a file of this machine, of any size, to a name that is not in use yet."""
        path = self.at(name)
        if is_local(self.files):
            target = Path(path)
            make_folder(target.parent, "object")
            part = target.with_name(f"{target.name}.part")
            shutil.copyfile(file, part)
            sync(part, "object")
            rename(part, target, "object")
        elif protocols(self.files) & _ATOMIC:
            self.files.put_file(str(file), path)
        else:
            self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.files.put_file(str(file), f"{path}.part")
            self.files.mv(f"{path}.part", path)

    def remove(self, name: str) -> None:
        """Delete a file. Raises: FileNotFoundError."""
        self.files.rm_file(self.at(name))

    def modified_s(self, name: str) -> float | None:
        """Time of the last write of a file, in seconds since 1970; None if the store lacks it."""
        try:
            return float(self.files.modified(self.at(name)).timestamp())
        except (NotImplementedError, KeyError, AttributeError):
            return None

    def at(self, name: str) -> str:
        """The path of a file for fsspec."""
        return f"{self.root}/{name}"


def refuse_secrets(address: str) -> None:
    """Raise InvalidParameterError if an address has a password, as logs show addresses."""
    parts = urlsplit(address) if REMOTE in address else None
    if parts is not None and parts.password:
        raise InvalidParameterError(
            f"address = {parts.scheme}://...@{parts.hostname} contains a password, which would "
            "appear in logs. Use the settings or environment variables of the store's client."
        )


def files_at(address: str) -> tuple[Any, str]:
    """The file system of fsspec at an address, and the path in it.

    Raises: EngineUnavailableError without fsspec, or without the package of a protocol.
    """
    try:
        import fsspec

        files, root = fsspec.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise EngineUnavailableError(
            f"{address} cannot be opened: {error}. Check the address, and install the "
            "package for its protocol: pip install 'kinlens[s3]' for s3://."
        ) from error
    return files, str(root).rstrip("/")


def protocols(files: Any) -> set[str]:
    """The protocols of an fsspec file system."""
    return {files.protocol} if isinstance(files.protocol, str) else {*files.protocol}


def is_local(files: Any) -> bool:
    """Whether an fsspec file system is the local one."""
    return "file" in protocols(files)


def _claim(target: Path, part: Path) -> None:
    """Give the whole file `part` the name `target`. Raises: FileExistsError."""
    try:
        target.hardlink_to(part)
    except FileExistsError:
        raise
    except OSError:  # a file system without links, such as SMB or exFAT
        os.close(os.open(f"{target}.claim", os.O_CREAT | os.O_EXCL))
        part.replace(target)
