"""Changes to a catalogue: all or nothing, one after the other, and never an old number again."""

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from embedder.errors import (
    GalleryCorruptError,
    GalleryWriteError,
    InvalidParameterError,
    ItemNotFoundError,
)
from indexer.catalog import database
from indexer.catalog.read import CatalogView, State
from indexer.catalog.write import CatalogWriter
from indexer.filters.text import parse_filter
from indexer.filters.tree import Equals
from indexer.types import Entry, Written
from tests.indexer.conftest import small_files
from tests.support.seams import Catalog

DIM = 4


def entry(number: int, content: int | None = None, **attributes: object) -> Entry:
    made = np.random.default_rng(number if content is None else content).normal(size=DIM)
    vector = (made / np.linalg.norm(made)).astype(np.float32)
    sha256 = f"{number if content is None else content:064x}"
    return Entry(f"key-{number}", vector, sha256, attributes, f"{number}.png", "PNG")


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    Catalog.create(tmp_path / "catalog.sqlite", DIM)
    opened = Catalog.open(tmp_path / "catalog.sqlite", writable=True)
    yield opened
    opened.close()


def add(catalog: Catalog, *entries: Entry) -> Written:
    with catalog.writing() as writer:
        return writer.add(entries)


def contents(catalog: Catalog) -> tuple[object, ...]:
    """Everything that can be seen."""
    with catalog.reading() as view:
        view.check()
        return (
            view.state(),
            view.schema(),
            [*view.items()],
            view.vectors(view.live_ids()).tobytes(),
            index_rows(view),
        )


def index_rows(view: CatalogView) -> list[tuple[object, ...]]:
    return view.connection.execute("SELECT * FROM attributes ORDER BY 1, 3").fetchall()


def test_adding_twice_changes_nothing(catalog: Catalog) -> None:
    entries = [entry(number, colour="red", price=number, sale=True) for number in range(5)]
    assert add(catalog, *entries) == Written(added=5)
    before = contents(catalog)
    assert add(catalog, *reversed(entries)) == Written(unchanged=5)
    assert add(catalog) == Written()
    assert contents(catalog) == before


def test_equal_content_with_other_attributes_keeps_number_and_vector(catalog: Catalog) -> None:
    add(catalog, entry(1, colour="red", price=1), entry(2, colour="red"))
    other = replace(entry(1, colour="blue", sale=False), vector=-entry(1).vector, path="b.jpg")
    assert add(catalog, other, entry(2, colour="red")) == Written(updated=1, unchanged=1)
    with catalog.reading() as view:
        item = view.get([1])[1]
        assert (item.attributes, item.path) == ({"colour": "blue", "sale": False}, "b.jpg")
        assert np.array_equal(view.vectors([1])[0], entry(1).vector)
        assert view.matching(parse_filter("colour = 'red'")).tolist() == [2]
        assert view.matching(parse_filter("price = 1")).tolist() == []
        assert view.matching(parse_filter("sale = false")).tolist() == [1]
        assert view.added_since(1)[0].tolist() == []
        assert view.attributes_since(1) == [(1, {"colour": "blue", "sale": False})]


def test_other_content_under_an_old_key_gets_a_new_number(catalog: Catalog) -> None:
    add(catalog, entry(1, colour="red"), entry(2))
    assert add(catalog, entry(1, content=9, colour="red"), entry(3)) == Written(added=1, replaced=1)
    with catalog.reading() as view:
        assert view.find(["key-1", "key-2", "key-3"]) == {"key-1": 3, "key-2": 2, "key-3": 4}
        assert view.state() == State(2, 3, None, 0)
        assert view.removed_since(1).tolist() == [1]
        ids, vectors = view.added_since(1)
        assert ids.tolist() == [3, 4]
        assert np.array_equal(vectors[0], entry(1, content=9).vector)
        assert view.matching(parse_filter("colour = 'red'")).tolist() == [3]


