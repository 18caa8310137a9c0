"""Addresses of fsspec, such as s3://bucket/photos, and images that stay below one.

Credentials are those of the store's client, from the environment. Nothing is connected before the
first read.
"""

import contextlib
import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from kinlens.embedder.decoding.formats import SUFFIXES
from kinlens.embedder.errors import (
    EngineUnavailableError,
    ImageTooManyBytesError,
    InvalidParameterError,
    KinlensError,
    SourceError,
    UnreachableError,
)
from kinlens.embedder.sources.names import NOT_UTF8, composed, printable
from kinlens.embedder.sources.walk import Fault, ImageFile, Omitted, omission

REMOTE = "://"
"""Marks an address of fsspec, in contrast to a folder."""

_HTTP = {"http", "https"}
_SETTLED_S = 2.0  # a file may change once more within the resolution of its time stamp
# What stores report of a file, without capitals, dashes and underscores.
_CONTENT = ("contentmd5", "etag", "generation", "md5hash")
_TIMES = ("created", "lastmodified", "mtime", "updated")


class FileState(NamedTuple):
    """A file as it was listed. If the same state is seen later, its content is the same.

    Attributes:
        size: in bytes.
        version: the time of change in ns, or a hash of what the store reports about the version.
        is_settled: whether another content would have another state.
    """

    size: int
    version: int
    is_settled: bool

    @classmethod
    def of_file(cls, file: Path) -> "FileState":
        """The state of a file on this machine. Raises: OSError."""
        status = file.stat()
        is_settled = time.time() - status.st_mtime >= _SETTLED_S
        return cls(status.st_size, status.st_mtime_ns, is_settled)

    @classmethod
    def of_object(cls, info: Mapping[str, Any]) -> "FileState":
        """The state of a file by what its store reports; `info` is that of fsspec."""
        values = {re.sub("[-_]", "", str(name)).lower(): value for name, value in info.items()}
        versions = [(name, str(values[name])) for name in (*_CONTENT, *_TIMES) if name in values]
        digest = hashlib.sha256(repr(versions).encode()).digest()
        ages = [_age_s(values[name]) for name in _TIMES if name in values]
        is_settled = any(name in values for name in _CONTENT) or max(ages, default=0) >= _SETTLED_S
        # 7 bytes fit into the signed integers of SQLite.
        return cls(info.get("size") or 0, int.from_bytes(digest[:7], "big"), is_settled)


