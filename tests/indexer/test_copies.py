"""Items with equal content are one candidate of the index, whatever becomes of them."""

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kinlens.indexer.bits import count_of, empty_bits, put_bits
from kinlens.indexer.checks.verify import check_files
from kinlens.indexer.entries import Entry
from kinlens.indexer.filters.tree import Equals, Range
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index import faiss as engine
from kinlens.indexer.index.copies import Copies
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.types import Grouping, SearchOptions
from tests.indexer.oracle import (
    BUNDLE,
    DIM,
    Oracle,
    assert_groups,
    assert_hits,
    entry,
    ids_of,
    units,
)

ALL = 4096
"""An effort at which a graph finds everything here."""


def signs(count: int, seed: int) -> np.ndarray:
    """Unit vectors (count, DIM) whose scores are exact, so that many are equal."""
    return np.random.default_rng(seed).choice(np.float32([-0.25, 0.25]), (count, DIM))


def made_of(draw: random.Random, images: np.ndarray, start: int, count: int) -> list[Entry]:
    """Items of these images, of which the first is shared by half of the items."""
    entries = []
    for number in range(start, start + count):
        image = 0 if draw.random() < 0.5 else draw.randrange(len(images))
        # One image in eight has two files with equal vectors, one in nine two vectors.
        file = f"{image} {number % 2 if image % 8 == 1 else 0}"
        vector = images[image] if image % 9 != 2 else signs(2, image)[number % 2]
        attributes = {"brand": f"b{draw.randrange(6)}", "price": draw.randrange(50)}
        entries.append(entry(f"key{number}", vector, attributes if number % 7 else {}, file))
    return entries


def check(
    gallery: Gallery,
    entries: Sequence[Entry],
    draw: random.Random,
    image: np.ndarray,
    is_exact: bool,
) -> None:
    """Compare searches, most of them close to an image, with a comparison of all vectors."""
    oracle, numbers = Oracle(gallery, entries), [*ids_of(gallery).values()]
    for _ in range(2 if is_exact else 8):
        query = signs(1, draw.randrange(1000))
        if draw.random() < 0.7:
            query = image.copy()
            query[0, draw.randrange(DIM)] *= -1
        options = SearchOptions(
            min_score=draw.choice([None, None, 0.3]),
            offset=draw.choice([0, 0, 3, 90]),
            distinct=draw.random() < 0.4,
            exclude=frozenset(draw.sample(numbers, draw.choice([0, 0, 1, 30]))),
            where=draw.choice([None, Equals("brand", "b3"), Range("price", below=25)]),
            exact=is_exact or draw.random() < 0.3,
            effort=ALL,
        )
        k = draw.choice([1, 5, 60])
        assert_hits(gallery.search(query, k, options)[0], oracle.hits(query[0], k, options))
        grouping = Grouping(draw.choice(["brand", "price"]), draw.choice([1, 4]))
        [groups] = gallery.search_groups(query, k, grouping, options)
        assert_groups(groups, oracle.groups(query[0], k, grouping, options))


@pytest.mark.parametrize(
    ("kind", "size", "count"), [("flat", 40, 150), ("hnsw", 40, 150), ("ivf-pq", 1200, 1800)]
)
def test_copies_come_and_go_and_searches_equal_brute_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, size: int, count: int
) -> None:
    """Items of `size` images; each step adds `count` of them."""
    monkeypatch.setattr(engine, "EXACT_BELOW", 0)
    images = signs(size, 3)
    look = partial(check, image=images[:1], is_exact=kind == "ivf-pq")
    draw = random.Random(kind)
    path = tmp_path / "gallery"
    settings = IndexSettings(kind, target_recall=0.5)
    Gallery.create(path, name="shop", bundle_id=BUNDLE, dim=DIM).close()
    entries: list[Entry] = []
    with closing(Gallery.open(path)) as gallery:
        for step in range(4):
            added = made_of(draw, images, count * step, count)
            gallery.add(added)
            entries += added
            if step % 2:
                # Also the first item of each image, which the index contains, and all of some.
                last = {e.sha256 for e in entries[40:50]}
                own = [e for e in entries if e.sha256 in last]
                for some in ([*entries[:40], *draw.sample(entries, 60)], own[::2], own[1::2]):
                    gone = {e.key for e in some}
                    gallery.remove(gone)
                    entries = [e for e in entries if e.key not in gone]
                    look(gallery, entries, draw)
                back = {item.key for item in gallery.restore([e.key for e in own[::3]])}
                entries += [e for e in own if e.key in back]
            look(gallery, entries, draw)
            gallery.compact(settings, keep_removed_s=draw.choice([0, 3600]))
            look(gallery, entries, draw)
        changed = {e.key: replace(e, attributes={"brand": "b3"}) for e in entries[:200]}
        gallery.update({key: {"brand": "b3", "price": None} for key in changed})
        entries = [changed.get(e.key, e) for e in entries]
        look(gallery, entries, draw)
    with closing(Gallery.open(path)) as again:
        look(again, entries, draw)
    check_files(path)


def test_removals_one_by_one_hide_what_all_removals_together_hide() -> None:
    draw = np.random.default_rng(4)
    for size in (1, 7, 300, 5000):
        images = draw.integers(0, [1, size, size // 3 + 1][size % 3], size)
        rows = np.argsort(images, kind="stable")
        copies = Copies.find(np.ones((size, 1), np.float32), rows, images[rows], size)
        tombstones = empty_bits(size)
        hidden = ~copies.folded(~tombstones)
        for removed in np.array_split(draw.permutation(size), 30):
            put_bits(tombstones, removed, True)
            put_bits(hidden, copies.hidden_by(removed, tombstones), True)
            assert np.array_equal(hidden, ~copies.folded(~tombstones))
        assert count_of(hidden, size) == size


def test_vectors_of_one_image_that_differ_by_rounding_become_equal(gallery: Gallery) -> None:
    vector = units(1)[0]
    rounded = vector + np.float32(1e-7)
    gallery.add([entry("first", vector, content="a"), entry("other", rounded, content="b")])
    later = [entry(f"copy{n}", rounded, content="a") for n in range(2)]
    gallery.add([*later, entry("moved", units(1, 5)[0], content="a")])
    stored = {one.key: one.vector for batch in gallery.scan() for one in batch}
    for copy in ("copy0", "copy1"):
        assert np.array_equal(stored[copy], stored["first"])
    assert not np.array_equal(stored["other"], stored["first"])
    assert np.array_equal(stored["moved"], units(1, 5)[0])


def test_an_index_that_needs_more_different_images_is_built_when_there_are_enough(
    gallery: Gallery, caplog
) -> None:
    wanted = IndexSettings("ivf-pq")
    images = units(640)
    gallery.add([entry(f"a{n}", images[n % 100], content=str(n % 100)) for n in range(700)])
    assert gallery.compact(wanted).manifest.kind == "flat"
    assert "100 vectors are too few to train the index ivf-pq" in caplog.text
    gallery.add([entry(f"b{n}", images[n], content=str(n)) for n in range(100, 640)])
    assert gallery.compact().manifest.kind == "ivf-pq"
