"""A gallery that is changed while it is searched: by threads, by processes, during compaction."""

import contextlib
import dataclasses
import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kinlens.embedder.errors import DeltaFullError, GalleryBusyError
from kinlens.indexer.catalog.database import Catalog
from kinlens.indexer.checks.verify import check_files
from kinlens.indexer.entries import Entry
from kinlens.indexer.filters.tree import Equals, Filter, Range
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index import faiss as engine
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.live import compaction
from kinlens.indexer.live.snapshot import Snapshot
from kinlens.indexer.types import Facet, SearchOptions
from tests.indexer.conftest import faults, generation_of
from tests.indexer.oracle import DIM, units
from tests.support.seams import Segment, write_backup
from tests.support.waiting import until

QUERY = units(1, 99)
ALL = 4096
"""An effort at which a graph finds everything here."""


def entries(names: range, seed: int = 0, **attributes: object) -> list[Entry]:
    vectors = units(len(names), seed + names.start)
    return [
        Entry(f"k{n}", vector, f"{seed:032x}{n:032x}", {"n": n, **attributes})
        for n, vector in zip(names, vectors, strict=True)
    ]


def keys(gallery: Gallery, where: Filter | None = None) -> set[str]:
    [hits] = gallery.search(QUERY, 10_000, SearchOptions(where=where))
    return {hit.key for hit in hits}


def test_no_search_is_beyond_the_loaded_version(gallery: Gallery, out: Path) -> None:
    with closing(Gallery.open(out)) as reader:
        for name in range(3):
            gallery.add(entries(range(name, name + 1)))
            assert reader.loaded_version != gallery.version == reader.version
            reader.search(QUERY, 3)
            assert reader.loaded_version == reader.version


