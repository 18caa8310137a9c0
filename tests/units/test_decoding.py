"""Decoding in a process: right pixels, exact errors, enforced limits, no leftovers."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kinlens.embedder import errors
from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.preprocess import ImageLimits, preprocess
from tests.support.odd_images import FORMATS
from tests.support.own_process import children
from tests.support.seams import ProcessDecoder
from tests.support.waiting import until
from tests.tiny import encoded, photo

LONG = bool(os.environ.get("KINLENS_LONG_TESTS"))
SPEC = Preprocessing(resize_px=40, crop_px=32)
LIMITS = ImageLimits()
FDS = Path("/proc/self/fd")
GOOD = encoded(photo(1))


@contextmanager
def running(memory_mb: int = 1024, timeout_s: float = 30.0) -> Iterator[Any]:
    decoder = ProcessDecoder(memory_mb, timeout_s)
    decoder.start()
    try:
        yield decoder
    finally:
        decoder.close()


def decodes(decoder: Any) -> bool:
    return np.array_equal(decoder.decode(GOOD, SPEC, LIMITS), preprocess(GOOD, SPEC))


def state(pid: int) -> str:
    """That of a process: R runs, S sleeps, Z has ended; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


def test_pixels_and_errors_equal_a_direct_call() -> None:
    cases: list[tuple[bytes, ImageLimits, Any]] = [
        (GOOD[:-40], LIMITS, None),
        (GOOD, ImageLimits(max_side_px=10), None),
        (GOOD, LIMITS, (0.0, 0.0, 1e-4, 1e-4)),
    ]
    with running() as decoder:
        for kind in FORMATS:
            data = encoded(photo(1, (320, 200)), kind)
            for box in (None, (0.25, 0.1, 0.5, 0.6)):
                pixels = decoder.decode(data, SPEC, LIMITS, box)
                assert np.array_equal(pixels, preprocess(data, SPEC, LIMITS, box))
                assert (pixels.dtype, pixels.shape) == (np.uint8, (3, 32, 32))
        for data, limits, box in cases:
            with pytest.raises(errors.KinlensError) as direct:
                preprocess(data, SPEC, limits, box)
            with pytest.raises(type(direct.value)) as remote:
                decoder.decode(data, SPEC, limits, box)
            assert str(remote.value) == str(direct.value)
        assert (decoder.restarts, decoder.kills) == (0, 0)


def test_an_upload_larger_than_every_socket_buffer_arrives() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2200, 2200, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), "BMP")
    assert len(data) > 13 * 2**20
    spec = Preprocessing(resize_px=1024, crop_px=1024)
    with running() as decoder:
        assert np.array_equal(decoder.decode(data, spec, LIMITS), preprocess(data, spec))


def test_many_kills_leave_no_zombie_and_no_file_descriptor() -> None:
    """Most are killed while they start, which is quick; some once they wait for an image."""
    before = len(list(FDS.iterdir()))
    with running() as decoder:
        for number in range(200 if LONG else 7):
            if number % 6 == 0:
                assert decodes(decoder)
            os.kill(decoder.pid, signal.SIGKILL)
            until(lambda pid=decoder.pid: state(pid) == "Z")
            decoder.close()
            decoder = ProcessDecoder(1024, 30)
            decoder.start()
        assert decodes(decoder)
        decoder.close()
    assert len(list(FDS.iterdir())) <= before


def test_a_process_inherits_no_secret_socket_or_file(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KINLENS_REDIS_URL", "redis://:secret@localhost/0")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with (tmp_path / "open").open("wb") as file, socket.create_server(("127.0.0.1", 0)) as own:
        os.set_inheritable(file.fileno(), True)
        os.set_inheritable(own.fileno(), True)
        with running() as decoder:
            assert decodes(decoder)
            process = Path(f"/proc/{decoder.pid}")
            environment = (process / "environ").read_bytes()
            command = (process / "cmdline").read_bytes()
            links = [str(link.readlink()) for link in (process / "fd").iterdir()]
            limits = (process / "limits").read_text()
            assert (process / "cwd").readlink() == Path("/")
            threads = len(list((process / "task").iterdir()))
    assert b"secret" not in environment + command
    assert b"KINLENS" not in environment
    assert b"OPENBLAS_NUM_THREADS=1" in environment
    assert sorted(link.split(":")[0] for link in links) == ["/dev/null"] * 3 + ["socket"]
    assert f"Max address space         {2**30}" in limits
    assert "Max core file size        0" in limits
    assert "Max file size             0" in limits
    assert threads == 1
