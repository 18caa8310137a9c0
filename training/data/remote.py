"""A file on a server, read from any byte on: HTTP, HTTPS and FTP."""

import ftplib
import http.client
import io
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote, urlsplit

from embedder.errors import DatasetError

_FOR_A_WHILE = frozenset((408, 425, 429, 500, 502, 503, 504))
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_REFUSED_RANGE = 416


class ConnectionLost(DatasetError):  # noqa: N818 - it names what happened
    """A fault that another attempt may not meet."""


class _Stream(Protocol):
    def read1(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Body:
    """The content of a file from byte `start` on.

    `total` is the size of the whole file and `tag` names its version, where the server says so.
    """

    url: str
    stream: _Stream
    start: int
    total: int | None
    tag: str
    close: Callable[[], None]

    def read(self, size: int) -> bytes:
        """At most `size` bytes, none at the end. Raises: ConnectionLost."""
        try:
            return self.stream.read1(size)
        except (OSError, EOFError, http.client.HTTPException) as error:
            raise _lost(self.url, error) from error


def open_url(url: str, offset: int, timeout_s: float) -> Body:
    """Ask for a file from byte `offset` on; a server that cannot do so gives all of it.

    Raises: DatasetError if the address is wrong, ConnectionLost if the server cannot be reached.
    """
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https"):
        return _open_http(url, offset, timeout_s)
    if scheme == "ftp":
        return _open_ftp(url, offset, timeout_s)
    raise DatasetError(f"{url} is not an address that can be read. Give one of http, https or ftp.")


def _open_http(url: str, offset: int, timeout_s: float) -> Body:
    headers = {"User-Agent": "kinlens"} | ({"Range": f"bytes={offset}-"} if offset else {})
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - open_url checks the scheme
    try:
        answer = urllib.request.urlopen(request, timeout=timeout_s)  # noqa: S310
    except urllib.error.HTTPError as error:
        with error:
            return _refused(url, offset, timeout_s, error)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _lost(url, error) from error
    tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
    stated_size = answer.headers.get("Content-Length", "")
    start, total = 0, int(stated_size) if stated_size.isdigit() else None
    if answer.status == http.HTTPStatus.PARTIAL_CONTENT:
        stated = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if stated is None or int(stated[1]) != offset:
            answer.close()
            raise _lost(url, "the server sent another part of the file than was asked for")
        start, total = offset, None if stated[2] == "*" else int(stated[2])
    return Body(url, answer, start, total, tag, answer.close)


def _refused(url: str, offset: int, timeout_s: float, error: urllib.error.HTTPError) -> Body:
    if error.code == _REFUSED_RANGE and offset:
        if error.headers.get("Content-Range") == f"bytes */{offset}":
            return Body(url, io.BytesIO(), offset, offset, error.headers.get("ETag", ""), _nothing)
        return _open_http(url, 0, timeout_s)
    if error.code in _FOR_A_WHILE:
        raise _lost(url, f"the server answers {error.code} {error.reason}")
    raise DatasetError(
        f"{url}: the server answers {error.code} {error.reason}. Pass --url with the address of "
        "another copy of the same file, or try again later."
    )


def _open_ftp(url: str, offset: int, timeout_s: float) -> Body:
    parts = urlsplit(url)
    ftp = ftplib.FTP(timeout=timeout_s)  # noqa: S321 - a public file, checked by its checksum
    try:
        ftp.connect(parts.hostname or "", parts.port or ftplib.FTP_PORT)
        ftp.login(unquote(parts.username or ""), unquote(parts.password or ""))
        path = unquote(parts.path)
        ftp.voidcmd("TYPE I")
        total = ftp.size(path)
        start, link = _transfer(ftp, path, offset)
    except ftplib.error_perm as error:
        ftp.close()
        raise DatasetError(
            f"{url}: the server answers {error}. Pass --url with the address of another copy of "
            "the same file, or try again later."
        ) from error
    except (ftplib.Error, OSError, EOFError, ValueError) as error:
        ftp.close()
        raise _lost(url, error) from error
    stream = link.makefile("rb")

    def close() -> None:
        stream.close()
        link.close()
        ftp.close()

    return Body(url, stream, start, total, "", close)


def _transfer(ftp: ftplib.FTP, path: str, offset: int) -> tuple[int, socket.socket]:
    try:
        return offset, ftp.transfercmd(f"RETR {path}", rest=offset or None)
    except ftplib.error_perm:
        if not offset:
            raise
        return 0, ftp.transfercmd(f"RETR {path}")


def _lost(url: str, reason: object) -> ConnectionLost:
    return ConnectionLost(
        f"{url} cannot be read: {reason or 'the connection was closed'}. Check the network and run "
        "the command again: it goes on where it stopped. Or pass --url with another address."
    )


def _nothing() -> None:
    pass
