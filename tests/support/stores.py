"""Stores of images at an address: S3, a web server and memory, each with what its tests need."""

import logging
import socket
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import until

HUGE = 2**30


class Store:
    """A store with a folder `photos`; `address` is that of the folder."""

    address: str

    def write(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    def remove(self, path: str) -> None:
        raise NotImplementedError


class MemoryStore(Store):
    def __init__(self, name: str) -> None:
        import fsspec

        self.address = f"memory://{name}/photos"
        self._files, self._root = fsspec.url_to_fs(self.address)

    def write(self, path: str, data: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{path}", data)

    def remove(self, path: str) -> None:
        self._files.rm_file(f"{self._root}/{path}")


class S3Store(Store):
    """A real S3 server on the loopback address, which can go away and come back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import boto3
        from moto.server import ThreadedMotoServer
        from s3fs import S3FileSystem

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._make_server = lambda: ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server = self._make_server()
        self._server.start()
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "eu-central-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
        }.items():
            monkeypatch.setenv(name, value)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._forget = S3FileSystem.clear_instance_cache
        self._forget()
        self._client = boto3.client("s3")
        self.bucket = f"shop-{self._port}"
        where = {"LocationConstraint": "eu-central-1"}
        self._client.create_bucket(Bucket=self.bucket, CreateBucketConfiguration=where)
        self.address = f"s3://{self.bucket}/photos"

    def write(self, path: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.bucket, Key=f"photos/{path}", Body=data)

    def remove(self, path: str) -> None:
        self._client.delete_object(Bucket=self.bucket, Key=f"photos/{path}")

    def go_away(self) -> None:
        self._server.stop()

    def come_back(self) -> None:
        until(self._is_free)  # otherwise the server would wait for ever
        self._server = self._make_server()
        self._server.start()

    def _is_free(self) -> bool:
        """Whether no connection of another program has taken the port meanwhile."""
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", self._port))
            except OSError:
                return False
        return True

    def close(self) -> None:
        self._server.stop()
        self._client.close()
        self._forget()


class WebStore(Store):
    """A folder behind a web server with listings. `requests` are the paths that were asked for.

    While `answers` is not set, it hangs. moved.png is a redirect to another file, secret.png is
    forbidden, and huge.png sends bytes for as long as somebody reads them; `sent` counts these.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "photos"
        self.folder.mkdir(parents=True)
        self.requests: list[str] = []
        self.answers = threading.Event()
        self.answers.set()
        self.sent = 0
        store = self

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given, directory=str(folder))

            def do_GET(self) -> None:
                store.requests.append(self.path)
                store.answers.wait()
                if self.path.endswith("/moved.png"):
                    self.send_response(302)
                    self.send_header("Location", "/outside.png")
                    self.end_headers()
                elif self.path.endswith("/secret.png"):
                    self.send_error(403)
                elif self.path.endswith("/huge.png"):
                    self.send_response(200)
                    self.send_header("Content-Length", str(HUGE))
                    self.end_headers()
                    while store.sent < HUGE:
                        try:
                            self.wfile.write(bytes(2**16))
                        except OSError:
                            return
                        store.sent += 2**16
                else:
                    super().do_GET()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/photos"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def write(self, path: str, data: bytes) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def remove(self, path: str) -> None:
        (self.folder / path).unlink()

    def close(self) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def s3_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    store = S3Store(monkeypatch)
    yield store
    store.close()


@pytest.fixture
def web_store(tmp_path: Path) -> Iterator[WebStore]:
    store = WebStore(tmp_path / "web")
    yield store
    store.close()


@pytest.fixture(params=["memory", "s3_store", "web_store"])
def image_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store of each kind."""
    if request.param == "memory":
        return MemoryStore(tmp_path.name)
    made: Store = request.getfixturevalue(request.param)
    return made
