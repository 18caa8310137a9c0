"""Workers that embed: the same vectors, enforced limits, no leftovers, no lost answers."""

import contextlib
import gc
import itertools
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import CorruptImageError, ImageCostError
from kinlens.embedder.manifest import FP32, Mode
from kinlens.embedder.session import OnnxEmbedder
from kinlens.service.app import create_app
from kinlens.service.settings import Settings
from tests.support.hostile import START, attempt
from tests.support.odd_images import FORMATS
from tests.support.own_process import children, own_process
from tests.support.seams import NoProcessError, Workers, fork_server
from tests.support.servers import Running, run
from tests.support.waiting import until
from tests.tiny import encoded, photo

pytestmark = pytest.mark.skipif(not Workers.can_run(), reason="fork servers need Linux")


@contextlib.contextmanager
def running(bundle: Bundle, mode: Mode = FP32, **limits: Any) -> Iterator[Any]:
    """Workers that are ready, or reported why not."""
    settings = SessionSettings(precision=mode.precision, engine=mode.engine, single_threads=2)
    embedder = OnnxEmbedder.open(bundle, settings)
    workers = Workers(embedder, **{"memory_mb": 1024, "timeout_s": 30.0, "count": 4} | limits)
    image = embedder.known_images()[0]
    workers.start(image, embedder.embed(embedder.preprocess(image)[np.newaxis])[0])
    try:
        yield workers
    finally:
        workers.close()


def vector_of(bundle: Bundle, data: bytes, box: Any = None, mode: Mode = FP32) -> Any:
    settings = SessionSettings(precision=mode.precision, engine=mode.engine)
    embedder = OnnxEmbedder.open(bundle, settings)
    return embedder.embed(embedder.preprocess(data, box)[np.newaxis])[0]


OTHERS = set[int]()
"""Children of this process that belong to other tests, as to a service that many of them use."""


def fork_servers() -> set[int]:
    """Those that the test has started."""
    return {pid for pid in children() - OTHERS if not is_gone(pid)}


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    OTHERS.clear()
    OTHERS.update(children())
    yield
    gc.collect()
    assert not children() - OTHERS


def test_vectors_are_those_of_the_service_bit_for_bit(tiny_bundle, monkeypatch) -> None:
    monkeypatch.chdir(tiny_bundle.path.parent)
    with running(Bundle.open(tiny_bundle.path.name)) as workers:
        until(lambda: workers.is_ready)
        for kind in FORMATS:
            data = encoded(photo(1, (320, 200)), kind)
            for box in (None, (0.25, 0.1, 0.5, 0.6)):
                vector, decode_ms = workers.embed(data, box)
                assert np.array_equal(vector, vector_of(tiny_bundle, data, box)), kind
                assert 0 < decode_ms < 10_000
        assert [worker.restarts for worker in workers.pool.decoders] == [0]


def test_openvino_answers_in_a_forked_process(tiny_bundle) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    mode = Mode("openvino", "fp32")
    with running(tiny_bundle, mode) as workers:
        until(lambda: workers.is_ready)
        data = encoded(photo(3))
        vector, _ = workers.embed(data)
        assert float(vector @ vector_of(tiny_bundle, data, mode=mode)) > 0.9999


@pytest.mark.parametrize(
    ("limit", "message"),
    [({"memory_mb": 256}, "256 MB"), ({"timeout_s": 0.2}, r"longer than 0\.2 s")],
    ids=["memory", "the alarm of the worker"],  # the service waits longer, for the model
)
def test_a_damaged_or_costly_image_fails_alone(tiny_bundle, heavy, limit, message: str) -> None:
    good = encoded(photo(1))
    with running(tiny_bundle, **limit) as workers:
        until(lambda: workers.is_ready)
        with pytest.raises(CorruptImageError):
            workers.embed(good[:-40])
        with pytest.raises(ImageCostError, match=message):
            workers.embed(heavy)
        assert np.array_equal(workers.embed(good)[0], vector_of(tiny_bundle, good))
        assert [(each.restarts, each.kills) for each in workers.pool.decoders] == [(1, 1)]


def answers(workers: Any, image: bytes, expected: Any) -> bool:
    """Whether a worker gives this vector; one that could not start pauses first."""
    try:
        return np.array_equal(workers.embed(image)[0], expected)
    except (NoProcessError, ImageCostError):
        return False


def test_after_some_crashes_the_server_is_a_new_one_with_other_addresses(tiny_bundle) -> None:
    with running(tiny_bundle) as workers:
        until(lambda: workers.is_ready)
        [server] = fork_servers()

        def is_new_after_a_crash() -> bool:
            for worker in workers.pool.decoders:
                if worker.pid is not None:
                    os.kill(worker.pid, signal.SIGSEGV)
            answers(workers, encoded(photo(1)), None)
            return workers.is_ready and fork_servers() != {server}

        until(is_new_after_a_crash)
        assert sum(worker.restarts for worker in workers.pool.decoders) >= 8


