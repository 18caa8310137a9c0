"""Publications to a real Milvus server: indexes and their recall, and kills."""

import multiprocessing
import signal
from contextlib import closing

import numpy as np
import pytest

from kinlens.embedder.errors import InvalidParameterError, PlanError, RecallError
from kinlens.indexer.entries import Entry
from kinlens.indexer.exchange import milvus_index
from kinlens.indexer.types import SearchOptions
from tests.indexer.conftest import collections, printed, published
from tests.indexer.oracle import BUNDLE, DIM, clumped, entry
from tests.support.milvus_server import imported
from tests.support.seams import MilvusStore, set_fault_hook

QUERIES = clumped(3000)[:20]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch) -> None:
    monkeypatch.setattr("kinlens.indexer.exchange.milvus_load._SWAP_S", 0)


def shop(count: int, seed: int = 0) -> list[Entry]:
    vectors = clumped(count, seed=seed)
    return [entry(f"k{n}", v, {"n": n, "odd": n % 2 == 1}) for n, v in enumerate(vectors)]


def check_same(store: MilvusStore, entries: list[Entry]) -> None:
    """It has these items and no others, each once."""
    found = sorted(e.key for batch in store.scan() for e in batch)
    assert found == sorted(e.key for e in entries)
    assert store.size == len(entries)
    [one] = store.entries([entries[-1].key])
    assert np.array_equal(one.vector, entries[-1].vector)
    assert one.attributes == entries[-1].attributes


@pytest.mark.long
@pytest.mark.milvus
def test_an_index_reaches_its_recall_or_replaces_nothing(milvus_server, monkeypatch) -> None:
    entries = shop(3000)
    made = published(milvus_server, "indexed", entries, index="hnsw")
    with closing(made) as store:
        check_same(store, entries)
        assert "Index hnsw on Milvus, effort" in store.index_text()
        vectors = np.array([e.vector for e in entries])
        found = store.search(QUERIES, 10)
        least = np.sort(QUERIES @ vectors.T, axis=1)[:, -10] - 1e-5
        hits = [
            [hit.score >= bound for hit in best] for best, bound in zip(found, least, strict=True)
        ]
        assert np.mean(hits) > 0.95
        with pytest.raises(InvalidParameterError, match="has the index hnsw on Milvus"):
            store.search(QUERIES, 5, SearchOptions(exact=True))
        version = store.version
        with pytest.raises(PlanError, match=r"cannot build the index ivf-rabitq.*--index"):
            published(milvus_server, "indexed", shop(60), index="ivf-rabitq")
        monkeypatch.setattr(milvus_index, "TARGET_RECALL", 1.01)
        with pytest.raises(RecallError, match=r"reaches a recall of at most 1\.000"):
            published(milvus_server, "indexed", shop(1500), index="ivf-flat")
        assert store.version == version
        assert len(collections(milvus_server, "indexed")) == 1


@pytest.mark.long
@pytest.mark.milvus
def test_a_killed_publication_replaces_nothing_and_the_same_call_succeeds(milvus_server) -> None:
    before = shop(60, seed=5)
    published(milvus_server, "killed", before).close()
    process = multiprocessing.get_context("spawn").Process(
        target=publish_until_killed, args=(milvus_server.uri,)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with closing(MilvusStore.open(milvus_server.uri, "killed")) as store:
        check_same(store, before)
    with closing(published(milvus_server, "killed", shop(9000))) as store:
        check_same(store, shop(9000))


def publish_until_killed(uri: str) -> None:
    from tests.indexer.crasher import Dies

    set_fault_hook(Dies("milvus: page loaded", 2))
    imported(uri, "killed", shop(9000), dim=DIM, bundle_id=BUNDLE)


@pytest.mark.milvus
def test_the_command_takes_an_index_of_milvus_and_says_what_was_measured(
    milvus_server, run, tmp_path, gallery
) -> None:
    gallery.add(shop(1500))
    there = f"{milvus_server.uri.replace('http', 'milvus')}/commanded"
    result = run("import", gallery.path, "--out", there, "--index", "ivf-flat", "--json")
    assert printed(result)["items"] == 1500
    assert "Index ivf-flat on Milvus, effort" in result.stderr
