"""The catalogue: what went in comes out, and damage is noticed."""

import gc
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from embedder.errors import GalleryCorruptError
from indexer.catalog import Catalog, Item, write_catalog

ATTRIBUTES = {'Farbe, "hell"': "grün 'n' blau, \\ \n \u2028", "emoji": "👟", "empty": ""}


def item(number: int) -> Item:
    return Item(number, f"key-{number}", f"folder/ü {number}.png", "0" * 64, ATTRIBUTES, "PNG")


def written(tmp_path: Path, count: int = 3) -> Path:
    path = tmp_path / "cata log#?%41.sqlite"
    write_catalog(path, (item(number) for number in range(count)))
    return path


def test_items_come_back_as_they_were_written(tmp_path: Path) -> None:
    catalog = Catalog.open(written(tmp_path))
    assert catalog.count() == 3
    assert catalog.get([2, 0]) == {0: item(0), 2: item(2)}
    assert list(catalog.items()) == [item(0), item(1), item(2)]
    catalog.close()


def test_items_come_in_pages_without_gaps(tmp_path: Path) -> None:
    catalog = Catalog.open(written(tmp_path, 25))
    assert [i.id for i in catalog.items(page_size=10)] == list(range(25))
    catalog.close()


def test_unknown_numbers_are_left_out_and_many_can_be_asked_for(tmp_path: Path) -> None:
    catalog = Catalog.open(written(tmp_path))
    assert set(catalog.get(range(-5, 100_000))) == {0, 1, 2}
    assert catalog.get([]) == {}
    catalog.close()


def test_a_key_can_be_used_once_only(tmp_path: Path) -> None:
    twins = [item(0), Item(1, "key-0", "x", "0" * 64, {}, "PNG")]
    with pytest.raises(sqlite3.IntegrityError, match="key"):
        write_catalog(tmp_path / "c", twins)


def test_an_open_catalogue_cannot_be_written(tmp_path: Path) -> None:
    catalog = Catalog.open(written(tmp_path))
    with pytest.raises(GalleryCorruptError, match="readonly"):
        catalog._query("DELETE FROM items")
    catalog.close()


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    catalog = Catalog.open(written(tmp_path, 100))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: catalog.get([number])[number].key, range(100)))
    assert found == [f"key-{number}" for number in range(100)]
    catalog.close()


def test_each_thread_has_its_own_connection_that_is_closed_with_it(tmp_path: Path) -> None:
    catalog = Catalog.open(written(tmp_path))
    seen = [catalog._connection()]
    thread = threading.Thread(target=lambda: seen.append(catalog._connection()))
    thread.start()
    thread.join()
    gc.collect()
    assert seen[0] is not seen[1]
    assert seen[0].execute("SELECT 1").fetchone() == (1,)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        seen[1].execute("SELECT 1")
    catalog.close()


def test_closing_closes_the_connections_of_all_threads(tmp_path: Path) -> None:
    catalog = Catalog.open(written(tmp_path))
    done, seen = threading.Event(), []

    def read() -> None:
        seen.append(catalog._connection())
        done.wait(10)

    thread = threading.Thread(target=read)
    thread.start()
    while not seen:
        thread.join(0.01)
    catalog.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        seen[0].execute("SELECT 1")
    done.set()
    thread.join()


def test_a_missing_catalogue_is_named(tmp_path: Path) -> None:
    with pytest.raises(GalleryCorruptError, match=r"gone is missing. Build"):
        Catalog.open(tmp_path / "gone")


def test_a_file_that_is_no_catalogue_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(GalleryCorruptError, match="cannot be read as a catalogue"):
        Catalog.open(path)


def test_a_truncated_catalogue_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, 500)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(GalleryCorruptError, match="Build the gallery again"):
        Catalog.open(path)


def test_a_damaged_page_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path, 500)
    data = bytearray(path.read_bytes())
    data[4096 * 3 : 4096 * 4] = bytes(4096)
    path.write_bytes(data)
    with pytest.raises(GalleryCorruptError, match="Build the gallery again"):
        Catalog.open(path)


def test_a_catalogue_of_another_schema_is_refused_by_both_numbers(tmp_path: Path) -> None:
    path = written(tmp_path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(GalleryCorruptError, match="schema 7, this version reads 1"):
        Catalog.open(path)
