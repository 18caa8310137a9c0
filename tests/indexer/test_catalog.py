"""The catalogue: what a reader sees, who may open it, and how damage is met."""

import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from embedder.errors import (
    FilterError,
    GalleryCorruptError,
    GalleryError,
    GalleryWriteError,
    ItemNotFoundError,
)
from indexer.filters.text import parse_filter
from indexer.types import Entry, Item
from tests.support.seams import Catalog, State, bulk_load

DIM = 8
ATTRIBUTES = {
    'Farbe, "hell"': "grün 'n' blau, \\ \n \u2028 \0",
    "emoji": "👟",
    "empty": "",
    "price": 0.1 + 0.2,
    "stock": 2**63 - 1,
    "sale": True,
    "new": False,
}


def vector(number: int) -> np.ndarray:
    made = np.random.default_rng(number).normal(size=DIM)
    return (made / np.linalg.norm(made)).astype(np.float32)


def entry(number: int, **attributes: object) -> Entry:
    path = f"folder/ü {number}.png"
    return Entry(f"key-{number}", vector(number), f"{number:064x}", attributes, path, "PNG")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "cata log#?%41.sqlite"
    Catalog.create(made, DIM)
    return made


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    opened = Catalog.open(path, writable=True)
    with opened.writing() as writer:
        writer.add([entry(number, **ATTRIBUTES) for number in range(3)])
    yield opened
    opened.close()


def filled(catalog: Catalog, count: int) -> None:
    with catalog.writing() as writer:
        writer.add([entry(number) for number in range(3, count)])


def test_items_come_back_as_they_were_written(catalog: Catalog) -> None:
    items = [
        Item(n + 1, f"key-{n}", f"folder/ü {n}.png", f"{n:064x}", ATTRIBUTES, "PNG")
        for n in range(3)
    ]
    with catalog.reading() as view:
        assert [*view.items()] == items
        assert view.get([3, 1]) == {1: items[0], 3: items[2]}
        kinds = [type(value) for value in view.get([1])[1].attributes.values()]
        assert kinds == [type(value) for value in ATTRIBUTES.values()]
        assert view.find(["key-2", "key-0", "none"]) == {"key-2": 3, "key-0": 1}
        assert view.content([f"{2:064x}", "f" * 64]) == {f"{2:064x}": 3}
        assert view.schema()["sale"] == "boolean"
        assert view.dim == DIM
        view.check()


def test_vectors_come_back_bit_for_bit_in_the_order_asked_for(catalog: Catalog) -> None:
    filled(catalog, 25)
    with catalog.reading() as view:
        asked = [25, 3, 3, 1]
        expected = np.stack([vector(number - 1) for number in asked])
        assert view.vectors(asked).tobytes() == expected.tobytes()
        assert view.vectors([]).shape == (0, DIM)
        with pytest.raises(GalleryCorruptError, match="item 26 has no vector"):
            view.vectors([1, 26])


def test_pages_have_no_gaps(catalog: Catalog) -> None:
    filled(catalog, 25)
    with catalog.reading() as view:
        assert [item.id for item in view.items(batch=10)] == [*range(1, 26)]
        batches = [*view.iter_vectors(batch=10)]
        assert [len(ids) for ids, _ in batches] == [10, 10, 5]
        ids = np.concatenate([ids for ids, _ in batches])
        vectors = np.concatenate([vectors for _, vectors in batches])
        assert ids.tolist() == view.live_ids().tolist() == [*range(1, 26)]
        assert np.array_equal(vectors, view.vectors(ids))


def test_unknown_numbers_and_keys_are_left_out(catalog: Catalog) -> None:
    with catalog.reading() as view:
        assert set(view.get(range(-5, 50_000))) == {1, 2, 3}
        assert view.get([]) == {}
        assert view.get([2**70]) == {}
        assert view.find(["key-0\0tail", "\ud800", "", "x" * 5000]) == {}
        assert view.content([]) == {}


def test_an_empty_catalogue_answers(tmp_path: Path) -> None:
    Catalog.create(tmp_path / "c", DIM)
    catalog = Catalog.open(tmp_path / "c")
    with catalog.reading() as view:
        assert view.state() == State(0, 0, None, 0)
        assert [*view.items()] == [*view.iter_vectors()] == []
        assert view.live_ids().tolist() == []
        assert view.added_since(0)[1].shape == (0, DIM)
        with pytest.raises(FilterError, match="No item of this gallery has attributes"):
            view.matching(parse_filter("a = 1"))
        view.check()
    catalog.close()


def test_few_matches_are_found_as_many_are(catalog: Catalog) -> None:
    with catalog.writing() as writer:
        writer.add([entry(n, half=n % 2 == 0, n=n) for n in range(10, 5010)])
    with catalog.reading() as view:
        for text in ("half = true and n < 3000", "n < 100 and half = true", "n >= 10 and n < 20"):
            where = parse_filter(text)
            expected = [item.id for item in view.items() if where.matches(item.attributes)]
            assert view.matching(where).tolist() == expected


