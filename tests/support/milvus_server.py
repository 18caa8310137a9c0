"""A real Milvus server on the loopback address, from the PyPI package `milvus`."""

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kinlens.indexer.entries import Entry
from kinlens.indexer.exchange.milvus import MilvusStore
from kinlens.indexer.exchange.milvus_load import import_to_milvus
from kinlens.indexer.types import GalleryExport
from tests.support.servers import free_port

_TRIES = 3
_READY_S = 120
_POLL_S = 0.1
# Searches wait for the clock of the server, 200 ms as it comes; a restarted server waits until the
# lease of the dead one has run out, 30 s.
FASTER = {"proxy.timeTickInterval": 80, "common.session.ttl": 3}


class MilvusServer:
    """One server process; its data, and every port that it listens on, are its own.

    The programs are unpacked to `cache` once, and stay there for later runs.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder = folder
        self._programs = _unpacked(cache)
        self._process: subprocess.Popen[bytes] | None = None
        self._data = folder
        self._metrics_port = 0
        self.uri = ""

    def start(self) -> None:
        """Start, and wait until it answers; another program may have taken one of the ports."""
        for attempt in range(_TRIES):
            self._data = self._folder / f"data{attempt}"
            self._data.mkdir(parents=True)
            ports = self._configure(self._data)
            self._metrics_port = ports["metrics"]
            self.uri = f"http://127.0.0.1:{ports['proxy_port']}"
            if self._runs():
                return
        log = (self._data / "server.log").read_text(errors="replace")
        raise AssertionError(f"Milvus did not start: {log[-2000:]}")

    def restart(self) -> None:
        """Start again with the same address and data."""
        assert self._runs(), "Milvus did not start again"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _configure(self, data: Path) -> dict[str, int]:
        from milvus import MilvusServerConfig

        config = MilvusServerConfig(data_dir=str(data))
        names = [name for name in config.configurable_items if name.endswith("_port")]
        ports = {name: free_port() for name in (*names, "metrics", "etcd_peer")}
        config.configs |= {name: ports[name] for name in names}
        config.extra_configs = dict(FASTER)
        etcd = data / "etcd.yaml"
        etcd.write_text(_etcd_config(ports["etcd_port"], ports["etcd_peer"]))
        config.template_text = config.template_text.replace(
            "\netcd:\n", f"\netcd:\n  config:\n    path: {etcd}\n"
        )
        config.resolve()
        return ports

    def _runs(self) -> bool:
        environment = os.environ | {
            "DEPLOY_MODE": "STANDALONE",
            "METRICS_PORT": str(self._metrics_port),
            "MILVUS_RUN_DIR": str(self._data / "run"),
            "LD_LIBRARY_PATH": str(self._programs),
        }
        dies_with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with (self._data / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*dies_with_us, str(self._programs / "milvus"), "run", "standalone"],
                cwd=self._data,
                env=environment,
                stdout=log,
                stderr=log,
            )
        if not self._answers():
            self.kill()
        return self._process is not None

    def _answers(self) -> bool:
        from pymilvus import MilvusClient
        from pymilvus.exceptions import MilvusException

        assert self._process is not None
        deadline = time.monotonic() + _READY_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                client = MilvusClient(uri=self.uri, timeout=10)
                client.list_collections()
            except MilvusException:
                time.sleep(_POLL_S)
            else:
                client.close()
                return True
        return False


def _unpacked(cache: Path) -> Path:
    from milvus import _initialize_data_files

    programs = cache / "bin"
    if not programs.exists():
        unpacking = cache / f"unpacking-{os.getpid()}"
        _initialize_data_files(str(unpacking))
        try:
            (unpacking / "bin").rename(programs)
        except OSError:  # another run was faster
            assert programs.exists()
        shutil.rmtree(unpacking)
    return programs


def _etcd_config(client: int, peer: int) -> str:
    client_url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    return (
        f"name: default\nlisten-client-urls: {client_url}\nadvertise-client-urls: {client_url}\n"
        f"listen-peer-urls: {peer_url}\ninitial-advertise-peer-urls: {peer_url}\n"
        f"initial-cluster: default={peer_url}\n"
    )


def started_server(request: pytest.FixtureRequest, folder: Path) -> Iterator[MilvusServer]:
    """A server with its data in `folder`; the test is skipped where there can be none."""
    for package in ("pymilvus", "milvus"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make test` installs it")
    assert request.config.cache is not None
    server = MilvusServer(folder, request.config.cache.mkdir("milvus-2.3.5"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def milvus_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MilvusServer]:
    """One server for the tests of a module; do not stop it."""
    yield from started_server(request, tmp_path_factory.mktemp("milvus"))


def imported(
    uri: str, name: str, entries: Sequence[Entry] = (), *, dim: int, bundle_id: str, **options: Any
) -> MilvusStore:
    """A gallery at this address, with these entries as a new generation."""
    facts = {"name": name, "bundle_id": bundle_id}
    dump = GalleryExport(facts, dim, len(entries), lambda: iter(entries))
    return import_to_milvus(dump, uri, name, **options)


@dataclass(frozen=True)
class MilvusFile:
    """A file of milvus-lite, which has the API of the current Milvus."""

    uri: str


@pytest.fixture(scope="module")
def milvus_lite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusFile]:
    """A file that milvus-lite serves in this process, for the tests of a module."""
    manager = pytest.importorskip("milvus_lite.server_manager", reason="`make test` installs it")
    uri = str(tmp_path_factory.mktemp("milvus") / "lite.db")
    yield MilvusFile(uri)
    manager.server_manager_instance.release_server(uri)
