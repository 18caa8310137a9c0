"""The micro-batcher: batches form under load, and every future is settled exactly once."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from embedder.errors import BundleError, OverloadedError, SearchError
from embedder.types import Embeddings, Images
from tests.support.seams import MicroBatcher

WAIT_S = 10.0


def image(value: int) -> Any:
    return np.full((3, 2, 2), value, dtype=np.uint8)


class Model:
    """Gives each image its own value as vector; 13 is poison, 99 ends the thread."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.values: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def embed(self, images: Images) -> Embeddings:
        self.sizes.append(len(images))
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        values = images[:, 0, 0, 0]
        self.values += values.tolist()
        if 99 in values:
            raise SystemExit(1)
        if 13 in values:
            raise ValueError("poison")
        return values[:, None].astype(np.float32)


async def while_held(model: Model, act: Callable[[], Awaitable[None]]) -> None:
    """Wait until the model is inside a batch, act, then let it go."""
    assert await asyncio.to_thread(model.entered.acquire, timeout=WAIT_S)
    try:
        await act()
    finally:
        model.gate.set()


def run(test: Callable[[Model, MicroBatcher], Awaitable[None]], **options: Any) -> Model:
    model = Model()
    settings = {"batch_size": 4, "queue_size": 8, "workers": 1} | options

    async def main() -> None:
        batcher = MicroBatcher(model.embed, **settings)
        batcher.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await test(model, batcher)
        finally:
            model.gate.set()
            await batcher.stop()

    asyncio.run(main())
    return model


async def submit_all(batcher: MicroBatcher, values: list[int]) -> list[Any]:
    calls = [batcher.submit(image(value)) for value in values]
    return await asyncio.gather(*calls, return_exceptions=True)


def test_a_crowd_forms_batches_while_the_worker_is_busy_and_each_gets_its_own_vector() -> None:
    async def test(model: Model, batcher: MicroBatcher) -> None:
        model.gate.clear()
        first = asyncio.create_task(batcher.submit(image(0)))
        rest: list[asyncio.Task[Any]] = []

        async def crowd() -> None:
            rest.extend(asyncio.create_task(batcher.submit(image(n))) for n in range(1, 8))
            await asyncio.sleep(0)
            assert batcher.depth == 7

        await while_held(model, crowd)
        vectors = [await first, *(await asyncio.gather(*rest))]
        assert [float(vector[0]) for vector in vectors] == list(range(8))
        assert batcher.depth == 0

    assert run(test).sizes == [1, 4, 3]


def test_a_full_queue_is_refused_but_the_readiness_check_gets_in() -> None:
    async def test(model: Model, batcher: MicroBatcher) -> None:
        model.gate.clear()
        tasks = [asyncio.create_task(batcher.submit(image(0)))]

        async def fill() -> None:
            tasks.extend(asyncio.create_task(batcher.submit(image(n))) for n in (1, 2))
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError, match="2 images wait") as refused:
                await batcher.submit(image(3))
            assert refused.value.retry_after_s >= 1
            tasks.append(asyncio.create_task(batcher.submit(image(4), urgent=True)))
            await asyncio.sleep(0)
            assert batcher.depth == 3

        await while_held(model, fill)
        assert [float(v[0]) for v in await asyncio.gather(*tasks)] == [0, 1, 2, 4]

    run(test, queue_size=2)


def test_an_urgent_image_is_embedded_before_all_that_waits() -> None:
    async def test(model: Model, batcher: MicroBatcher) -> None:
        model.gate.clear()
        tasks = [asyncio.create_task(batcher.submit(image(0)))]

        async def queue() -> None:
            tasks.extend(asyncio.create_task(batcher.submit(image(n))) for n in range(1, 7))
            await asyncio.sleep(0)
            tasks.append(asyncio.create_task(batcher.submit(image(77), urgent=True)))
            await asyncio.sleep(0)

        await while_held(model, queue)
        await asyncio.gather(*tasks)

    assert run(test, batch_size=2).values == [0, 77, 1, 2, 3, 4, 5, 6]


def test_cancelled_calls_are_never_embedded_and_the_others_are_right() -> None:
    async def test(model: Model, batcher: MicroBatcher) -> None:
        model.gate.clear()
        tasks = [asyncio.create_task(batcher.submit(image(0)))]

        async def cancel_some() -> None:
            tasks.extend(asyncio.create_task(batcher.submit(image(n))) for n in range(1, 7))
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.sleep(0)
            assert batcher.depth == 3

        await while_held(model, cancel_some)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [float(vector[0]) for vector in results[1::2]] == [1, 3, 5]
        assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])

    assert run(test).sizes == [1, 3]


def test_only_the_bad_item_of_a_batch_fails() -> None:
    async def test(model: Model, batcher: MicroBatcher) -> None:
        results = await submit_all(batcher, [1, 13, 2, 3])
        assert isinstance(results[1], ValueError)
        assert [float(results[n][0]) for n in (0, 2, 3)] == [1, 2, 3]
        assert float((await batcher.submit(image(5)))[0]) == 5
        assert batcher.alive

    assert run(test).sizes == [4, 1, 1, 1, 1, 1]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def restarted(batcher: MicroBatcher, times: int) -> None:
    while batcher.restarts < times:
        await asyncio.sleep(0.001)