def test_a_number_is_never_given_twice(catalog: Catalog) -> None:
    seen: set[int] = set()
    for _ in range(5):
        add(catalog, entry(1), entry(2))
        with catalog.writing() as writer:
            ids = writer.live_ids().tolist()
            assert not seen & {*ids}
            seen |= {*ids}
            assert writer.remove(ids) == 2
            writer.adopt_segment("s", writer.state().seq)
    assert len(seen) == 10


def test_a_removed_item_leaves_nothing_behind(catalog: Catalog) -> None:
    add(catalog, *(entry(n, secret="x" * 50, price=n + 0.1, sale=True) for n in range(20)))
    with catalog.writing() as writer:
        assert writer.remove([1, 1, 2, 999, 2**70]) == 2
        assert writer.remove(writer.matching(Equals("sale", True))) == 18
    with catalog.reading() as view:
        assert view.state() == State(2, 0, None, 0)
        assert index_rows(view) == []
        assert view.removed_since(1).tolist() == [*range(1, 21)]
        assert view.schema() == {"secret": "text", "price": "number", "sale": "boolean"}
        view.check()


def test_one_write_has_one_seq_and_no_change_has_none(catalog: Catalog) -> None:
    with catalog.writing() as writer:
        writer.add([entry(1, a=1)])
        writer.add([entry(2, a=2)])
        writer.update({"key-1": {"a": 3}})
        writer.remove([2])
        assert writer.state() == State(1, 1, None, 0)
    before = contents(catalog)
    with catalog.writing() as writer:
        assert writer.add([entry(1, a=3)]) == Written(unchanged=1)
        assert writer.update({"key-1": {"a": 3, "none": None}}) == 0
        assert writer.remove([77]) == 0
    assert contents(catalog) == before


def test_attributes_change_alone(catalog: Catalog) -> None:
    add(catalog, entry(1, a=1, b="x"), entry(2, a=1), entry(3, a=1))
    with catalog.writing() as writer:
        changes = {"key-1": {"a": None, "c": True}, "key-2": {"a": 1}, "key-3": {"a": 2.5}}
        assert writer.update(changes) == 2
    with catalog.reading() as view:
        attributes = [item.attributes for item in view.items()]
        assert attributes == [{"b": "x", "c": True}, {"a": 1}, {"a": 2.5}]
        assert [number for number, _ in view.attributes_since(1)] == [1, 3]
        assert view.matching(parse_filter("a >= 1")).tolist() == [2, 3]
        assert view.added_since(0)[0].tolist() == [1, 2, 3]
        assert view.removed_since(0).tolist() == []


def test_an_update_of_an_unknown_key_changes_nothing(catalog: Catalog) -> None:
    add(catalog, entry(1, a=1))
    before = contents(catalog)
    changes = {"key-1": {"a": 2}, "key-2": {"a": 2}}
    with (
        catalog.writing() as writer,
        pytest.raises(ItemNotFoundError, match="no item with the key 'key-2'"),
    ):
        writer.update(changes)
    assert contents(catalog) == before


def test_a_segment_takes_over_its_tombstones(catalog: Catalog) -> None:
    add(catalog, *(entry(number) for number in range(4)))
    for number in (1, 2, 3):
        with catalog.writing() as writer:
            writer.remove([number])
    with catalog.writing() as writer:
        writer.adopt_segment("segment-a", 3)
    with catalog.writing() as writer, pytest.raises(InvalidParameterError, match="state 2"):
        writer.adopt_segment("segment-b", 2)
    with catalog.writing() as writer, pytest.raises(InvalidParameterError, match="state 5"):
        writer.adopt_segment("segment-b", 5)
    with catalog.reading() as view:
        assert view.state() == State(4, 1, "segment-a", 3)
        assert view.removed_since(0).tolist() == view.removed_since(3).tolist() == [3]


