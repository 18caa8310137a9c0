"""A gallery as a Parquet file comes back with every type; damage is named; imports are resumed."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinlens.embedder.errors import (
    EngineUnavailableError,
    GalleryBusyError,
    GalleryWriteError,
    InvalidParameterError,
    KinlensError,
    SourceError,
)
from kinlens.indexer.entries import Entry, Item
from kinlens.indexer.exchange import parquet as transfer
from kinlens.indexer.exchange.parquet import export_gallery
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.foreign import read_export
from kinlens.indexer.types import GalleryExport
from tests.indexer import oracle
from tests.indexer.conftest import small_files
from tests.indexer.crasher import forks
from tests.indexer.oracle import contents, ids_of
from tests.support.seams import import_gallery

pa = pytest.importorskip(
    "pyarrow", reason="pyarrow is not installed: pip install 'kinlens[parquet]'"
)
pq = pytest.importorskip("pyarrow.parquet")

FACTS = {"name": "shop", "bundle_id": "b" * 64, "source": "folder /shop", "source_root": "/shop"}
DIM = 8


class MemoryStore:
    """As much of a store as an export needs; `meanwhile` is called between two batches."""

    def __init__(self, entries: Sequence[Entry], meanwhile: Callable[[], object] = int) -> None:
        self.name, self.dim = "shop", DIM
        self.contents = list(entries)
        self._meanwhile = meanwhile

    def items(self) -> Iterator[Item]:
        for number, entry in enumerate(self.contents):
            yield Item(number, entry.key, entry.path, entry.sha256, entry.attributes, entry.format)

    def scan(self, batch_size: int = 1000) -> Iterator[list[Entry]]:
        for start in range(0, len(self.contents), batch_size):
            yield self.contents[start : start + batch_size]
            self._meanwhile()


def vectors(count: int, seed: int = 0) -> np.ndarray:
    return oracle.units(count, seed, DIM)


def made(count: int, **attributes: Sequence[Any]) -> list[Entry]:
    """Entries whose attributes are taken in turn from these lists; None leaves one out."""
    entries = []
    for number, vector in enumerate(vectors(count)):
        values = {name: given[number % len(given)] for name, given in attributes.items()}
        kept = {name: value for name, value in values.items() if value is not None}
        sha256 = f"{number:064x}"
        entries.append(Entry(f"key {number}", vector, sha256, kept, f"{number}.png", "PNG"))
    return entries


def typed(entry: Entry) -> tuple[Any, ...]:
    """Everything of an entry, with the types of its attributes, so that 1 is not True or 1.0."""
    values = [(name, type(value), value) for name, value in sorted(entry.attributes.items())]
    return entry.key, entry.path, entry.format, entry.sha256, values, entry.vector.tobytes()


def written(path: Path, entries: Sequence[Entry]) -> Path:
    export_gallery(MemoryStore(entries), path, FACTS)
    return path


def read(path: Path) -> list[Entry]:
    return list(read_export(path).entries())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shop.parquet"


def test_every_item_comes_back_with_the_types_of_its_attributes(file: Path) -> None:
    entries = made(
        500,
        colour=["red", "grün", "", None, "'\"\\\n"],
        stock=[1, 0, -(2**62), 2**62],
        price=[1.0, 0.1, -1e300, None],
        size=[1, 1.0, 2**53 + 1, None, 0.5],
        sale=[True, False],
        only_once=[None] * 499 + ["here"],
    )
    names = {"farbe/größe": "帽子", "a.b": "x", "attribute.c": "y", "vector": "z", "key": "k"}
    entries += [replace(entries[0], key="靴/ü 👞", path="ordner/ü 👞.png", attributes=names)]
    for written_ones in (entries, []):
        written(file, written_ones)
        assert [typed(entry) for entry in read(file)] == [typed(entry) for entry in written_ones]
    assert (read_export(file).count, read_export(file).dim) == (0, DIM)
    written(file, made(3, price=[1.5], stock=[2]))
    assert read_export(file).facts == {**FACTS, "dim": "8", "schema": "1"}
    schema = pq.read_schema(file)  # any Parquet tool can read the columns
    assert schema.metadata[b"kinlens.name"] == b"shop"
    assert {field.name: str(field.type) for field in schema} == {
        **dict.fromkeys(("key", "path", "format", "sha256"), "string"),
        "vector": "fixed_size_list<element: float>[8]",
        "attribute.price": "double",
        "attribute.stock": "int64",
    }


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_export_that_fails_leaves_the_old_file_and_nothing_else(file: Path) -> None:
    before = written(file, made(2)).read_bytes()
    with small_files(20_000), pytest.raises(GalleryWriteError, match=r"shop\.parquet.*free space"):
        written(file, made(5000))
    store = MemoryStore(made(2))
    store.scan = lambda size: iter([made(2, stock=[1])])
    with pytest.raises(GalleryBusyError, match="new type"):  # that came meanwhile
        export_gallery(store, file, FACTS)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
    with pytest.raises(GalleryWriteError, match="nowhere"):
        written(file.parent / "nowhere" / "shop.parquet", made(1))


def test_a_killed_export_leaves_no_half_file_and_the_next_one_cleans_up(file: Path) -> None:
    before = written(file, made(2)).read_bytes()
    process = forks.Process(target=export_gallery, args=(MemoryStore(made(9), die), file, FACTS))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert file.read_bytes() == before
    assert len(list(file.parent.iterdir())) == 2  # what the killed one had written aside
    assert len(read(written(file, made(3)))) == 3
    assert list(file.parent.iterdir()) == [file]


def test_an_export_holds_one_row_group_in_memory(file: Path) -> None:
    alive: list[int] = []
    block = vectors(transfer.ROWS)

    def scan(batch_size: int = 1000) -> Iterator[list[Entry]]:
        for start in range(0, 100_000, batch_size):
            alive.append(pa.total_allocated_bytes())
            yield [Entry(f"{start}-{n}", row, "", {}) for n, row in enumerate(block)]

    store = MemoryStore([])
    store.scan = scan
    export_gallery(store, file, FACTS)
    assert max(alive) - alive[0] < 3 * (block.nbytes + transfer.ROWS * 100)
    assert file.stat().st_size > 7 * block.nbytes


# Damage: the file, its columns, its rows.


def changed(file: Path, **columns: Any) -> Path:
    """A file of four rows in which these columns are others; None takes one away."""
    table = pq.read_table(written(file, made(4, price=[1.0, 2.0])))
    metadata = table.schema.metadata
    for name, values in columns.items():
        number = table.schema.get_field_index(name)
        table = table.remove_column(number)
        if values is not None:
            table = table.append_column(name, values)
    pq.write_table(table.replace_schema_metadata(metadata), file)
    return file


def fixed(rows: list[Any], dim: int = DIM) -> Any:
    return pa.array(rows, pa.list_(pa.float32(), dim))


ROWS = [row.tolist() for row in vectors(4)]
COLUMNS = ("key", "path", "format", "sha256", "vector")


WRONG: list[tuple[str, Any, str]] = [
    *((name, None, f"no column {name}") for name in COLUMNS),
    ("vector", fixed([row[:4] for row in ROWS], 4), "kinlens.dim is '8', expected 4"),
    ("attribute.price", pa.array([[b"x"]] * 4), "attribute.price is list"),
    ("key", pa.array(["a", "b", None, "d"]), "row 3 has no key"),
    # Earlier versions of pyarrow write no fixed lists with a gap.
    ("vector", pa.array([*ROWS[:2], None, ROWS[3]]), "the vector of 'key 2' is missing"),
    ("key", pa.array(["a", "b", "c", "b"]), "'b'"),
    ("vector", fixed([*ROWS[:3], [float("nan")] * DIM]), "'key 3' has NaN"),
    ("vector", fixed([[None, *ROWS[0][1:]], *ROWS[1:]]), "'key 0' has NaN"),
    ("vector", fixed([ROWS[0], [0.0] * DIM, *ROWS[2:]]), "'key 1' is zero"),
]


def test_a_wrong_column_or_row_is_named_and_the_existing_gallery_stays(tmp_path, file) -> None:
    import_gallery(dump(varied(10)), tmp_path / "shop")
    for name, values, reason in WRONG:
        with pytest.raises(KinlensError, match=reason):
            import_gallery(read_export(changed(file, **{name: values})), tmp_path / "shop")
    with closing(Gallery.open(tmp_path / "shop")) as again:
        assert contents(again).keys() == {entry.key for entry in varied(10)}


def test_a_missing_fact_is_named(file: Path) -> None:
    assert len(read(changed(file, vector=fixed(ROWS)))) == 4  # a file like this is read
    for fact in ("name", "bundle_id", "schema", "dim"):
        table = pq.read_table(written(file, made(2)))
        facts = table.schema.metadata
        facts.pop(f"kinlens.{fact}".encode())
        pq.write_table(table.replace_schema_metadata(facts), file)
        with pytest.raises(SourceError, match=rf"kinlens\.{fact}"):
            read_export(file)


def test_a_damaged_file_is_refused(file: Path) -> None:
    whole = written(file, made(100)).read_bytes()
    row = vectors(100)[50].tobytes()
    for damaged in (whole[: len(whole) // 2], whole.replace(row, b"x" * 32), b"key,path\n"):
        file.write_bytes(damaged)
        with pytest.raises(SourceError, match=r"shop\.parquet is not a valid Parquet file"):
            read(file)
    file.unlink()
    with pytest.raises(SourceError, match="is missing"):
        read_export(file)


def test_without_pyarrow_the_extra_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EngineUnavailableError, match=r"kinlens\[parquet\]"):
        written(file, made(1))
    assert not file.exists()


def varied(count: int) -> list[Entry]:
    """Items of three kinds of attributes; one in seven is a copy."""
    colours, prices, sales = ["red", "grün", "青"], [0.25, None, 1.5, 7], [True, None, False]
    entries = made(count, colour=colours, stock=[*range(50)], price=prices, sale=sales)
    for n in range(3, count, 7):
        copied = entries[n - 1]
        entries[n] = replace(entries[n], vector=copied.vector, sha256=copied.sha256)
    return entries


def dump(entries: Sequence[Entry]) -> GalleryExport:
    return GalleryExport(
        {"name": "shop", "bundle_id": "b" * 64}, DIM, len(entries), lambda: iter(entries)
    )


def test_an_import_that_was_stopped_goes_on_and_leaves_nothing_of_another(tmp_path: Path) -> None:
    entries, out = made(5000), tmp_path / "shop"
    other_vector = replace(entries[1], vector=vectors(1, seed=2)[0])

    def broken() -> Iterator[Entry]:
        yield from [replace(entries[0], key="of another"), other_vector, *entries[2:4500]]
        raise KeyError("source")

    with pytest.raises(KeyError):
        import_gallery(replace(dump(entries), entries=broken), out)
    [draft] = (out / "versions").iterdir()
    with closing(Gallery.open(draft)) as begun:
        numbers = ids_of(begun)
    assert len(numbers) == 4096
    import_gallery(dump(entries), out)
    with closing(Gallery.open(out)) as gallery:
        found = ids_of(gallery)
        [stored] = gallery.entries(["key 1"])
    np.testing.assert_allclose(stored.vector, entries[1].vector, atol=1e-6)
    assert found.keys() == {entry.key for entry in entries}
    kept = numbers.keys() & found.keys() - {"key 1"}
    assert len(kept) == 4094
    assert all(found[key] == numbers[key] for key in kept)  # they were not written again
    assert not draft.exists()


@pytest.mark.parametrize(("price", "rewritten"), [(4, 0), ("low", 30)])
def test_a_resumed_import_rewrites_attributes_only_if_types_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, price: object, rewritten: int
) -> None:
    out, updated, update = tmp_path / "shop", list[str](), Gallery.update

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    def noted(gallery: Gallery, changes: Mapping[str, Any]) -> object:
        updated.extend(changes)
        return update(gallery, changes)

    with pytest.raises(KeyboardInterrupt):
        import_gallery(dump(made(30, price=[price])), out, on_progress=stop)
    monkeypatch.setattr(Gallery, "update", noted)
    import_gallery(dump(made(30, price=[5])), out)
    assert len(updated) == rewritten
    with closing(Gallery.open(out)) as gallery:
        assert [item.attributes for item in gallery.items()] == [{"price": 5}] * 30


@pytest.mark.parametrize(("distance", "is_resumed"), [(1, False), (4500, False), (4500, True)])
def test_a_key_twice_is_named_and_changes_nothing(
    tmp_path: Path, distance: int, is_resumed: bool
) -> None:
    """What an import had that was stopped, like the types of its attributes, binds no other."""
    entries, out = made(5000), tmp_path / "shop"
    if is_resumed:
        texts = [replace(one, attributes={"price": "low"}) for one in entries]
        with pytest.raises(InvalidParameterError):
            import_gallery(dump([*texts, replace(entries[0], key="")]), out)
    priced = [replace(one, attributes={"price": 5}) for one in entries[: 400 + distance]]
    with pytest.raises(InvalidParameterError, match=r"Key 'key 7' .* twice"):
        import_gallery(dump([*priced, replace(entries[7], sha256="f" * 64)]), out)
    assert not (out / "CURRENT").exists()