def test_when_the_last_worker_dies_everything_that_waits_fails_at_once_and_once() -> None:
    async def test(model: Model, batcher: MicroBatcher) -> None:
        model.gate.clear()
        settled: list[int] = []
        tasks = [asyncio.create_task(batcher.submit(image(99)))]

        async def queue() -> None:
            tasks.extend(asyncio.create_task(batcher.submit(image(n))) for n in range(1, 8))
            await asyncio.sleep(0)
            for number, future in enumerate(list(batcher._waiting)):
                future.add_done_callback(lambda _, n=number: settled.append(n))

        await while_held(model, queue)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [SearchError] * 8
        assert "started again" in str(results[0])
        assert sorted(settled) == list(range(7))
        await until(lambda: not batcher.alive)
        assert batcher.last_failure == "SystemExit in the model"
        assert batcher.depth == 0
        with pytest.raises(SearchError, match="has stopped"):
            await batcher.submit(image(1), urgent=True)

    assert run(test, pause_s=60).values == [99]


def test_a_dead_worker_is_started_again_and_serves() -> None:
    async def test(_: Model, batcher: MicroBatcher) -> None:
        for number in range(1, 4):
            with pytest.raises(SearchError):
                await batcher.submit(image(99))
            await restarted(batcher, number)
            assert float((await batcher.submit(image(number)))[0]) == number

    run(test, pause_s=0.001)


def test_the_pause_before_a_restart_grows_until_something_is_embedded() -> None:
    async def test(_: Model, batcher: MicroBatcher) -> None:
        pauses = [batcher._pause_s]
        for value, restarts in ((99, 1), (99, 2), (99, 3), (5, 3), (99, 4)):
            with contextlib.suppress(SearchError):
                await batcher.submit(image(value))
            await restarted(batcher, restarts)
            pauses.append(batcher._pause_s)
        assert pauses == [0.001, 0.002, 0.004, 0.008, 0.001, 0.002]

    run(test, pause_s=0.001)


def test_while_another_worker_lives_what_waits_is_served_by_it() -> None:
    async def test(model: Model, batcher: MicroBatcher) -> None:
        model.gate.clear()
        dying = asyncio.create_task(batcher.submit(image(99)))
        assert await asyncio.to_thread(model.entered.acquire, timeout=WAIT_S)
        held = asyncio.create_task(batcher.submit(image(1)))
        assert await asyncio.to_thread(model.entered.acquire, timeout=WAIT_S)
        waiting = [asyncio.create_task(batcher.submit(image(n))) for n in range(2, 6)]
        await asyncio.sleep(0)
        model.gate.set()
        with pytest.raises(SearchError):
            await dying
        assert [float((await task)[0]) for task in (held, *waiting)] == [1, 2, 3, 4, 5]
        assert batcher.alive

    run(test, workers=2, batch_size=1, pause_s=60)


def test_a_batcher_that_is_stopped_during_the_pause_stays_stopped() -> None:
    async def test(_: Model, batcher: MicroBatcher) -> None:
        with pytest.raises(SearchError):
            await batcher.submit(image(99))
        await until(lambda: not batcher.alive)
        await batcher.stop()
        await asyncio.sleep(0.05)
        assert not batcher.alive
        assert batcher.restarts == 0

    run(test, pause_s=0.02)


def test_a_model_that_gives_the_wrong_number_of_vectors_is_an_error_of_the_bundle() -> None:
    async def main() -> None:
        batcher = MicroBatcher(
            lambda images: np.zeros((len(images) + 1, 2), np.float32),
            batch_size=2,
            queue_size=2,
            workers=1,
        )
        batcher.start()
        with pytest.raises(BundleError, match="2 vectors for 1 images"):
            await batcher.submit(image(1))
        await batcher.stop()

    asyncio.run(main())


def test_stopping_fails_what_waits_instead_of_leaving_it_hanging() -> None:
    async def test(model: Model, batcher: MicroBatcher) -> None:
        model.gate.clear()
        tasks = [asyncio.create_task(batcher.submit(image(n))) for n in range(6)]
        assert await asyncio.to_thread(model.entered.acquire, timeout=WAIT_S)
        await batcher.stop()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, SearchError) for result in results)

    run(test)


def test_several_workers_embed_at_the_same_time() -> None:
    async def test(model: Model, batcher: MicroBatcher) -> None:
        model.gate.clear()
        tasks = [asyncio.create_task(batcher.submit(image(n))) for n in range(2)]
        for _ in range(2):
            assert await asyncio.to_thread(model.entered.acquire, timeout=WAIT_S)
        model.gate.set()
        assert [float(v[0]) for v in await asyncio.gather(*tasks)] == [0, 1]

    assert run(test, workers=2, batch_size=1).sizes == [1, 1]