UNIT = np.array([1, 0, 0, 0], dtype=np.float32)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (entry(1), "'key-1' is there twice"),
        (replace(entry(5), vector=np.ones(3, np.float32)), r"'key-5' has the shape \(3,\)"),
        (replace(entry(5), vector=UNIT[None]), r"'key-5' has the shape \(1, 4\)"),
        (replace(entry(5), vector=UNIT * 1.01), "'key-5' has norm 1.01"),
        (replace(entry(5), vector=UNIT * 0), "'key-5' has norm 0"),
        (replace(entry(5), vector=UNIT * np.nan), "'key-5' has NaN or infinity"),
        (replace(entry(5), vector=UNIT + np.inf), "'key-5' has NaN or infinity"),
        (replace(entry(5), key=""), "'' is not a key"),
        (replace(entry(5), key="a/../b"), "is not a key"),
        (replace(entry(5), key="a\nb"), "is not a key"),
        (replace(entry(5), key="\ud800"), "is not a key"),
        (replace(entry(5), key="a" * 1025), "is not a key"),
        (replace(entry(5), sha256="F" * 64), "sha256 of 'key-5'"),
        (replace(entry(5), sha256="ab"), "sha256 of 'key-5'"),
        (replace(entry(5), path="\udcff.png"), "broken Unicode"),
        (entry(5, a="x"), "'a' is a number, and 'key-5' has 'x', a text"),
        (entry(5, a=True), "'a' is a number, and 'key-5' has True, a boolean"),
        (entry(5, b=1, c=float("nan")), "'c' of 'key-5': nan is not a finite number"),
        (entry(5, c=float("-inf")), "not a finite number"),
        (entry(5, c=2**63), "does not fit in 64 bits"),
        (entry(5, c=None), "None is not a text"),
        (entry(5, c=[1]), r"\[1\] is not a text"),
        (entry(5, c="\ud800"), "not valid Unicode"),
        (entry(5, c="x" * 4097), "4,097 characters, the limit is 4,096"),
        (entry(5, **{"": 1}), "is not an attribute name"),
        (entry(5, **{"a\n": 1}), "is not an attribute name"),
        (entry(5, **{"n" * 129: 1}), "is not an attribute name"),
    ],
)
def test_a_wrong_entry_is_named_and_nothing_is_written(
    catalog: Catalog, bad: Entry, match: str
) -> None:
    add(catalog, entry(0, a=1))
    before = contents(catalog)
    with catalog.writing() as writer, pytest.raises(InvalidParameterError, match=match):
        writer.add([entry(1, new="x"), entry(0, a=2), bad])
    assert contents(catalog) == before


def test_keys_and_texts_at_their_limits_are_stored(catalog: Catalog) -> None:
    at_limits = replace(entry(1, **{"ñ" * 128: "👟" * 4096, "\u3000": -(2**63)}), key="ü" * 1024)
    add(catalog, at_limits, replace(entry(2), key="a..b/.../c"))
    with catalog.reading() as view:
        assert view.get([1])[1].attributes == at_limits.attributes
        assert view.matching(Equals("ñ" * 128, "👟" * 4096)).tolist() == [1]


def test_a_kind_stays_when_its_items_are_gone(catalog: Catalog) -> None:
    add(catalog, entry(1, a=1))
    with catalog.writing() as writer:
        writer.remove([1])
    with pytest.raises(InvalidParameterError, match="'a' is a number"):
        add(catalog, entry(1, a="x"))


def test_kinds_of_one_call_must_agree(catalog: Catalog) -> None:
    with pytest.raises(InvalidParameterError, match="'a' is a boolean, and 'key-2' has 0"):
        add(catalog, entry(1, a=False), entry(2, a=0))
    with catalog.reading() as view:
        assert view.schema() == {}


def interrupted(writer: CatalogWriter) -> None:
    writer.add([entry(2, b="new")])
    writer.remove([1])
    raise KeyboardInterrupt


def test_an_exception_in_the_block_takes_everything_back(catalog: Catalog) -> None:
    add(catalog, entry(1, a=1))
    before = contents(catalog)
    with pytest.raises(KeyboardInterrupt), catalog.writing() as writer:
        interrupted(writer)
    assert contents(catalog) == before
    assert add(catalog, entry(2, b=3)) == Written(added=1)


