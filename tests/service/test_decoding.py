"""Decoding in processes: right pixels, exact errors, limits that hold, nothing left behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embedder import errors
from embedder.manifest import Preprocessing
from embedder.preprocess import ImageLimits, preprocess
from service.search.decode_wire import REFUSED, pack_error, unpack_error
from service.search.decoder import Decoder, create_decoder
from service.settings import Settings
from tests.support.seams import DecodePool, InlineDecoder
from tests.tiny import encoded, picture

SPEC = Preprocessing(resize_px=40, crop_px=32)
LIMITS = ImageLimits()
WAIT_S = 60.0
FDS = Path("/proc/self/fd")


@asynccontextmanager
async def running(decoder: Decoder) -> AsyncIterator[Any]:
    await decoder.start()
    try:
        async with asyncio.timeout(WAIT_S):
            yield decoder
    finally:
        await decoder.close()


def pool(workers: int = 1, queue_size: int = 64, memory_mb: int = 1024, timeout_s: float = 30.0):
    return running(DecodePool(workers, queue_size, memory_mb, timeout_s))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children() -> set[int]:
    own = os.getpid()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == own:
                found.add(int(entry.name))
    return found


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """48 megapixels with transparency in a small file: seconds to decode."""
    image = Image.new("RGBA", (8000, 6000), (10, 200, 30, 128))
    return encoded(image, "PNG", compress_level=1)


@pytest.fixture
def held(bomb: bytes) -> bytes:
    """An image that keeps a worker busy while something is tried."""
    return bomb


@pytest.mark.parametrize("make", [lambda: DecodePool(2, 8, 1024, 30), lambda: InlineDecoder(2, 8)])
def test_pixels_and_errors_are_those_of_a_direct_call(make: Callable[[], Decoder]) -> None:
    async def check() -> None:
        async with running(make()) as decoder:
            for kind in ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP"):
                data = encoded(picture(1, (320, 200)), kind)
                for box in (None, (0.25, 0.1, 0.5, 0.6)):
                    pixels = await decoder.decode(data, SPEC, LIMITS, box)
                    assert np.array_equal(pixels, preprocess(data, SPEC, LIMITS, box))
                    assert (pixels.dtype, pixels.shape) == (np.uint8, (3, 32, 32))
                    assert pixels.flags.c_contiguous
            cases = [
                (b"", LIMITS, None),
                (b"no image", LIMITS, None),
                (encoded(picture(1))[:-40], LIMITS, None),
                (encoded(picture(1)), ImageLimits(max_bytes=10), None),
                (encoded(picture(1)), ImageLimits(max_side_px=10), None),
                (encoded(picture(1)), LIMITS, (0.0, 0.0, 1e-4, 1e-4)),
            ]
            for data, limits, box in cases:
                with pytest.raises(errors.KinlensError) as direct:
                    preprocess(data, SPEC, limits, box)
                with pytest.raises(type(direct.value)) as remote:
                    await decoder.decode(data, SPEC, limits, box)
                assert str(remote.value) == str(direct.value)
            assert (decoder.restarts, decoder.kills, decoder.waiting) == (0, 0, 0)
            assert decoder.workers_alive >= 1

    asyncio.run(check())


def test_many_images_at_once_each_get_their_own_pixels() -> None:
    async def check() -> None:
        images = [encoded(picture(n)) for n in range(60)]
        async with pool(2) as decoder:
            results = await asyncio.gather(*(decoder.decode(d, SPEC, LIMITS) for d in images))
        for data, pixels in zip(images, results, strict=True):
            assert np.array_equal(pixels, preprocess(data, SPEC))

    asyncio.run(check())


def test_an_upload_larger_than_every_socket_buffer_arrives() -> None:
    async def check() -> None:
        noise = np.random.default_rng(0).integers(0, 256, (2200, 2200, 3), dtype=np.uint8)
        data = encoded(Image.fromarray(noise), "BMP")
        assert len(data) > 13 * 2**20
        spec = Preprocessing(resize_px=1024, crop_px=1024)
        async with pool(1) as decoder:
            for _ in range(2):
                pixels = await decoder.decode(data, spec, LIMITS)
                assert np.array_equal(pixels, preprocess(data, spec))
            assert decoder.restarts == 0

    asyncio.run(check())


def test_an_image_above_the_time_limit_is_killed_and_the_next_one_decoded(bomb: bytes) -> None:
    async def check() -> None:
        async with pool(1, timeout_s=0.05) as decoder:
            await until(lambda: decoder.workers_alive == 1)
            [first] = decoder.pids
            with pytest.raises(errors.ImageCostError, match=r"longer than 0\.05 s"):
                await decoder.decode(bomb, SPEC, LIMITS)
            assert not (decoder.kills, decoder.restarts) < (1, 1)
            await until(lambda: not alive(first))
            assert (await decoder.decode(encoded(picture(1)), SPEC, LIMITS)).shape == (3, 32, 32)
            assert decoder.pids != [first]

    asyncio.run(check())


def test_an_image_above_the_memory_limit_is_refused_and_the_next_one_decoded(bomb: bytes) -> None:
    async def check() -> None:
        async with pool(1, memory_mb=300) as decoder:
            with pytest.raises(errors.ImageCostError, match="more memory than the limit of 300 MB"):
                await decoder.decode(bomb, SPEC, LIMITS)
            good = encoded(picture(1))
            assert np.array_equal(await decoder.decode(good, SPEC, LIMITS), preprocess(good, SPEC))
            assert (decoder.kills, decoder.restarts) == (1, 1)

    asyncio.run(check())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_process_that_dies_in_the_middle_costs_its_own_image_alone(
    number: signal.Signals, held: bytes
) -> None:
    async def check() -> None:
        async with pool(2) as decoder:
            await until(lambda: decoder.workers_alive == 2)
            before = set(decoder.pids)
            doomed = asyncio.create_task(decoder.decode(held, SPEC, LIMITS))
            await asyncio.sleep(0)
            [victim] = [worker.pid for worker in decoder._workers if worker.job is not None]
            goods = [encoded(picture(n)) for n in range(10)]
            others = [asyncio.create_task(decoder.decode(d, SPEC, LIMITS)) for d in goods]
            os.kill(victim, number)
            with pytest.raises(errors.ImageCostError, match="ended in the middle"):
                await doomed
            for data, pixels in zip(goods, await asyncio.gather(*others), strict=True):
                assert np.array_equal(pixels, preprocess(data, SPEC))
            await until(lambda: decoder.workers_alive == 2)
            assert len(before & set(decoder.pids)) == 1
            assert (decoder.restarts, decoder.kills) == (1, 0)

    asyncio.run(check())


def test_a_process_that_died_while_idle_costs_no_image() -> None:
    async def check() -> None:
        async with pool(1) as decoder:
            await until(lambda: decoder.workers_alive == 1)
            [pid] = decoder.pids
            os.kill(pid, signal.SIGKILL)
            while alive(pid):
                time.sleep(0.005)  # the loop does not notice before the next image is handed over
            data = encoded(picture(1))
            assert np.array_equal(await decoder.decode(data, SPEC, LIMITS), preprocess(data, SPEC))
            assert decoder.restarts == 1

    asyncio.run(check())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_a_stop_of_the_whole_group_leave_the_processes_to_the_service(
    number: signal.Signals,
) -> None:
    async def check() -> None:
        async with pool(1) as decoder:
            await until(lambda: decoder.workers_alive == 1)
            [pid] = decoder.pids
            assert os.getsid(pid) != os.getsid(0)
            os.kill(pid, number)
            await decoder.decode(encoded(picture(1)), SPEC, LIMITS)
            assert (decoder.pids, decoder.restarts) == ([pid], 0)

    asyncio.run(check())


def test_a_full_queue_refuses_and_an_urgent_call_goes_first(held: bytes) -> None:
    async def check() -> None:
        async with pool(1, queue_size=2) as decoder:
            await until(lambda: decoder.workers_alive == 1)
            good = encoded(picture(1))
            order: list[str] = []

            async def note(name: str, call: Awaitable[Any]) -> None:
                await call
                order.append(name)

            def task(name: str, data: bytes, **options: Any) -> "asyncio.Task[None]":
                return asyncio.create_task(
                    note(name, decoder.decode(data, SPEC, LIMITS, **options))
                )

            tasks = [task("held", held), task("one", good), task("two", good)]
            await asyncio.sleep(0)
            assert decoder.waiting == 2
            with pytest.raises(errors.OverloadedError, match="2 images wait"):
                await decoder.decode(good, SPEC, LIMITS)
            tasks.append(task("urgent", good, urgent=True))
            await asyncio.gather(*tasks)
            assert order == ["held", "urgent", "one", "two"]
            assert decoder.waiting == 0

    asyncio.run(check())


def test_a_cancelled_call_leaves_the_queue_and_one_that_runs_frees_its_process(
    held: bytes,
) -> None:
    async def check() -> None:
        async with pool(1) as decoder:
            await until(lambda: decoder.workers_alive == 1)
            tasks = [
                asyncio.create_task(decoder.decode(data, SPEC, LIMITS))
                for data in (held, encoded(picture(1)), encoded(picture(2)))
            ]
            await asyncio.sleep(0)
            assert decoder.waiting == 2
            tasks[0].cancel()
            tasks[1].cancel()
            await asyncio.sleep(0)
            assert decoder.waiting == 1
            assert np.array_equal(await tasks[2], preprocess(encoded(picture(2)), SPEC))
            assert (decoder.waiting, decoder.restarts) == (0, 0)

    asyncio.run(check())


@pytest.mark.parametrize("make", [lambda: DecodePool(1, 8, 1024, 30), lambda: InlineDecoder(1, 8)])
def test_a_decoder_that_is_stopped_fails_everything_that_waits_and_takes_no_more(
    make: Callable[[], Decoder], held: bytes
) -> None:
    async def check() -> None:
        decoder = make()
        with pytest.raises(errors.SearchError, match="stopped"):
            await decoder.decode(held, SPEC, LIMITS)
        await decoder.start()
        await until(lambda: decoder.workers_alive == 1)
        calls = [asyncio.create_task(decoder.decode(held, SPEC, LIMITS)) for _ in range(4)]
        await asyncio.sleep(0.01)
        await decoder.close()
        async with asyncio.timeout(WAIT_S):
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        waited = [
            o for o in outcomes[1:] if isinstance(o, errors.SearchError | asyncio.CancelledError)
        ]
        assert len(waited) == 3
        assert (decoder.waiting, decoder.workers_alive) == (0, 0)
        with pytest.raises(errors.SearchError, match="stopped"):
            await decoder.decode(held, SPEC, LIMITS)

    asyncio.run(check())


def test_processes_that_cannot_start_fail_every_call_instead_of_hanging(monkeypatch) -> None:
    async def check() -> None:
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        async with pool(2) as decoder:
            with pytest.raises(errors.SearchError, match=r"cannot be started.*FileNotFoundError"):
                await decoder.decode(encoded(picture(1)), SPEC, LIMITS)
            monkeypatch.undo()
            await until(lambda: decoder.workers_alive >= 1)  # it is tried again
            await decoder.decode(encoded(picture(1)), SPEC, LIMITS)

    asyncio.run(check())


def test_a_process_that_ends_at_its_start_fails_every_call(monkeypatch) -> None:
    async def check() -> None:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        async with pool(1) as decoder:
            with pytest.raises(errors.SearchError, match="cannot be started"):
                await decoder.decode(encoded(picture(1)), SPEC, LIMITS)

    asyncio.run(check())


def test_two_hundred_kills_leave_no_zombie_and_no_file_descriptor(monkeypatch) -> None:
    """Most are killed while they start, which is quick; some in the middle of an image."""
    monkeypatch.setattr("service.search.decode_pool._LAST_RETRY_S", 0.0)

    async def check() -> None:
        before, others = len(list(FDS.iterdir())), children()
        data, killed = encoded(picture(1)), 0
        async with running(DecodePool(2, 64, 1024, 30)) as decoder:
            while killed < 200:
                call = None
                if killed % 40 == 0:
                    await until(lambda: decoder.workers_alive == 2)
                    call = asyncio.create_task(decoder.decode(data, SPEC, LIMITS))
                    await asyncio.sleep(0)
                await until(lambda: len(decoder.pids) == 2)
                seen = decoder.restarts
                for pid in decoder.pids:
                    os.kill(pid, signal.SIGKILL)
                await until(lambda seen=seen: decoder.restarts == seen + 2)
                killed += 2
                if call is not None:
                    await asyncio.gather(call, return_exceptions=True)
            await until(lambda: decoder.workers_alive == 2)
            assert np.array_equal(await decoder.decode(data, SPEC, LIMITS), preprocess(data, SPEC))
            await until(lambda: children() - others == set(decoder.pids))
            assert decoder.restarts == 200
        assert children() <= others
        assert len(list(FDS.iterdir())) <= before + 1

    asyncio.run(check())


PARENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from embedder.manifest import Preprocessing
from embedder.preprocess import ImageLimits
from service.search.decode_pool import DecodePool

async def main():
    pool = DecodePool(2, 8, 1024, 2.0)
    await pool.start()
    while pool.workers_alive < 2:
        await asyncio.sleep(0.01)
    data = open(sys.argv[2], "rb").read()
    spec = Preprocessing(resize_px=40, crop_px=32)
    busy = asyncio.create_task(pool.decode(data, spec, ImageLimits()))
    await asyncio.sleep(0)
    print(*pool.pids, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_processes_end_when_the_service_dies(
    number: signal.Signals, held: bytes, tmp_path: Path
) -> None:
    (tmp_path / "held.png").write_bytes(held)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PARENT, str(root), str(tmp_path / "held.png")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(number)
    end = time.monotonic() + WAIT_S
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end, "a decoding process outlived its service"
        time.sleep(0.02)


def test_a_process_has_no_secrets_no_listening_socket_and_no_file_of_the_service(
    monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KINLENS_REDIS_URL", "redis://:secret@localhost/0")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")

    async def check() -> None:
        with (tmp_path / "open").open("wb") as file, socket.create_server(("127.0.0.1", 0)) as own:
            os.set_inheritable(file.fileno(), True)
            os.set_inheritable(own.fileno(), True)
            async with pool(1) as decoder:
                await until(lambda: decoder.workers_alive == 1)
                await decoder.decode(encoded(picture(1)), SPEC, LIMITS)
                process = Path(f"/proc/{decoder.pids[0]}")
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

    asyncio.run(check())


def test_a_process_loads_nothing_that_it_does_not_need() -> None:
    code = """
    import sys
    import service.search.decode_worker
    heavy = ("fastapi", "uvicorn", "onnxruntime", "faiss", "torch", "redis", "structlog", "indexer")
    print([name for name in heavy if name in sys.modules])
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
    )
    assert done.stdout.strip() == "[]"