@dataclass(frozen=True)
class ImageAddress:
    """An address below which images are read where they are. Thread safe."""

    address: str

    def __post_init__(self) -> None:
        """Raises: InvalidParameterError for an address with a password or parameters."""
        refuse_secrets(self.address)
        if re.search(r"[?#]|::https?://", self.address):
            raise InvalidParameterError(
                f"The address {self.address.partition('?')[0]} must name a folder of a store, "
                "without ?, # or a chain to a web address: images are read below it alone."
            )
        if not self.address.endswith(REMOTE):
            object.__setattr__(self, "address", self.address.rstrip("/"))

    def __str__(self) -> str:
        return self.address

    def read(self, path: str, max_bytes: int) -> bytes:
        """One image of at most `max_bytes` bytes; no more than that is read.

        Raises: SourceError if it is missing or outside of the address; ImageTooManyBytesError;
            UnreachableError if the store does not answer or refuses access.
        """
        files, place = self._place(path)
        with _errors_explained(self.address, path):
            data = _read(files, place, max_bytes + 1)
        if len(data) > max_bytes:
            raise ImageTooManyBytesError(
                f"The image has more than {max_bytes:,} bytes, the limit. Resize or compress it."
            )
        return data

    def probe(self, path: str) -> None:
        """Ask the store for one byte of an image, which may be missing.

        Raises: UnreachableError if the store does not answer or refuses access.
        """
        try:
            files, place = self._place(path)
            with _errors_explained(self.address, path):
                _read(files, place, 1)
        except SourceError:
            pass

    def state(self, path: str) -> FileState:
        """The state of one image. Raises: SourceError if it is missing; UnreachableError."""
        files, place = self._place(path)
        with _errors_explained(self.address, path):
            return FileState.of_object(files.info(place))

    def images(self, omitted: Omitted, below: str = "") -> Iterator[tuple[ImageFile, FileState]]:
        """The images in the folder `below` the address, sorted by name, by one listing of it.

        As in `walk_images`, thumbnails, trash and hidden files are omitted.

        Raises: UnreachableError.
        """
        files, root = self._opened
        with _errors_explained(self.address, below):
            found = _listed(files, f"{root}/{below}" if below else root)
        states: dict[str, FileState] = {}
        for place, info in found.items():
            path = place[len(root) + 1 :]
            path = unquote(path) if _is_http(files) else path
            if place.startswith(f"{root}/") and path.lower().endswith(SUFFIXES):
                if (reason := omission(path)) is not None:
                    omitted.count(reason, path)
                else:
                    states[path] = FileState.of_object(info)
        names: dict[str, str] = {}
        # The composed spelling first, so that it keeps the name.
        for path in sorted(states, key=lambda path: (composed(path), composed(path) != path, path)):
            first = names.setdefault(composed(path), path)
            fault = _fault_of(path)
            if fault is None and first != path:
                fault = (
                    f"Its name {path!a} equals that of another file, {first!a}, but for the "
                    "Unicode form. Rename or remove one of them."
                )
            if fault is None:
                yield ImageFile(path, composed(path)), states[path]
            else:
                omitted.faults.append(Fault(printable(path), fault))

    def below(self, address: str) -> str:
        """The path of another address below this one, "" for this one itself.

        Raises: SourceError if it is outside of this one.
        """
        other = ImageAddress(address)
        if other != self and not other.address.startswith(f"{self}/"):
            raise SourceError(
                f"{address} is outside of {self}, the image root of the gallery. Copy the images "
                "below that address, set the current one with --image-root, or build a separate "
                "gallery."
            )
        return other.address[len(self.address) :].lstrip("/")

    def relative(self, below: str, path: str) -> str:
        """A path of a list relative to the folder `below`, if it is the address of a file there;
        else the same path.
        """
        start = f"{self}/{below}/" if below else f"{self}/"
        if not path.startswith(start):
            return path
        rest = path[len(start) :]
        return unquote(rest) if urlsplit(self.address).scheme in _HTTP else rest

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        # The listings of fsspec would hide what others have written since.
        options: dict[str, Any] = {"use_listings_cache": False}
        if urlsplit(self.address).scheme in _HTTP:
            options["max_redirects"] = 1  # of aiohttp: it raises an error at the first one
        return files_at(self.address, **options)

    def _place(self, path: str) -> tuple[Any, str]:
        """The file system and the path in it. Raises: SourceError if that is outside."""
        if (fault := _fault_of(path)) is not None:
            raise SourceError(fault)
        files, root = self._opened
        return files, f"{root}/{quote(path) if _is_http(files) else path}"


ImageRoot = Path | ImageAddress
"""The place that paths of images are relative to: a folder, or an address of fsspec."""


def image_root_of(place: ImageRoot | str) -> ImageRoot:
    """The folder or address that a text names. Raises: InvalidParameterError for a password."""
    if isinstance(place, ImageAddress):
        return place
    if REMOTE not in str(place):
        return Path(place)
    address = ImageAddress(str(place))
    if urlsplit(address.address).scheme == "file":
        return Path(files_at(address.address)[1])
    return address


def is_same_root(one: ImageRoot, other: ImageRoot) -> bool:
    """Whether two roots are the same place."""
    if isinstance(one, Path) and isinstance(other, Path):
        return one.resolve() == other.resolve()
    return one == other


