"""What the catalogue of a gallery keeps and refuses, who may write it, and how damage is met."""

import contextlib
import multiprocessing
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kinlens.embedder.errors import (
    GalleryCorruptError,
    GalleryError,
    GalleryWriteError,
    InvalidParameterError,
)
from kinlens.indexer.catalog import database
from kinlens.indexer.checks.verify import check_files
from kinlens.indexer.filters.tree import Equals
from kinlens.indexer.gallery import Gallery
from tests.indexer import crasher
from tests.indexer.conftest import catalog_of, faults, generation_of, small_files
from tests.indexer.crasher import forks
from tests.indexer.oracle import BUNDLE, DIM, entry, units

UNIT = units(1)[0]
LIMITS = {
    'Farbe, "hell"': "grün 'n' blau, \\ \n \u2028 \0",
    "ñ" * 128: "👟" * 4096,
    "empty": "",
    "price": 0.1 + 0.2,
    "stock": 2**63 - 1,
    "\u3000": -(2**63),
    "sale": True,
    "new": False,
}


def keys(gallery: Gallery) -> list[str]:
    return [item.key for item in gallery.page(0, 10_000).items]


def test_names_values_and_keys_at_their_limits_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "gal lery#?%41"
    gallery = Gallery.create(path, name="g", bundle_id=BUNDLE, dim=DIM)
    entries = [entry(key, UNIT, LIMITS) for key in ("ü" * 1024, "a..b/.../c", "ü 1.png")]
    entries[1] = replace(entries[1], vector=units(2)[1])
    gallery.add(entries)
    gallery.close()
    gallery = Gallery.open(path)
    found = gallery.entries([entries[n].key for n in (1, 0, 1, 2)])
    assert [one.vector.tobytes() for one in found] == [
        entries[n].vector.tobytes() for n in (1, 0, 1, 2)
    ]
    for one in found:
        assert [(n, type(v), v) for n, v in one.attributes.items()] == [
            (n, type(v), v) for n, v in LIMITS.items()
        ]
    for name, value in LIMITS.items():
        assert gallery.page(0, 5, Equals(name, value)).total == 3
    gallery.close()
    check_files(path)


WRONG_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "'a' is a number, and 'bad' has 'x', a text": {"a": "x"},
    "'a' is a number, and 'bad' has True, a boolean": {"a": True},
    "'a' is a number, and 'bad' has .*, a text": {"a": ["x"]},
    "'new' is a text, and 'bad' has 1": {"new": 1},
    "'c' of 'bad': nan is not a finite": {"b": 1, "c": float("nan")},
    "does not fit in 64 bits": {"c": 2**63},
    "None must be a string": {"c": None},
    "a list in a list": {"c": [[1]]},
    "a list with 1, a number, and 'x', a text": {"c": [1, "x"]},
    "a list of 1,001 values; give at most 1,000": {"c": [1] * 1001},
    "not valid Unicode": {"c": "\ud800"},
    "4,097 characters, the limit is 4,096": {"c": "x" * 4097},
    "an attribute name must have": {"a\n": 1},
    "attribute name must have": {"n" * 129: 1},
}


def test_a_wrong_attribute_is_named_and_nothing_is_written(gallery: Gallery) -> None:
    gallery.add([entry("old", UNIT, {"a": 1})])
    before = gallery.version, gallery.schema(), [*gallery.items()]
    for match, given in WRONG_ATTRIBUTES.items():
        entries = [entry("new", UNIT, {"new": "x"}), entry("old", UNIT, {"a": 2})]
        with pytest.raises(InvalidParameterError, match=match):
            gallery.add([*entries, entry("bad", UNIT, given)])
    assert (gallery.version, gallery.schema(), [*gallery.items()]) == before


@pytest.mark.parametrize("content", ["first", "second"], ids=["that another item has", "new"])
def test_one_add_takes_eight_statements_besides_the_transaction(
    tmp_path, monkeypatch, content: str
) -> None:
    seen: list[str] = []

    def traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_trace_callback(seen.append)
        return connection

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", traced)
    with closing(
        Gallery.create(tmp_path / "shop", name="shop", bundle_id=BUNDLE, dim=len(UNIT))
    ) as gallery:
        gallery.add([entry("first", UNIT, {"a": 1})])
        seen.clear()
        gallery.add([entry("second", UNIT, {"a": 2}, content)])
        end = seen.index("COMMIT")  # the reads that follow are those of the next search
        assert seen[0] == "BEGIN IMMEDIATE"
        assert end - 1 <= 8, seen
        assert gallery.size == 2


