"""Decoding in a process: right pixels, exact errors, no leftovers, and a sandbox.

Each layer is tested alone, so none hides a fault of the other; and no layer at all, to show that
each attempt would succeed.
"""

import os
import re
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kinlens.embedder import errors
from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.preprocess import ImageLimits, preprocess
from tests.support.hostile import START, attempt
from tests.support.odd_images import FORMATS, colour_spaces
from tests.support.own_process import children, command_of
from tests.support.seams import ForkServer, Workers, sandbox, spawn
from tests.support.waiting import until
from tests.tiny import encoded, photo

SPEC = Preprocessing(resize_px=40, crop_px=32)
LIMITS = ImageLimits()
FDS = Path("/proc/self/fd")
GOOD = encoded(photo(1))
KILLS = 200 if os.environ.get("KINLENS_LONG_TESTS") else 40


@contextmanager
def running(memory_mb: int = 1024, timeout_s: float = 30.0) -> Iterator[Any]:
    """Workers that only decode; a test uses one at a time."""
    workers = Workers(ForkServer(memory_mb, timeout_s), timeout_s, 4)
    workers.start()
    try:
        yield workers
    finally:
        workers.close()


def pid_of(workers: Any) -> int:
    [pid] = workers.pids
    return int(pid)


def server_of(workers: Any) -> int:
    [server] = [pid for pid in children() if pid_of(workers) in children(pid)]
    return server


def assert_decodes(decoder: Any, kinds: Sequence[str] = ("JPEG",)) -> None:
    for kind in kinds:
        data = encoded(photo(1, (320, 200)), kind)
        expected = preprocess(data, SPEC, LIMITS)
        assert np.array_equal(decoder.decode(data, SPEC, LIMITS)[0], expected), kind


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
    noise = np.random.default_rng(0).integers(0, 256, (2200, 2200, 3), dtype=np.uint8)
    large = encoded(Image.fromarray(noise), "BMP")  # larger than every buffer of a socket
    with running() as decoder:
        assert np.array_equal(decoder.decode(large, SPEC, LIMITS)[0], preprocess(large, SPEC))
        for kind in FORMATS:
            data = encoded(photo(1, (320, 200)), kind)
            boxes = None, (0.25, 0.1, 0.5, 0.6)
            for box, pixels in zip(boxes, decoder.decode(data, SPEC, LIMITS, boxes), strict=True):
                assert np.array_equal(pixels, preprocess(data, SPEC, LIMITS, box))
                assert (pixels.dtype, pixels.shape) == (np.uint8, (3, 32, 32))
        wide = colour_spaces()["prophoto-JPEG"]
        shown, stored = (
            decoder.decode(wide, spec, LIMITS)[0]
            for spec in (SPEC, SPEC.model_copy(update={"colour": "stored"}))
        )
        assert np.array_equal(shown, preprocess(wide, SPEC))
        assert np.abs(shown.astype(int) - stored).mean() > 5
        for data, limits, box in cases:
            with pytest.raises(errors.KinlensError) as direct:
                preprocess(data, SPEC, limits, box)
            with pytest.raises(type(direct.value)) as remote:
                decoder.decode(data, SPEC, limits, [box])
            assert str(remote.value) == str(direct.value)
        assert (decoder.restarts, decoder.kills) == (0, 0)


def test_kills_leave_no_zombie_and_no_file_descriptor() -> None:
    before = len(list(FDS.iterdir()))
    with running() as decoder:
        for _ in range(KILLS):
            os.kill(pid_of(decoder), signal.SIGKILL)
            assert_decodes(decoder)
        assert decoder.restarts == KILLS
        assert children(server_of(decoder)) == {pid_of(decoder)}
    assert len(list(FDS.iterdir())) <= before