@pytest.mark.parametrize("kind", ["another item", "a hit changes", "a hit is removed"])
def test_a_search_is_repeated_only_if_a_write_has_changed_one_of_its_hits(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The write comes after the vectors were compared, and before the rows of hits are read."""
    gallery.add(entries(range(40), colour="red"))
    [before] = gallery.search(QUERY, 3)
    read, compare, compared = Catalog.rows, Snapshot.nearest, Counter[str]()

    def overtaken(catalog: Catalog, ids: list[int], seq: int) -> Any:
        monkeypatch.setattr(Catalog, "rows", read)
        if kind == "another item":
            gallery.add([dataclasses.replace(entries(range(1))[0], key="new", vector=QUERY[0])])
        elif kind == "a hit changes":
            gallery.update({before[1].key: {"colour": "blue"}})
        else:
            gallery.remove([before[1].key])
        return read(catalog, ids, seq)

    def counted(snapshot: Snapshot, *arguments: Any, **options: Any) -> Any:
        compared["searches"] += 1
        return compare(snapshot, *arguments, **options)

    monkeypatch.setattr(Catalog, "rows", overtaken)
    monkeypatch.setattr(Snapshot, "nearest", counted)
    [hits] = gallery.search(QUERY, 3)
    if kind == "another item":  # acknowledged after the search began
        assert hits == before
        assert compared["searches"] == 1
        assert gallery.search(QUERY, 1)[0][0].key == "new"
    elif kind == "a hit changes":
        assert [hit.key for hit in hits] == [hit.key for hit in before]
        assert [hit.attributes["colour"] for hit in hits] == ["red", "blue", "red"]
    else:
        assert [hit.key for hit in hits[:2]] == [before[0].key, before[2].key]


def test_searches_and_facets_see_whole_changes_while_items_come_go_and_are_compacted(
    gallery: Gallery,
) -> None:
    """Each change moves ten items at once; what sees some of them sees all."""
    gallery.add(entries(range(200), round=-1))
    done, seen = threading.Event(), set[tuple[int, ...]]()

    def look() -> None:
        while not done.is_set():
            [hits] = gallery.search(QUERY, 1000)
            found = Counter(hit.attributes["round"] for hit in hits)
            facet = gallery.facets(["round"])["round"].values or ()
            seen.update(tuple(sorted(counts.values())) for counts in (found, dict(facet)))

    with ThreadPoolExecutor(3) as pool:
        looking = [pool.submit(look) for _ in range(3)]
        try:
            for number in range(15):
                moving = range(1000 + 10 * number, 1010 + 10 * number)
                gallery.add(entries(moving, round=number))
                if number % 3 == 0:
                    gallery.compact()
                gallery.remove(f"k{n}" for n in moving)
        finally:
            done.set()
        for one in looking:
            one.result()
    assert seen <= {(200,), (10, 200)}
    assert gallery.facets(["round"])["round"] == Facet(((-1, 200),))


def test_old_segments_are_removed_when_their_last_reader_closes(gallery, out) -> None:
    with closing(Gallery.open(out)) as older:
        gallery.add(entries(range(100, 105)))
        assert len(keys(older)) == 5
        gallery.remove(f"k{n}" for n in range(100, 105))
        gallery.compact()  # of nothing, so there is no segment before and after
        gallery.add(entries(range(30)))
        assert keys(older) == keys(gallery)
    gallery.compact()
    segments = generation_of(out) / "segments"
    [first] = segments.iterdir()
    reader = Gallery.open(out)
    gallery.remove(["k0"])
    gallery.update({"k3": {"n": -3}})
    assert keys(gallery, Equals("n", -3)) == {"k3"}  # a filter that is cached
    gallery.compact()
    assert "k0" not in keys(gallery)
    assert first.is_dir()  # the reader has not searched since
    assert "k0" not in keys(reader)
    until(lambda: len([*segments.iterdir()]) == 1)
    [second] = segments.iterdir()
    gallery.compact()
    [third] = set(segments.iterdir()) - {second}
    reader.close()
    assert len(keys(gallery)) == 29
    until(lambda: [*segments.iterdir()] == [third])


def test_a_segment_that_two_threads_have_opened_changes_no_answer(
    gallery, out, monkeypatch
) -> None:
    """The one that began first ends last, after items were removed."""
    gallery.add(entries(range(30)))
    gallery.compact()
    original, is_opening, may_open = Segment.open, threading.Event(), threading.Event()

    def slow(folder: Path, **options: Any) -> Segment:
        if threading.current_thread() is not threading.main_thread():
            is_opening.set()
            assert may_open.wait(60)
        return original(folder, **options)

    with closing(Gallery.open(out)) as reader, ThreadPoolExecutor(1) as pool:
        where = Range("n", 29, None)
        assert keys(reader, where) == {"k29"}
        gallery.add(entries(range(30, 32)))
        gallery.compact()
        monkeypatch.setattr(Segment, "open", slow)
        first = pool.submit(reader.refresh)
        assert is_opening.wait(60)
        gallery.add(entries(range(32, 35)))
        assert keys(reader, where) == {f"k{n}" for n in range(29, 35)}
        gallery.remove(["k33"])
        left = {"k29", "k30", "k31", "k32", "k34"}
        assert keys(reader, where) == left
        may_open.set()
        first.result()
        assert keys(reader, where) == left


def test_searches_go_on_while_a_new_segment_is_opened(gallery, out, monkeypatch) -> None:
    """Also through changes, which they see at once."""
    gallery.add(entries(range(30)))
    gallery.compact()
    gate, opened = threading.Event(), []
    original = Segment.open

    def slow(folder: Path, **options: Any) -> Segment:
        if "segment" in threading.current_thread().name:
            gate.wait(60)
            opened.append(folder.name)
        return original(folder, **options)

    with closing(Gallery.open(out)) as reader:
        assert len(keys(reader)) == 30
        monkeypatch.setattr(Segment, "open", slow)
        gallery.compact()
        gallery.add(entries(range(30, 33)))
        gallery.remove(["k1", "k31"])
        gallery.update({"k2": {"n": 7}})
        assert keys(reader) == keys(gallery)
        assert keys(reader, Equals("n", 7)) == {"k2", "k7"}
        assert (reader.facts().delta, opened) == (2, [])
        gate.set()
        until(lambda: opened and reader.facts().segment == gallery.facts().segment)
        assert keys(reader) == keys(gallery)


@pytest.mark.parametrize("is_filtered_before", [False, True])
def test_searches_go_on_while_the_segment_of_rewritten_vectors_is_opened(
    gallery, out, monkeypatch, is_filtered_before
) -> None:
    gallery.add(entries(range(30)))
    gallery.compact()
    may_open, original = threading.Event(), Segment.open

    def slow(folder: Path, **options: Any) -> Segment:
        assert may_open.wait(60)
        return original(folder, **options)

    with closing(Gallery.open(out)) as reader, ThreadPoolExecutor(1) as pool:
        gallery.remove([f"k{n}" for n in range(20)])
        left, few = {f"k{n}" for n in range(20, 30)}, {f"k{n}" for n in range(25, 30)}
        where = Range("n", 25, None)
        assert keys(reader, where if is_filtered_before else None) >= few
        old = reader.facts().segment
        gallery.compact()
        assert gallery.facts().segment.vectors != old.vectors
        monkeypatch.setattr(Segment, "open", slow)
        try:
            assert pool.submit(keys, reader).result(20) == left
            assert pool.submit(keys, reader, where).result(20) == few
            assert reader.facts().segment == old
        finally:
            may_open.set()
        until(lambda: reader.facts().segment == gallery.facts().segment)
        assert (keys(reader), keys(reader, where)) == (left, few)


@pytest.mark.parametrize("vector_type", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_changes_are_seen_while_the_segment_of_rewritten_vectors_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vector_type: Any, kind: str
) -> None:
    """Also after a second such compaction: items have other rows in each file of vectors."""
    monkeypatch.setattr(engine, "EXACT_BELOW", 0)
    path, may_open, original = tmp_path / "gallery", threading.Event(), Segment.open
    made = {"name": "shop", "bundle_id": "b" * 64, "dim": DIM, "vector_type": vector_type}

    def held(folder: Path, **options: Any) -> Segment:
        if threading.current_thread() is not threading.main_thread():
            assert may_open.wait(60)
        return original(folder, **options)

    def answers(opened: Gallery) -> list[Any]:
        found: list[Any] = [keys(opened), keys(opened, Range("n", 25, None))]
        queries = np.concatenate([QUERY, *(one.vector[None] for one in shown)])
        for given in ({}, {"distinct": True}, {"near": 0.9}):
            hits = opened.search(queries, 12, SearchOptions(effort=ALL, **given))
            found.append([[(hit.key, round(hit.score, 3)) for hit in row] for row in hits])
        options = SearchOptions(min_score=0.1, exact=True)
        return [*found, opened.facets(["n"], QUERY, options)]

    with (
        closing(Gallery.create(path, **made)) as gallery,
        closing(Gallery.open(path)) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        gallery.add(entries(range(40)))
        gallery.compact(IndexSettings(kind))
        shown = entries(range(50, 55))
        reader.refresh()
        old = reader.facts().segment
        monkeypatch.setattr(Segment, "open", held)
        try:
            for start in (50, 60):
                gallery.remove([f"k{n}" for n in range(start - 50, start - 30)])
                assert pool.submit(keys, reader).result(20) == keys(gallery)
                gallery.compact()
                gallery.add(entries(range(start, start + 5)))
                copies = [dataclasses.replace(one, key=f"c{start}-{one.key}") for one in shown[:3]]
                gallery.add([*entries(range(30, 32), seed=start), *copies])
                gallery.remove([f"k{start + 4}"])
                gallery.update({"k39": {"n": start}})
                with closing(Gallery.open(path)) as again:
                    expected = answers(again)
                assert pool.submit(answers, reader).result(20) == expected
                assert reader.facts().segment == old
        finally:
            may_open.set()
        until(lambda: reader.facts().segment == gallery.facts().segment)
        assert answers(reader) == expected


@pytest.mark.parametrize("point", ["segment: before rename", "adopt: before commit"])
def test_changes_made_during_a_compaction_are_neither_lost_nor_undone(
    gallery: Gallery, out: Path, point: str
) -> None:
    gallery.add(entries(range(30)))
    gallery.compact()
    reader = Gallery.open(out)
    assert len(keys(reader)) == 30
    happened = []

    def change(reached: str) -> None:
        if reached == point and not happened:
            happened.append(point)
            gallery.add(entries(range(30, 35)))
            gallery.remove(["k1", "k31"])
            gallery.add([dataclasses.replace(entries(range(2, 3), seed=9)[0], key="k2")])
            gallery.update({"k3": {"n": -3}})

    with faults(change):
        gallery.compact()
    assert happened
    expected = {f"k{n}" for n in range(35)} - {"k1", "k31"}
    again = Gallery.open(out)
    for opened in (gallery, reader, again):
        assert keys(opened) == expected
        assert keys(opened, Equals("n", -3)) == {"k3"}
        [hits] = opened.search(entries(range(2, 3), seed=9)[0].vector[None], 1)
        assert hits[0].key == "k2"
        assert hits[0].score == pytest.approx(1, abs=1e-5)
    again.close()
    reader.close()
    write_backup(out, out.parent / "backup")  # also without the row of the number of k31
    gallery.compact()
    check_files(out)


def test_background_compaction_begins_at_a_fifth_removed_and_searches_go_on(gallery) -> None:
    gallery.add(entries(range(500)))
    gallery.compact()
    assert gallery.needs_compaction() is None
    background = gallery.compact_in_background()
    gallery.remove(f"k{n}" for n in range(99))
    assert gallery.needs_compaction() is None
    gallery.remove(["k99"])
    until(lambda: gallery.facts().tombstones == 0)
    assert keys(gallery) == {f"k{n}" for n in range(100, 500)}
    assert background.last_error is None


def test_writes_of_another_process_are_compacted_once_they_are_noticed(gallery, out: Path) -> None:
    gallery.add(entries(range(500)))
    gallery.compact()
    background = gallery.compact_in_background()
    gallery.has_changed()
    with closing(Gallery.open(out)) as script:
        script.remove(f"k{n}" for n in range(100))
    assert gallery.has_changed()
    gallery.refresh()
    until(lambda: gallery.facts().tombstones == 0)
    assert keys(gallery) == {f"k{n}" for n in range(100, 500)}
    assert background.last_error is None


def test_a_gallery_that_waits_for_writes_is_compacted_after_the_next_one(gallery, out) -> None:
    gallery.add(entries(range(100)))
    gallery.compact()
    gallery.remove(f"k{n}" for n in range(50))
    due = gallery.needs_compaction()
    gallery.compact_in_background(after_writes=True)
    gallery.refresh()
    until(lambda: not compacting())
    assert gallery.needs_compaction() == due
    gallery.update({"k60": {"n": 1}})
    until(lambda: gallery.facts().tombstones == 0)


def test_one_gallery_is_compacted_in_the_background_at_a_time(tmp_path, monkeypatch) -> None:
    began, may_end, original = [], threading.Event(), compaction.compact

    def held(generation: Path, *arguments: Any, **options: Any) -> Any:
        began.append(generation)
        assert may_end.wait(60)
        return original(generation, *arguments, **options)

    monkeypatch.setattr("kinlens.indexer.live.upkeep.compact", held)
    monkeypatch.setattr("kinlens.indexer.live.upkeep._SMALL_DELTA", 1)
    monkeypatch.setattr(compaction, "_TURN_S", 0.01)
    with contextlib.ExitStack() as stack:
        galleries = []
        for n in range(4):
            made = Gallery.create(tmp_path / str(n), name="shop", bundle_id="b" * 64, dim=DIM)
            galleries.append(stack.enter_context(closing(made)))
            made.add(entries(range(5)))
        galleries[0].compact_in_background()
        until(lambda: began)
        for one in galleries[1:]:
            one.compact_in_background()
        galleries.pop().close()  # which waits for its turn
        assert (len(began), len(compacting())) == (1, 3)
        may_end.set()
        until(lambda: not compacting())
        assert [one.facts().delta for one in galleries] == [0, 0, 0]
        assert len(began) == 3


def compacting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "compaction"]


def test_a_failed_background_compaction_is_reported_and_the_gallery_answers(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery.add(entries(range(100)))
    gallery.compact()

    fail = Mock(side_effect=MemoryError("out of memory"))
    monkeypatch.setattr("kinlens.indexer.live.upkeep.compact", fail)
    background = gallery.compact_in_background()
    gallery.remove(f"k{n}" for n in range(50))
    until(lambda: background.last_error is not None)
    assert "out of memory" in str(background.last_error)
    assert keys(gallery) == {f"k{n}" for n in range(50, 100)}


def test_a_second_compaction_is_refused_by_the_process_of_the_first(gallery, out) -> None:
    gallery.add(entries(range(10)))
    with compaction.compaction_lock(generation_of(out), wait=False):
        with pytest.raises(GalleryBusyError, match=r"process \(\d+\) is compacting"):
            gallery.compact()
        gallery.add(entries(range(10, 12)))  # changes go on
    gallery.compact()
    assert gallery.facts().delta == 0


def test_a_writer_compacts_a_full_delta_once_and_continues(
    gallery: Gallery, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts what other writers have added, and waits for a compaction that runs already."""
    monkeypatch.setattr("kinlens.indexer.live.upkeep._SMALL_DELTA", 1)
    compacted: list[str] = []
    with (
        faults(lambda step: compacted.extend([step] * (step == "adopt: after commit"))),
        closing(Gallery.open(out)) as script,
        ThreadPoolExecutor() as pool,
    ):
        gallery.add(entries(range(20)))  # any number in one write
        script.update({"k1": {"n": -1}})
        script.remove(["k2"])
        assert compacted == []
        script.add(entries(range(20, 21)))
        assert (len(compacted), gallery.facts().delta) == (1, 1)
        assert gallery.restore(["k2"])[0].key == "k2"
        for _ in range(7):  # items that are removed take part in each search, too
            gallery.add(entries(range(30, 31)))
            gallery.remove(["k30"])
        assert (len(compacted), gallery.facts().delta) == (2, 0)
        gallery.add(entries(range(40, 60)))
        with compaction.compaction_lock(generation_of(out), wait=False):
            adding = [
                pool.submit(one.add, entries(range(n, n + 1)))
                for n, one in ((60, gallery), (61, script))
            ]
        assert [one.result().added for one in adding] == [1, 1]
        assert (len(compacted), gallery.facts().delta) == (3, 2)
        assert keys(gallery) == keys(script)


def test_a_gallery_that_refuses_writers_compacts_for_them_soon(
    gallery: Gallery, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinlens.indexer.live.upkeep._SMALL_DELTA", 1)
    gallery.when_full = "refuse"
    gallery.add(entries(range(20)))
    assert len(keys(gallery)) == 20
    gallery.remove(f"k{n}" for n in range(12))
    with pytest.raises(DeltaFullError, match=r"has 8 items .* from 8 on"):
        gallery.check_delta()
    gallery.remove(["k12"])
    assert gallery.add(entries(range(20, 21))).added == 1
    assert keys(gallery) == {f"k{n}" for n in range(13, 21)}
    with pytest.raises(DeltaFullError, match=r"has 8 items .* from 8 on"):
        gallery.add(entries(range(21, 22)))
    until(lambda: gallery.facts().delta == 0)
    assert gallery.add(entries(range(21, 22))).added == 1


def test_a_gallery_may_be_searched_and_changed_while_it_is_scanned(gallery: Gallery) -> None:
    gallery.add(entries(range(50)))
    scanned = []
    for batch in gallery.scan(10):
        scanned += batch
        gallery.remove([batch[0].key])
        assert len(keys(gallery)) == gallery.size
    assert [item.key for item in scanned] == [f"k{n}" for n in range(50)]
    gallery.compact()
    assert (gallery.size, gallery.facts().tombstones) == (45, 0)


def test_closing_does_not_wait_for_a_compaction(gallery, monkeypatch) -> None:
    began, release = threading.Event(), threading.Event()

    def endless(*_: object, **__: object) -> None:
        began.set()
        release.wait()

    monkeypatch.setattr("kinlens.indexer.live.upkeep.compact", endless)
    monkeypatch.setattr("kinlens.indexer.live.upkeep._SMALL_DELTA", 50)
    monkeypatch.setattr(compaction, "_CLOSE_S", 0.01)
    gallery.add(entries(range(100)))
    background = gallery.compact_in_background()
    began.wait()
    gallery.close()
    assert not release.is_set()
    release.set()
    assert background.last_error is None


def test_a_removal_in_steps_that_a_build_interrupts_reports_its_progress(
    gallery: Gallery, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinlens.indexer.live.writer._BATCH", 7)
    gallery.add(entries(range(20)))
    steps = itertools.count()

    def replaced(step: str) -> None:
        if step == "write: after commit" and next(steps) == 1:
            Gallery.create(out, name="g", bundle_id="b", dim=DIM).close()

    with faults(replaced), pytest.raises(GalleryBusyError, match="14 of 20 items were removed"):
        gallery.remove_where(Range("n", below=30))
    assert keys(gallery) == {f"k{n}" for n in range(14, 20)}  # what is open answers on
    with pytest.raises(GalleryBusyError, match=r"was replaced by a build.*Open it again"):
        gallery.remove(["k15"])
