"""The write-ahead log of a catalogue stays short, whatever goes on, and goes at the end."""

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest

from indexer.catalog import database
from indexer.types import Entry
from tests.support.seams import Catalog

DIM = 8
UNIT = np.eye(DIM, dtype=np.float32)[0]


def entry(number: int) -> Entry:
    return Entry(f"key-{number}", UNIT, f"{number:064x}")


def add(catalog: Catalog, number: int) -> None:
    with catalog.writing() as writer:
        writer.add([entry(number)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Catalog.create(tmp_path / "c", DIM)
    return tmp_path / "c"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> int:
    """A log that is long already with this many bytes."""
    monkeypatch.setattr(database, "_KEEP_LOG_BYTES", 100_000)
    return 100_000


def test_the_log_stays_short_while_some_search_is_always_open(path: Path, short: int) -> None:
    catalog, reader = Catalog.open(path, writable=True), Catalog.open(path)
    began, stop = threading.Event(), threading.Event()

    def search() -> None:
        held = contextlib.ExitStack()
        while not stop.is_set():
            following = contextlib.ExitStack()
            following.enter_context(reader.reading()).state()
            held.close()  # when the next has begun
            held = following
            began.set()
        held.close()

    thread = threading.Thread(target=search)
    thread.start()
    began.wait()
    log, longest = path.with_name("c-wal"), 0
    for number in range(120):
        add(catalog, number)
        longest = max(longest, log.stat().st_size)
    stop.set()
    thread.join()
    assert longest < 20 * short  # it would be 100 times that long
    reader.close()
    catalog.close()
    assert not log.exists()


def test_a_log_that_cannot_be_shortened_fails_no_write_and_delays_few(
    path: Path, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_CHECKPOINT_S", 0.02)
    catalog, reader = Catalog.open(path, writable=True), Catalog.open(path)
    log = path.with_name("c-wal")
    statements: list[str] = []
    with reader.reading() as view:
        assert view.state().size == 0
        for number in range(30):
            with catalog.writing() as writer:
                writer.connection.set_trace_callback(statements.append)
                writer.add([entry(number)])
        tried = sum("wal_checkpoint" in statement for statement in statements)
        assert log.stat().st_size > 3 * short
        assert 2 <= tried <= log.stat().st_size / short
        assert view.live_ids().tolist() == []
    with catalog.writing() as writer:
        [(wait,)] = writer.connection.execute("PRAGMA busy_timeout").fetchall()
        assert wait == 30_000
        writer.add([entry(number) for number in range(100, 3000)])
    assert log.stat().st_size == 0
    reader.close()
    catalog.close()
