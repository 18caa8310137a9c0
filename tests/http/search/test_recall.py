"""Online recall: a sample of searches is repeated exactly, in the background."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kinlens.indexer.types import SearchOptions
from tests.support.servers import WAIT_S, FakeGallery
from tests.support.waiting import until


class Approximate(FakeGallery):
    """Misses its best item unless it is asked to be exact; an exact search waits for `gate`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exact = 0
        self.kind: str | None = "hnsw"
        self.gate = threading.Event()
        self.gate.set()

    def facts(self) -> Any:
        return SimpleNamespace(segment=self.kind and SimpleNamespace(kind=self.kind))

    def search(self, queries: Any, k: int, options: SearchOptions | None = None) -> Any:
        options = options or SearchOptions()
        if options.exact:
            self.exact += 1
            assert self.gate.wait(WAIT_S)
            return super().search(queries, k, options)
        return super().search(queries, k, replace(options, offset=options.offset + 1))


@pytest.fixture
def gallery(embedder, photos) -> Iterator[Approximate]:
    found = Approximate(embedder, photos)
    yield found
    found.gate.set()


def sampled(service: Any) -> float:
    return service.metric("kinlens_online_recall_count", gallery="shop")


def test_one_in_n_searches_is_measured(start_service, gallery, photos) -> None:
    service = start_service(recall_sample=3)
    for number in range(9):
        service.search(photos[number], k=4)
        until(lambda number=number: sampled(service) == (number + 1) // 3)
    assert gallery.exact == 3
    total = service.metric("kinlens_online_recall_sum", gallery="shop")
    assert total == pytest.approx(3 * 3 / 4)  # of four true ones the best is missing


@pytest.mark.parametrize(
    ("kind", "sample", "fields"),
    [
        ("flat", 1, {}),
        ("hnsw", 0, {}),
        ("hnsw", 1, {"exact": "true"}),
        ("hnsw", 1, {"diversity": "0.1"}),  # in another order than that of the scores
    ],
)
def test_exact_search_is_not_measured(start_service, gallery, photos, kind, sample, fields) -> None:
    service = start_service(recall_sample=sample)
    gallery.kind = kind
    for data in (*photos[:4], photos[0]):  # the last from the cache
        service.search(data, **fields)
    until(lambda: not service.runtime.sampler.is_running)
    assert gallery.exact == (4 if "exact" in fields else 0)
    assert sampled(service) == 0
