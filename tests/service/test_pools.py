"""The bounded pool refuses instead of piling up, and forgets what was cancelled."""

import asyncio
import threading

import pytest

from embedder.errors import OverloadedError
from service.pools import BoundedPool

WAIT_S = 10.0


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


def test_unbounded_work_gets_in_when_the_pool_is_full() -> None:
    async def main() -> None:
        gate = threading.Event()
        pool = BoundedPool("search", workers=1, queue_size=0)
        held = asyncio.create_task(pool.run(lambda: gate.wait(WAIT_S)))
        await asyncio.sleep(0)
        check = asyncio.create_task(pool.run(lambda: "ok", bounded=False))
        await asyncio.sleep(0)
        gate.set()
        assert await check == "ok"
        await held
        pool.close()

    asyncio.run(main())
