"""Workers that embed: the same vectors, enforced limits, no leftovers, no lost answers."""

import contextlib
import gc
import io
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from PIL import Image

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import (
    BundleMismatchError,
    CorruptImageError,
    ImageCostError,
    SearchError,
)
from kinlens.embedder.manifest import FP32, Mode
from kinlens.embedder.preprocess import ImageLimits, preprocess
from kinlens.embedder.session import OnnxEmbedder
from kinlens.service.settings import Settings
from tests.support.detectors import bright_photo, with_detector
from tests.support.hostile import START, attempt
from tests.support.odd_images import FORMATS, turned
from tests.support.own_process import children, own_process
from tests.support.seams import ForkServer, Workers, spawn
from tests.support.servers import Running, create_app, run, workers_of
from tests.support.shops import assert_problem
from tests.support.waiting import until
from tests.tiny import encoded, photo


@contextlib.contextmanager
def running(
    bundle: Bundle, mode: Mode = FP32, memory_mb: int = 1024, timeout_s: float = 30.0, **more: Any
) -> Iterator[Any]:
    session = SessionSettings(precision=mode.precision, engine=mode.engine, **more)
    workers = Workers(ForkServer(memory_mb, timeout_s, bundle, session), timeout_s, 4)
    try:
        workers.start()
        yield workers
    finally:
        workers.close()


def embed(workers: Any, bundle: Bundle, data: bytes, box: Any = None) -> tuple[Any, float]:
    manifest = bundle.manifest
    found = workers.embed(data, manifest.preprocessing, ImageLimits(), [box], manifest.dim)
    [vector], decode_ms = found
    return vector, float(decode_ms)


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


@pytest.mark.parametrize("threads", [1, 2])
def test_vectors_are_those_of_this_process_bit_for_bit(tiny_bundle, monkeypatch, threads) -> None:
    monkeypatch.chdir(tiny_bundle.path.parent)
    with running(Bundle.open(tiny_bundle.path.name), threads=threads) as workers:
        for kind in FORMATS:
            data = encoded(photo(1, (320, 200)), kind)
            for box in (None, (0.25, 0.1, 0.5, 0.6)):
                vector, decode_ms = embed(workers, tiny_bundle, data, box)
                assert np.array_equal(vector, vector_of(tiny_bundle, data, box)), kind
                assert 0 < decode_ms < 10_000
        assert workers.restarts == 0
        [pid] = workers.pids
        assert len(list(Path(f"/proc/{pid}/task").iterdir())) == threads


@pytest.mark.parametrize("threads", [1, 2])
def test_one_worker_finds_boxes_and_embeds_them(tiny_bundle, tmp_path, threads: int) -> None:
    bundle = with_detector(tiny_bundle, tmp_path / "bundle")
    spec, dim, limits = bundle.manifest.preprocessing, bundle.manifest.dim, ImageLimits()
    with Image.open(io.BytesIO(bright_photo((1, 1)))) as image:
        photos = [turned(image, "JPEG", orientation) for orientation in (1, 6)]
    with running(bundle, threads=threads) as workers:
        for data in photos:
            found, vectors, decode_ms = workers.find(data, spec, limits, 16, dim, 4)
            assert found[0].box == pytest.approx((0.2375, 0.475, 0.275, 0.525), abs=1e-4)
            assert (len(found), vectors.shape, decode_ms > 0) == (1, (2, dim), True)
            for part, vector in zip((None, found[0].box), vectors, strict=True):
                assert np.array_equal(vector, vector_of(bundle, data, part))
            alone, nothing, _ = workers.find(data, spec, limits, 16)
            assert (alone, nothing.size) == (found, 0)
            with pytest.raises(CorruptImageError):
                workers.find(data[:-400], spec, limits, 16, dim, 4)
        assert workers.restarts == 0


def test_workers_without_the_model_have_the_detector_alone(tiny_bundle, tmp_path) -> None:
    """As next to a model on a GPU; and a bundle without a detector loads none."""
    bundle = with_detector(tiny_bundle, tmp_path / "bundle")
    spec, limits, data = bundle.manifest.preprocessing, ImageLimits(), bright_photo((1, 1))
    workers = Workers(ForkServer(1024, 30.0, bundle), 30.0, 4)
    with contextlib.closing(workers):
        workers.start()
        [found] = workers.find(data, spec, limits, 16)[0]
        assert found.box == pytest.approx((0.2375, 0.475, 0.275, 0.525), abs=1e-4)
        decoded = workers.decode(data, spec, limits, [None, found.box])
        assert np.array_equal(decoded[1], preprocess(data, spec, box=found.box))
    with running(tiny_bundle) as workers:
        with pytest.raises(RuntimeError, match="AssertionError"):
            workers.find(data, spec, limits, 16)
        assert workers.restarts == 0


def test_a_replaced_detector_is_refused(tiny_bundle, tmp_path) -> None:
    """Its boxes would be cached under the description of the first."""
    path = with_detector(tiny_bundle, tmp_path / "bundle").path
    bundle = Bundle.open(path)
    shutil.rmtree(path)
    with_detector(tiny_bundle, path, "yolo")
    with pytest.raises(BundleMismatchError, match="has become the bundle"), running(bundle):
        pass