def test_a_replaced_bundle_is_refused(make_tiny_bundle, tiny_bundle, tmp_path) -> None:
    """Its vectors would be stored, and cached, under the id of the first."""
    path = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    with structlog.testing.capture_logs() as events, running(Bundle.open(path)) as workers:
        until(lambda: workers.is_ready)
        [server] = fork_servers()
        shutil.rmtree(path)
        shutil.copytree(make_tiny_bundle(seed=5).path, path)
        os.kill(server, signal.SIGKILL)
        until(lambda: not answers(workers, encoded(photo(1)), None) and not workers.is_ready)
        until(lambda: any(event["event"] == "workers do not embed" for event in events))
    assert "has become the bundle" in str(events)


def test_server_and_workers_end_when_the_service_dies(tiny_settings, tmp_path) -> None:
    with own_process(tmp_path / "log", may_be_killed=True, **tiny_settings) as service:

        def workers() -> set[int]:
            return {pid for server in children(service.pid) for pid in children(server)}

        until(workers)
        pids = workers() | children(service.pid)
        service.process.kill()
    until(lambda: all(is_gone(pid) for pid in pids))


def test_a_hostile_worker_is_confined_and_reaches_nothing(
    tiny_bundle, monkeypatch, tmp_path
) -> None:
    code = START.format(layers=("landlock", "seccomp"), fault="")
    monkeypatch.setattr(fork_server, "CODE", code.replace("decode_worker", "fork_server"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (tmp_path / "keys.json").write_text("{}")
    with running(tiny_bundle) as workers:
        until(lambda: workers.is_ready)
        [worker] = workers.pool.decoders
        process = Path(f"/proc/{worker.pid}")
        links = [str(link.readlink()) for link in (process / "fd").iterdir()]
        limits = (process / "limits").read_text()
        assert b"secret" not in (process / "environ").read_bytes()
        assert sorted(link.split(":")[0] for link in links) == ["/dev/null"] * 3 + ["socket"]
        assert "Max core file size        0" in limits
        assert "Max file size             0" in limits
        assert len(list((process / "task").iterdir())) == 1
        if not any(layer.holds for layer in worker.layers):
            pytest.skip(f"this kernel has no layer: {worker.layers[0].absence}")
        for what in ("read", "remove"):
            assert attempt(worker, what, str(tmp_path / "keys.json")) == "PermissionError"
        os.kill(worker.pid, signal.SIGKILL)
        workers.embed(encoded(photo(1)))
        assert attempt(worker, "read", "/etc/passwd") == "PermissionError"


PHOTOS = [encoded(photo(number)) for number in range(8)]
NUMBERS = itertools.count()


def search_right(service: Running, count: int) -> None:
    """Eight at a time for images in files that no cache knows; each must find its item."""

    def best(number: int) -> str:
        data = PHOTOS[number % 8] + next(NUMBERS).to_bytes(4, "big")
        return str(service.search(data, k=1).raise_for_status().json()["hits"][0]["key"])

    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(best, range(count)))
    assert found == [f"{number % 8}.png" for number in range(count)]


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return os.getpid()


def test_killed_workers_a_killed_server_and_a_lost_bundle_cost_no_answer(
    tiny_bundle, tiny_gallery, tmp_path
) -> None:
    bundle = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    settings = Settings(bundle=bundle, galleries=(f"shop={tiny_gallery}",), search_threads=3)
    with contextlib.closing(run(create_app(settings))) as service, ThreadPoolExecutor(1) as pool:
        threads = service.runtime.search_threads

        def embedding() -> list[int]:
            """Workers that searches use: no children of the service, but of its fork server."""
            search_right(service, 6)
            return [pid for pid in threads.pids if parent(pid) != os.getpid()]

        until(lambda: 0 < len(embedding()) == len(threads.pids))
        [server] = {parent(pid) for pid in embedding()}
        answers = pool.submit(search_right, service, 96)
        while not answers.done():
            for pid in embedding()[:1]:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)  # an image during which two workers end is refused
        answers.result()
        answers = pool.submit(search_right, service, 96)
        os.kill(server, signal.SIGKILL)
        answers.result()
        assert threads.restarts > 1
        until(lambda: {parent(pid) for pid in embedding()} - {server, os.getpid()})
        shutil.rmtree(bundle)  # so that the service itself embeds from now on
        for pid in {parent(pid) for pid in embedding()} - {os.getpid()}:
            os.kill(pid, signal.SIGKILL)
        search_right(service, 24)
        assert service.client.get("/ready").status_code == 200