def test_a_reader_keeps_its_state_while_others_write(catalog: Catalog) -> None:
    with catalog.reading() as view:
        before = view.state()
        with catalog.writing() as writer:
            writer.remove([1])
            writer.add([entry(7, price=3.0)])
        assert view.state() == before
        assert [item.id for item in view.items()] == [1, 2, 3]
        assert view.live_ids().tolist() == [1, 2, 3]
        assert view.matching(parse_filter("price = 3")).tolist() == []
        with catalog.reading() as second:
            assert second.state().seq == before.seq + 1
            assert [item.id for item in second.items()] == [2, 3, 4]
    with catalog.reading() as view:
        assert view.live_ids().tolist() == [2, 3, 4]


def test_an_iterator_left_unfinished_keeps_no_old_state(catalog: Catalog) -> None:
    with catalog.reading() as view:
        unfinished = view.items(batch=1)
        assert next(unfinished).id == 1
    with catalog.writing() as writer:
        writer.remove([1])
    with catalog.reading() as view:
        assert view.live_ids().tolist() == [2, 3]
    del unfinished


def test_a_view_cannot_be_used_after_its_block(catalog: Catalog) -> None:
    with catalog.reading() as view:
        pass
    with pytest.raises(AttributeError):
        view.state()


def test_an_exception_leaves_no_transaction_open(catalog: Catalog) -> None:
    with pytest.raises(ItemNotFoundError), catalog.reading() as view:
        _fail_after(view.state())
    with catalog.writing() as writer:
        writer.remove([1])
    with catalog.reading() as view:
        assert view.live_ids().tolist() == [2, 3]


def _fail_after(_: State) -> None:
    raise ItemNotFoundError("no such item")


def test_many_threads_read_while_one_writes(catalog: Catalog) -> None:
    filled(catalog, 100)
    done = threading.Event()

    def read(_: int) -> set[int]:
        totals = set()
        while not done.is_set() or not totals:
            with catalog.reading() as view:
                state = view.state()
                assert len(view.live_ids()) == state.size
                totals.add(state.size)
        return totals

    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(read, number) for number in range(6)]
        for number in range(1, 31):
            with catalog.writing() as writer:
                writer.remove([number])
        done.set()
        assert all(reader.result() <= {*range(70, 101)} for reader in readers)


def test_a_connection_is_used_again_by_whoever_asks_next(catalog: Catalog) -> None:
    with catalog.reading() as view:
        first = view.connection
        with catalog.reading() as inner:
            assert inner.connection is not first
    with ThreadPoolExecutor(1) as pool, catalog.reading() as view:
        assert view.connection is first
        assert pool.submit(lambda: live(catalog)).result() == [1, 2, 3]


def test_closing_closes_idle_connections_now_and_others_at_the_end_of_their_block(
    catalog: Catalog,
) -> None:
    with catalog.reading() as view:
        with catalog.reading() as other:
            idle = other.connection
        busy = view.connection
        catalog.close()
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            idle.execute("SELECT 1")
        assert view.live_ids().tolist() == [1, 2, 3]
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        busy.execute("SELECT 1")
    with pytest.raises(GalleryError, match="is closed"), catalog.reading():
        pass


def test_a_catalogue_opened_for_reading_cannot_be_written(path: Path) -> None:
    catalog = Catalog.open(path)
    with (
        pytest.raises(GalleryWriteError, match=r"Nothing was written .* readonly"),
        catalog.writing() as writer,
    ):
        writer.add([entry(1)])
    catalog.close()


