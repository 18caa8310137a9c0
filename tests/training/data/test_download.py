"""Downloads from local servers, well behaved and not."""

import contextlib
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.errors import DatasetError
from kinlens.training.data.download import BY_HAND, SOURCES, Source, find_source, obtain
from tests.training.jobs import called

CONTENT = np.random.default_rng(0).bytes(700_000)
BIRDS = {"birds/images/1.jpg": CONTENT, "birds/list.txt": b"1", "attributes.txt": b"a"}
NOWHERE = "http://127.0.0.1:1/birds.tgz"


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
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked += 1
            self.send_response(site.status)
            for name, value in (site.headers | {"Content-Length": str(len(site.content))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(site.content[: site.drop])
            self.close_connection = True

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        site.url = f"http://127.0.0.1:{server.server_port}/birds.tgz"
        try:
            yield site
        finally:
            server.shutdown()


def tgz(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return buffer.getvalue()


def source_of(content: bytes, url: str) -> Source:
    md5 = hashlib.md5(content).hexdigest()
    return Source("Birds", url, md5, "birds", 0.001, "to all")


def put_archive(root: Path, content: bytes) -> Source:
    root.mkdir(exist_ok=True)
    (root / "birds.tgz").write_bytes(content)
    return source_of(content, NOWHERE)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("pack", [tgz, zipped])
def test_a_data_set_appears_complete(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    messages: list[str] = []
    # A server may call a packed file so: it stays packed on its way.
    headers = {"Content-Encoding": "x-gzip"} if pack is tgz else {}
    with http_site(Site(pack(BIRDS), headers=headers)) as site:
        source = source_of(site.content, site.url)
        folder = obtain(source, tmp_path / "new", report=messages.append)
        assert obtain(source, tmp_path / "new") == folder == tmp_path / "new" / "birds"
    assert site.asked == 1
    assert (folder / "images" / "1.jpg").read_bytes() == CONTENT
    assert names(folder.parent) == ["birds"]
    assert messages == ["Birds is being downloaded: 0.001 GB.", "Birds is unpacked."]


def test_an_archive_that_lies_there_is_used_if_it_is_the_right_one(tmp_path: Path) -> None:
    content = tgz(BIRDS)
    put_archive(tmp_path, content[:-1])
    with pytest.raises(DatasetError, match="Birds could not be downloaded"):
        obtain(source_of(content, NOWHERE), tmp_path)
    assert names(tmp_path) == ["birds.tgz"]
    (tmp_path / ".birds.unpacking" / "birds" / "old").mkdir(parents=True)  # of a broken unpacking
    obtain(put_archive(tmp_path, content), tmp_path, keep_archive=True)
    assert names(tmp_path) == ["birds", "birds.tgz"]
    assert names(tmp_path / "birds") == ["images", "list.txt"]


def test_an_address_that_fails_is_named_with_what_to_do(tmp_path: Path) -> None:
    with http_site(Site(b"", status=404)) as gone, pytest.raises(DatasetError) as caught:
        obtain(source_of(tgz(BIRDS), NOWHERE), tmp_path, gone.url)
    fault = str(caught.value)
    assert f"{gone.url}: 404 Client Error" in fault
    assert "--url with another address" in fault
    assert f"curl -L -C - -o {tmp_path / 'birds.tgz'} {gone.url}" in fault
    assert not names(tmp_path)


@pytest.mark.parametrize("fault", ["cut short", "of another file"])
def test_what_is_not_the_whole_file_is_not_kept(tmp_path: Path, fault: str) -> None:
    content = tgz(BIRDS)
    site = Site(content, drop=300_000) if fault == "cut short" else Site(content[::-1])
    reason = "IncompleteRead" if fault == "cut short" else "does not match the known hash"
    with http_site(site), pytest.raises(DatasetError, match=rf"birds.tgz: .*{reason}"):
        obtain(source_of(content, site.url), tmp_path)
    assert not names(tmp_path)


def test_a_full_disk_is_told_before_the_download(tmp_path: Path) -> None:
    with http_site(Site(tgz(BIRDS))) as site:
        source = replace(source_of(site.content, site.url), gigabytes=10**9)
        with pytest.raises(DatasetError, match=r"GB free; 2100000000.00 GB are needed .*--root"):
            obtain(source, tmp_path)
    assert site.asked == 0


def test_nothing_is_unpacked_outside_the_folder(tmp_path: Path) -> None:
    source = put_archive(tmp_path / "data", tgz({"birds/1.jpg": b"1", "../../up.txt": b"2"}))
    with pytest.raises(tarfile.OutsideDestinationError):
        obtain(source, tmp_path / "data")
    assert (names(tmp_path), names(tmp_path / "data")) == (["data"], ["birds.tgz"])


def test_every_official_data_set_can_be_fetched_or_is_explained(tmp_path: Path) -> None:
    assert {*SOURCES, *BY_HAND} == {"cub", "cars196", "sop", "in_shop", "aircraft"}
    with pytest.raises(DatasetError, match=r"data set 'cubs'. Give one of cub, .*in_shop"):
        find_source("cubs")
    printed = called("data", "download", "in_shop", "--root", tmp_path / "d", code=1)
    assert f"{tmp_path / 'd'}/in_shop/Eval/list_eval_partition.txt" in printed
    assert not (tmp_path / "d").exists()


def test_the_command_names_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with http_site(Site(tgz(BIRDS))) as site:
        known = {"birds": source_of(site.content, NOWHERE)}
        monkeypatch.setattr("kinlens.training.data.download.SOURCES", known)
        words = "data", "download", "birds", "--root", tmp_path, "--url", site.url
        assert f"kinlens-train data doctor {tmp_path / 'birds'}" in called(*words)
        assert "exists already" in called(*words)
    assert site.asked == 1
