"""Several threads share the calls of a model: right vectors, and a bad image fails alone."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tests.support.seams import Batcher

WAIT_S = 10.0
BAD = 13


class Model:
    """The vector of an image is its first pixel; calls wait for `gate`, and 13 is refused."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.batches: list[list[int]] = []

    def embed(self, images: Any) -> Any:
        values = images[:, 0, 0, 0]
        self.batches.append(values.tolist())
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        if BAD in values:
            raise ValueError("a bad image")
        return values.astype(np.float32)[:, np.newaxis]


def images(*values: int) -> Any:
    return np.stack([np.full((3, 2, 2), value, dtype=np.uint8) for value in values])


def crowd(model: Model, batcher: Batcher, values: list[int], until: Any) -> list[Any]:
    """What each of many threads gets, all of which wait while the first call is held."""
    with ThreadPoolExecutor(len(values) + 1) as threads:
        first = threads.submit(batcher.embed, images(0))
        assert model.entered.acquire(timeout=WAIT_S)
        calls = [threads.submit(batcher.embed, images(value)) for value in values]
        until(lambda: batcher.waiting == len(values))
        model.gate.set()
        assert first.result() == [[0]]
        return [call.exception() or call.result().item() for call in calls]


def test_what_waits_is_embedded_in_one_call_and_each_gets_its_own_vector(until) -> None:
    model = Model()
    batcher = Batcher(model.embed, batch_size=8, at_once=1)
    values = list(range(20, 30))
    assert crowd(model, batcher, values, until) == values
    assert [len(batch) for batch in model.batches] == [1, 8, 2]


def test_only_the_bad_image_of_a_call_fails(until) -> None:
    model = Model()
    batcher = Batcher(model.embed, batch_size=8, at_once=1)
    *good, bad = crowd(model, batcher, [20, 21, 22, BAD], until)
    assert good == [20, 21, 22]
    assert isinstance(bad, ValueError)


def test_many_images_of_one_caller_are_cut_into_calls_of_the_batch_size() -> None:
    model = Model()
    model.gate.set()
    found = Batcher(model.embed, 2, 1).embed(images(1, 2, 3, 4, 5))
    assert found.ravel().tolist() == [1, 2, 3, 4, 5]
    assert model.batches == [[1, 2], [3, 4], [5]]