def test_a_process_inherits_no_secret_socket_or_file(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KINLENS_REDIS_URL", "redis://:secret@localhost/0")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with (tmp_path / "open").open("wb") as file, socket.create_server(("127.0.0.1", 0)) as own:
        os.set_inheritable(file.fileno(), True)
        os.set_inheritable(own.fileno(), True)
        with running() as decoder:
            assert_decodes(decoder)
            process = Path(f"/proc/{pid_of(decoder)}")
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
    [most] = re.findall(r"Max address space +(\d+)", limits)
    assert 2**30 < int(most) < 2**31, "that of the fork server, and 1,024 MB"
    assert "Max core file size        0" in limits
    assert "Max file size             0" in limits
    assert threads == 1


ALL = ("landlock", "seccomp")
HEADERS = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}
SECCOMP_ONLY = ("new socket", "fork")
SINCE = {"connect": 4, "signal parent": 6}
"""The version of Landlock that has a right over this; it has none over the others of ALL."""


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[list[tuple[Any, ...]]]:
    """What a hostile process tries; the last attempt removes `keys.json`."""
    keys = tmp_path / "keys.json"
    keys.write_text("{}")
    read = [("read", name) for name in ("/etc/passwd", str(keys), "/proc/self/environ")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield [
            *(("connect", server.getsockname()[1]), ("new socket",), *read, ("list", "/")),
            *(("memory of parent",), ("write", str(tmp_path / "new")), ("execute",)),
            *(("fork",), ("signal parent",), ("remove", str(keys))),
        ]


@contextmanager
def hostile(
    monkeypatch: Any, layers: Sequence[str] = ALL, fault: str = "", restarts: int = 0
) -> Iterator[Any]:
    """A hostile worker in these layers."""
    monkeypatch.setattr(spawn, "CODE", START.format(layers=tuple(layers), fault=fault))
    with running() as decoder:
        assert_decodes(decoder)
        yield decoder
        assert_decodes(decoder)
        assert decoder.restarts == restarts


def test_without_a_layer_every_attempt_succeeds(monkeypatch, attempts, tmp_path) -> None:
    with hostile(monkeypatch, ()) as decoder:
        assert not decoder.layers
        reported = [attempt(decoder, *one) for one in attempts]
    assert reported == ["done"] * len(reported)
    assert not (tmp_path / "keys.json").exists()


@pytest.mark.parametrize("name", ALL)
def test_each_layer_refuses_every_attempt(monkeypatch, attempts, tmp_path, name: str) -> None:
    with hostile(monkeypatch, [name]) as decoder:
        [layer] = decoder.layers
        if not layer.holds:
            pytest.skip(f"{name} is absent here: {layer.absence}")
        refused = [one for one in attempts if refuses(name, one[0])]
        reported = {one: attempt(decoder, *one) for one in refused}
    assert set(reported.values()) == {"PermissionError"}, reported
    assert len(reported) >= (8 if name == "landlock" else 12)
    assert (tmp_path / "keys.json").exists()
    assert not (tmp_path / "new").exists()


def refuses(layer: str, what: str) -> bool:
    """Whether this layer of this kernel refuses the attempt."""
    if layer == "seccomp":
        return True
    return what not in SECCOMP_ONLY and sandbox.landlock_version() >= SINCE.get(what, 1)


def test_a_replacement_enters_the_same_layers(monkeypatch, attempts, tmp_path) -> None:
    with hostile(monkeypatch, restarts=1) as decoder:
        layers = decoder.layers
        if not any(layer.holds for layer in layers):
            pytest.skip(f"this kernel has no layer: {layers[0].absence}")
        code = START.format(layers=(), fault="")  # none if it were rehearsed
        monkeypatch.setattr(spawn, "CODE", code)
        worker = pid_of(decoder)
        os.kill(server_of(decoder), signal.SIGKILL)
        until(lambda: not command_of(worker))
        assert_decodes(decoder)
        assert attempt(decoder, "read", str(tmp_path / "keys.json")) == "PermissionError"
        assert decoder.layers == layers


def test_a_layer_that_is_absent_or_prevents_decoding_is_not_entered(monkeypatch) -> None:
    with hostile(monkeypatch, fault="lacking") as decoder:
        assert [layer.holds for layer in decoder.layers] == [False, False]
        assert "Use Linux 5.13" in decoder.layers[0].absence
        assert "CONFIG_SECCOMP_FILTER" in decoder.layers[1].absence
        assert_decodes(decoder, FORMATS)
    with hostile(monkeypatch, fault="foreign") as decoder:
        [absence] = [layer.absence for layer in decoder.layers if layer.name == "seccomp"]
        assert "No image can be decoded in it" in absence


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_of_the_system_calls_are_those_of_the_kernel(machine: str) -> None:
    header = Path("/usr/include", HEADERS[machine])
    if not header.exists():
        pytest.skip(f"{header} is absent here: install linux-libc-dev on Debian for x86_64")
    lines = [line.split() for line in header.read_text().splitlines()]
    numbers = {
        re.sub("__NR(3264)?_", "", name): number
        for define, name, number in (line for line in lines if len(line) == 3)
        if define == "#define" and number.isdigit()
    }
    words = sandbox.ALLOWED_CALLS.split()
    column = 1 + [*HEADERS].index(machine)
    for name, number in zip(words[::3], words[column::3], strict=True):
        assert number == numbers.get(name, "-"), name
