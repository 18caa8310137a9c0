"""Online recall: a sample of searches is repeated exactly, in the background."""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kinlens.embedder.types import Hit
from kinlens.indexer.types import SearchOptions
from tests.support.seams import recall_of
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
        (None, 1, {}),
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


def test_only_one_measurement_runs_at_a_time(start_service, gallery, photos) -> None:
    service = start_service(recall_sample=1, search_threads=1)
    gallery.gate.clear()
    for data in photos:
        assert service.search(data).status_code == 200
    assert gallery.exact == 1
    gallery.gate.set()
    until(lambda: sampled(service) == 1)


def test_a_changed_gallery_is_not_measured(start_service, gallery, photos, monkeypatch) -> None:
    service = start_service(recall_sample=1)
    gallery.gate.clear()
    service.search(photos[0])
    until(lambda: gallery.exact == 1)
    gallery.version = "changed"
    gallery.gate.set()
    new = itertools.count(1)  # another k each time, since a cached answer is not measured
    until(lambda: gallery.exact > 1 or service.search(photos[1], k=next(new)).status_code != 200)
    until(lambda: 1 <= sampled(service) == gallery.exact - 1)


@pytest.mark.parametrize(
    ("scores", "recall"),
    [
        ((0.9, 0.8, 0.8, 0.7), 1.0),
        ((), 0.0),
        ((0.9, 0.8, 0.6, 0.5), 0.5),
        ((0.9, 0.8, 0.7, 0.7), 1.0),  # equals count as equal
    ],
)
def test_recall_is_the_share_of_the_true_best(scores: tuple[float, ...], recall: float) -> None:
    exact = [Hit(number, "", score) for number, score in enumerate((0.9, 0.8, 0.8, 0.7))]
    assert recall_of([Hit(n, "", score) for n, score in enumerate(scores)], exact) == recall