def test_a_full_disk_is_named_and_the_catalogue_stays_usable(catalog: Catalog) -> None:
    add(catalog, entry(1, a=1))
    before = contents(catalog)
    many = [entry(number, text="x" * 2000) for number in range(100, 600)]
    with (
        small_files(200_000),
        pytest.raises(GalleryWriteError, match=r"Nothing was written to .*catalog.sqlite.*Free"),
    ):
        add(catalog, *many)
    assert contents(catalog) == before
    assert add(catalog, *many) == Written(added=500)
    catalog.close()
    again = Catalog.open(catalog.path)
    with again.reading() as view:
        assert view.state().size == 501
        view.check()
    again.close()


def test_a_writer_that_waits_too_long_is_told_so(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    other = Catalog.open(catalog.path, writable=True)
    with catalog.writing() as writer:
        writer.add([entry(1)])
        with pytest.raises(GalleryWriteError, match=r"locked\. Another process has been writing"):
            add(other, entry(2))
    assert add(other, entry(2)) == Written(added=1)
    other.close()


def test_damage_met_by_a_writer_is_named(catalog: Catalog) -> None:
    add(catalog, *(entry(number) for number in range(2000)))
    catalog.close()
    data = bytearray(catalog.path.read_bytes())
    data[16384 * 2 :] = b"\x55" * (len(data) - 16384 * 2)
    catalog.path.write_bytes(data)
    damaged = Catalog.open(catalog.path, writable=True)
    with pytest.raises(GalleryCorruptError, match=r"malformed\. Restore a backup"):
        add(damaged, entry(9999))
    damaged.close()


def test_threads_take_turns(catalog: Catalog) -> None:
    def write(first: int) -> None:
        for number in range(first, first + 10):
            add(catalog, entry(number))

    threads = [threading.Thread(target=write, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with catalog.reading() as view:
        assert view.state() == State(40, 40, None, 0)
        view.check()


WRITER = """
import sys
from pathlib import Path
import numpy as np
from indexer.catalog.database import Catalog
from indexer.types import Entry
catalog = Catalog.open(Path(sys.argv[1]), writable=True)
sys.stdin.readline()
unit = np.array([1, 0, 0, 0], dtype=np.float32)
for number in range(20):
    with catalog.writing() as writer:
        size = writer.state().size
        writer.add([Entry(f"{sys.argv[2]}-{number}", unit, f"{number:064x}", {"before": size})])
"""


def test_processes_take_turns(catalog: Catalog) -> None:
    command = [sys.executable, "-c", WRITER, str(catalog.path)]
    writers = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, text=True) for name in "abc"
    ]
    for process in writers:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(60) for process in writers] == [0, 0, 0]
    for process in writers:
        process.stdin.close()
    with catalog.reading() as view:
        assert view.state() == State(60, 60, None, 0)
        # Each saw the state that the one before it had left.
        assert [item.attributes["before"] for item in view.items()] == [*range(60)]
        view.check()


def test_booleans_equal_no_number_in_the_table(catalog: Catalog) -> None:
    add(catalog, entry(1, a=True, b=1, c="1"))
    with catalog.reading() as view:
        types = view.connection.execute("SELECT typeof(value) FROM attributes ORDER BY name")
        assert sorted(kind for (kind,) in types) == ["blob", "integer", "text"]


def test_an_unforeseen_error_of_sqlite_is_translated(catalog: Catalog) -> None:
    with pytest.raises(GalleryWriteError, match="UNIQUE") as caught, catalog.writing() as writer:
        writer.connection.execute("INSERT INTO vectors VALUES (1, 0, x''), (1, 0, x'')")
    assert isinstance(caught.value.__cause__, sqlite3.IntegrityError)
    with catalog.reading() as view:
        assert view.state().size == 0
