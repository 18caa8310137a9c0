"""Removed items come back for a day, as they were; changes within a filter cross it nowhere."""

import random
import time

import pytest

from kinlens.embedder.errors import InvalidParameterError, ItemNotFoundError
from kinlens.indexer.catalog import database
from kinlens.indexer.catalog.database import catalog_view
from kinlens.indexer.checks.verify import check_files
from kinlens.indexer.entries import Entry
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.galleries import stored_contents
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.live.compaction import KEEP_REMOVED_S
from kinlens.indexer.types import SearchOptions
from tests.indexer.conftest import failure, faults, printed, usage
from tests.indexer.oracle import BUNDLE, contents, entry, units
from tests.support.waiting import until

VECTORS = units(60)


@pytest.fixture
def stocked(gallery) -> Gallery:
    """Sixty items, forty of them in a segment."""
    entries = [entry(f"k{n}", row, {"n": n, "even": n % 2 == 0}) for n, row in enumerate(VECTORS)]
    gallery.add(entries[:40])
    gallery.compact()
    gallery.add(entries[40:])
    return gallery


def catalogue_bytes(gallery: Gallery) -> int:
    """The size of the catalogue and its log."""
    return sum(file.stat().st_size for file in gallery.generation_folder.glob("catalog.sqlite*"))


def checked(gallery: Gallery) -> dict[str, tuple[object, ...]]:
    """The contents of a gallery, in which searches and filters find the same items."""
    found = contents(gallery)
    [hits] = gallery.search(units(1, 5), 1000)
    assert {hit.key for hit in hits} == found.keys()
    [even] = gallery.search(units(1, 5), 1000, SearchOptions(where=parse_filter("even = true")))
    assert {hit.key for hit in even} == {key for key in found if int(key[1:]) % 2 == 0}
    return found


def test_what_was_removed_comes_back_as_it_was_under_new_numbers(stocked) -> None:
    before, other = checked(stocked), Gallery.open(stocked.path)
    old = {item.key: item.id for item in stocked.items()}
    keys = [f"k{n}" for n in range(30, 50)]  # of the segment, and later ones
    assert stocked.remove(keys[:5]) == 5
    assert stocked.remove_items([old[key] for key in keys[5:10]]) == 5
    assert stocked.remove_where(parse_filter("n >= 40 and n < 50")) == 10
    assert checked(other).keys() == before.keys() - set(keys)
    version = stocked.version
    back = stocked.restore([*keys, "k0", "never there"])
    assert {item.key for item in back} == set(keys)
    assert min(item.id for item in back) > max(old.values())
    assert stocked.version != version
    assert checked(stocked) == checked(other) == before
    assert stocked.restore(keys) == []  # they are there
    check_files(stocked.path)
    stocked.compact()
    assert checked(stocked) == before
    other.close()


def test_a_compaction_erases_the_removed_items_that_it_has_seen(stocked) -> None:
    stocked.remove(["k1"])
    sha = [entry("k1", VECTORS[1]).sha256, entry("k2", VECTORS[2]).sha256]

    def remove_meanwhile(point: str) -> None:
        if point == "adopt: before commit":
            stocked.remove(["k2"])

    with faults(remove_meanwhile):
        stocked.compact()
    assert stored_contents(stocked.path, sha) == {sha[1]}
    assert [item.key for item in stocked.restore(["k1", "k2"])] == ["k2"]
    stocked.remove(["k2"])
    stocked.compact()
    assert stocked.restore(["k1", "k2"]) == []
    assert stored_contents(stocked.path, sha) == set()
    assert checked(stocked).keys() == {f"k{n}" for n in range(60)} - {"k1", "k2"}