def test_an_answer_that_makes_no_sense_ends_its_process_and_no_other(monkeypatch) -> None:
    async def check() -> None:
        async with pool(1) as decoder:
            await until(lambda: decoder.workers_alive == 1)
            [worker] = decoder._workers
            call = asyncio.create_task(decoder.decode(encoded(picture(1)), SPEC, LIMITS))
            await asyncio.sleep(0)
            assert worker.job is not None
            worker.job.crop_px = 31  # the pixels that come do not have this size
            with pytest.raises(errors.ImageCostError):
                await call
            await decoder.decode(encoded(picture(1)), SPEC, LIMITS)
            assert decoder.restarts == 1
            assert decoder.last_failure == "answered nonsense"

    asyncio.run(check())


@pytest.mark.parametrize("content", [b"{", b"[]", b"3", b"\xff\xff"])
def test_an_error_that_cannot_be_read_ends_its_process(content: bytes) -> None:
    async def check() -> None:
        async with pool(1) as decoder:
            await until(lambda: decoder.workers_alive == 1)
            [worker] = decoder._workers
            call = asyncio.create_task(decoder.decode(encoded(picture(1)), SPEC, LIMITS))
            await asyncio.sleep(0)
            worker._take(REFUSED, np.frombuffer(content, np.uint8))
            with pytest.raises(errors.ImageCostError):
                await call
            assert decoder.restarts == 1

    asyncio.run(check())


def test_errors_come_back_as_their_class_and_only_those_of_images() -> None:
    back = unpack_error(pack_error(errors.CorruptImageError("the text")))
    assert type(back) is errors.CorruptImageError
    assert str(back) == "the text"
    for foreign in (ZeroDivisionError("x"), errors.KeyMissingError("x"), SystemError("x")):
        assert type(unpack_error(pack_error(foreign))) is RuntimeError
    assert len(pack_error(errors.ImageError("\u20ac" * 10_000))) < 4096


def test_the_settings_choose_the_decoder() -> None:
    assert isinstance(create_decoder(Settings()), DecodePool)
    assert isinstance(create_decoder(Settings(decode_isolation=False)), InlineDecoder)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before
