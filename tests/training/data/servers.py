"""A small HTTP server for tests of downloads, well behaved and not."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """A file on an HTTP server: `asked` counts requests, `drop` cuts each answer short there."""

    content: bytes
    status: int = 200
    drop: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    asked: int = 0
    url: str = ""


@contextlib.contextmanager
def http_site(site: Site) -> Iterator[Site]:
    """Serve `site` at its `url`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"site": site}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}/birds.tgz"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        site = self.site
        site.asked += 1
        if site.status != 200:
            return self.send_error(site.status)
        self.send_response(200)
        for name, value in (site.headers | {"Content-Length": str(len(site.content))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(site.content[: site.drop])
        self.close_connection = True
        return None

    def log_message(self, *_: object) -> None:
        """Say nothing."""