def test_writers_take_turns_with_an_erasure_and_the_next_compaction_continues_one_that_died(
    stocked, monkeypatch
) -> None:
    monkeypatch.setattr(database, "_ERASED_ROWS", 7)
    keys, added = [f"k{n}" for n in range(10, 40)], []
    stocked.remove(keys)

    def die_in_the_third_batch(point: str) -> None:
        if point == "erase: after a batch":
            n = 60 + len(added)
            added.append(f"k{n}")
            stocked.add([entry(f"k{n}", VECTORS[0], {"n": n, "even": n % 2 == 0})])
            if len(added) == 3:
                raise KeyboardInterrupt

    with faults(die_in_the_third_batch), pytest.raises(KeyboardInterrupt):
        stocked.compact()
    again = Gallery.open(stocked.path)
    check_files(again.path)
    left = {f"k{n}" for n in range(60)} - set(keys)
    assert checked(again).keys() == checked(stocked).keys() == left | set(added)
    assert (again.restore(keys), again.has_removed()) == ([], False)  # their vectors were erased
    again.remove(added[:1])
    assert len(again.restore(added[:1])) == 1
    again.compact(keep_removed_s=KEEP_REMOVED_S)
    assert checked(again).keys() == left | set(added)
    again.close()
    with catalog_view(stocked.generation_folder / "catalog.sqlite") as view:
        assert not len(view.removed_since(-1))  # no row of a removed item is left


def test_an_automatic_compaction_leaves_a_day_to_undo(stocked, monkeypatch) -> None:
    keys = [f"k{n}" for n in range(30)]  # of the forty in the segment
    segment = stocked.facts().segment
    stocked.remove(keys[:10])
    stocked.compact_in_background()
    until(lambda: stocked.facts().segment != segment and not stocked.needs_compaction())
    assert stocked.restore(keys[:5]) != []
    assert len(stocked.restore(keys[:10])) == 5
    stocked.remove(keys[:1])
    later = time.time() + KEEP_REMOVED_S + 1
    monkeypatch.setattr(time, "time", lambda: later)
    stocked.remove(keys[1:])
    first = [entry("k0", VECTORS[0]).sha256]
    until(lambda: not stored_contents(stocked.path, first))
    assert len(stocked.restore(keys)) == 29
    assert not stocked.has_removed()


def test_a_removal_stores_no_vector_again_and_a_day_to_undo_outlives_rewritten_vectors(
    tmp_path,
) -> None:
    wide = units(600, 3, dim=512)
    gallery = Gallery.create(tmp_path / "wide", name="wide", bundle_id=BUNDLE, dim=512)
    gallery.add([entry(f"k{n}", row, {"n": n}) for n, row in enumerate(wide)])
    gallery.compact()
    before, keys = contents(gallery), [f"k{n}" for n in range(0, 600, 3)]
    size = catalogue_bytes(gallery)
    gallery.remove(keys)
    assert catalogue_bytes(gallery) - size < wide[::3].nbytes // 2
    gallery.compact(keep_removed_s=KEEP_REMOVED_S)
    gallery.add([entry("last", wide[0], {"n": -1})])

    def remove_meanwhile(point: str) -> None:
        if point == "adopt: before commit":
            gallery.add([entry("meanwhile", wide[1], {"n": -2})])
            gallery.remove(["k1", "last", "meanwhile"])

    gallery.remove([f"k{n}" for n in range(2, 600, 3)])
    with faults(remove_meanwhile):
        gallery.compact(keep_removed_s=KEEP_REMOVED_S)
    check_files(gallery.path)
    assert gallery.size == 199
    back = gallery.restore([*before, "last", "meanwhile"])
    assert len(back) == 403
    gallery.remove(["last", "meanwhile"])
    assert contents(gallery) == before
    gallery.close()