def test_a_catalogue_is_not_made_over_another_file(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(GalleryWriteError, match="is there already"):
        Catalog.create(path, DIM)
    assert path.read_bytes() == before


@pytest.fixture
def shown() -> Iterator[Path]:
    """A new folder that every user can look into."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Nothing can be written in this folder; for root that takes another user, too."""
    user = os.geteuid()
    folder.chmod(0o555)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


WRITER = """
import sys
from pathlib import Path
from indexer.catalog.database import Catalog
catalog = Catalog.open(Path(sys.argv[1]), writable=True)
for line in sys.stdin:
    with catalog.writing() as writer:
        writer.remove([int(line)])
    print("done", flush=True)
catalog.close()
"""


def test_a_folder_that_cannot_be_written_is_read_and_follows_changes(shown: Path) -> None:
    path = shown / "c"
    bulk_load(path, DIM, [entry(number) for number in range(5)])
    with unwritable(shown):
        reader = Catalog.open(path)
        assert live(reader) == [1, 2, 3, 4, 5]
    assert [file.name for file in shown.iterdir()] == ["c"]
    command = [sys.executable, "-c", WRITER, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as writer:
        for number in (1, 2):
            print(number, file=writer.stdin, flush=True)
            assert writer.stdout.readline() == "done\n"
            with unwritable(shown):
                assert live(reader) == [*range(number + 1, 6)]
    with unwritable(shown):
        assert live(reader) == [3, 4, 5]
    reader.close()


def test_a_connection_from_before_a_change_is_not_used_again(shown: Path) -> None:
    """Of a reader without locks that was in a search when the file changed."""
    path = shown / "c"
    bulk_load(path, DIM, [entry(number) for number in range(5)])
    with unwritable(shown):
        reader = Catalog.open(path)
        held = reader.reading()
        held.__enter__()
    writer = Catalog.open(path, writable=True)
    with writer.writing() as view:
        view.remove([1])
    writer.close()
    with unwritable(shown):
        assert live(reader) == [2, 3, 4, 5]
        held.__exit__(None, None, None)
        assert live(reader) == [2, 3, 4, 5]
        assert reader.state().size == 4
    reader.close()


def test_changes_that_stand_in_the_log_are_never_passed_over(shown: Path) -> None:
    path = shown / "c"
    bulk_load(path, DIM, [entry(1)])
    catalog = Catalog.open(path, writable=True)
    with catalog.writing() as writer:
        writer.remove([1])
    log = path.with_name("c-wal")
    kept = log.read_bytes()
    catalog.close()
    assert not log.exists()
    log.write_bytes(kept)
    with unwritable(shown), pytest.raises(GalleryError, match="cannot be read: unable to open"):
        Catalog.open(path)


def live(catalog: Catalog) -> list[int]:
    with catalog.reading() as view:
        return view.live_ids().tolist()


def test_what_was_committed_is_there_after_a_kill(path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
import numpy as np
from indexer.catalog.database import Catalog
from indexer.types import Entry
catalog = Catalog.open(Path(sys.argv[1]), writable=True)
unit = np.eye(8, dtype=np.float32)[0]
with catalog.writing() as writer:
    writer.add([Entry("kept", unit, "0" * 64)])
with catalog.writing() as writer:
    writer.add([Entry("lost", unit, "1" * 64)])
    os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == 9
    catalog = Catalog.open(path)
    with catalog.reading() as view:
        assert [item.key for item in view.items()] == ["kept"]
        assert view.state().seq == 1
        view.check()
    catalog.close()


def test_a_commit_is_synced(catalog: Catalog) -> None:
    with catalog.writing() as writer:
        [(mode,)] = writer.connection.execute("PRAGMA synchronous").fetchall()
        [(journal,)] = writer.connection.execute("PRAGMA journal_mode").fetchall()
        [(size,)] = writer.connection.execute("PRAGMA page_size").fetchall()
        [(overwrite,)] = writer.connection.execute("PRAGMA secure_delete").fetchall()
    assert (mode, journal, size, overwrite) == (2, "wal", 16384, 2)


def test_a_missing_catalogue_is_named(tmp_path: Path) -> None:
    with pytest.raises(GalleryCorruptError, match=r"gone is missing\. Restore a backup"):
        Catalog.open(tmp_path / "gone")


@pytest.mark.parametrize("data", [b"no database at all" * 100, b""])
def test_a_file_that_is_no_catalogue_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "c").write_bytes(data)
    with pytest.raises(GalleryCorruptError, match="Restore a backup: kinlens-index restore"):
        Catalog.open(tmp_path / "c")


def test_a_truncated_catalogue_is_refused(catalog: Catalog, path: Path) -> None:
    filled(catalog, 2000)
    catalog.close()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(GalleryCorruptError, match=r"malformed. Restore a backup"):
        Catalog.open(path)


@pytest.mark.parametrize("page", range(1, 12))
def test_a_damaged_page_is_noticed(catalog: Catalog, path: Path, page: int) -> None:
    filled(catalog, 2000)
    catalog.close()
    data = bytearray(path.read_bytes())
    data[16384 * page : 16384 * (page + 1)] = b"\x55" * 16384
    path.write_bytes(data)
    with pytest.raises(GalleryCorruptError, match="Restore a backup"):  # noqa: PT012
        opened = Catalog.open(path)
        with opened.reading() as view:
            view.check()


def test_counts_that_do_not_fit_are_noticed(catalog: Catalog) -> None:
    with catalog.writing() as writer:
        writer.connection.execute("DELETE FROM vectors WHERE id = 2")
    with (
        catalog.reading() as view,
        pytest.raises(GalleryCorruptError, match="3 items, 2 vectors and a size of 3"),
    ):
        view.check()


@pytest.mark.parametrize(
    ("version", "cure"),
    [(1, "kinlens-index build"), (4, "Install a newer version of Kinlens")],
)
def test_another_schema_is_refused_by_both_numbers(path: Path, version: int, cure: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.raises(
        GalleryCorruptError, match=rf"schema {version}, this version reads 3\. .*{cure}"
    ):
        Catalog.open(path)
