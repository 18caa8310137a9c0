"""Small servers for tests of downloads: HTTP with and without faults, and FTP."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """A file on an HTTP server. `drops` and `statuses` are used up, one an answer."""

    content: bytes
    etag: str = '"one"'
    ranges: bool = True
    sized: bool = True
    drops: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    url: str = ""


@contextlib.contextmanager
def http_site(site: Site) -> Iterator[Site]:
    """Serve `site` at its `url`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"site": site}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}/file.tgz"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        site, asked = self.site, self.headers.get("Range", "")
        site.asked.append(asked)
        if site.statuses:
            return self.send_error(site.statuses.pop(0))
        start = int(asked[len("bytes=") : -1]) if asked and site.ranges else 0
        if start and start >= len(site.content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(site.content)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        body = site.content[start:]
        self.send_response(206 if start else 200)
        if start:
            last = len(site.content) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(site.content)}")
        if site.etag:
            self.send_header("ETag", site.etag)
        if site.sized:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client may have seen enough
            self.wfile.write(body[: site.drops.pop(0)] if site.drops else body)
        self.close_connection = True
        return None

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@dataclass
class FtpFile:
    """A file on an FTP server that knows REST or does not."""

    content: bytes
    rest: bool = True
    drops: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    url: str = ""


@contextlib.contextmanager
def ftp_site(file: FtpFile) -> Iterator[FtpFile]:
    """Serve `file` at its `url` to one client at a time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        file.url = f"ftp://127.0.0.1:{listener.getsockname()[1]}/pub/file.zip"
        thread = threading.Thread(target=_serve_ftp, args=(listener, file))
        thread.start()
        try:
            yield file
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve_ftp(listener: socket.socket, file: FtpFile) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        with client, contextlib.suppress(OSError):
            _talk(client, file)


def _talk(client: socket.socket, file: FtpFile) -> None:
    start = 0

    def say(text: str) -> None:
        client.sendall(f"{text}\r\n".encode())

    say("220 ready")
    with client.makefile("r") as lines, contextlib.ExitStack() as stack:
        for line in lines:
            command, _, value = line.strip().partition(" ")
            if command == "USER":
                say("230 welcome")
            elif command == "TYPE":
                say("200 done")
            elif command == "SIZE":
                found = value == "/pub/file.zip"
                say(f"213 {len(file.content)}" if found else "550 no such file")
            elif command == "PASV":
                data = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                port = data.getsockname()[1]
                say(f"227 Passive (127,0,0,1,{port // 256},{port % 256})")
            elif command == "REST":
                start = int(value) if file.rest else 0
                say("350 go on" if file.rest else "502 not known")
            elif command == "RETR":
                file.starts.append(start)
                say("150 coming")
                body = file.content[start:]
                link, _ = data.accept()
                with link:
                    link.sendall(body[: file.drops.pop(0)] if file.drops else body)
                say("226 done")
            else:
                say("502 not known")
