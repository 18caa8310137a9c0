"""Single flight: shared work, independent callers."""

import asyncio

import pytest

from service.search.single_flight import SingleFlight


class Work:
    def __init__(self) -> None:
        self.starts = 0
        self.cancelled = 0
        self.release = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.starts += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return self.starts


def test_equal_calls_at_the_same_time_run_once_and_later_ones_anew() -> None:
    async def main() -> None:
        work, flights = Work(), SingleFlight[int]()
        calls = [asyncio.create_task(flights.run("a", work)) for _ in range(5)]
        other = asyncio.create_task(flights.run("b", work))
        await asyncio.sleep(0)
        work.release.set()
        assert len(set(await asyncio.gather(*calls))) == 1
        await other
        assert work.starts == 2
        await flights.run("a", work)
        assert work.starts == 3

    asyncio.run(main())


def test_a_caller_that_leaves_does_not_take_the_others_along() -> None:
    async def main() -> None:
        work, flights = Work(), SingleFlight[int]()
        calls = [asyncio.create_task(flights.run("a", work)) for _ in range(3)]
        await asyncio.sleep(0)
        calls[0].cancel()
        await asyncio.sleep(0)
        work.release.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert results[1:] == [1, 1]
        assert work.cancelled == 0

    asyncio.run(main())


def test_the_last_caller_that_leaves_cancels_the_work_and_the_next_one_starts_afresh() -> None:
    async def main() -> None:
        work, flights = Work(), SingleFlight[int]()
        calls = [asyncio.create_task(flights.run("a", work)) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        work.release.set()
        assert await flights.run("a", work) == 2
        assert work.cancelled == 1

    asyncio.run(main())


def test_a_failure_reaches_every_caller_and_is_not_remembered() -> None:
    async def main() -> None:
        work, flights = Work(), SingleFlight[int]()
        work.error = ValueError("no")
        calls = [asyncio.create_task(flights.run("a", work)) for _ in range(2)]
        work.release.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [ValueError, ValueError]
        work.error = None
        assert await flights.run("a", work) == 2

    asyncio.run(main())


def test_the_error_of_abandoned_work_is_not_reported_as_forgotten() -> None:
    problems: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: problems.append(context)
        )
        work, flights = Work(), SingleFlight[int]()
        work.error = ValueError("no")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await flights.run("a", work)
        work.release.set()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert problems == []