def test_a_key_that_has_another_item_stays_and_the_last_of_several_removed_ones_comes_back(
    stocked,
) -> None:
    stocked.remove(["k1", "k2"])
    stocked.add([entry("k1", units(1, 7)[0], {"n": 1, "even": False}, content="new")])
    stocked.add([entry("k2", units(1, 8)[0], {"n": 2, "even": True}, content="newer")])
    stocked.remove(["k2"])
    assert [item.key for item in stocked.restore(["k1", "k2"])] == ["k2"]
    new, newer = stocked.stored(["k1", "k2"]).values()
    assert {new.sha256, newer.sha256} == {
        entry("a", VECTORS[0], content=name).sha256 for name in ("new", "newer")
    }
    stocked.add([entry("k3", units(1, 9)[0], {"n": 3, "even": False}, content="replacing")])
    assert stocked.restore(["k3"]) == []  # a replaced item is not a removed one


def test_the_command_brings_items_back(run, stocked, tmp_path) -> None:
    path = stocked.path
    run("remove", path, "k1", "k2", "k3")
    shown = run("unremove", path, "k1", "nobody")
    assert "1 items restored; 58 items in the gallery." in shown.stdout
    assert "Not restored: nobody" in shown.stderr
    (tmp_path / "keys").write_text("k2\nk3\n", encoding="utf-8")
    report = printed(run("unremove", path, "--keys-from", tmp_path / "keys", "--json"))
    assert report == {"restored": 2, "left": []}
    assert stocked.size == 60
    run("remove", path, *(f"k{n}" for n in range(20)))  # which compacts
    assert stocked.facts().tombstones == 0
    assert stocked.has_removed()
    run("compact", path)  # which erases at once what was kept for a day
    assert not stocked.has_removed()
    assert "Pass either keys or --keys-from" in usage(run("unremove", path))
    assert "does not keep removed items" in failure(
        run("unremove", "milvus://localhost:1/shop", "k1")
    )


SEVEN = parse_filter("tenant = 7")
KEYS = [f"k{n}" for n in range(12)]


def outside(gallery: Gallery) -> dict[str, tuple[object, ...]]:
    return {key: one for key, one in contents(gallery).items() if not SEVEN.matches(one[1])}


def some(chance: random.Random) -> Entry:
    tenant = chance.choice([{"tenant": 7}, {"tenant": 7}, {"tenant": 8}, {}])
    made = entry(chance.choice(KEYS), VECTORS[chance.randrange(40)], tenant)
    return Entry(made.key, made.vector, made.sha256, made.attributes, keeps=chance.random() < 0.3)


def test_whatever_is_done_within_a_filter_the_items_outside_stay_as_they_are(gallery) -> None:
    """By drawing changes; those that are refused have changed nothing at all."""
    chance = random.Random(7)
    others = [f"other{n}" for n in range(4)]
    gallery.add(entry(key, VECTORS[n], {"tenant": 8, "n": n}) for n, key in enumerate(others))
    gallery.add([entry("k0", VECTORS[9], {"tenant": 8}), entry("gone", VECTORS[8], {"tenant": 8})])
    gallery.remove(["gone"])
    before, done, refused = outside(gallery), 0, 0
    ways = {
        "add": lambda: gallery.add([some(chance), some(chance)], within=SEVEN),
        "update": lambda: gallery.update(
            {chance.choice([*KEYS, *others]): {"tenant": chance.choice([7, 8, None]), "n": 1}},
            SEVEN,
        ),
        "where": lambda: gallery.update_where(
            parse_filter("tenant = 7"), {"tenant": chance.choice([7, 7, 8])}, SEVEN
        ),
        "remove": lambda: gallery.remove([chance.choice([*KEYS, *others])], within=SEVEN),
        "number": lambda: gallery.remove_items([chance.randrange(60)], SEVEN),
        "restore": lambda: gallery.restore([chance.choice(KEYS), "gone", *others], SEVEN),
    }
    for _ in range(250):
        inside = {key: item.attributes for key, item in gallery.stored(KEYS).items()}
        try:
            ways[chance.choice([*ways])]()
            done += 1
        except (InvalidParameterError, ItemNotFoundError):
            refused += 1
            now = {key: item.attributes for key, item in gallery.stored(KEYS).items()}
            assert now == inside
        assert outside(gallery) == before
    assert done > 80
    assert refused > 40
