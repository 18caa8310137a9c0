"""Files in a folder that fsspec reaches: on this machine, or in an object store such as S3.

Each file is there whole or not at all, whatever the file system.
"""

import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kinlens.embedder.durable import make_folder, rename, sync, write_whole
from kinlens.embedder.errors import EngineUnavailableError, InvalidParameterError

REMOTE = "://"
"""What tells an address of fsspec from a folder."""

_IN_ONE_STEP = {"s3", "s3a", "gs", "gcs", "az", "abfs", "memory"}  # a file is there whole, or not


class ObjectFolder:
    """The folder at an address. Its methods raise OSError, and what a client of a store raises."""

    def __init__(self, address: str) -> None:
        """Raises: EngineUnavailableError without fsspec, or without the package of a protocol;
        InvalidParameterError for an address with a password.
        """
        refuse_secrets(address)
        # Each worker process has a current folder of its own.
        self.address = address if REMOTE in address else str(Path(address).resolve())
        self.files, self.root = files_at(self.address)

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name now."""
        self.files.invalidate_cache()
        return bool(self.files.exists(self.at(name)))

    def size(self, name: str) -> int | None:
        """The bytes of a file; None if there is none."""
        self.files.invalidate_cache()
        try:
            return int(self.files.info(self.at(name))["size"])
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> set[str]:
        """The names of the files in a folder; none if there is no such folder."""
        self.files.invalidate_cache()
        try:
            return {Path(name).name for name in self.files.ls(self.at(folder), detail=False)}
        except FileNotFoundError:
            return set()

    def read(self, name: str) -> bytes:
        """The content of a file. Raises: FileNotFoundError."""
        return bytes(self.files.cat_file(self.at(name)))

    def download(self, name: str, file: Path) -> None:
        """Copy a file to this machine. Raises: FileNotFoundError."""
        self.files.get_file(self.at(name), str(file))

    def write(self, name: str, data: bytes) -> None:
        """Replace a small file."""
        place = self.at(name)
        if is_local(self.files):
            make_folder(Path(place).parent, "object")
            write_whole(Path(place), data, "object")
            Path(place).chmod(0o644)  # others may be other users
        elif protocols(self.files) & _IN_ONE_STEP:
            self.files.pipe_file(place, data)
        else:
            self.files.makedirs(place.rpartition("/")[0], exist_ok=True)
            self.files.pipe_file(f"{place}.part", data)
            self.files.mv(f"{place}.part", place)

    def upload(self, file: Path, name: str) -> None:
        """Copy a file of this machine, of any size, into a name that has none yet."""
        place = self.at(name)
        if is_local(self.files):
            target = Path(place)
            make_folder(target.parent, "object")
            part = target.with_name(f"{target.name}.part")
            shutil.copyfile(file, part)
            sync(part, "object")
            rename(part, target, "object")
        elif protocols(self.files) & _IN_ONE_STEP:
            self.files.put_file(str(file), place)
        else:
            self.files.makedirs(place.rpartition("/")[0], exist_ok=True)
            self.files.put_file(str(file), f"{place}.part")
            self.files.mv(f"{place}.part", place)

    def remove(self, name: str) -> None:
        """Delete a file. Raises: FileNotFoundError."""
        self.files.rm_file(self.at(name))

    def modified_s(self, name: str) -> float | None:
        """When a file was written, in seconds since 1970; None where the store does not tell."""
        try:
            return float(self.files.modified(self.at(name)).timestamp())
        except (NotImplementedError, KeyError, AttributeError):
            return None

    def at(self, name: str) -> str:
        """The path of a file for fsspec."""
        return f"{self.root}/{name}"


def refuse_secrets(address: str) -> None:
    """Refuse an address with a password: logs and answers show addresses.

    Raises: InvalidParameterError.
    """
    parts = urlsplit(address) if REMOTE in address else None
    if parts is not None and parts.password:
        raise InvalidParameterError(
            f"address = {parts.scheme}://...@{parts.hostname} has a password, which logs "
            "would show. Give them to the client of the store by its own settings or variables."
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
            f"{address} cannot be reached: {error}. Check the address, and install fsspec with the "
            "package of its protocol, such as s3fs for s3://."
        ) from error
    return files, str(root).rstrip("/")


def protocols(files: Any) -> set[str]:
    """The protocols of a file system of fsspec."""
    return {files.protocol} if isinstance(files.protocol, str) else {*files.protocol}


def is_local(files: Any) -> bool:
    """Whether a file system of fsspec is that of this machine."""
    return "file" in protocols(files)
