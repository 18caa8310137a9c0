"""Archives unpacked without trust: nothing leads out of the folder, nothing grows past a limit."""

import gzip
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from embedder.errors import DatasetError

_MOST_MEMBERS = 1_000_000
_CHUNK = 2**18
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    RuntimeError,  # zipfile: a password is wanted
)
_DISTRUST = "That is no archive of a data set; delete it and take another address."
_DRIVE = re.compile(r"[A-Za-z]:")


def unpack(
    archive: Path, into: Path, most_bytes: int, on_progress: Callable[[int, int], None]
) -> None:
    """Unpack a zip or (compressed) tar file.

    Args:
        archive: the file.
        into: an empty folder.
        most_bytes: what the content may take.
        on_progress: called with bytes of the archive done and in all.

    Raises: DatasetError if the archive is damaged, holds a name that leads out of `into`, a link
        out of it or a device, or more than `most_bytes` (what was unpacked until then remains).
    """
    size = archive.stat().st_size
    budget = _Budget(archive, most_bytes)
    try:
        if zipfile.is_zipfile(archive):
            _unpack_zip(archive, into, budget, lambda done: on_progress(done, size))
        else:
            with archive.open("rb") as stream:
                _unpack_tar(stream, into, budget, lambda done: on_progress(done, size))
    except tarfile.FilterError as error:
        raise DatasetError(f"{archive}: {error}. {_DISTRUST}") from error
    except _DAMAGED as error:
        raise DatasetError(f"{archive} is damaged ({error}). Delete it; download again.") from error
    except OSError as error:
        raise DatasetError(
            f"{archive} cannot be unpacked into {into}: {error}. "
            "Free space or choose another --root."
        ) from error
    on_progress(size, size)


class _Budget:
    def __init__(self, archive: Path, most_bytes: int) -> None:
        self.archive = archive
        self.most_bytes = most_bytes
        self.spent_bytes = 0
        self.members = 0

    def spend(self, size: int) -> None:
        self.spent_bytes += size
        self.members += 1
        if self.spent_bytes > self.most_bytes or self.members > _MOST_MEMBERS:
            raise DatasetError(
                f"{self.archive} unpacks to {self.spent_bytes:,} bytes or more in {self.members:,} "
                f"files or more; the limits are {self.most_bytes:,} and {_MOST_MEMBERS:,}. "
                f"{_DISTRUST}"
            )


def _unpack_tar(
    stream: BinaryIO, into: Path, budget: _Budget, on_progress: Callable[[int], None]
) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise DatasetError("This Python cannot unpack tar files safely. Take 3.11.4 or newer.")
    with tarfile.open(fileobj=stream) as tar:
        for member in tar:
            budget.spend(member.size)
            tar.extract(member, into, filter="data")
            on_progress(stream.tell())
        while rest := tar.fileobj.read(_CHUNK):  # gzip finds damage when its end is read
            budget.spend(len(rest))


def _unpack_zip(
    archive: Path, into: Path, budget: _Budget, on_progress: Callable[[int], None]
) -> None:
    done = 0
    with zipfile.ZipFile(archive) as file:
        members = file.infolist()
        for member in members:
            _check_member(archive, member)
            budget.spend(member.file_size)
        for member in members:
            file.extract(member, into)
            done += member.compress_size
            on_progress(done)


def _check_member(archive: Path, member: zipfile.ZipInfo) -> None:
    name = PurePosixPath(member.filename.replace("\\", "/"))
    if name.is_absolute() or ".." in name.parts or _DRIVE.match(member.filename):
        raise DatasetError(
            f"{archive}: {member.filename!r} leads out of the folder it is unpacked into. "
            f"{_DISTRUST}"
        )
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise DatasetError(
            f"{archive}: {member.filename!r} is a link or a device, not a file. {_DISTRUST}"
        )
