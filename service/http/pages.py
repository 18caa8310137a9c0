"""The pages and their files, read once, compressed once and answered from memory.

A page names its files as `ui/CHECKSUM/...`, where the checksum is of all files, so browsers keep
them for a year. The same files without a checksum are always checked for changes. All names in
pages and scripts are relative, so the pages work below any path prefix of a proxy.
"""

import gzip
import hashlib
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kinlens.service.http.edge import accepts_gzip

UI = Path(__file__).parents[1] / "ui"
_MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_CHECKSUM = re.compile(r"([0-9a-f]{12})/")
_IMPORT = re.compile(r'^import [^;]*?"(\.[^"]+)";', re.MULTILINE)
_ENTRY = re.compile(r'<script type="module" src="ui/([^"]+)"></script>')
_FOREVER = "public, max-age=31536000, immutable"
_SMALLEST = 500  # bytes; smaller texts fit into one packet anyway


@dataclass(frozen=True, slots=True)
class Page:
    """A text that stays constant while the process runs; `compressed` is empty for a short one."""

    body: bytes
    compressed: bytes
    media_type: str
    checksum: str

    @classmethod
    def of(cls, body: bytes, media_type: str) -> "Page":
        """Compress a text."""
        compressed = gzip.compress(body, mtime=0) if len(body) >= _SMALLEST else b""
        return cls(body, compressed, media_type, hashlib.sha256(body).hexdigest())

    def answer(self, headers: Headers, cache: str = "no-cache") -> Response:
        """The page, or a 304 without a body if the client has it cached."""
        is_packed = bool(self.compressed) and accepts_gzip(headers.get("accept-encoding", ""))
        etag = f'"{self.checksum}{"-gzip" if is_packed else ""}"'
        sent = {"ETag": etag, "Vary": "Accept-Encoding", "Cache-Control": cache}
        if etag in headers.get("if-none-match", ""):
            return Response(status_code=304, headers=sent)
        if is_packed:
            sent["Content-Encoding"] = "gzip"
        return Response(self.compressed if is_packed else self.body, 200, sent, self.media_type)


class Assets:
    """The files of a folder, and the pages among them."""

    def __init__(self, folder: Path = UI) -> None:
        self._texts = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.suffix in _MEDIA_TYPES
        }
        self._files = {
            name: Page.of(body, _MEDIA_TYPES[posixpath.splitext(name)[1]])
            for name, body in self._texts.items()
        }
        names = "".join(f"{name} {file.checksum}\n" for name, file in self._files.items())
        self.checksum = hashlib.sha256(names.encode()).hexdigest()[:12]

    def page(self, name: str, *changes: tuple[str, str]) -> Page:
        """The page in a file, with texts replaced, which loads all its scripts at once."""
        html = self._texts[name].decode()
        for old, new in changes:
            html = html.replace(old, new)
        if entry := _ENTRY.search(html):
            early = "".join(
                f'<link rel="modulepreload" href="ui/{module}">\n  '
                for module in dict.fromkeys(self._imported(entry[1], set()))
            )
            html = html.replace(entry[0], early + entry[0])
        return Page.of(self.located(html).encode(), "text/html")

    def located(self, html: str) -> str:
        """A page whose files are named with the checksum."""
        return html.replace('="ui/', f'="ui/{self.checksum}/')

    def answer(self, path: str, headers: Headers) -> Response:
        """The file at `path`, which may begin with a checksum. Raises: HTTPException (404)."""
        checksum = _CHECKSUM.match(path)
        # The files of another release, during a change of releases, are the current ones.
        file = self._files.get(path[checksum.end() :] if checksum else path)
        if file is None:
            raise HTTPException(404, f"/ui/{path} does not exist.")
        is_current = checksum is not None and checksum[1] == self.checksum
        return file.answer(headers, _FOREVER if is_current else "no-cache")

    def _imported(self, name: str, seen: set[str]) -> Iterator[str]:
        """The modules that a module imports, and what these import."""
        seen.add(name)
        for path in _IMPORT.findall(self._texts[name].decode()):
            module = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
            yield module
            if module not in seen:
                yield from self._imported(module, seen)