def refuse_secrets(address: str) -> None:
    """Raise InvalidParameterError if an address has a password, as logs show addresses."""
    parts = urlsplit(address) if REMOTE in address else None
    if parts is not None and parts.password:
        raise InvalidParameterError(
            f"address = {parts.scheme}://...@{parts.hostname} contains a password, which would "
            "appear in logs. Use the settings or environment variables of the store's client."
        )


def files_at(address: str, **options: Any) -> tuple[Any, str]:
    """The file system of fsspec at an address, and the path in it.

    Raises: EngineUnavailableError without fsspec, or without the package of a protocol.
    """
    try:
        import fsspec

        files, root = fsspec.url_to_fs(address, **options)
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


def _is_http(files: Any) -> bool:
    return bool(protocols(files) & _HTTP)


def _fault_of(path: str) -> str | None:
    """Why an image with this path is not read; None if it is."""
    if path != printable(path):
        return f"{NOT_UTF8}."
    if {"", ".", ".."} & {*re.split(r"[/\\]", path)}:
        return (
            f"The path {path!r:.200} has an empty part, . or .., which could lead out of the "
            "address. Rename it."
        )
    return None


def _read(files: Any, place: str, limit: int) -> bytes:
    """The first `limit` bytes of a file. Raises: OSError and the errors of the store's client."""
    if not _is_http(files):
        try:
            return bytes(files.cat_file(place, end=limit))
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            raise
        except Exception:  # S3 refuses a range of an empty file
            if files.info(place).get("size") != 0:
                raise
            return b""
    from aiohttp import ClientResponseError, TooManyRedirects

    # A server may ignore the range that is asked for, so the answer is read as a stream. With a
    # size, fsspec sends no request of its own for it.
    parts: list[bytes] = []
    try:
        with files.open(place, "rb", block_size=0, size=1) as stream:
            while limit > 0 and (part := stream.read(limit)):
                parts.append(part)
                limit -= len(part)
    except TooManyRedirects as error:
        raise SourceError(
            f"{place} is a redirect, which may lead out of the address and is not followed. Use "
            "the address that the images have."
        ) from error
    except ClientResponseError as error:
        if error.status in (401, 403):
            raise PermissionError(f"{error.status} {error.message}") from error
        if error.status == 410:
            raise FileNotFoundError(place) from error
        raise
    return b"".join(parts)


def _listed(files: Any, place: str) -> dict[str, Mapping[str, Any]]:
    """All files in a folder and below it, with what the store reports about each."""
    if not _is_http(files):
        found: dict[str, Mapping[str, Any]] = files.find(place, detail=True)
        return found
    # `find` asks for folders without their slash, which servers answer with a redirect.
    listed: dict[str, Mapping[str, Any]] = {}
    folders = [f"{place}/"]
    for folder in folders:
        for info in files.ls(folder, detail=True):
            name = info["name"]
            if not name.startswith(folder):
                continue
            if info["type"] != "directory":
                listed[name] = info
            elif name not in folders:
                folders.append(name)
    return listed


def _age_s(changed: object) -> float:
    """How long ago a file was changed, by what its store reports; 0 if that is not a time."""
    if isinstance(changed, int | float):
        return time.time() - changed
    with contextlib.suppress(ValueError):
        moment = parsedate_to_datetime(changed) if isinstance(changed, str) else changed
        if isinstance(moment, datetime):
            return (
                time.time() - (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            )
    return 0.0


@contextlib.contextmanager
def _errors_explained(address: str, path: str) -> Iterator[None]:
    """Translate the errors of a store, whose client has its own exception classes."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise SourceError(
            f"{path} is missing below {address}. Restore it, or remove it from the list."
        ) from error
    except KinlensError:
        raise
    except Exception as error:
        raise UnreachableError(
            f"{path} cannot be read at {address}: {type(error).__name__}: {error}. Check the "
            "network, the address and the credentials, and try again."
        ) from error
