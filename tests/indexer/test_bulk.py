"""Loading many items at once gives the same catalogue as adding them."""

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from embedder.errors import GalleryWriteError, InvalidParameterError
from indexer.filters.text import parse_filter
from indexer.types import Entry, Written
from tests.indexer.conftest import small_files
from tests.support.seams import Catalog, State, bulk_load

DIM = 4


def entries(count: int) -> list[Entry]:
    vectors = np.random.default_rng(0).normal(size=(count, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return [
        Entry(
            f"key-{number}",
            vectors[number],
            f"{number % 7:064x}",
            {"colour": "red" if number % 2 else "grün", "price": number / 3, "sale": number < 9},
            f"{number}.png",
            "PNG",
        )
        for number in range(count)
    ]


def opened(path: Path) -> Catalog:
    return Catalog.open(path, writable=True)


def test_it_holds_what_adding_would_have_stored(tmp_path: Path) -> None:
    made = entries(5000)
    progress: list[int] = []
    assert bulk_load(tmp_path / "bulk", DIM, iter(made), progress.append) == 5000
    assert progress == [4096, 904]
    Catalog.create(tmp_path / "slow", DIM)
    bulk, slow = opened(tmp_path / "bulk"), opened(tmp_path / "slow")
    with slow.writing() as writer:
        writer.add(made)
    with bulk.reading() as left, slow.reading() as right:
        left.check()
        assert left.state() == right.state() == State(1, 5000, None, 0)
        assert left.schema() == right.schema()
        assert [*left.items()] == [*right.items()]
        assert np.array_equal(left.vectors(left.live_ids()), right.vectors(right.live_ids()))
        for text in ("colour = 'red' and price < 700", "sale = true", "not (sale = false)"):
            where = parse_filter(text)
            assert np.array_equal(left.matching(where), right.matching(where))
        tables = "SELECT type, name, sql FROM sqlite_schema ORDER BY name"
        assert [*left.connection.execute(tables)] == [*right.connection.execute(tables)]
    bulk.close()
    slow.close()


def test_it_can_be_changed_like_any_other(tmp_path: Path) -> None:
    made = entries(10)
    bulk_load(tmp_path / "c", DIM, made)
    catalog = opened(tmp_path / "c")
    with catalog.writing() as writer:
        [(journal,)] = writer.connection.execute("PRAGMA journal_mode").fetchall()
        assert journal == "wal"
        assert writer.add(made) == Written(unchanged=10)
        assert writer.add([replace(made[0], sha256="f" * 64)]) == Written(replaced=1)
        assert writer.find(["key-0"]) == {"key-0": 11}
    catalog.close()


def test_no_items_are_a_catalogue_too(tmp_path: Path) -> None:
    assert bulk_load(tmp_path / "c", DIM, []) == 0
    catalog = opened(tmp_path / "c")
    with catalog.writing() as writer:
        assert writer.state() == State(1, 0, None, 0)
        writer.add(entries(1))
        assert writer.live_ids().tolist() == [1]
    catalog.close()


@pytest.mark.parametrize("distance", [1, 4500])
def test_a_key_twice_is_named_and_leaves_no_file(tmp_path: Path, distance: int) -> None:
    made = entries(5000)
    twins = [*made[:400], *made[400 : 400 + distance], replace(made[7], sha256="f" * 64)]
    with pytest.raises(InvalidParameterError, match="Key 'key-7' is there twice"):
        bulk_load(tmp_path / "c", DIM, twins)
    assert [*tmp_path.iterdir()] == []


def test_a_wrong_entry_leaves_no_file(tmp_path: Path) -> None:
    made = entries(5000)
    made[4500] = replace(made[4500], attributes={"price": "cheap"})
    with pytest.raises(InvalidParameterError, match="'price' is a number, and 'key-4500'"):
        bulk_load(tmp_path / "c", DIM, made)
    assert [*tmp_path.iterdir()] == []


def test_an_exception_of_the_source_passes_and_leaves_no_file(tmp_path: Path) -> None:
    def broken() -> Iterator[Entry]:
        yield from entries(10)
        raise KeyError("source")

    with pytest.raises(KeyError, match="source"):
        bulk_load(tmp_path / "c", DIM, broken())
    assert [*tmp_path.iterdir()] == []


def test_a_full_disk_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    with small_files(300_000), pytest.raises(GalleryWriteError, match=r"Nothing was written.*Free"):
        bulk_load(tmp_path / "c", DIM, entries(20_000))
    assert [*tmp_path.iterdir()] == []


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("mine")
    with pytest.raises(GalleryWriteError, match="is there already"):
        bulk_load(tmp_path / "c", DIM, entries(1))
    assert (tmp_path / "c").read_text() == "mine"


def test_it_can_be_read_from_a_folder_without_a_log(tmp_path: Path) -> None:
    bulk_load(tmp_path / "c", DIM, entries(10))
    assert [file.name for file in tmp_path.iterdir()] == ["c"]
    connection = sqlite3.connect(f"{(tmp_path / 'c').as_uri()}?mode=ro&immutable=1", uri=True)
    assert connection.execute("SELECT count(*) FROM items").fetchone() == (10,)
    connection.close()