def test_one_add_passes_no_more_than_eight_modules_of_the_indexer(gallery: Gallery) -> None:
    """Those of the write alone; after the commit, the snapshot for the next search advances."""
    gallery.add([entry("first", UNIT, {"a": 1})])
    modules: set[str] = set()
    is_over = False

    def profile(frame: Any, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and not is_over and name.startswith("kinlens.indexer."):
            modules.add(name)

    def end(point: str) -> None:
        nonlocal is_over
        is_over |= point == "write: after commit"

    with faults(end):
        sys.setprofile(profile)
        try:
            gallery.add([entry("second", UNIT, {"a": 2})])
        finally:
            sys.setprofile(None)
    assert is_over
    assert len(modules) <= 8, " ".join(sorted(modules))


def test_a_prefix_is_compared_letter_by_letter_also_at_the_ends_of_unicode(gallery) -> None:
    texts = ["a", "ab", "a%", "A", "b", "\ud7ffx", "\ue000", "\U0010ffff", "\U0010ffffz", "é", "e"]
    gallery.add([entry(text, UNIT) for text in texts])
    for prefix in (*texts, "\ud7ff", "a\U0010ffff", "a\0", "\x00"):
        found = {item.key for item in gallery.page(0, 200, prefix=prefix).items}
        assert found == {text for text in texts if text.startswith(prefix)}, repr(prefix)


def test_threads_that_come_and_go_share_a_few_connections(gallery: Gallery) -> None:
    def descriptors(_: int) -> int:
        gallery.add([entry("key", UNIT)])
        gallery.search(UNIT[None], 3)
        return len([*Path("/proc/self/fd").iterdir()])

    counts = []
    for number in range(8):
        with ThreadPoolExecutor(1) as pool:
            counts += pool.map(descriptors, [number])
    assert len(set(counts[1:])) == 1


def test_a_closed_gallery_answers_nothing(gallery: Gallery) -> None:
    gallery.close()
    add = partial(gallery.add, [entry("key", UNIT)])
    for call in (gallery.schema, partial(gallery.search, UNIT[None], 1), add):
        with pytest.raises(GalleryError, match="is closed"):
            call()


@contextmanager
def writer(path: Path) -> Iterator[Callable[[str], None]]:
    """Another process adds 20 items for each name, or removes the item of "-key"."""
    pipe, theirs = multiprocessing.Pipe()
    process = forks.Process(target=crasher.obey, args=(path, theirs))
    process.start()

    def ask(name: str) -> None:
        pipe.send(name)
        assert pipe.poll(60)
        assert pipe.recv() == "done"

    yield ask
    pipe.send(None)
    process.join(60)
    assert process.exitcode == 0


def test_writers_of_two_processes_lose_no_item(tmp_path: Path) -> None:
    path = tmp_path / "gallery"
    crasher.build(path, 1)
    with writer(path) as a, writer(path) as b, ThreadPoolExecutor(2) as pool:
        for asked in [pool.submit(a, "a"), pool.submit(b, "b")]:
            asked.result()
    with closing(Gallery.open(path)) as gallery:
        assert {*keys(gallery)} == {"new-0"} | {f"{name}-{n}" for name in "ab" for n in range(20)}
        assert gallery.ids().tolist() == [*range(1, 42)]


def test_a_write_that_waits_too_long_for_another_is_refused(gallery, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    other = sqlite3.connect(catalog_of(tmp_path / "gallery"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(GalleryWriteError, match=r"locked\. Another process has been writing"):
        gallery.add([entry("key", UNIT)])
    other.close()
    assert gallery.add([entry("key", UNIT)]).added == 1


def log_of(path: Path) -> Path:
    return catalog_of(path).with_name("catalog.sqlite-wal")


def test_the_log_stays_short_while_some_search_is_always_open(
    gallery: Gallery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 100_000
    monkeypatch.setattr(database, "_KEEP_LOG_BYTES", limit)
    reader = Gallery.open(tmp_path / "gallery")
    gallery.add([entry(f"first{n}", UNIT) for n in range(3)])
    began, stop = threading.Event(), threading.Event()

    def search() -> None:
        scan = reader.scan(1)
        next(scan)
        while not stop.is_set():
            following = reader.scan(1)
            next(following)
            scan.close()  # when the next has begun
            scan = following
            began.set()
        scan.close()

    log, longest = log_of(tmp_path / "gallery"), 0
    with ThreadPoolExecutor(1) as pool:
        searching = pool.submit(search)
        began.wait(60)
        for number in range(60):
            gallery.add([entry(f"key{number}", UNIT)])
            longest = max(longest, log.stat().st_size)
        stop.set()
        searching.result()
    assert longest < 20 * limit  # without the law it would be 50 times as long
    reader.close()
    gallery.close()  # the writer, at last
    assert not log.exists()


@pytest.fixture
def shown() -> Iterator[Path]:
    """A gallery that every user can look into, closed."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        path = Path(name) / "gallery"
        gallery = Gallery.create(path, name="g", bundle_id=BUNDLE, dim=DIM)
        gallery.add([entry(f"key{n}", UNIT) for n in range(5)])
        gallery.close()
        yield path


@contextmanager
def unwritable(path: Path, mode: int = 0o555) -> Iterator[None]:
    """Nothing can be written in its catalogue; for root that takes another user, too."""
    generation_of(path).chmod(mode)
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)
        generation_of(path).chmod(0o755)


def test_a_folder_that_cannot_be_written_is_read_follows_changes_and_makes_none(shown) -> None:
    before = [*catalog_of(shown).parent.iterdir()]
    with unwritable(shown):
        reader = Gallery.open(shown)
        assert keys(reader) == [f"key{n}" for n in range(5)]
    assert [*catalog_of(shown).parent.iterdir()] == before
    with writer(shown) as ask:
        for number in (0, 1):
            ask(f"-key{number}")
            with unwritable(shown):
                assert keys(reader) == [f"key{n}" for n in range(number + 1, 5)]
                assert reader.size == 4 - number
    with unwritable(shown):
        assert keys(reader) == ["key2", "key3", "key4"]
        with pytest.raises(GalleryWriteError, match="may write there"):
            reader.remove(["key2"])
        with pytest.raises(GalleryWriteError, match="permissions"):
            reader.compact()
        assert [hit.key for hit in reader.search(UNIT[None], 9)[0]] == keys(reader)
    reader.close()
    with unwritable(shown, 0o000), pytest.raises(GalleryError, match=r"[Pp]ermission"):
        Gallery.open(shown)


def test_a_full_disk_is_read_and_the_first_changes_after_it_are_kept(shown: Path) -> None:
    with small_files(4096):
        reader = Gallery.open(shown)
        assert keys(reader) == [f"key{n}" for n in range(5)]
        assert [hit.key for hit in reader.search(UNIT[None], 9)[0]] == keys(reader)
        with pytest.raises(GalleryError, match="Free space on the disk"):
            reader.remove(["key0"])
    reader.remove(["key0"])
    assert keys(reader) == [f"key{n}" for n in range(1, 5)]
    with writer(shown) as ask:
        ask("-key1")
        assert keys(reader) == ["key2", "key3", "key4"]
    reader.remove(["key2"])  # to the same log, which the other process has not deleted
    with small_files(4096), pytest.raises(GalleryError, match="Free space on the disk"):
        reader.remove(["key3"])
    with closing(Gallery.open(shown)) as other:
        assert keys(other) == keys(reader) == ["key3", "key4"]
    reader.close()


def test_a_reader_without_write_permission_never_skips_changes_in_the_log(shown: Path) -> None:
    gallery = Gallery.open(shown)
    gallery.remove(["key1"])
    kept = log_of(shown).read_bytes()
    gallery.close()
    log_of(shown).write_bytes(kept)
    with unwritable(shown), pytest.raises(GalleryError, match="cannot be read: unable to open"):
        Gallery.open(shown)


def changed(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(catalog_of(path), isolation_level=None)) as connection:
        for statement in statements:
            assert abs(connection.execute(statement).rowcount) == 1


SWAPPED = "; ".join(
    f"UPDATE vectors SET id = {new} WHERE id = {old}" for old, new in ((2, 999), (3, 2), (999, 3))
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gallery with something of everything, closed."""
    path = tmp_path_factory.mktemp("made") / "gallery"
    gallery = Gallery.create(path, name="g", bundle_id=BUNDLE, dim=DIM)
    gallery.add(
        entry(f"key-{n}", vector, {"colour": ("red", "blue")[n % 2], "price": n / 7, "stock": n})
        for n, vector in enumerate(units(400))
    )
    gallery.remove(f"key-{n}" for n in range(0, 400, 40))
    gallery.update({f"key-{n}": {"price": n} for n in range(1, 40)})
    gallery.close()
    return path


@pytest.fixture
def sample(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "sample")


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        ("UPDATE vectors SET crc = 7 WHERE id = 3", "vector of item [23] "),
        (SWAPPED, "vector of item [23] "),
        ("UPDATE items SET attributes = '{}' WHERE id = 3", "item 3 does not fit"),
        ("UPDATE names SET kind = 'number' WHERE name = 'colour'", "names of attributes"),
        ("UPDATE state SET seq = 77", "its state"),
        ("UPDATE items SET key = 'other' WHERE id = 41", "item 41 does not fit"),
        ("DELETE FROM vectors WHERE id = 2", "390 items, 389 vectors and a size of 390"),
        ("PRAGMA user_version = 1", r"schema 1, this version reads 7\. .*kinlens-index build"),
        ("PRAGMA user_version = 4", r"schema 4, this version reads 7\. .*kinlens-index build"),
        ("PRAGMA user_version = 8", r"schema 8, this version reads 7\. .*Install a newer version"),
    ],
)
def test_parts_that_do_not_fit_together_are_named(sample: Path, statement: str, match: str) -> None:
    changed(sample, *statement.split("; "))
    with pytest.raises(GalleryCorruptError, match=match):
        check_files(sample)


def test_a_commit_waits_for_the_disk(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def recorded(*arguments: object, **settings: object) -> sqlite3.Connection:
        opened.append(connect(*arguments, **settings))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", recorded)
    gallery.add([entry("key", UNIT)])
    [writer] = opened
    pragmas = ("synchronous", "journal_mode", "page_size", "secure_delete")
    found = [writer.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas]
    assert found == [2, "wal", 4096, 2]