def test_openvino_answers_in_a_forked_process(tiny_bundle) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    mode = Mode("openvino", "fp32")
    with running(tiny_bundle, mode) as workers:
        data = encoded(photo(3))
        vector, _ = embed(workers, tiny_bundle, data)
        assert float(vector @ vector_of(tiny_bundle, data, mode=mode)) > 0.9999


@pytest.mark.parametrize(
    ("limit", "message"),
    [({"memory_mb": 256}, "256 MB"), ({"timeout_s": 0.2}, r"longer than 0\.2 s")],
    ids=["memory", "the alarm of the worker"],  # the service waits longer, for the model
)
def test_a_damaged_or_costly_image_fails_alone(tiny_bundle, heavy, limit, message: str) -> None:
    good = encoded(photo(1))
    with running(tiny_bundle, **limit) as workers:
        with pytest.raises(CorruptImageError):
            embed(workers, tiny_bundle, good[:-40])
        with pytest.raises(ImageCostError, match=message):
            embed(workers, tiny_bundle, heavy)
        vector, _ = embed(workers, tiny_bundle, good)
        assert np.array_equal(vector, vector_of(tiny_bundle, good))
        assert (workers.restarts, workers.kills) == (1, 1)


def test_after_some_crashes_the_server_is_a_new_one_with_other_addresses(tiny_bundle) -> None:
    with running(tiny_bundle) as workers:
        [server] = fork_servers()
        for _ in range(8):
            assert fork_servers() == {server}
            os.kill(workers.pids[0], signal.SIGSEGV)
            embed(workers, tiny_bundle, encoded(photo(1)))
        assert server not in fork_servers()
        assert workers.restarts >= 8


def test_a_replaced_bundle_is_refused(make_tiny_bundle, tiny_bundle, tmp_path) -> None:
    """Its vectors would be stored, and cached, under the id of the first."""
    path = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    with structlog.testing.capture_logs() as events, running(Bundle.open(path)) as workers:
        [server] = fork_servers()
        shutil.rmtree(path)
        shutil.copytree(make_tiny_bundle(seed=5).path, path)
        os.kill(server, signal.SIGKILL)

        def is_refused() -> bool:  # a worker lives a little longer than its server
            try:
                embed(workers, tiny_bundle, encoded(photo(1)))
            except SearchError as error:
                return "No worker process runs" in str(error)
            return False

        until(is_refused)
        assert "has become the bundle" in workers.fault
    assert "workers did not start" in [event["event"] for event in events]


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
    monkeypatch.setattr(spawn, "CODE", code)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (tmp_path / "keys.json").write_text("{}")
    with running(tiny_bundle) as workers:
        [pid] = workers.pids
        process = Path(f"/proc/{pid}")
        links = [str(link.readlink()) for link in (process / "fd").iterdir()]
        limits = (process / "limits").read_text()
        assert b"secret" not in (process / "environ").read_bytes()
        assert sorted(link.split(":")[0] for link in links) == ["/dev/null"] * 3 + ["socket"]
        assert "Max core file size        0" in limits
        assert "Max file size             0" in limits
        assert len(list((process / "task").iterdir())) == 1
        if not any(layer.holds for layer in workers.layers):
            pytest.skip(f"this kernel has no layer: {workers.layers[0].absence}")
        for what in ("read", "remove"):
            assert attempt(workers, what, str(tmp_path / "keys.json")) == "PermissionError"
        os.kill(pid, signal.SIGKILL)
        embed(workers, tiny_bundle, encoded(photo(1)))
        assert attempt(workers, "read", "/etc/passwd") == "PermissionError"


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


def test_killed_workers_and_a_killed_server_cost_no_answer_and_no_worker_is_not_ready(
    tiny_bundle, tiny_gallery, tmp_path
) -> None:
    bundle = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    settings = Settings(bundle=bundle, galleries=(f"shop={tiny_gallery}",), search_threads=3)
    with contextlib.closing(run(create_app(settings))) as service, ThreadPoolExecutor(1) as pool:
        workers = workers_of(service)
        search_right(service, 24)
        answers = pool.submit(search_right, service, 96)
        for pid in workers.pids:  # not their successors: an image that loses two is refused
            os.kill(pid, signal.SIGKILL)
            until(lambda before=workers.restarts: workers.restarts > before or answers.done())
        answers.result()
        answers = pool.submit(search_right, service, 96)
        os.kill(fork_servers().pop(), signal.SIGKILL)
        answers.result()
        assert workers.restarts > 0
        search_right(service, 1)
        shutil.move(bundle, tmp_path / "lost")
        os.kill(fork_servers().pop(), signal.SIGKILL)
        refused: list[Any] = []

        def is_refused() -> bool:  # a worker lives a little longer than its server
            refused.append(service.search(PHOTOS[0] + next(NUMBERS).to_bytes(4, "big")))
            return bool(refused[-1].status_code == 503)

        until(is_refused)
        problem = assert_problem(refused[-1], 503, "search-unavailable")
        assert "No worker process runs" in problem["detail"]
        until(lambda: service.client.get("/ready").status_code == 503)
        checks = service.client.get("/ready").json()["checks"]
        assert "no worker process runs" in checks["model"]
        shutil.move(tmp_path / "lost", bundle)
        until(lambda: service.client.get("/ready").status_code == 200)
        search_right(service, 8)
