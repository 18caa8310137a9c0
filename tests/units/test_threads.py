"""The bounded pool refuses instead of piling up, and forgets what was cancelled."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from embedder.errors import OverloadedError
from service.concurrency import BoundedPool

ROOT = Path(__file__).parents[2]
WAIT_S = 10.0
HANG = """
import asyncio, threading
from service.concurrency import BoundedPool

async def main():
    pool = BoundedPool("file", workers=1, queue_size=0)
    try:
        await asyncio.wait_for(pool.run(threading.Event().wait), 0.05)
    except TimeoutError:
        print("timed out")
    pool.close()

asyncio.run(main())
"""


def test_a_full_pool_refuses_and_takes_again_when_work_has_ended() -> None:
    async def main() -> None:
        gate = threading.Event()
        pool = BoundedPool("decode", workers=1, queue_size=1)
        held = [asyncio.create_task(pool.run(lambda: gate.wait(WAIT_S))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="2 requests are in the decode stage"):
            await pool.run(lambda: True)
        gate.set()
        assert await asyncio.gather(*held) == [True, True]
        assert await pool.run(lambda: 7) == 7
        pool.close()

    asyncio.run(main())


def test_a_cancelled_call_that_waits_never_runs_and_gives_its_place_back() -> None:
    async def main() -> None:
        gate, ran = threading.Event(), []
        pool = BoundedPool("decode", workers=1, queue_size=1)
        first = asyncio.create_task(pool.run(lambda: gate.wait(WAIT_S)))
        second = asyncio.create_task(pool.run(lambda: ran.append("second")))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        third = asyncio.create_task(pool.run(lambda: ran.append("third")))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, third)
        assert ran == ["third"]
        pool.close()

    asyncio.run(main())


def test_an_error_of_the_work_reaches_the_caller_and_frees_the_place() -> None:
    async def main() -> None:
        pool = BoundedPool("decode", workers=1, queue_size=0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await pool.run(lambda: 1 // 0)
        pool.close()

    asyncio.run(main())


def test_urgent_work_gets_in_when_the_pool_is_full() -> None:
    async def main() -> None:
        gate = threading.Event()
        pool = BoundedPool("search", workers=1, queue_size=0)
        held = asyncio.create_task(pool.run(lambda: gate.wait(WAIT_S)))
        await asyncio.sleep(0)
        check = asyncio.create_task(pool.run(lambda: "ok", urgent=True))
        await asyncio.sleep(0)
        gate.set()
        assert await check == "ok"
        await held
        pool.close()

    asyncio.run(main())


def test_urgent_work_goes_before_all_that_waits() -> None:
    async def main() -> None:
        gate, order = threading.Event(), []
        pool = BoundedPool("search", workers=1, queue_size=9)
        calls = [asyncio.create_task(pool.run(lambda: gate.wait(WAIT_S)))]
        await asyncio.sleep(0)
        calls += [asyncio.create_task(pool.run(lambda n=n: order.append(n))) for n in range(8)]
        await asyncio.sleep(0)
        calls.append(asyncio.create_task(pool.run(lambda: order.append(99), urgent=True)))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*calls)
        assert order == [99, *range(8)]
        pool.close()

    asyncio.run(main())


def test_cancelled_calls_behind_one_that_hangs_do_not_pile_up() -> None:
    async def main() -> None:
        gate = threading.Event()
        pool = BoundedPool("file", workers=1, queue_size=2)
        held = asyncio.create_task(pool.run(lambda: gate.wait(WAIT_S)))
        await asyncio.sleep(0)
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.run(lambda: True), 0.001)
        assert pool.waiting == 0
        gate.set()
        assert await held
        pool.close()

    asyncio.run(main())


def test_calls_that_wait_are_dropped_when_the_pool_is_closed() -> None:
    async def main() -> None:
        gate, started, ran = threading.Event(), threading.Event(), []
        pool = BoundedPool("file", workers=1, queue_size=1)
        held = asyncio.create_task(pool.run(lambda: started.set() or gate.wait(WAIT_S)))
        assert await asyncio.to_thread(started.wait, WAIT_S)
        waiting = asyncio.create_task(pool.run(lambda: ran.append("waiting")))
        await asyncio.sleep(0)
        assert pool.waiting == 1
        closing = asyncio.create_task(asyncio.to_thread(pool.close))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
        assert await held
        await closing
        assert not ran

    asyncio.run(main())


def test_work_that_hangs_does_not_keep_the_process_alive() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANG], cwd=ROOT, capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "timed out\n", "")
