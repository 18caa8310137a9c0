"""Damage inside the rows of a catalogue, which SQLite does not notice, is never a wrong answer."""

import contextlib
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from embedder.errors import GalleryCorruptError
from indexer.filters.text import parse_filter
from indexer.types import Entry
from tests.support.seams import Catalog

DIM = 8


def entry(number: int, **attributes: object) -> Entry:
    made = np.random.default_rng(number).normal(size=DIM)
    vector = (made / np.linalg.norm(made)).astype(np.float32)
    return Entry(f"key-{number}", vector, f"{number:064x}", attributes, f"{number}.png", "PNG")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Catalog.create(tmp_path / "c", DIM)
    return tmp_path / "c"


def everything(path: Path) -> tuple[object, ...]:
    """What every kind of read gives."""
    filters = ("colour = 'red'", "price < 20", "not sale = true", "sale = true and price > 9")
    catalog = Catalog.open(path)
    try:
        with catalog.reading() as view:
            ids = view.live_ids()
            items = [*view.items(batch=50)]
            return (
                (view.state(), view.dim, view.schema(), ids.tolist(), items),
                [(ids.tolist(), rows.tobytes()) for ids, rows in view.iter_vectors(batch=50)],
                view.vectors(ids).tobytes(),
                [*view.get(ids.tolist()).values()] == items,
                view.content([item.sha256 for item in items[:20]]),
                view.removed_since(0).tolist(),
                [view.matching(parse_filter(text)).tolist() for text in filters],
            )
    finally:
        catalog.close()


@pytest.fixture
def sample(path: Path) -> Path:
    """A catalogue with something of everything, closed."""
    catalog = Catalog.open(path, writable=True)
    with catalog.writing() as writer:
        writer.add(
            [
                entry(n, colour=("red", "blue")[n % 2], price=n / 7, stock=n, sale=n % 3 == 0)
                for n in range(400)
            ]
        )
    with catalog.writing() as writer:
        writer.remove([*range(1, 400, 40)])
        writer.update({f"key-{n}": {"price": n} for n in range(1, 40)})
    catalog.close()
    return path


def test_a_flipped_bit_is_a_named_error_or_harmless(sample: Path) -> None:
    expected, good = everything(sample), sample.read_bytes()
    with sqlite3.connect(sample) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    rng = np.random.default_rng(5)
    noticed: list[str] = []
    for place, bit in zip(
        rng.integers(100, len(good), 100), rng.integers(8, size=100), strict=True
    ):
        data = bytearray(good)
        data[place] ^= 1 << bit
        sample.write_bytes(data)
        try:
            if everything(sample) != expected:
                _check(sample)  # a wrong index of attributes is found there
                pytest.fail(f"bit {bit} of byte {place}")
        except GalleryCorruptError as error:
            noticed.append(str(error))
    assert len(noticed) > 15
    assert all(str(sample) in text and "kinlens-index restore" in text for text in noticed)


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        ("UPDATE vectors SET vector = zeroblob(32) WHERE id = 3", "vectors 2 to"),
        ("UPDATE items SET attributes = '{}' WHERE id = 3", "item 3 does not fit"),
        ("UPDATE items SET key = 'other' WHERE id = 3", "item 3 does not fit"),
        ("UPDATE attributes SET value = 8 WHERE item = 50 AND value = 49", "'stock' of item 50"),
        ("DELETE FROM attributes WHERE item = 50 AND value = 49", "'stock' of item 50"),
        ("INSERT INTO attributes VALUES (2, 9, 50)", "1,168 values|index of attributes has"),
        ("UPDATE names SET kind = 'number' WHERE name = 'colour'", "names of attributes"),
        ("DELETE FROM names WHERE name = 'colour'", "names of attributes"),
        ("UPDATE state SET seq = 77", "its state"),
        ("INSERT INTO tombstones VALUES (2, 3)", "item 3 is there although"),
        ("UPDATE vectors SET id = 1 WHERE id = 3", "vectors 1 to"),
    ],
)
def test_parts_that_do_not_fit_together_are_named(sample: Path, statement: str, match: str) -> None:
    with sqlite3.connect(sample) as connection:
        assert connection.execute(statement).rowcount == 1
    connection.close()
    with pytest.raises(GalleryCorruptError, match=match):
        _check(sample)


def _check(path: Path) -> None:
    catalog = Catalog.open(path)
    with contextlib.closing(catalog), catalog.reading() as view:
        view.check()


def test_vectors_that_were_swapped_are_noticed(sample: Path) -> None:
    with sqlite3.connect(sample) as connection:
        for old, new in ((2, -1), (3, 2), (-1, 3)):
            connection.execute("UPDATE vectors SET id = ? WHERE id = ?", (new, old))
    connection.close()
    catalog = Catalog.open(sample)
    with catalog.reading() as view:
        assert view.vectors([4]).shape == (1, DIM)
        with pytest.raises(GalleryCorruptError, match="vectors 2 to 3"):
            view.vectors([2, 3])
    catalog.close()
